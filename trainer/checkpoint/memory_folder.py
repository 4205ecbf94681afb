"""Where in-memory checkpoints lie: files in the shared memory of a node, which outlive the
processes. Imports no torch.

    /dev/shm/longhaul-<user>-<run>/rank-<R>.<0|1>   of rank R, which runs on this node
    /dev/shm/longhaul-<user>-<run>/held-<R>.<0|1>   of rank R, which runs on the previous node

A file is a sealed header of a page, the training state, and the rank's shards. A node whose ranks
have other numbers than before has files of others, too, until a launch has resumed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar, NamedTuple

from pydantic import Field

from models.files import read_regular
from trainer.errors import RunFailedError
from trainer.hardware.host import boot_id
from trainer.storage.artifact import Artifact
from trainer.storage.durable_io import write_atomic

log = logging.getLogger("trainer")

SHARED_MEMORY = Path("/dev/shm")
ABANDONED_SECONDS = 3600.0
"""Time since a run last wrote a checkpoint here, after which another run on the node frees the
memory.
"""
FILES_PER_RANK = 2
"""Files of a rank's checkpoints: while one is written, the other is whole."""
RECORD_FILE = "newest"


class InMemoryCheckpoint(Artifact):
    """Header of one rank's part. `state_bytes` of a sealed `TrainState` and the shards follow
    it.
    """

    kind: ClassVar[str] = "in-memory checkpoint"
    step: int = Field(ge=0)
    launch: str
    """Random name of the launch that wrote it or resumed from it: steps of two launches must not
    be mixed.
    """
    layout: str
    """Hash of names, shapes and dtypes of the shards."""
    state_bytes: int = Field(ge=0)
    sha256: str
    """Hash of everything that follows the header."""


def memory_folder(run_dir: Path) -> Path:
    """Folder of a run's in-memory checkpoints on this node.

    The same for every launch of the run; another for a copy of the run folder.
    """
    # A folder that was removed and created again, or replaced by a copy, has the same path but
    # another inode.
    identity = f"{run_dir.resolve()} {run_dir.stat().st_ino}"
    return (
        SHARED_MEMORY
        / f"longhaul-{os.geteuid()}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    )


def identity_of(folder: Path) -> list[str | int]:
    """The same for the ranks that see the same files."""
    found = folder.stat()
    return [boot_id(), found.st_dev, found.st_ino]


def create_memory_folder(folder: Path) -> None:
    """Creates the folder. Raises `RunFailedError` if it cannot be used."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        # Names in shared memory can be guessed: another user may have made this one, or a link to
        # elsewhere.
        found = folder.lstat()
    except OSError as error:
        raise RunFailedError(
            f"checkpoint.memory_interval: {folder} cannot be created: {error.strerror}"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise RunFailedError(
            f"{folder} is not a folder that only this user can write to; remove it"
        )


class Copy(NamedTuple):
    """One rank's part of a step, as a rank offers it that can read it."""

    step: int
    owner: int
    holder: int
    file: str
    """Its name, on the node of the holder."""


def newest_whole(copies: Iterable[Copy], num_ranks: int, *, newer_than: int) -> list[Copy] | None:
    """The copy for each rank, if possible its own, of the newest step of which every rank's part
    is in the memory of some node.

    The same for the same copies in any order, so that all ranks choose alike. None without such a
    step.
    """
    by_step = defaultdict[int, dict[int, Copy]](dict)
    for copy in sorted(copies, key=lambda copy: (copy.holder != copy.owner, copy)):
        by_step[copy.step].setdefault(copy.owner, copy)
    whole = [
        step
        for step, parts in by_step.items()
        if step > newer_than and parts.keys() == {*range(num_ranks)}
    ]
    return [by_step[max(whole)][rank] for rank in range(num_ranks)] if whole else None


def stems(kind: str, ranks: Iterable[int]) -> set[str]:
    """The names of these ranks' files, without what tells the steps apart."""
    return {f"{kind}-{rank}" for rank in ranks}


def owner_of(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def remove_others(folder: Path, kept: Collection[str]) -> None:
    """Removes the files whose stems are not `kept`."""
    with naming_the_key(folder):
        for path in folder.iterdir():
            if path.stem not in kept:
                remove_entry(path)


def remove_entry(path: Path) -> None:
    """Removes a file, or what lies in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def naming_the_key(folder: Path) -> Iterator[None]:
    """Turns an error of shared memory, such as one without inodes, into `RunFailedError`."""
    try:
        yield
    except OSError as error:
        raise RunFailedError(
            f"checkpoint.memory_interval: {folder} cannot be used: {error.strerror}"
        ) from None


def remove_memory_folder(folder: Path) -> None:
    """Removes the folder if it is one of this user."""
    with suppress(OSError):
        # Only for its checks: rmtree must not follow a link, or touch the folder of another user.
        os.close(open_own_folder(folder))
        shutil.rmtree(folder, ignore_errors=True)


def hold(folder: Path) -> int:
    """Keeps other runs from freeing the folder as long as this process lives; returns the
    descriptor.
    """
    descriptor = open_own_folder(folder)
    # The kernel drops the lock when the process ends, however it ends.
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def open_own_folder(path: Path) -> int:
    """A descriptor of a folder of this user. Raises OSError for what is none, and does not wait
    for a pipe's writer.

    Every user of the host can create files in shared memory, by any name.
    """
    descriptor = os.open(
        path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    )
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "it is of another user", str(path))
    return descriptor


def remove_abandoned() -> None:
    """Frees what runs left that nobody holds or continues."""
    for folder in sorted(SHARED_MEMORY.glob(f"longhaul-{os.geteuid()}-*")):
        try:
            descriptor = open_own_folder(folder)
        except FileNotFoundError:  # Another rank was quicker.
            continue
        except OSError as error:
            log.info("%s is left alone: %s", folder, error.strerror)
            continue
        try:
            # Every rank of a living run has a shared lock, so the exclusive one fails while any
            # lives.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(descriptor).st_mtime > ABANDONED_SECONDS:
                remove_memory_folder(folder)
        except OSError:  # Its run lives.
            continue
        finally:
            os.close(descriptor)


class Newest(NamedTuple):
    """The record of a run's newest launch with in-memory checkpoints, beside the checkpoints on
    disk.
    """

    in_memory: int = -1
    """Step of the newest in-memory checkpoint that all ranks completed; -1: none."""
    on_disk: int = -1
    """Step of the newest checkpoint on disk when this was recorded; -1: none."""
    launch: str = ""

    def write(self, checkpoints_dir: Path) -> None:
        write_atomic(
            checkpoints_dir / RECORD_FILE,
            f"{self.in_memory} {self.on_disk} {self.launch}\n".encode(),
        )

    @classmethod
    def read(cls, checkpoints_dir: Path) -> Newest:
        with suppress(OSError, ValueError):
            in_memory, on_disk, launch = read_regular(
                checkpoints_dir / RECORD_FILE, max_bytes=100
            ).split()
            return cls(int(in_memory), int(on_disk), launch.decode())
        return cls()


def forget(run_dir: Path, checkpoints_dir: Path) -> None:
    """Forgets in-memory checkpoints of earlier launches, for a launch without any.

    Its steps take another course, so no later launch may resume from the old ones.
    """
    with suppress(OSError):
        (checkpoints_dir / RECORD_FILE).unlink()
    # The folder of a run that saves nothing.
    with suppress(FileNotFoundError):
        remove_memory_folder(memory_folder(run_dir))
    remove_abandoned()
