"""Which checkpoints are deleted, and how: first by another name, so that none is ever there in part. Imports no torch."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from trainer.checkpoint.durable_io import sync, write_synced
from trainer.checkpoint.manifest import DamageError, sound
from trainer.errors import ResumeError, RunError

PINNED, REASON = "pinned", "reason"
Committed = Sequence[tuple[int, Path]]


def superfluous(
    committed: Committed, *, keep: int, keep_every: int | None = None, kept: Collection[Path] = ()
) -> list[Path]:
    """Of good checkpoints, oldest first, those to delete: beyond the newest `keep`, and kept for no other reason.

    Reasons are a step that is a multiple of `keep_every`, a file `pinned` in the folder, and being among `kept`.
    """
    places = {path.resolve() for path in kept}
    return [
        folder
        for step, folder in committed[: max(0, len(committed) - keep)]
        if not (keep_every and step % keep_every == 0) and not is_pinned(folder) and folder.resolve() not in places
    ]


def is_pinned(folder: Path) -> bool:
    return (folder / PINNED).exists()


def good(committed: Committed) -> list[tuple[int, Path]]:
    """Those whose manifest and state are as they were written."""
    found = []
    for step, folder in committed:
        with suppress(DamageError, ResumeError, RunError):
            sound(folder)
            found.append((step, folder))
    return found


def delete(folder: Path) -> None:
    with suppress(FileNotFoundError):  # Another process was faster.
        doomed = folder.rename(folder.with_name(f".tmp-old-{folder.name}"))
        shutil.rmtree(doomed)


def wipe(checkpoints: Path) -> None:
    """Removes what dead processes left: only one save is ever under way."""
    for left_over in checkpoints.glob(".tmp-*"):
        if left_over.is_symlink() or not left_over.is_dir():
            left_over.unlink()
        else:
            shutil.rmtree(left_over)


def quarantine(folder: Path, reason: str) -> Path:
    """Puts a damaged checkpoint aside, under a name that is none's, with the reason in a file; returns where it is."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
    aside = folder.rename(folder.with_name(f"bad-{folder.name}-{now}"))
    with suppress(OSError):  # A full disk is no reason to train on from it.
        write_synced(aside / REASON, f"{reason}\n".encode())
    sync(aside.parent)
    return aside


def put_aside(checkpoints: Path) -> list[str]:
    """Those that are in quarantine, each with its reason."""
    found = []
    for folder in sorted(checkpoints.glob("bad-step-*")):
        reason = "no reason is known"
        with suppress(OSError):
            reason = (folder / REASON).read_text(errors="replace").strip()
        found.append(f"{folder.name}: {reason}")
    return found
