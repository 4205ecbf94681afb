"""The host that processes share. Imports no torch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

GIB = 1 << 30


def node_memory_bytes() -> float:
    """Memory of this node, or the container's limit where that is lower."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        return float(min(installed, int(Path("/sys/fs/cgroup/memory.max").read_text())))
    return float(installed)
