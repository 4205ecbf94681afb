"""Downloads the newest whole copy of a run's checkpoints, before a launch looks at its run folder.
Imports no torch.

Of several processes on a shared file system one downloads and the others wait. Files gather in a
temporary folder, which becomes `step-<N>` in one rename once every hash matches.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.errors import ConfigError, ResumeError, RunFailedError
from trainer.storage import manifest
from trainer.storage.artifact import DamageError
from trainer.storage.durable_io import file_lock, format_bytes, fsync_path, write_and_fsync
from trainer.storage.lease import Lease
from trainer.storage.object_store import RemoteError, RemoteRefusedError
from trainer.storage.remote_checkpoints import (
    RemoteCheckpoints,
    committed_steps,
    pinned_steps,
)
from trainer.storage.remote_files import transfer
from trainer.storage.retention import PIN_FILE, quarantine
from trainer.storage.run_dir import RunDir
from trainer.storage.run_id import require_own_copies

log = logging.getLogger("trainer")


def require_readable_copies(url: str) -> None:
    """Raises `ConfigError` if the store refuses or does not answer. Writes nothing."""
    try:
        RemoteCheckpoints(url).folder.is_empty()
    except RemoteRefusedError as error:
        raise _refusal(error) from None
    except RemoteError as error:
        raise ConfigError([f"checkpoint.remote: {error}"]) from None


def _refusal(error: RemoteRefusedError) -> ConfigError:
    return ConfigError([f"checkpoint.remote: {error}; {error.hint}"])


def restore_newest(run_dir: RunDir, url: str, *, name: str, probes: bool) -> bool:
    """Downloads the newest whole copy if it is newer than every intact local checkpoint; returns
    whether it did.

    With `probes`, checks first that objects can be written, and that the copies are of the run of
    this `name`. Raises `ConfigError` if they are not or the store refuses, `RunFailedError` if it
    does not answer and nothing is here to resume from, and `ResumeError` if checkpoints exist and
    none is whole.
    """
    with _one_at_a_time(run_dir):
        local = _newest_local(run_dir)
        try:
            remote = RemoteCheckpoints(url)
            if probes:
                remote.folder.require_conditional_writes()
            sizes = remote.folder.sizes()
            require_own_copies(run_dir.path, name, remote.folder, sizes, claims=probes)
        except RemoteRefusedError as error:
            raise _refusal(error) from None
        except RemoteError as error:
            if local >= 0:
                log.warning("the copies of checkpoints are not looked at: %s", error)
                return False
            raise RunFailedError(
                f"{error}; the run has no checkpoint here, and does not start over while its copies cannot be looked at"
            ) from None
        newer = [step for step in committed_steps(sizes) if step > local]
        if not newer:
            return False
        with Lease(run_dir.logs_dir):
            found = _download_newest(run_dir, remote, newer, is_only=local < 0)
        if found is not None and found in pinned_steps(sizes):
            (run_dir.checkpoints_dir / f"step-{found}" / PIN_FILE).touch()
        return found is not None


@contextmanager
def _one_at_a_time(run_dir: RunDir) -> Iterator[None]:
    try:
        run_dir.create()
        lock = run_dir.logs_dir / "restore.lock"
        with file_lock(lock):
            yield
    except OSError as error:
        raise RunFailedError(
            f"{run_dir.checkpoints_dir} cannot take a copy from checkpoint.remote: {error.strerror or error}"
        ) from None


def _newest_local(run_dir: RunDir) -> int:
    """The newest step with an intact manifest; -1 without any."""
    try:
        newest = run_dir.latest_valid_checkpoint()
    except ResumeError:
        # All are damaged, so that any copy is better.
        return -1
    return -1 if newest is None else manifest.read(newest).step


def _download_newest(
    run_dir: RunDir, remote: RemoteCheckpoints, steps: list[int], *, is_only: bool
) -> int | None:
    """The newest step whose copy is whole, now also here. Sets damaged copies aside."""
    damaged = []
    for step in reversed(steps):
        try:
            _download(run_dir, remote, step)
        except DamageError as error:
            url = f"{remote.folder.url}/step-{step}"
            log.warning("%s is damaged: %s", url, error)
            run_dir.log_event("remote_damaged", url=url, reason=str(error))
            damaged.append((step, str(error)))
        except RemoteError as error:
            raise RunFailedError(f"{error}; the same command continues the download") from None
        else:
            _set_aside(remote, damaged)
            return step
    if is_only:
        # Nothing is renamed: the store, and not each of the copies, may be at fault.
        listed = "".join(f"\n  step-{step}: {reason}" for step, reason in damaged)
        raise ResumeError(f"no checkpoint at {remote.folder.url} is intact:{listed}")
    return None


def _set_aside(remote: RemoteCheckpoints, damaged: list[tuple[int, str]]) -> None:
    try:
        for step, reason in damaged:
            remote.set_aside(step, reason)
    except RemoteError as error:
        log.warning("a damaged copy cannot be set aside: %s", error)


def _download(run_dir: RunDir, remote: RemoteCheckpoints, step: int) -> None:
    """Raises `DamageError` and `RemoteError`; what is whole stays for the next try."""
    started = time.monotonic()
    checkpoint = remote.read(step)
    total = checkpoint.manifest.bytes
    temporary = run_dir.checkpoints_dir / f".tmp-remote-step-{step}"
    temporary.mkdir(exist_ok=True)
    for path in temporary.iterdir():
        if path.name not in checkpoint.manifest.files:
            path.unlink()
    sizes = {
        name: size
        for name, (size, _) in sorted(checkpoint.manifest.files.items())
        if manifest.find_damage(temporary, checkpoint.manifest, [name])
    }
    needed = sum(sizes.values())
    if (free := shutil.disk_usage(temporary).free) < needed:
        raise RunFailedError(
            f"disk full: {format_bytes(free)} free in {run_dir.checkpoints_dir}, {format_bytes(needed)} needed for step-{step}"
        )
    log.info(
        "downloading %s/step-%d: %s of %s",
        remote.folder.url,
        step,
        format_bytes(needed),
        format_bytes(total),
    )
    transfer(
        sizes,
        lambda name, count: checkpoint.download_file(remote.folder, temporary, name, count),
        title=f"downloading {remote.folder.url}/step-{step}",
    )
    write_and_fsync(temporary / manifest.MANIFEST_FILE, checkpoint.content)
    manifest.read_validated(temporary)
    fsync_path(temporary)
    final = run_dir.checkpoints_dir / f"step-{step}"
    if final.exists():
        quarantine(final, "damaged; replaced by the copy of checkpoint.remote")
    temporary.rename(final)
    fsync_path(final.parent)
    seconds = time.monotonic() - started
    log.info("downloaded %s: %s in %.1f s", final, format_bytes(total), seconds)
    run_dir.log_event(
        "checkpoint_downloaded", step=step, url=remote.folder.url, bytes=total, seconds=seconds
    )
