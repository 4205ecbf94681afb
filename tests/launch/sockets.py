"""The sockets of processes, as the kernel lists them."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LISTENS = "0A"
"""State of a socket in /proc/net/tcp."""


class Listener(NamedTuple):
    address: str
    port: int
    inode: str


def listening(pid: int) -> set[Listener]:
    """Every socket that listens in a process' network."""
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state == LISTENS:
                address, port = local.split(":")
                words = [address[at : at + 8] for at in range(0, len(address), 8)]
                packed = b"".join(bytes.fromhex(word)[::-1] for word in words)
                found.add(Listener(socket.inet_ntop(family, packed), int(port, 16), inode))
    return found


def sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = str(descriptor.readlink())
            if target.startswith("socket:["):
                found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found
