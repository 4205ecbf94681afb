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

from trainer.checkpoint.durable_io import sync, write_synced

Kind = Literal["DONE", "REQUEUE", "STOP"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ATTEMPT = "LONGHAUL_ATTEMPT"
"""Environment variable that tells one start of a run from the others."""


def write(folder: Path, kind: Kind, **facts: Any) -> None:
    """Whole or not at all, and in place of any other: a run ended one way."""
    content = {"time": time.time(), **facts}
    temporary = folder / f".{kind}.{os.getpid()}"
    write_synced(temporary, (json.dumps(content) + "\n").encode())
    temporary.rename(folder / kind)
    for other in KINDS:
        if other != kind:
            (folder / other).unlink(missing_ok=True)
    sync(folder)


def settle(folder: Path, kind: Kind, **facts: Any) -> None:
    """The same, unless that kind is there already: for a start that finds nothing to do."""
    if not (folder / kind).exists():
        write(folder, kind, **facts)


def read(folder: Path, attempt: str) -> Kind | None:
    """What that start left. Others are not its own: a second run may have been refused in the same folder."""
    for kind in KINDS:
        with suppress(OSError, ValueError):
            facts = json.loads((folder / kind).read_bytes())
            if isinstance(facts, dict) and facts.get("attempt") == attempt:
                return kind
    return None


def clear(folder: Path) -> None:
    """At a start, once the folder is its own, so that what an earlier one left says nothing about it."""
    for kind in KINDS:
        (folder / kind).unlink(missing_ok=True)
