"""The host that processes share. Imports no torch."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

GIB = 1 << 30
LOOPBACK_INTERFACE = "lo"
GLOO_INTERFACE_ENV = "GLOO_SOCKET_IFNAME"
GET_INTERFACE_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux."""


def node_memory_bytes() -> float:
    """Memory of this node, or the container's limit where that is lower."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Without a limit the file holds `max`, which is no integer; without cgroup v2 it is absent.
    with suppress(OSError, ValueError):
        return float(min(installed, int(Path("/sys/fs/cgroup/memory.max").read_text())))
    return float(installed)


def boot_id() -> str:
    """Names the kernel of this host since it booted: no other host has it, whatever its name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def seconds_since_boot() -> float:
    """A clock that all processes of this host share and that nobody sets; it counts while the host
    sleeps.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of a Python process that finds the modules which this one finds."""
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def loopback_listener(backlog: int) -> socket.socket:
    """A socket that listens on a free port of loopback."""
    try:
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    except OSError:  # A host with IPv6 alone.
        return socket.create_server(("::1", 0), family=socket.AF_INET6, backlog=backlog)


def loopback_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that keep the sockets of gloo and NCCL on loopback, for ranks of one host; what is
    set already stays.

    By default both listen on the interface of the host's name, where other hosts reach them.
    """
    has_loopback = any(name == LOOPBACK_INTERFACE for _, name in socket.if_nameindex())
    names = (GLOO_INTERFACE_ENV, "NCCL_SOCKET_IFNAME") if has_loopback else ()
    return {name: LOOPBACK_INTERFACE for name in names if name not in environment}


def cluster_environment(environment: Mapping[str, str], address: str) -> dict[str, str]:
    """A variable that keeps the sockets of gloo on the interface by which this host reaches
    `address`; what is set already stays.

    NCCL chooses interfaces by their speed, and listens at their addresses only.
    """
    if GLOO_INTERFACE_ENV in environment:
        return {}
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))  # Sends nothing: the kernel chooses the way.
        own, _ = probe.getsockname()
        for _, name in socket.if_nameindex():
            if name != LOOPBACK_INTERFACE and _interface_address(name) == own:
                return {GLOO_INTERFACE_ENV: name}
    # By default gloo listens at the address of the host's name.
    return {}


def _interface_address(name: str) -> str | None:
    """The first IPv4 address of an interface."""
    request = struct.pack("256s", name.encode()[:15])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket.fileno(), GET_INTERFACE_ADDRESS, request)
        # A name of 16 bytes, family and port of 4, the address.
        return socket.inet_ntoa(answer[20:24])
    return None
