"""Writes that survive a crash of the machine: data is on disk when a function returns."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from threading import Lock

log = logging.getLogger(__name__)


def keep_others_from_writing() -> None:
    """Whatever this process and its children create can be written by this user, and by the group
    if the umask says so, as teams do that share folders.

    Called first by each command and rank.
    """
    os.umask(os.umask(0o077) | 0o002)


def fsync_path(path: Path) -> None:
    """Flushes a file, or the entries of a folder."""
    # A new file or a rename survives a crash only once the entries of its folder are on disk.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes | bytearray) -> None:
    """Creates or replaces a file in one rename. Processes may write the same path at once."""
    # In the same folder, because a rename is atomic within one file system only.
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


@contextmanager
def atomic_folder(output: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `output` on success and removed on failure."""
    temporary = output.with_name(f".tmp-{output.name}-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        fsync_path(temporary)
        temporary.rename(output)
        fsync_path(output.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def file_lock(path: Path) -> Iterator[bool]:
    """Waits until no other process holds `path`.

    Yields False, without waiting, on a file system without locks.
    """
    with path.open("w") as file:
        acquired = True
        try:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # POSIX lets fcntl fail with EAGAIN or EACCES where another process holds the lock.
            except (BlockingIOError, PermissionError):
                log.info("waiting for the process that holds %s", path)
                fcntl.lockf(file, fcntl.LOCK_EX)
        except OSError as error:
            acquired = False
            log.warning(
                "%s: no locks on this file system (%s); other processes may do the same",
                path,
                error,
            )
        yield acquired


class LineAppender:
    """Appends lines to a file. Buffers them while the disk is full or the folder is missing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending = b""
        self._problem = ""
        # A thread that uploads has events, too.
        self._lock = Lock()

    def append(self, line: str) -> None:
        """Writes the line and any buffered ones to disk. Never raises `OSError`."""
        with self._lock:
            already_warned = bool(self._pending)
            self._pending = self._pending + line.encode() + b"\n"
            self._flush(already_warned=already_warned)

    def close(self) -> str:
        """Tries once more to write the buffered lines; says which are lost, "" if none."""
        with self._lock:
            if self._pending:
                self._flush(already_warned=True)
            lost = self._pending.count(b"\n")
            return f"{self._path} lacks its last {lost:,} lines: {self._problem}" if lost else ""

    def _flush(self, *, already_warned: bool) -> None:
        try:
            # Unbuffered: closing the file would write what a failed flush left in a buffer.
            with self._path.open("a+b", buffering=0) as file:
                self._write_pending(file)
        except OSError as error:
            self._problem = error.strerror or str(error)
            if not already_warned:
                log.warning(
                    "%s cannot be written, its lines are buffered: %s", self._path, error.strerror
                )
            return
        self._pending = b""

    def _write_pending(self, file: FileIO) -> None:
        # The length before, to which a write that fails half-way is cut back.
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        ends_mid_line = file.read(1) not in (b"", b"\n")  # A process was killed while writing.
        remaining = b"\n" + self._pending if ends_mid_line else self._pending
        try:
            while remaining:
                # A raw file may write only a part.
                remaining = remaining[file.write(remaining) :]
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise


def format_bytes(number: float) -> str:
    """Human-readable size: 1.2 GiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            return f"{number / 1024**power:.1f} {unit}"
    return f"{number:.0f} B"
