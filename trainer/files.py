"""What is on disk when a function returns, whatever happens to the machine then."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Flushes a file, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes | bytearray) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
