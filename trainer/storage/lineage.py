"""Where a run comes from: `lineage.json`, and initial weights at a URL. Imports no torch.

`lineage.json` names the checkpoint of another run that a run branched from.
The first checkpoint of a branch is its parent's, file by file. The lineage says how the branch
reads it: what continues, what starts fresh, and which values of the configuration are others.
"""

from __future__ import annotations

import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from models.files import MAX_SEALED_BYTES
from trainer.errors import ResumeError
from trainer.storage import manifest
from trainer.storage.artifact import (
    Artifact,
    DamageError,
    read_artifact,
    read_regular,
    write_artifact,
)
from trainer.storage.durable_io import write_atomic
from trainer.storage.train_state import Count, SpikeState, StagePosition, TrainState

LINEAGE_FILE = "lineage.json"
MAX_SHOWN_CHANGES = 8
MAX_SHOWN_CHARS = 80
MAX_NAME_BYTES = 4096


class Lineage(Artifact):
    kind: ClassVar[str] = "lineage record"
    parent: Annotated[str, Field(pattern=r"^[^\x00]+$", max_length=4096)]
    """Run folder of the parent, as a path from the branch's own folder."""
    step: Annotated[Count, Field(ge=1)]
    manifest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Hash of the manifest of the parent's checkpoint, which lists the hashes of all files."""
    carries_step: bool
    """Whether steps are counted on, with everything that depends on the step; otherwise only
    weights were taken.
    """
    carries_data: bool
    """Whether the data position and the counters of tokens continue."""
    optimizer_start: Count
    """The step after which the optimizer started: `step` if the branch starts a new one."""
    stage: StagePosition
    """Stage of the branch that the checkpoint counts as a part of."""
    changed: dict[str, tuple[Any, Any]]
    """Values of the configuration by dotted key: the parent's and the branch's."""
    created: str
    """UTC, ISO 8601."""

    @property
    def carries_optimizer(self) -> bool:
        return self.carries_step and self.optimizer_start < self.step

    def starts_at(self, checkpoint: Path) -> bool:
        """Whether the checkpoint is the one that the branch started from, byte by byte."""
        return self.carries_step and manifest_hash(checkpoint) == self.manifest

    def applied_to(self, state: TrainState) -> TrainState:
        """The parent's state, as the branch continues from it."""
        # The branch has a goodput of its own: the time until it began was not lost.
        trainer = state.trainer.model_copy(update={"goodput": None})
        others: dict[str, Any] = {
            "stage": self.stage,
            "config": state.config | {key: now for key, (_, now) in self.changed.items()},
        }
        if not self.carries_data:
            restart = {"next_sequence": 0, "tokens": 0, "sources": {}, "losses": SpikeState()}
            trainer = trainer.model_copy(update=restart)
            # Nothing of the branch's data was read yet, so it may be any.
            others |= {"data": {}, "plans": {}}
        return state.model_copy(update=others | {"trainer": trainer})

    def __str__(self) -> str:
        return f"{self.parent}@{self.step}"

    def describe(self) -> str:
        """Parent, what continues and what starts fresh, and the changed keys, in one line."""
        changed = self.describe_changes()
        shown = changed[:MAX_SHOWN_CHANGES]
        if len(changed) > MAX_SHOWN_CHANGES:
            shown.append(f"and {len(changed) - MAX_SHOWN_CHANGES} more")
        return "; ".join(
            [
                f"branch of {self}",
                self.describe_parts(),
                f"changed: {', '.join(shown) or 'nothing'}",
            ]
        )

    def describe_parts(self) -> str:
        parts = {
            "weights": True,
            "optimizer": self.carries_optimizer,
            "data position": self.carries_data,
            "step": self.carries_step,
        }
        fresh = ", ".join(part for part, continues in parts.items() if not continues)
        carried = ", ".join(part for part, continues in parts.items() if continues)
        return f"carried: {carried}" + (f"; fresh: {fresh}" if fresh else "")

    def describe_changes(self) -> list[str]:
        return [
            f"{key} {_shown(was)} -> {_shown(now)}"
            for key, (was, now) in sorted(self.changed.items())
        ]


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 3]}..."


def new_lineage(run_folder: Path, parent: Path, checkpoint: Path, **facts: Any) -> Lineage:
    """The lineage of a branch that is being made from a checkpoint of `parent`."""
    return Lineage(
        parent=os.path.relpath(parent.resolve(), run_folder.resolve()),
        manifest=manifest_hash(checkpoint),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
    )


def write(run_folder: Path, lineage: Lineage) -> None:
    write_artifact(run_folder / LINEAGE_FILE, lineage, made_from=lineage.manifest)


def read(run_folder: Path) -> Lineage | None:
    """The lineage of a run; None if it is no branch.

    Raises `ResumeError` if the record is damaged, and `RunFailedError` for an I/O error.
    """
    path = run_folder / LINEAGE_FILE
    try:
        return manifest.retry_io(path, lambda: read_artifact(path, Lineage))
    except FileNotFoundError:
        return None
    except DamageError as error:
        raise ResumeError(f"{path} is damaged: {error}") from None


def read_state(run_folder: Path, checkpoint: Path) -> TrainState:
    """The state of a checkpoint of this run; of the first one of a branch, as the branch continues
    from it.

    Raises `ResumeError` or `RunFailedError`.
    """
    state = manifest.read_state(checkpoint)
    lineage = read(run_folder)
    is_branch_point = lineage is not None and lineage.starts_at(checkpoint)
    return lineage.applied_to(state) if lineage and is_branch_point else state


def manifest_hash(checkpoint: Path) -> str:
    """Hash of a checkpoint's manifest. Raises `ResumeError` or `RunFailedError`."""
    path = checkpoint / manifest.MANIFEST_FILE
    try:
        data = manifest.retry_io(path, lambda: read_regular(path, max_bytes=MAX_SEALED_BYTES))
    except (FileNotFoundError, DamageError) as error:
        raise ResumeError(f"{path} cannot be read: {error}") from None
    return hashlib.sha256(data).hexdigest()


def record_download(url: str, folder: Path) -> None:
    """Records beside the folder that it has what is at the URL."""
    write_atomic(_download_file(url, folder.parent), folder.name.encode())


def local_copy(url: str, cache: Path) -> Path | None:
    """The folder in `cache` that was last downloaded from the URL, if it is still here."""
    try:
        name = read_regular(_download_file(url, cache), max_bytes=MAX_NAME_BYTES).decode()
    except (OSError, DamageError, UnicodeDecodeError):
        return None
    folder = cache / Path(name).name
    return folder if folder.is_dir() else None


def _download_file(url: str, cache: Path) -> Path:
    return cache / f".{hashlib.sha256(url.encode()).hexdigest()}.url"
