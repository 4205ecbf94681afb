"""Retention: which checkpoints to delete, and quarantine of damaged ones. Imports no torch.

A checkpoint is renamed before it is deleted, so that a partial `step-N` never exists.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from models.files import MAX_CONFIG_BYTES, read_regular
from trainer.errors import ResumeError, RunFailedError
from trainer.storage.artifact import DamageError
from trainer.storage.durable_io import fsync_path, write_and_fsync
from trainer.storage.manifest import read_validated

PIN_FILE = "pinned"
REASON_FILE = "reason"
StepsAndFolders = Sequence[tuple[int, Path]]


def checkpoints_to_delete(
    committed: StepsAndFolders,
    *,
    keep: int,
    keep_every: int | None = None,
    protected: Collection[Path] = (),
) -> list[Path]:
    """The checkpoints to delete from `committed`, which is ordered oldest first.

    Kept are the newest `keep`, multiples of `keep_every`, folders with a file `pinned`, and
    `protected` ones.
    """
    protected_paths = {path.resolve() for path in protected}
    superfluous = superfluous_steps(
        [step for step, _ in committed], keep=keep, keep_every=keep_every
    )
    return [
        folder
        for step, folder in committed
        if step in superfluous
        and not is_pinned(folder)
        and folder.resolve() not in protected_paths
    ]


def superfluous_steps(steps: Sequence[int], *, keep: int, keep_every: int | None) -> set[int]:
    """All steps but the newest `keep` and multiples of `keep_every`, of steps in ascending
    order.
    """
    return {step for step in steps[:-keep] if not (keep_every and step % keep_every == 0)}


def parse_step(name: str) -> int | None:
    """The step of a folder `step-<N>`; None for another name."""
    number = name.removeprefix("step-")
    return (
        int(number)
        if number.isascii() and number.isdecimal() and str(int(number)) == number
        else None
    )


def is_pinned(folder: Path) -> bool:
    return (folder / PIN_FILE).exists()


def valid_checkpoints(committed: StepsAndFolders) -> list[tuple[int, Path]]:
    """The checkpoints with an intact manifest and `state.json`."""
    valid = []
    for step, folder in committed:
        with suppress(DamageError, ResumeError, RunFailedError):
            read_validated(folder)
            valid.append((step, folder))
    return valid


def delete_checkpoint(folder: Path) -> None:
    with suppress(FileNotFoundError):  # Another process deleted it.
        # Renamed first: a crash during the removal must not leave a part of a `step-N`.
        shutil.rmtree(folder.rename(folder.with_name(f".tmp-old-{folder.name}")))


def remove_temporary_folders(checkpoints: Path) -> None:
    """Removes leftovers of killed processes. Call only while no save is in progress."""
    for leftover in checkpoints.glob(".tmp-*"):
        if leftover.is_symlink() or not leftover.is_dir():
            leftover.unlink()
        else:
            shutil.rmtree(leftover)


def quarantine(folder: Path, reason: str) -> Path:
    """Renames a damaged checkpoint to a unique `bad-step-*`, writes the reason into it, and
    returns the new path.
    """
    # The same step may be damaged twice, after a resume wrote it again.
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
    quarantined = folder.rename(folder.with_name(f"bad-{folder.name}-{now}"))
    # A full disk must not keep a damaged checkpoint in use.
    with suppress(OSError):
        write_and_fsync(quarantined / REASON_FILE, f"{reason}\n".encode())
    fsync_path(quarantined.parent)
    return quarantined


def list_quarantined(checkpoints: Path) -> list[str]:
    """One line per quarantined checkpoint: name and reason."""
    quarantined = []
    for folder in sorted(checkpoints.glob("bad-step-*")):
        reason = "unknown reason"
        with suppress(OSError):
            reason = (
                read_regular(folder / REASON_FILE, max_bytes=MAX_CONFIG_BYTES)
                .decode(errors="replace")
                .strip()
            )
        quarantined.append(f"{folder.name}: {reason}")
    return quarantined
