"""The copies of a run's checkpoints at `checkpoint.remote`. Imports no torch.

    <URL>/step-<N>/manifest.json        the manifest of the local checkpoint; commits the copy
    <URL>/step-<N>/<hash>/<file>        its files (trainer/storage/remote_files.py)
    <URL>/step-<N>/pinned               keeps the copy
    <URL>/run.json                      the run that they are of; made once

Exported weights at a URL have the form of a copy, without the folder of the step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from models.files import MAX_CONFIG_BYTES, MAX_SEALED_BYTES
from trainer.storage.artifact import DamageError, unseal
from trainer.storage.manifest import MANIFEST_FILE, Manifest
from trainer.storage.object_store import RemoteFolder
from trainer.storage.remote_files import SealedFiles
from trainer.storage.retention import PIN_FILE, REASON_FILE, parse_step

SET_ASIDE = re.compile(rf"bad-step-[^/]+/{REASON_FILE}")


@dataclass(frozen=True)
class RemoteCheckpoint(SealedFiles):
    """A manifest and where the files that it lists are."""

    manifest: Manifest


def remote_checkpoint(manifest: Manifest, content: bytes, folder: str = "") -> RemoteCheckpoint:
    """The copy with this manifest, whose stored form is `content`."""
    return RemoteCheckpoint(folder, MANIFEST_FILE, content, manifest.files, manifest)


def read_remote_checkpoint(store: RemoteFolder, folder: str = "") -> RemoteCheckpoint:
    """The copy in a folder. Raises `DamageError` for a manifest that is damaged."""
    name = f"{folder}/{MANIFEST_FILE}".lstrip("/")
    content = store.read(name, max_bytes=MAX_SEALED_BYTES)
    found, _ = unseal(content, Manifest)
    return remote_checkpoint(found, content, folder)


class RemoteCheckpoints:
    """Lists and deletes copies. All methods raise `RemoteError`."""

    def __init__(self, url: str) -> None:
        self.folder = RemoteFolder(url)

    def steps(self) -> list[int]:
        """Committed steps in ascending order."""
        return committed_steps(self.folder.sizes())

    def read(self, step: int) -> RemoteCheckpoint:
        """Raises `DamageError` for a manifest that is damaged or of another step."""
        found = read_remote_checkpoint(self.folder, f"step-{step}")
        if found.manifest.step != step:
            raise DamageError(f"{MANIFEST_FILE} is for step {found.manifest.step}")
        return found

    def pin(self, step: int) -> None:
        self.folder.create(f"step-{step}/{PIN_FILE}", b"")

    def delete(self, step: int, sizes: Mapping[str, int]) -> None:
        """Deletes a copy, the manifest first, so that a part of it never counts."""
        self.folder.delete([name for name in sizes if name == f"step-{step}/{MANIFEST_FILE}"])
        self.folder.delete([name for name in sizes if name.startswith(f"step-{step}/")])

    def set_aside(self, step: int, reason: str) -> None:
        """Makes a damaged copy one that does not count, and says why beside its manifest."""
        name = f"step-{step}/{MANIFEST_FILE}"
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
        content = self.folder.read(name, max_bytes=MAX_SEALED_BYTES)
        self.folder.create(f"bad-step-{step}-{now}/{MANIFEST_FILE}", content)
        self.folder.create(f"bad-step-{step}-{now}/{REASON_FILE}", f"{reason}\n".encode())
        self.folder.delete([name])


def committed_steps(sizes: Mapping[str, int]) -> list[int]:
    """Steps that have a manifest, in ascending order."""
    return sorted(_steps_with(MANIFEST_FILE, sizes))


def copy_folders(sizes: Mapping[str, int]) -> list[str]:
    """The folders of copies, oldest first: "" for a URL that itself is a copy or exported
    weights.
    """
    if MANIFEST_FILE in sizes:
        return [""]
    return [f"step-{step}" for step in committed_steps(sizes)]


def pinned_steps(sizes: Mapping[str, int]) -> set[int]:
    return _steps_with(PIN_FILE, sizes)


def reasons_of_damage(store: RemoteFolder, sizes: Mapping[str, int]) -> list[str]:
    """One line per copy that was set aside: name and reason."""
    names = [name for name in sorted(sizes) if SET_ASIDE.fullmatch(name)]
    reasons = (store.read(name, max_bytes=MAX_CONFIG_BYTES) for name in names)
    return [
        f"{name.partition('/')[0]}: {reason.decode(errors='replace').strip()}"
        for name, reason in zip(names, reasons, strict=True)
    ]


def begun_steps(sizes: Mapping[str, int]) -> set[int]:
    """Steps with any object, committed or not."""
    return {step for name in sizes if (step := _step_of(name)) is not None}


def _steps_with(file: str, sizes: Mapping[str, int]) -> set[int]:
    return {step for step in begun_steps(sizes) if f"step-{step}/{file}" in sizes}


def _step_of(name: str) -> int | None:
    folder = name.partition("/")[0]
    return parse_step(folder) if folder.startswith("step-") else None
