"""`manifest.json`: the files of a checkpoint with their sizes and hashes. Imports no torch.

{"format": 1, "step": 6, "attempt": ..., "world_size": ..., "mesh": {...}, "versions": {...}, "saved": ...,
 "files": {name: [bytes, sha256]}, "sha256": hash of the JSON of all other entries, with sorted keys}
"""

from __future__ import annotations

import errno
import hashlib
import json
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

from trainer.checkpoint.durable_io import write_and_fsync
from trainer.errors import ResumeError, RunFailedError

T = TypeVar("T")

MANIFEST_FILE, STATE_FILE, METADATA_FILE = "manifest.json", "state.json", ".metadata"
FORMAT_VERSION = 1
TRANSIENT_ERRNOS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
"""Errors of a network file system that may succeed on a retry."""
MAX_RETRIES = 3
RETRY_DELAY_SECONDS = 1.0


class DamageError(Exception):
    """A checkpoint file is missing or differs from what was written. A retry does not help."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    step: int
    attempt: str
    """Launch that wrote the checkpoint."""
    world_size: int
    mesh: dict[str, int]
    versions: dict[str, str]
    saved: str
    """Time of the commit in UTC, ISO 8601."""
    files: dict[str, tuple[int, str]]
    """Bytes and sha256 of every file except the manifest."""

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


FIELD_TYPES = {name: get_origin(hint) or hint for name, hint in get_type_hints(Manifest).items()}


def write(folder: Path, manifest: Manifest) -> None:
    write_and_fsync(folder / MANIFEST_FILE, _encode({"format": FORMAT_VERSION, **asdict(manifest)}))


def read(folder: Path) -> Manifest:
    """Reads the manifest and checks its own hash.

    Raises `DamageError`, `ResumeError` for another format version, and `RunFailedError` for an I/O error.
    """
    path = folder / MANIFEST_FILE
    try:
        content = retry_io(path, path.read_bytes)
    except FileNotFoundError:
        raise DamageError(f"{MANIFEST_FILE} is missing") from None
    try:
        body = json.loads(content)
        del body["sha256"]
        hash_matches = _encode(body) == content
    except (ValueError, TypeError, KeyError, RecursionError):
        raise DamageError(f"{MANIFEST_FILE} is not a manifest") from None
    if not hash_matches:
        raise DamageError(f"{MANIFEST_FILE} does not match its own checksum")
    if (version := body.pop("format", None)) != FORMAT_VERSION:
        raise ResumeError(f"{folder} has checkpoint format {version}; this version reads format {FORMAT_VERSION}")
    return _validate(folder, body)


def read_validated(folder: Path) -> Manifest:
    """As `read`, and checks the hash of `state.json`. Ignores the other files."""
    manifest = read(folder)
    if STATE_FILE not in manifest.files or METADATA_FILE not in manifest.files:
        raise DamageError(f"{MANIFEST_FILE} must list {STATE_FILE} and {METADATA_FILE}")
    if problems := find_damage(folder, manifest, [STATE_FILE]):
        raise DamageError("; ".join(problems))
    return manifest


def read_intact(folder: Path, *, check_hashes: bool) -> Manifest:
    """The manifest of a checkpoint whose files all have the recorded sizes and, with `check_hashes`, hashes.

    Raises `ResumeError` or `RunFailedError`.
    """
    try:
        manifest = read_validated(folder)
        if problems := find_damage(folder, manifest, manifest.files, check_hashes=check_hashes):
            raise DamageError("; ".join(problems))
    except DamageError as error:
        raise ResumeError(f"{folder} cannot be read: {error}") from None
    return manifest


def find_damage(folder: Path, manifest: Manifest, names: Iterable[str], *, check_hashes: bool = True) -> list[str]:
    """One line per named file whose size or hash differs from the manifest. Raises `RunFailedError` for I/O errors."""
    damages = (_file_damage(folder / name, *manifest.files[name], check_hashes=check_hashes) for name in names)
    return [damage for damage in damages if damage]


def hash_file(path: Path) -> tuple[int, str]:
    """Bytes and sha256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def retry_io(path: Path, function: Callable[[], T]) -> T:
    """Calls a function that reads `path`; retries transient errors `MAX_RETRIES` times.

    Raises `FileNotFoundError`, and `RunFailedError` for any other `OSError`: the file may be intact.
    """
    attempt = 1
    while True:
        try:
            return function()
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno not in TRANSIENT_ERRNOS or attempt > MAX_RETRIES:
                raise RunFailedError(f"{path} cannot be read (attempt {attempt}): {error.strerror}") from None
        attempt += 1
        time.sleep(RETRY_DELAY_SECONDS)


def _file_damage(path: Path, size: int, digest: str, *, check_hashes: bool) -> str | None:
    try:
        stats = retry_io(path, path.lstat)
        if not stat.S_ISREG(stats.st_mode):
            return f"{path.name} is not a regular file"
        if stats.st_size != size:
            return f"{path.name} has {stats.st_size:,} bytes instead of {size:,}"
        if check_hashes and retry_io(path, lambda: hash_file(path)) != (size, digest):
            return f"{path.name}: checksum mismatch ({size:,} bytes)"
    except FileNotFoundError:
        return f"{path.name} is missing"
    return None


def _validate(folder: Path, body: dict[str, Any]) -> Manifest:
    """Raises `DamageError`: a forged manifest can have the right checksum and invalid entries."""
    if body.keys() != FIELD_TYPES.keys() or not all(isinstance(body[key], kind) for key, kind in FIELD_TYPES.items()):
        raise DamageError(f"{MANIFEST_FILE} must contain {', '.join(FIELD_TYPES)}")
    for name, entry in body["files"].items():
        # A name must not lead out of the folder.
        if name in ("", ".", "..", MANIFEST_FILE) or set(name) & {"/", "\\", "\0"}:
            raise DamageError(f'{MANIFEST_FILE} lists "{name}", which is not a checkpoint file')
        if not (isinstance(entry, list) and [*map(type, entry)] == [int, str]):
            raise DamageError(f"{MANIFEST_FILE} must list size and sha256 of {name}")
    number = folder.name.removeprefix("step-")
    if number != folder.name and number != str(body["step"]):
        raise DamageError(f"{MANIFEST_FILE} is for step {body['step']}")
    return Manifest(**body | {"files": {name: (size, digest) for name, (size, digest) in body["files"].items()}})


def _encode(body: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps(body | {"sha256": digest}, sort_keys=True, indent=1) + "\n").encode()
