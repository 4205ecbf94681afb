"""Where in-memory checkpoints lie: files in the shared memory of a node, which outlive the processes. Imports no torch.

    /dev/shm/longhaul-<user>-<run>/rank-<R>.<0|1>   of rank R, which runs on this node
    /dev/shm/longhaul-<user>-<run>/held-<R>.<0|1>   of rank R, which runs on the previous node

A file is a sealed header of a page, the training state, and the rank's shards.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from models.files import read_regular
from trainer.artifact import Artifact
from trainer.checkpoint.durable_io import write_atomic
from trainer.errors import RunFailedError

SHARED_MEMORY = Path("/dev/shm")
ABANDONED_SECONDS = 3600.0
"""Since a run last wrote a checkpoint here; the next run on the node then frees the memory."""
FILES_PER_RANK = 2
"""While one is written, the other is whole."""
STEPS_FILE = "newest_checkpoints"


class InMemoryCheckpoint(Artifact):
    """One rank's part. What follows the header is `state_bytes` of a sealed `TrainState`, and the shards."""

    kind: ClassVar[str] = "in-memory checkpoint"
    step: int = Field(ge=0)
    layout: str
    """Hash of names, shapes and dtypes of the shards."""
    state_bytes: int = Field(ge=0)
    sha256: str
    """Of everything that follows the header."""


def memory_folder(run_dir: Path) -> Path:
    """The same for every launch of a run on this node; another for a copy of the run folder."""
    identity = f"{run_dir.resolve()} {run_dir.stat().st_ino}"
    return SHARED_MEMORY / f"longhaul-{os.geteuid()}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def create_memory_folder(folder: Path) -> None:
    """Creates the folder, and frees what ended runs left. Raises `RunFailedError` if it cannot be used."""
    _remove_abandoned(folder)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise RunFailedError(f"checkpoint.memory_interval: {folder} cannot be created: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise RunFailedError(f"{folder} is not a folder that only this user can write to; remove it")


def remove_others(folder: Path, kinds: Sequence[str], num_ranks: int) -> None:
    """Removes the files of ranks that this launch does not have."""
    names = {f"{kind}-{rank}" for kind in kinds for rank in range(num_ranks)}
    for path in folder.iterdir():
        if path.stem not in names:
            path.unlink(missing_ok=True)


def remove_memory_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(own: Path) -> None:
    for folder in SHARED_MEMORY.glob(f"longhaul-{os.geteuid()}-*"):
        with suppress(OSError):
            if folder != own and time.time() - folder.stat().st_mtime > ABANDONED_SECONDS:
                remove_memory_folder(folder)


def write_newest_steps(logs_dir: Path, in_memory: int, on_disk: int) -> None:
    write_atomic(logs_dir / STEPS_FILE, f"{in_memory} {on_disk}\n".encode())


def newest_steps(logs_dir: Path) -> tuple[int, int]:
    """Of the newest checkpoint (in memory, on disk) that a run with in-memory checkpoints ever had; -1: none."""
    with suppress(OSError, ValueError):
        in_memory, on_disk = map(int, read_regular(logs_dir / STEPS_FILE, max_bytes=100).split())
        return in_memory, on_disk
    return -1, -1
