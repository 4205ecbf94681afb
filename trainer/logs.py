"""The log: one line per message on standard error, rank 0's from `info` up, other ranks' warnings with their number."""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is now, so that a progress bar can put itself below the lines."""

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)


def configure(rank: int) -> None:
    origin = "" if rank == 0 else f"[rank {rank}] "
    handler = _StandardError()
    handler.setFormatter(logging.Formatter(f"%(asctime)s {origin}%(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("trainer").setLevel(logging.INFO if rank == 0 else logging.WARNING)
