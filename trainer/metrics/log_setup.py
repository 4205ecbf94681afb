"""Logging to standard error: rank 0 from INFO up, other ranks from WARNING up with their rank."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TextIO


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Looks up `sys.stderr` for each record, because a progress bar replaces it to stay below the log lines."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure(rank: int) -> None:
    handler = _StderrHandler()
    handler.setFormatter(_formatter(rank, "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("trainer").setLevel(logging.INFO if rank == 0 else logging.WARNING)


def add_file_handler(folder: Path, rank: int) -> None:
    """Also appends to `rank-N.log`, which is only created with the first message."""
    handler = logging.FileHandler(folder / f"rank-{rank}.log", delay=True)
    handler.setFormatter(_formatter(rank, "%Y-%m-%d %H:%M:%S"))
    logging.getLogger().addHandler(handler)


def _formatter(rank: int, time: str) -> logging.Formatter:
    origin = "" if rank == 0 else f"[rank {rank}] "
    return logging.Formatter(f"%(asctime)s {origin}%(message)s", datefmt=time)
