"""Uploads of a run's checkpoints to `checkpoint.remote`, in a thread. Imports no torch.

The thread compares the local checkpoints with the copies and uploads what is missing, the newest
first, so it repeats an upload that failed, and one that an earlier launch did not finish.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Lock, Thread

from models.files import MAX_SEALED_BYTES
from trainer.config.job_config import Config
from trainer.errors import ResumeError, RunFailedError
from trainer.storage import manifest
from trainer.storage.artifact import DamageError, read_regular
from trainer.storage.durable_io import format_bytes
from trainer.storage.object_store import RemoteError
from trainer.storage.progress import progress
from trainer.storage.remote_checkpoints import (
    RemoteCheckpoints,
    begun_steps,
    committed_steps,
    pinned_steps,
    remote_checkpoint,
)
from trainer.storage.retention import is_pinned, superfluous_steps, valid_checkpoints
from trainer.storage.run_dir import RunDir

log = logging.getLogger("trainer")

FIRST_RETRY_SECONDS = 5.0
MAX_RETRY_SECONDS = 300.0
GIVE_UP_SECONDS = 900.0
"""Time without any progress after which the end of a run no longer waits."""


def uploads_of(config: Config, run_dir: RunDir) -> Uploads | None:
    """The uploads of a run; None without `checkpoint.remote`."""
    section = config.checkpoint
    if section.remote is None:
        return None
    return Uploads(run_dir, section.remote, keep=section.keep, keep_every=section.keep_every)


def finish_uploads(config: Config) -> None:
    """Uploads what a finished run lacks at `checkpoint.remote`. Raises `RunFailedError`."""
    uploads = uploads_of(config, RunDir(config.output_dir))
    if uploads is None:
        return
    with uploads:
        if problem := uploads.finish():
            raise RunFailedError(f"the run is done, but {problem}")


class Uploads:
    """Uploads checkpoints within its context. On rank 0, or in the launcher."""

    def __init__(self, run_dir: RunDir, url: str, *, keep: int, keep_every: int | None) -> None:
        self._run_dir = run_dir
        self._url = url
        self._keep = keep
        self._keep_every = keep_every
        self._uploading: Path | None = None
        """The checkpoint that is read now, which must not be deleted."""
        self._sent_bytes = 0
        self._expected_bytes = 0
        """Bytes sent once the current checkpoint is uploaded."""
        self._file_bytes = 0
        """Bytes of the current file that this try has sent."""
        self._furthest_bytes = 0
        """Most bytes of the current file that any try has sent: to send them again is no progress."""
        self._last_progress = 0.0
        self._problem = ""
        """Reason of the newest failure; "" after a success."""
        self._damaged = dict[Path, str]()
        """Local checkpoints that differ from their manifests, with the reason."""
        self._lock = Lock()
        self._wake = Event()
        self._idle = Event()
        self._stop = Event()
        self._thread = Thread(target=self._run, name="uploads", daemon=True)

    def __enter__(self) -> Uploads:
        self._run_dir.announce_commit = self.wake
        self._run_dir.is_in_use = self._is_uploading
        self.wake()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # A request in progress ends with the process: an upload that is cut off leaves no object.
        self._stop.set()
        self._wake.set()

    def wake(self) -> None:
        """Makes the thread look for checkpoints to upload."""
        with self._lock:
            self._idle.clear()
            self._wake.set()

    def finish(self, is_interrupted: Callable[[], bool] = lambda: False) -> str:
        """Waits until every checkpoint is uploaded; shows progress.

        Returns what is missing, or "". Gives up after `GIVE_UP_SECONDS` without progress, or once
        interrupted.
        """
        started = time.monotonic()
        # What was sent while the run trained is no part of the wait.
        sent_before = self._sent_bytes
        with progress(f"uploading to {self._url}", total=0) as shown:
            while not self._idle.wait(0.2):
                last_progress = max(started, self._last_progress)
                if is_interrupted() or time.monotonic() - last_progress > GIVE_UP_SECONDS:
                    return self._missing(self._problem or "the upload was not finished")
                total = max(self._expected_bytes - sent_before, 0)
                shown.show(self._sent_bytes - sent_before, total)
        newest = self._run_dir.committed_checkpoints()[-1:]
        damage = self._damaged.get(newest[0][1], "") if newest else ""
        return self._missing(damage) if damage else ""

    def _missing(self, reason: str) -> str:
        newest = self._run_dir.committed_checkpoints()[-1:]
        name = newest[0][1].name if newest else "checkpoints"
        return f"{self._url} may lack {name}: {reason}"

    def _is_uploading(self, folder: Path) -> bool:
        return self._uploading == folder

    # ---- in the thread

    def _run(self) -> None:
        delay = FIRST_RETRY_SECONDS
        while not self._stop.is_set():
            self._wake.clear()
            try:
                self._synchronize()
            except Exception as error:  # noqa: BLE001 - an upload that fails never ends a run
                self._report_failure(error)
                # A new checkpoint is tried at once.
                self._wake.wait(delay)
                delay = min(2 * delay, MAX_RETRY_SECONDS)
                continue
            delay = FIRST_RETRY_SECONDS
            with self._lock:
                if not self._wake.is_set():
                    self._idle.set()
            self._wake.wait()

    def _report_failure(self, error: Exception) -> None:
        known = isinstance(error, RemoteError | DamageError | ResumeError | RunFailedError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        # Said once: a store that is away for hours would fill the log.
        if not self._problem:
            log.warning("uploading checkpoints failed, tried again later: %s", reason)
            self._run_dir.log_event("upload_failed", reason=reason)
        self._problem = reason

    def _synchronize(self) -> None:
        remote = RemoteCheckpoints(self._url)
        while not self._stop.is_set() and (checkpoint := self._next(remote)) is not None:
            self._uploading = checkpoint
            try:
                self._upload(remote, checkpoint)
            except FileNotFoundError:
                # Retention deleted it before it was marked as in use.
                if checkpoint.exists():
                    raise
            except DamageError as error:
                log.warning("%s is damaged and is not uploaded: %s", checkpoint, error)
                self._damaged[checkpoint] = str(error)
            finally:
                self._uploading = None
            self._problem = ""
        self._prune(remote)
        self._problem = ""

    def _next(self, remote: RemoteCheckpoints) -> Path | None:
        """The newest checkpoint that has no copy, and that retention would keep."""
        local = dict(valid_checkpoints(self._run_dir.committed_checkpoints()))
        copied = remote.steps()
        superfluous = superfluous_steps(
            sorted({*local, *copied}), keep=self._keep, keep_every=self._keep_every
        )
        wanted = [
            step
            for step, folder in local.items()
            if step not in copied
            and folder not in self._damaged
            and (step not in superfluous or is_pinned(folder))
        ]
        return local[max(wanted)] if wanted else None

    def _upload(self, remote: RemoteCheckpoints, folder: Path) -> None:
        started = time.monotonic()
        content = read_regular(folder / manifest.MANIFEST_FILE, max_bytes=MAX_SEALED_BYTES)
        found = manifest.read_validated(folder)
        checkpoint = remote_checkpoint(found, content, f"step-{found.step}")
        # What an earlier try sent is there in full: an object of this name was compared with the
        # manifest before it appeared.
        missing = checkpoint.missing(remote.folder)
        self._expected_bytes = self._sent_bytes + sum(found.files[name][0] for name in missing)
        for name in missing:
            self._file_bytes = 0
            checkpoint.upload_file(remote.folder, folder, name, self._count)
            self._furthest_bytes = 0
            self._last_progress = time.monotonic()
            if self._stop.is_set():
                return
        # A launch that lost its run folder must not commit.
        self._run_dir.require_lease()
        step = checkpoint.manifest.step
        if not checkpoint.commit(remote.folder):
            log.info("%s/step-%d is there already, of another launch", self._url, step)
            return
        seconds = time.monotonic() - started
        num_bytes = checkpoint.manifest.bytes
        log.info(
            "uploaded %s/step-%d: %s in %.1f s",
            self._url,
            step,
            format_bytes(num_bytes),
            seconds,
        )
        self._run_dir.log_event(
            "checkpoint_uploaded", step=step, url=self._url, bytes=num_bytes, seconds=seconds
        )

    def _prune(self, remote: RemoteCheckpoints) -> None:
        """Deletes superfluous copies, and what uploads before the newest copy left."""
        sizes = remote.folder.sizes()
        copied = committed_steps(sizes)
        pinned = pinned_steps(sizes)
        for step, folder in self._run_dir.committed_checkpoints():
            if step in copied and step not in pinned and is_pinned(folder):
                remote.pin(step)
                pinned.add(step)
        begun = {step for step in begun_steps(sizes) if copied and step < copied[-1]}
        superfluous = superfluous_steps(copied, keep=self._keep, keep_every=self._keep_every)
        for step in sorted((superfluous | (begun - {*copied})) - pinned):
            remote.delete(step, sizes)

    def _count(self, num_bytes: int) -> None:
        self._sent_bytes += num_bytes
        self._file_bytes += num_bytes
        if self._file_bytes > self._furthest_bytes:
            self._furthest_bytes = self._file_bytes
            self._last_progress = time.monotonic()
