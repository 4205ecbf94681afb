"""`manifest.json`: the files of a checkpoint with their sizes and hashes. Imports no torch."""

from __future__ import annotations

import errno
import hashlib
import json
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import Field, field_validator

from models.files import MAX_SEALED_BYTES
from trainer.errors import ResumeError, RunFailedError, UnreadableError
from trainer.storage.artifact import Artifact, DamageError, read_regular, seal, unseal
from trainer.storage.durable_io import write_and_fsync
from trainer.storage.progress import progress
from trainer.storage.train_state import STATE_FILE, TrainState, config_of

A = TypeVar("A", bound=Artifact)
T = TypeVar("T")

MANIFEST_FILE = "manifest.json"
METADATA_FILE = ".metadata"
TRANSIENT_ERRNOS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
"""Errors of a network file system that may succeed on a retry."""
MAX_RETRIES = 3
RETRY_DELAY_SECONDS = 1.0
HASH_PART_BYTES = 1 << 20

OnBytes = Callable[[int], None]
"""Is called with the number of bytes that were read since its last call."""


def ignore_bytes(_: int) -> None:
    """The `OnBytes` of those who show no progress."""


class Manifest(Artifact):
    kind: ClassVar[str] = "checkpoint manifest"
    step: int = Field(ge=0)
    attempt: str
    """Launch that wrote the checkpoint."""
    world_size: int = Field(ge=1)
    mesh: dict[str, int]
    versions: dict[str, str]
    saved: str
    """Time of the commit in UTC, ISO 8601."""
    files: dict[str, tuple[int, str]]
    """Bytes and sha256 of every file except the manifest."""

    @field_validator("files")
    @classmethod
    def _require_plain_names(cls, files: dict[str, tuple[int, str]]) -> dict[str, tuple[int, str]]:
        for name in files:
            # A name must not lead out of the folder.
            if name in ("", ".", "..", MANIFEST_FILE) or set(name) & {"/", "\\", "\0"}:
                raise ValueError(f'"{name[:80]}" is not a checkpoint file')
        if missing := {STATE_FILE, METADATA_FILE} - files.keys():
            raise ValueError(f"{' and '.join(sorted(missing))} must be listed")
        return files

    @classmethod
    def from_unsealed(cls, data: bytes) -> tuple[dict[str, Any], int]:
        """Reads format 1: {"format": 1, ..., "sha256": hash of the JSON of all other entries, with
        sorted keys}.
        """
        try:
            body = json.loads(data)
            digest = body.pop("sha256")
            matches = (
                hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest() == digest
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise DamageError(f"it is not a {cls.kind}") from None
        if not matches:
            raise DamageError("it does not match its own checksum")
        return body, body.pop("format", None)

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


def write(folder: Path, manifest: Manifest) -> None:
    write_and_fsync(
        folder / MANIFEST_FILE,
        # Bound to its state by that file's hash.
        seal(manifest, made_from=manifest.files[STATE_FILE][1], owner=manifest.attempt),
    )


def read(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint.

    Raises `DamageError`, `ResumeError` for a later format, and `RunFailedError` for an I/O error.
    """
    manifest = _read(folder / MANIFEST_FILE, Manifest)
    number = folder.name.removeprefix("step-")
    # A folder of another name was exported or copied, so only `step-N` must agree.
    if number != folder.name and number != str(manifest.step):
        raise DamageError(f"{MANIFEST_FILE} is for step {manifest.step}")
    return manifest


def read_state(folder: Path) -> TrainState:
    """`state.json`, its configuration in today's schema. Raises `ResumeError`."""
    path = folder / STATE_FILE
    try:
        state = _read(path, TrainState)
    except DamageError as error:
        raise ResumeError(f"{folder} cannot be read: {error}") from None
    return state.model_copy(update={"config": config_of(state, path)})


def read_validated(folder: Path) -> Manifest:
    """Reads as `read` does, checks `state.json`, and that both are of one step.

    Ignores the other files.
    """
    manifest = read(folder)
    if problems := find_damage(folder, manifest, [STATE_FILE]):
        raise DamageError("; ".join(problems))
    state = _read(folder / STATE_FILE, TrainState)
    if steps := {state.step, state.trainer.step} - {manifest.step}:
        raise DamageError(
            f"{STATE_FILE} is for step {steps.pop()}, {MANIFEST_FILE} for step {manifest.step}"
        )
    return manifest


def _read(path: Path, kind: type[A]) -> A:
    try:
        return unseal(
            retry_io(path, lambda: read_regular(path, max_bytes=MAX_SEALED_BYTES)), kind
        )[0]
    except FileNotFoundError:
        raise DamageError(f"{path.name} is missing") from None
    except DamageError as error:
        raise DamageError(f"{path.name} is damaged: {error}") from None
    except ResumeError as error:
        raise ResumeError(f"{path} cannot be read: {error}") from None


def read_intact(folder: Path, *, check_hashes: bool, on_bytes: OnBytes = ignore_bytes) -> Manifest:
    """The manifest of a checkpoint whose files all have the recorded sizes and, with
    `check_hashes`, hashes.

    Raises `ResumeError` or `RunFailedError`.
    """
    try:
        manifest = read_validated(folder)
        if problems := find_damage(
            folder, manifest, manifest.files, check_hashes=check_hashes, on_bytes=on_bytes
        ):
            raise DamageError("; ".join(problems))
    except DamageError as error:
        raise ResumeError(f"{folder} cannot be read: {error}") from None
    return manifest


def read_verified(folder: Path) -> Manifest:
    """`read_intact` with all hashes; shows progress, for a command that is waited for."""
    num_bytes = 0
    with suppress(DamageError):  # Reported below.
        num_bytes = read(folder).bytes
    with progress(f"verifying {folder.name}", total=num_bytes) as shown:
        return read_intact(folder, check_hashes=True, on_bytes=shown.advance)


def find_damage(
    folder: Path,
    manifest: Manifest,
    names: Iterable[str],
    *,
    check_hashes: bool = True,
    on_bytes: OnBytes = ignore_bytes,
) -> list[str]:
    """One line per named file whose size or hash differs from the manifest.

    Raises `RunFailedError` for I/O errors.
    """
    to_hash = on_bytes if check_hashes else None
    damages = (_file_damage(folder / name, *manifest.files[name], to_hash) for name in names)
    return [damage for damage in damages if damage]


def hash_file(path: Path, on_bytes: OnBytes = ignore_bytes) -> tuple[int, str]:
    """Bytes and sha256 of a file."""
    digest = hashlib.sha256()
    part = memoryview(bytearray(HASH_PART_BYTES))
    num_bytes = 0
    # Unbuffered: the kernel fills `part` itself.
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(part):
            digest.update(part[:size])
            num_bytes += size
            on_bytes(size)
    return num_bytes, digest.hexdigest()


def retry_io(path: Path, function: Callable[[], T]) -> T:
    """Calls a function that reads `path`; retries transient errors `MAX_RETRIES` times.

    Raises `FileNotFoundError`, `UnreadableError` for EIO, and `RunFailedError` for any other
    `OSError`: the file may be intact.
    """
    attempt = 1
    while True:
        try:
            return function()
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno not in TRANSIENT_ERRNOS or attempt > MAX_RETRIES:
                # EIO accuses the device, so an older checkpoint may be used; a stale or slow
                # server may return.
                kind = UnreadableError if error.errno == errno.EIO else RunFailedError
                raise kind(
                    f"{path} cannot be read (attempt {attempt}): {error.strerror}"
                ) from None
        attempt += 1
        time.sleep(RETRY_DELAY_SECONDS)


def _file_damage(path: Path, size: int, digest: str, to_hash: OnBytes | None) -> str | None:
    """`to_hash` is given the bytes that are hashed; None: only the size is compared."""
    try:
        # lstat and sizes first: cheap for all files before terabytes are hashed, and a link is no
        # checkpoint file.
        stats = retry_io(path, path.lstat)
        if not stat.S_ISREG(stats.st_mode):
            return f"{path.name} is not a regular file"
        if stats.st_size != size:
            return f"{path.name} has {stats.st_size:,} bytes instead of {size:,}"
        if to_hash and retry_io(path, lambda: hash_file(path, to_hash)) != (size, digest):
            return f"{path.name}: checksum mismatch ({size:,} bytes)"
    except FileNotFoundError:
        return f"{path.name} is missing"
    return None
