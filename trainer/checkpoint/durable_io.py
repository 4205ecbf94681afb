"""What is on disk when a function returns, whatever happens to the machine then."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from io import FileIO
from pathlib import Path

log = logging.getLogger(__name__)


def fsync_path(path: Path) -> None:
    """Flushes a file, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes | bytearray) -> None:
    """Creates or replaces a file in one rename. Processes may write the same path at once."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        write_and_fsync(temporary, content)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_and_fsync(path: Path, content: bytes | bytearray) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


class LineAppender:
    """Lines at the end of a file. While they cannot be written, because the disk is full or the folder gone, they wait."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending = b""

    def append(self, line: str) -> None:
        """On disk when this returns, if that can be; never raises for what a disk may do."""
        already_warned, self._pending = bool(self._pending), self._pending + line.encode() + b"\n"
        self._flush(already_warned=already_warned)

    def close(self) -> None:
        """The last attempt to write what waits."""
        if self._pending:
            self._flush(already_warned=False)

    def _flush(self, *, already_warned: bool) -> None:
        try:
            # Without a buffer: what was in it would be written after all when the file is closed.
            with self._path.open("a+b", buffering=0) as file:
                self._write_pending(file)
        except OSError as error:
            if not already_warned:
                log.warning("%s cannot be written to, its lines wait: %s", self._path, error.strerror)
            return
        self._pending = b""

    def _write_pending(self, file: FileIO) -> None:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        ends_mid_line = file.read(1) not in (b"", b"\n")  # By a process that was killed while it wrote.
        remaining = b"\n" * ends_mid_line + self._pending
        try:
            while remaining:
                remaining = remaining[file.write(remaining) :]
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise
