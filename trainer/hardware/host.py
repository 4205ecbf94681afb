"""The host that processes share. Imports no torch."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

GIB = 1 << 30
LOOPBACK_INTERFACE = "lo"


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


def loopback_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that keep the sockets of gloo and NCCL on loopback, for ranks of one host; what is
    set already stays.

    By default both listen on the interface of the host's name, where other hosts reach them.
    """
    has_loopback = any(name == LOOPBACK_INTERFACE for _, name in socket.if_nameindex())
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if has_loopback else ()
    return {name: LOOPBACK_INTERFACE for name in names if name not in environment}
