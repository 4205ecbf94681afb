"""Which checkpoints are deleted, and how: first by another name, so that none is ever there in part. Imports no torch."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from trainer.checkpoint.durable_io import fsync_path, write_and_fsync
from trainer.checkpoint.manifest import DamageError, read_validated
from trainer.errors import ResumeError, RunFailedError

PIN_FILE, REASON_FILE = "pinned", "reason"
StepsAndFolders = Sequence[tuple[int, Path]]


def checkpoints_to_delete(
    committed: StepsAndFolders, *, keep: int, keep_every: int | None = None, protected: Collection[Path] = ()
) -> list[Path]:
    """Of good checkpoints, oldest first, those to delete: beyond the newest `keep`, and kept for no other reason.

    Reasons are a step that is a multiple of `keep_every`, a file `pinned` in the folder, and being among `kept`.
    """
    protected_paths = {path.resolve() for path in protected}
    return [
        folder
        for step, folder in committed[: max(0, len(committed) - keep)]
        if not (keep_every and step % keep_every == 0)
        and not is_pinned(folder)
        and folder.resolve() not in protected_paths
    ]


def is_pinned(folder: Path) -> bool:
    return (folder / PIN_FILE).exists()


def valid_checkpoints(committed: StepsAndFolders) -> list[tuple[int, Path]]:
    """Those whose manifest and state are as they were written."""
    valid = []
    for step, folder in committed:
        with suppress(DamageError, ResumeError, RunFailedError):
            read_validated(folder)
            valid.append((step, folder))
    return valid


def delete_checkpoint(folder: Path) -> None:
    with suppress(FileNotFoundError):  # Another process was faster.
        temporary = folder.rename(folder.with_name(f".tmp-old-{folder.name}"))
        shutil.rmtree(temporary)


def remove_temporary_folders(checkpoints: Path) -> None:
    """Removes what dead processes left: only one save is ever under way."""
    for leftover in checkpoints.glob(".tmp-*"):
        if leftover.is_symlink() or not leftover.is_dir():
            leftover.unlink()
        else:
            shutil.rmtree(leftover)


def quarantine(folder: Path, reason: str) -> Path:
    """Puts a damaged checkpoint aside, under a name that is none's, with the reason in a file; returns where it is."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
    quarantined = folder.rename(folder.with_name(f"bad-{folder.name}-{now}"))
    with suppress(OSError):  # A full disk is no reason to train on from it.
        write_and_fsync(quarantined / REASON_FILE, f"{reason}\n".encode())
    fsync_path(quarantined.parent)
    return quarantined


def list_quarantined(checkpoints: Path) -> list[str]:
    """Those that are in quarantine, each with its reason."""
    quarantined = []
    for folder in sorted(checkpoints.glob("bad-step-*")):
        reason = "no reason is known"
        with suppress(OSError):
            reason = (folder / REASON_FILE).read_text(errors="replace").strip()
        quarantined.append(f"{folder.name}: {reason}")
    return quarantined
