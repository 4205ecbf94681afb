"""Exit markers: a file in the run folder, named as `trainer.errors.ENDINGS` say, tells a launcher
how a run ended. Imports no torch.

Checkpoints decide whether a run is done. A marker only says what to do next. A process that was
killed writes none: the run may be restarted.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from trainer.errors import ENDINGS, ResumeError
from trainer.storage.artifact import (
    Artifact,
    DamageError,
    parse_object,
    read_artifact,
    write_artifact,
)
from trainer.storage.durable_io import fsync_path

EXIT_MARKERS = tuple(dict.fromkeys(ending.marker for ending in ENDINGS))
MAX_TIME = 1e11  # seconds: the year 5138
ATTEMPT_VARIABLE = "LONGHAUL_ATTEMPT"
"""Environment variable that identifies one launch of a run."""


class Marker(Artifact):
    kind: ClassVar[str] = "exit marker"
    time: float = Field(ge=0, le=MAX_TIME)
    reason: str = ""
    attempt: str | None = None
    step: int | None = None
    """Set in markers of earlier versions only."""

    @classmethod
    def from_unsealed(cls, data: bytes) -> tuple[dict[str, Any], int]:
        return parse_object(data), 1


def write(
    folder: Path,
    marker: str,
    *,
    reason: str = "",
    attempt: str | None = None,
    clears_others: bool = True,
) -> None:
    """Writes a marker atomically and removes all others, because a run ends in one way; unless
    they are of another launch.
    """
    content = Marker(time=time.time(), reason=reason, attempt=attempt)
    # The new marker is there before the others are removed: a reader in between must find one.
    write_artifact(folder / marker, content, owner=attempt or "")
    if clears_others:
        clear(folder, keep=marker)
    fsync_path(folder)


def write_if_absent(
    folder: Path, marker: str, *, reason: str = "", attempt: str | None = None
) -> None:
    """Writes a marker unless that kind exists: for a launch with nothing to do."""
    if not (folder / marker).exists():
        write(folder, marker, reason=reason, attempt=attempt)


def read(folder: Path, attempt: str) -> str | None:
    """The marker of that launch, else None: a second run, refused in the same folder, may have
    written one too.
    """
    found = ((marker, content_of(folder, marker)) for marker in EXIT_MARKERS)
    return next(
        (
            marker
            for marker, content in found
            if content is not None and content.attempt == attempt
        ),
        None,
    )


def content_of(folder: Path, marker: str) -> Marker | None:
    """Content of a marker; None if there is no such marker, or none that can be read."""
    with suppress(OSError, DamageError, ResumeError):
        return read_artifact(folder / marker, Marker)
    return None


def clear(folder: Path, *, keep: str | None = None) -> None:
    """Removes all markers but `keep`.

    Call only in the launch that holds the lease of the folder.
    """
    for marker in EXIT_MARKERS:
        if marker != keep:
            (folder / marker).unlink(missing_ok=True)
