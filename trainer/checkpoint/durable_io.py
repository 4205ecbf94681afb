"""What is on disk when a function returns, whatever happens to the machine then."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from io import FileIO
from pathlib import Path

log = logging.getLogger(__name__)


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


class Lines:
    """Lines at the end of a file. While they cannot be written, because the disk is full or the folder gone, they wait."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting = b""

    def append(self, line: str) -> None:
        """On disk when this returns, if that can be; never raises for what a disk may do."""
        told, self._waiting = bool(self._waiting), self._waiting + line.encode() + b"\n"
        self._try(told=told)

    def close(self) -> None:
        """The last attempt to write what waits."""
        if self._waiting:
            self._try(told=False)

    def _try(self, *, told: bool) -> None:
        try:
            # Without a buffer: what was in it would be written after all when the file is closed.
            with self._path.open("a+b", buffering=0) as file:
                self._write(file)
        except OSError as error:
            if not told:
                log.warning("%s cannot be written to, its lines wait: %s", self._path, error.strerror)
            return
        self._waiting = b""

    def _write(self, file: FileIO) -> None:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        torn = file.read(1) not in (b"", b"\n")  # By a process that was killed while it wrote.
        left = b"\n" * torn + self._waiting
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise
