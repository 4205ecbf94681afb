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
"""Of a description, index, tokenizer or configuration."""


class UnusableFileError(OSError):
    """Not a regular file, or too large; `strerror` says which."""


def read_regular(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Raises `UnusableFileError`, and OSError if the file cannot be read."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise UnusableFileError(
                errno.EFBIG, f"it has {size:,} bytes, more than {max_bytes:,}", str(path)
            )
        return file.read(size)


def open_regular(path: Path) -> BufferedReader:
    """Raises `UnusableFileError` for a pipe, device or folder, and OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")  # noqa: PTH123 - no path
    os.close(descriptor)
    raise UnusableFileError(errno.EINVAL, "it is not a regular file", str(path))
