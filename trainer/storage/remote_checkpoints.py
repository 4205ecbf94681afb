"""The copies of a run's checkpoints at `checkpoint.remote`. Imports no torch.

    <URL>/step-<N>/manifest.json        the manifest of the local checkpoint; commits the copy
    <URL>/step-<N>/<hash>/<file>        its files; <hash> is the beginning of the manifest's sha256
    <URL>/step-<N>/pinned               keeps the copy

The manifest is written last and never replaced. Files of two launches that save the same step
have different names, so the first manifest commits only files of its own launch.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from models.files import MAX_SEALED_BYTES
from trainer.storage.artifact import DamageError, unseal
from trainer.storage.manifest import MANIFEST_FILE, Manifest
from trainer.storage.object_store import RemoteError, RemoteFolder, RemoteRefusedError
from trainer.storage.retention import PIN_FILE, parse_step

HASH_CHARS = 16


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A manifest and where the files that it lists are."""

    manifest: Manifest
    content: bytes
    """The manifest as it is stored."""

    @property
    def folder(self) -> str:
        """Name of the folder with the manifest."""
        return f"step-{self.manifest.step}"

    @property
    def manifest_name(self) -> str:
        return f"{self.folder}/{MANIFEST_FILE}"

    def name_of(self, file: str) -> str:
        return f"{self.folder}/{hashlib.sha256(self.content).hexdigest()[:HASH_CHARS]}/{file}"


class RemoteCheckpoints:
    """Lists, commits and deletes copies. All methods raise `RemoteError`."""

    def __init__(self, url: str) -> None:
        self.folder = RemoteFolder(url)

    def require_usable(self) -> None:
        """Raises `RemoteRefusedError` unless objects can be created, once, and deleted."""
        name = f"probe-{secrets.token_hex(8)}"
        if not self.folder.create(name, b"") or self.folder.create(name, b""):
            raise RemoteRefusedError(
                f"{self.folder.url}: the store replaces objects that exist; it must know conditional writes (If-None-Match)"
            )
        self.folder.delete([name])

    def steps(self) -> list[int]:
        """Committed steps in ascending order."""
        return committed_steps(self.folder.sizes())

    def read(self, step: int) -> RemoteCheckpoint:
        """Raises `DamageError` for a manifest that is damaged or of another step."""
        content = self.folder.read(f"step-{step}/{MANIFEST_FILE}", max_bytes=MAX_SEALED_BYTES)
        found, _ = unseal(content, Manifest)
        if found.step != step:
            raise DamageError(f"{MANIFEST_FILE} is for step {found.step}")
        return RemoteCheckpoint(found, content)

    def upload_file(
        self, checkpoint: RemoteCheckpoint, path: Path, on_bytes: Callable[[int], None]
    ) -> None:
        """Raises `DamageError` if the local file differs from the manifest."""
        size, digest = checkpoint.manifest.files[path.name]
        self.folder.upload(
            path, checkpoint.name_of(path.name), size=size, digest=digest, on_bytes=on_bytes
        )

    def download_file(
        self, checkpoint: RemoteCheckpoint, path: Path, on_bytes: Callable[[int], None]
    ) -> None:
        """Raises `DamageError` if the copy differs from the manifest."""
        size, digest = checkpoint.manifest.files[path.name]
        self.folder.download(
            checkpoint.name_of(path.name), path, size=size, digest=digest, on_bytes=on_bytes
        )

    def missing_files(self, checkpoint: RemoteCheckpoint) -> list[str]:
        """The files of the manifest that are not there in full."""
        sizes = self.folder.sizes(checkpoint.folder)
        return [
            name
            for name, (size, _) in sorted(checkpoint.manifest.files.items())
            if sizes.get(checkpoint.name_of(name)) != size
        ]

    def commit(self, checkpoint: RemoteCheckpoint) -> bool:
        """Writes the manifest; returns False if that step has another one already.

        Raises `RemoteError` unless all files are there in full.
        """
        if missing := self.missing_files(checkpoint):
            raise RemoteError(
                f"{self.folder.url}/{checkpoint.folder}: {', '.join(missing[:3])} did not arrive in full"
            )
        if self.folder.create(checkpoint.manifest_name, checkpoint.content):
            return True
        # A reply may have been lost on the way, and the library asked again.
        stored = self.folder.read(checkpoint.manifest_name, max_bytes=MAX_SEALED_BYTES)
        return stored == checkpoint.content

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
        self.folder.create(f"bad-step-{step}-{now}/reason", f"{reason}\n".encode())
        self.folder.delete([name])


def committed_steps(sizes: Mapping[str, int]) -> list[int]:
    """Steps that have a manifest, in ascending order."""
    return sorted(_steps_with(MANIFEST_FILE, sizes))


def pinned_steps(sizes: Mapping[str, int]) -> set[int]:
    return _steps_with(PIN_FILE, sizes)


def begun_steps(sizes: Mapping[str, int]) -> set[int]:
    """Steps with any object, committed or not."""
    return {step for name in sizes if (step := _step_of(name)) is not None}


def _steps_with(file: str, sizes: Mapping[str, int]) -> set[int]:
    return {step for step in begun_steps(sizes) if f"step-{step}/{file}" in sizes}


def _step_of(name: str) -> int | None:
    folder = name.partition("/")[0]
    return parse_step(folder) if folder.startswith("step-") else None
