"""What a checkpoint consists of, and whether it is whole: `manifest.json`. Imports no torch.

{"format": 1, "step": 6, "attempt": ..., "world_size": ..., "mesh": {...}, "versions": {...}, "saved": ...,
 "files": {name: [bytes, sha256]}, "sha256": that of all the others, written in this form}
"""

from __future__ import annotations

import errno
import hashlib
import json
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from trainer.checkpoint.durable_io import write_and_fsync
from trainer.errors import ResumeError, RunFailedError

T = TypeVar("T")

MANIFEST_FILE, STATE_FILE, METADATA_FILE = "manifest.json", "state.json", ".metadata"
FORMAT_VERSION = 1
TRANSIENT_ERRNOS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
"""What a file system says that may answer when it is asked again."""
MAX_RETRIES = 3
RETRY_DELAY_SECONDS = 1.0  # seconds
FIELD_TYPES: dict[str, type] = {
    "step": int,
    "attempt": str,
    "world_size": int,
    "mesh": dict,
    "versions": dict,
    "saved": str,
    "files": dict,
}


class DamageError(Exception):
    """What is wrong with a checkpoint's files, in words. Reading them again would not mend it."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    step: int
    attempt: str
    """Which start of the run wrote it."""
    world_size: int
    mesh: dict[str, int]
    versions: dict[str, str]
    saved: str
    """When, in UTC."""
    files: dict[str, tuple[int, str]]
    """Bytes and sha256 of every file but this one."""

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


def write(folder: Path, manifest: Manifest) -> None:
    """On disk when it returns."""
    body = {"format": FORMAT_VERSION, **asdict(manifest)}
    write_and_fsync(folder / MANIFEST_FILE, _encode(body))


def read(folder: Path) -> Manifest:
    """The manifest, as it was written. Raises `DamageError`, `ResumeError` if a newer version wrote it, and `RunError`."""
    try:
        content = retry_io(folder / MANIFEST_FILE, (folder / MANIFEST_FILE).read_bytes)
    except FileNotFoundError:
        raise DamageError(f"{MANIFEST_FILE} is missing") from None
    try:
        body = json.loads(content)
        del body["sha256"]
        hash_matches = _encode(body) == content
    except (ValueError, TypeError, KeyError, RecursionError):
        raise DamageError(f"{MANIFEST_FILE} is no manifest") from None
    if not hash_matches:
        raise DamageError(f"{MANIFEST_FILE} does not have its own hash")
    if (version := body.pop("format", None)) != FORMAT_VERSION:
        raise ResumeError(f"{folder} is a checkpoint of format {version}, and this version reads {FORMAT_VERSION}")
    return _validate(folder, body)


def read_validated(folder: Path) -> Manifest:
    """The manifest, if it and `state.json` are as they were written; other files are not looked at.

    Raises as `read` does.
    """
    manifest = read(folder)
    if STATE_FILE not in manifest.files or METADATA_FILE not in manifest.files:
        raise DamageError(f"{MANIFEST_FILE} names no {STATE_FILE} or no {METADATA_FILE}")
    if problems := find_damage(folder, manifest, [STATE_FILE]):
        raise DamageError("; ".join(problems))
    return manifest


def find_damage(folder: Path, manifest: Manifest, names: Iterable[str], *, check_hashes: bool = True) -> list[str]:
    """What is wrong with these files, by their sizes and, unless only these are asked for, hashes. Raises `RunError`."""
    return [
        problem
        for name in names
        if (problem := _file_damage(folder / name, *manifest.files[name], check_hashes=check_hashes))
    ]


def hash_file(path: Path) -> tuple[int, str]:
    """Bytes and sha256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def retry_io(path: Path, function: Callable[[], T]) -> T:
    """The function's value, which reads `path`; where a file system fails in passing it is asked 3 times more.

    Raises FileNotFoundError, and `RunError` for everything else that keeps a file from being read: it may be good.
    """
    for attempt in count(1):
        try:
            return function()
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno not in TRANSIENT_ERRNOS or attempt > MAX_RETRIES:
                raise RunFailedError(f"{path} cannot be read (attempt {attempt}): {error.strerror}") from None
        time.sleep(RETRY_DELAY_SECONDS)
    raise RunFailedError(f"{path} cannot be read")


def _file_damage(path: Path, size: int, digest: str, *, check_hashes: bool) -> str | None:
    try:
        stats = retry_io(path, path.lstat)
        if not stat.S_ISREG(stats.st_mode):
            return f"{path.name} is not a regular file"
        if stats.st_size != size:
            return f"{path.name} has {stats.st_size:,} bytes and not {size:,}"
        if check_hashes and retry_io(path, lambda: hash_file(path)) != (size, digest):
            return f"{path.name} has other content than was written"
    except FileNotFoundError:
        return f"{path.name} is missing"
    return None


def _validate(folder: Path, body: dict[str, Any]) -> Manifest:
    """A manifest made by hand may have its hash and still say nothing of use."""
    if body.keys() != FIELD_TYPES.keys() or not all(isinstance(body[key], kind) for key, kind in FIELD_TYPES.items()):
        raise DamageError(f"{MANIFEST_FILE} must hold {', '.join(FIELD_TYPES)}")
    for name, entry in body["files"].items():
        if not is_plain_file_name(name) or name == MANIFEST_FILE:
            raise DamageError(f'{MANIFEST_FILE} names "{name}", which is no file of a checkpoint')
        if not (isinstance(entry, list) and [*map(type, entry)] == [int, str]):
            raise DamageError(f"{MANIFEST_FILE} does not tell size and hash of {name}")
    number = folder.name.removeprefix("step-")
    if number != folder.name and number != str(body["step"]):
        raise DamageError(f"{MANIFEST_FILE} is of update {body['step']}")
    return Manifest(**body | {"files": {name: (size, digest) for name, (size, digest) in body["files"].items()}})


def is_plain_file_name(name: str) -> bool:
    """Whether a name is that of a file in a folder, and leads nowhere else."""
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


def format_bytes(number: float) -> str:
    """Bytes for people: 1.2 GiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            return f"{number / 1024**power:.1f} {unit}"
    return f"{number:.0f} B"


def _encode(body: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps(body | {"sha256": digest}, sort_keys=True, indent=1) + "\n").encode()
