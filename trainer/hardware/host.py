"""The host that processes share. Imports no torch."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

GIB = 1 << 30


def node_memory_bytes() -> float:
    """Memory of this node, or the container's limit where that is lower."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        return float(min(installed, int(Path("/sys/fs/cgroup/memory.max").read_text())))
    return float(installed)


def boot_id() -> str:
    """Names the kernel of this host since it booted: no other host has it, whatever its name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def seconds_since_boot() -> float:
    """A clock that all processes of this host share and that nobody sets; it counts while the host sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
