"""The lease on a run folder: one launch at a time trains in it, also where the file system has no
locks. Imports no torch.

`logs/lease` names its owner, who touches it every HEARTBEAT_SECONDS. Another launch

    takes it over at once                    if it was copied with the folder, or its owner on this host has ended
    takes it over after LEASE_SECONDS        if its owner is on another host and does not touch it any more
    is refused                               while its owner lives

An owner that was stopped for so long finds its lease taken, and ends before it writes anything. It
looks each time before it writes, because its own clock may have stood still with it.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field

from trainer.errors import (
    ConfigError,
    ResumeError,
    RunFailedError,
    RunFolderHeldElsewhereError,
    RunFolderInUseError,
)
from trainer.hardware.host import boot_id
from trainer.storage.artifact import Artifact, DamageError, read_artifact, seal
from trainer.storage.durable_io import write_and_fsync
from trainer.storage.manifest import retry_io

log = logging.getLogger("trainer")

HEARTBEAT_SECONDS = 10.0
LEASE_SECONDS = 90.0
"""Age at which a lease is stale.

More than the 60 seconds for which a client of NFS may use a cached time of a file.
"""
SETTLE_SECONDS = 1.0
"""Wait after a takeover, in which another launch that also began one finishes."""
ENDING_SECONDS = 3.0
"""Wait for an owner on this host that is about to end."""
POLL_SECONDS = 0.1
REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors that stay until a person changes something."""


class LeaseOwner(Artifact):
    kind: ClassVar[str] = "lease"
    folder: int
    """Inode of the folder: another one in a copy."""
    host: str
    boot: str
    """Names the host's kernel since it booted."""
    pid_namespace: str
    pid: int = Field(ge=1, lt=1 << 31)
    started: str
    """Start time of the process: its number may be another's by now."""
    job: str
    """Job id of the scheduler; empty without one."""
    attempt: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" of job {self.job}" if self.job else "")


class _Sighting(NamedTuple):
    """State of a lease file. It changes when the lease changes hands, and when its owner touches
    it.
    """

    inode: int
    touched_ns: int


class Lease:
    """The lease of this launch on a run folder, held within its context."""

    def __init__(self, folder: Path, *, job: str = "", attempt: str = "") -> None:
        self._path = folder / "lease"
        self._owner = LeaseOwner(
            folder=folder.stat().st_ino,
            host=socket.gethostname(),
            boot=boot_id(),
            pid_namespace=_pid_namespace(),
            pid=os.getpid(),
            started=_start_time(os.getpid()) or "",
            job=job,
            attempt=attempt,
        )
        self._stop = Event()
        self._is_lost = False
        self._thread = Thread(target=self._touch, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        """Acquires the lease; waits while its owner is elsewhere and may have ended.

        Raises `RunFolderInUseError` and `RunFolderHeldElsewhereError`; `ConfigError` if the folder
        refuses to be written, and `RunFailedError` for any other error of the file system.
        """
        try:
            self._acquire()
        except OSError as error:
            problem = f"{self._path} cannot be held: {error.strerror or error}"
            raise (
                ConfigError([problem]) if error.errno in REFUSALS else RunFailedError(problem)
            ) from None
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        # What is left is taken over: its owner has ended.
        with suppress(OSError):
            if self._is_mine():
                self._path.unlink(missing_ok=True)
        with suppress(OSError):
            os.close(self._descriptor)

    def require(self) -> None:
        """Raises `RunFailedError` if another launch has taken the lease over, or if it cannot be
        read.
        """
        self._is_lost = self._is_lost or retry_io(self._path, self._was_taken)
        if self._is_lost:
            raise RunFailedError(
                f"{self._path} is not this launch's any more: another one took the run over"
            )

    # ---- acquiring

    def _acquire(self) -> None:
        taken_over = False
        last = None
        since = 0.0
        began = time.monotonic()
        while not self._create():
            if (found := self._look(began)) is None:
                continue
            owner, sighting = found
            state = "stale" if owner is None else self._state_of(owner)
            # Age is the time for which this launch saw no change, by its own clock: clocks of
            # hosts and servers differ.
            if sighting != last:
                # It changed while this launch watched, so its owner lives.
                if state == "elsewhere" and last is not None:
                    raise RunFolderHeldElsewhereError(
                        f"{self._path.parent.parent} is in use by {owner}"
                    )
                if state == "elsewhere":
                    log.info("waiting for the lease of %s on %s", owner, self._path.parent.parent)
                last = sighting
                since = time.monotonic()
            if state == "here" and time.monotonic() - began > ENDING_SECONDS:
                raise RunFolderInUseError(
                    f"job.output_dir = {self._path.parent.parent} is in use by {owner}"
                )
            if state == "stale" or (
                state == "elsewhere" and time.monotonic() - since > LEASE_SECONDS
            ):
                log.info(
                    "taking over the lease of %s on %s",
                    owner or "an unknown launch",
                    self._path.parent.parent,
                )
                taken_over = self._remove(sighting) or taken_over
                last = None
            else:
                time.sleep(POLL_SECONDS)
        # Two launches may have seen the same stale lease. The slower one may have removed the new
        # lease, so look again before relying on it.
        if taken_over:
            time.sleep(SETTLE_SECONDS)
            if not self._is_mine():
                os.close(self._descriptor)
                self._acquire()

    def _state_of(self, owner: LeaseOwner) -> Literal["stale", "here", "elsewhere"]:
        if owner.folder != self._owner.folder:
            return "stale"
        # Process ids say something only under the same kernel and in the same namespace, as of a
        # container.
        if (owner.boot, owner.pid_namespace) != (self._owner.boot, self._owner.pid_namespace):
            return "elsewhere"
        # Process ids are reused; the start time tells a new process from the owner.
        return "here" if _start_time(owner.pid) == owner.started else "stale"

    def _look(self, began: float) -> tuple[LeaseOwner | None, _Sighting] | None:
        """The owner, None if the file cannot be understood; None if there is none any more.

        Raises OSError.
        """
        owner = None
        try:
            status = self._path.lstat()
            # Nobody writes a link, a pipe or a socket.
            if stat.S_ISREG(status.st_mode):
                with suppress(DamageError, ResumeError):
                    owner = read_artifact(self._path, LeaseOwner)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ESTALE or time.monotonic() - began > LEASE_SECONDS:
                raise
            # On a server it was replaced between two requests.
            return None
        return owner, _Sighting(status.st_ino, status.st_mtime_ns)

    def _create(self) -> bool:
        """Tries to create the lease; returns whether it was free."""
        content = seal(self._owner)
        draft = self._path.with_name(f"lease.{self._owner.host}-{self._owner.pid}")
        try:
            write_and_fsync(draft, content)
            # Kept open while the lease is held: an open inode is not reused, so it identifies this
            # launch's file.
            self._descriptor = os.open(draft, os.O_RDONLY | os.O_CLOEXEC)
            is_free = self._link(draft)
            if not is_free:
                os.close(self._descriptor)
            return is_free
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def _link(self, draft: Path) -> bool:
        """Gives the draft the lease's name; whether it was free."""
        try:
            # A link is atomic also on NFS, where O_EXCL is not on old servers, and the file is
            # complete from the start.
            os.link(draft, self._path)
        except FileExistsError:
            # The reply to a first request may be lost on NFS; the second one then finds what the
            # first has made.
            return draft.stat().st_nlink == 2
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
                raise
            return self._copy(draft)  # A file system without hard links.
        return True

    def _copy(self, draft: Path) -> bool:
        try:
            with self._path.open("xb") as file:
                file.write(draft.read_bytes())
                os.dup2(file.fileno(), self._descriptor, inheritable=False)
        except FileExistsError:
            return False
        return True

    def _remove(self, sighting: _Sighting) -> bool:
        """Removes the lease that was seen, and no other."""
        aside = self._path.with_name(f"lease.stale-{self._owner.host}-{self._owner.pid}")
        with suppress(FileNotFoundError):
            # Only one launch can move the file aside. It then checks that it moved the lease it
            # saw, and else puts it back.
            self._path.rename(aside)
            was_seen = aside.lstat().st_ino == sighting.inode
            # Another launch has taken it over in between.
            if not was_seen:
                with suppress(FileExistsError):
                    os.link(aside, self._path)
            shutil.rmtree(aside) if stat.S_ISDIR(aside.lstat().st_mode) else aside.unlink()
            return was_seen
        return False

    # ---- holding

    def _is_mine(self) -> bool:
        """Opens the file, because a client of NFS may believe what it knew of it.

        Raises OSError if it cannot be read.
        """
        try:
            there = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            # Gone, or a link or socket in its place.
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
                return False
            raise
        try:
            # Both files are open, so neither inode number can be a reused one.
            return os.fstat(there).st_ino == os.fstat(self._descriptor).st_ino
        finally:
            os.close(there)

    def _was_taken(self) -> bool:
        """Looks twice: another launch may have moved it aside, to put it back. Raises OSError."""
        return not self._is_mine() and not (self._stop.wait(SETTLE_SECONDS) or self._is_mine())

    def _touch(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            # An unreachable file system: others cannot see it either.
            with suppress(OSError):
                # By descriptor, not by name: a launch that was paused must not touch the lease of
                # its successor.
                os.utime(self._descriptor)
                self._is_lost = self._is_lost or self._was_taken()
            if self._is_lost:
                return


def _pid_namespace() -> str:
    with suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""


def _start_time(pid: int) -> str | None:
    """When a process of this host started, in ticks; None if it has ended."""
    with suppress(OSError, IndexError):
        # The second field is the name in parentheses, which may hold spaces; state and start time
        # follow the last one.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    with suppress(OSError):
        os.kill(pid, 0)
        return ""  # A system without /proc.
    return None
