"""Blocks of tokens in a file of fixed size that the processes of a node share. Imports no torch.

Block n is kept at place n modulo the number of places, so the file needs neither an index nor a
rule for what to forget. Nothing says what a place holds: whoever reads a block compares its hash,
so a block that is damaged, torn, or another one is a block that is not there.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger("trainer")


class BlockCache:
    """Keeps at most `places` blocks. A file system that cannot keep them costs only their reuse."""

    def __init__(self, path: Path, *, places: int, block_bytes: int) -> None:
        self._places = places
        self._block_bytes = block_bytes
        self._path = path
        self._has_warned = False
        self._file = -1
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._warn(error)

    def read(self, block: int, num_bytes: int) -> bytes:
        """The first bytes of the place of a block; fewer if the file ends before."""
        if self._file < 0:
            return b""
        try:
            return os.pread(self._file, num_bytes, self._offset(block))
        except OSError as error:
            self._warn(error)
            return b""

    def write(self, block: int, content: bytes) -> None:
        if self._file < 0:
            return
        try:
            os.pwrite(self._file, content, self._offset(block))
        except OSError as error:
            # A full disk. What is kept already can be read on.
            self._warn(error)

    @contextmanager
    def locked(self, blocks: Sequence[int]) -> Iterator[None]:
        """Waits until no other process fetches one of the blocks.

        Only saves requests: ranks that read the same tokens would each fetch them.
        """
        # In ascending order, so that two processes cannot wait for each other.
        places = sorted({block % self._places for block in blocks}) if self._file >= 0 else []
        try:
            for place in places:
                # A file system without locks.
                with suppress(OSError):
                    fcntl.lockf(self._file, fcntl.LOCK_EX, 1, place * self._block_bytes)
            yield
        finally:
            with suppress(OSError):
                if places:
                    fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _offset(self, block: int) -> int:
        return block % self._places * self._block_bytes

    def _warn(self, error: OSError) -> None:
        # Once: a full disk would fill the log.
        if not self._has_warned:
            log.warning("%s: blocks are not kept: %s", self._path, error.strerror or error)
            self._has_warned = True
