"""How a run ended, for whatever started it: a file in the run folder, DONE, REQUEUE or STOP. Imports no torch.

Whether a run is done is judged by its checkpoints; a marker only says what to do next: nothing, start it again
elsewhere, or look at the reason first. None is left by a crash, after which it may be started again at once.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

from trainer.checkpoint.durable_io import fsync_path, write_and_fsync

ExitMarker = Literal["DONE", "REQUEUE", "STOP"]
EXIT_MARKERS: tuple[ExitMarker, ...] = get_args(ExitMarker)
ATTEMPT_VARIABLE = "LONGHAUL_ATTEMPT"
"""Environment variable that tells one start of a run from the others."""


def write(folder: Path, marker: ExitMarker, **fields: Any) -> None:
    """Whole or not at all, and in place of any other: a run ended one way."""
    content = {"time": time.time(), **fields}
    temporary = folder / f".{marker}.{os.getpid()}"
    write_and_fsync(temporary, (json.dumps(content) + "\n").encode())
    temporary.rename(folder / marker)
    for other in EXIT_MARKERS:
        if other != marker:
            (folder / other).unlink(missing_ok=True)
    fsync_path(folder)


def write_if_absent(folder: Path, marker: ExitMarker, **fields: Any) -> None:
    """The same, unless that kind is there already: for a start that finds nothing to do."""
    if not (folder / marker).exists():
        write(folder, marker, **fields)


def read(folder: Path, attempt: str) -> ExitMarker | None:
    """What that start left. Others are not its own: a second run may have been refused in the same folder."""
    for marker in EXIT_MARKERS:
        with suppress(OSError, ValueError):
            fields = json.loads((folder / marker).read_bytes())
            if isinstance(fields, dict) and fields.get("attempt") == attempt:
                return marker
    return None


def clear(folder: Path) -> None:
    """At a start, once the folder is its own, so that what an earlier one left says nothing about it."""
    for marker in EXIT_MARKERS:
        (folder / marker).unlink(missing_ok=True)
