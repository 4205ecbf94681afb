"""Exit markers: the file DONE, REQUEUE or STOP in the run folder tells a launcher how a run ended. Imports no torch.

Checkpoints decide whether a run is done. A marker only says what to do next: nothing (DONE), requeue (REQUEUE), or
fix the reason first (STOP). A crash writes no marker; the run may be restarted at once.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

from trainer.checkpoint.durable_io import fsync_path, write_atomic

ExitMarker = Literal["DONE", "REQUEUE", "STOP"]
EXIT_MARKERS: tuple[ExitMarker, ...] = get_args(ExitMarker)
ATTEMPT_VARIABLE = "LONGHAUL_ATTEMPT"
"""Environment variable that identifies one launch of a run."""


def write(folder: Path, marker: ExitMarker, **fields: Any) -> None:
    """Writes a marker atomically and removes all others: a run ends in one way."""
    write_atomic(folder / marker, (json.dumps({"time": time.time(), **fields}) + "\n").encode())
    clear(folder, keep=marker)
    fsync_path(folder)


def write_if_absent(folder: Path, marker: ExitMarker, **fields: Any) -> None:
    """Writes a marker unless that kind exists: for a launch with nothing to do."""
    if not (folder / marker).exists():
        write(folder, marker, **fields)


def read(folder: Path, attempt: str) -> ExitMarker | None:
    """The marker of that launch, else None: a second run, refused in the same folder, may have written one too."""
    for marker in EXIT_MARKERS:
        with suppress(OSError, ValueError):
            fields = json.loads((folder / marker).read_bytes())
            if isinstance(fields, dict) and fields.get("attempt") == attempt:
                return marker
    return None


def clear(folder: Path, *, keep: ExitMarker | None = None) -> None:
    """Removes all markers but `keep`. Call only in the launch that holds the lock of the folder."""
    for marker in EXIT_MARKERS:
        if marker != keep:
            (folder / marker).unlink(missing_ok=True)
