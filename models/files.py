"""Files from anywhere: regular ones, so that a pipe is not waited for, and of a bounded size.

Imports no torch.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

MAX_TEXT_BYTES = 1 << 30
"""Largest size of a description, index, tokenizer or configuration."""


class UnusableFileError(OSError):
    """The path is no regular file, or the file is too large; `strerror` says which."""


def read_regular(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """The content of a file. Raises `UnusableFileError`, and OSError if it cannot be read."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise UnusableFileError(
                errno.EFBIG, f"it has {size:,} bytes, more than {max_bytes:,}", str(path)
            )
        return file.read(size)


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file. Raises `UnusableFileError` for a pipe, device or folder, and OSError."""
    # O_NONBLOCK: opening a pipe that nobody writes to would wait forever. The descriptor is
    # checked, not the path, which may name another file by then.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")  # noqa: PTH123 - no path
    os.close(descriptor)
    raise UnusableFileError(errno.EINVAL, "it is not a regular file", str(path))
