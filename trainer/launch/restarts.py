"""Restart policy: relaunch failed workers until the run finishes, fails permanently, or stops
making progress.

Only a new checkpoint counts as progress: a run that fails every hour for weeks is restarted each
time, one that fails at once is given up. Imports no torch.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainer.checkpoint.memory_folder import Newest
from trainer.config.job_config import Config, TrainingStage
from trainer.config.run_spec import RunSpec
from trainer.config.training_stages import Recipe
from trainer.errors import (
    CONCLUSIVE_EXIT_CODES,
    EXIT_FAILURE,
    EXIT_SUCCESS,
    START_TIME_ENV,
    RunError,
    failure_ending,
)
from trainer.hardware.host import boot_id, seconds_since_boot
from trainer.launch.cluster import LaunchWorld
from trainer.launch.workers import Workers
from trainer.resilience.watchdog import summarize_hang
from trainer.storage import exit_markers
from trainer.storage.run_dir import RunDir, next_stage

MAX_BACKOFF_SECONDS = 300.0


def run_with_restarts(
    spec: RunSpec,
    cluster: LaunchWorld,
    script: Path,
    *,
    reload: Callable[[], Recipe],
    prepare: Callable[[Recipe, LaunchWorld], RunSpec | int],
) -> int:
    """Runs the remaining stages, each in new processes; returns the exit code.

    `reload` and `prepare` read the configuration again before each stage: it may change while an
    earlier stage runs.
    """
    config = spec.config
    folder = RunDir(config.output_dir)
    workers = Workers()
    start_time = time.time()
    launch_index = 0
    failures_without_progress = 0
    stage = next_stage(config)
    # job.max_minutes counts from the first launch of this command. The time since boot cannot be
    # set back, and the boot id says whether it is of this host.
    os.environ.setdefault(START_TIME_ENV, f"{boot_id()} {seconds_since_boot()}")
    with workers.forward_signals():
        while True:
            # Markers bear this name: one that an earlier launch left must not decide about this
            # one.
            attempt = os.environ[exit_markers.ATTEMPT_VARIABLE] = (
                f"{socket.gethostname()}-{os.getpid()}-{start_time:.0f}.{launch_index}"
            )
            previous_progress = _progress(folder)
            status = workers.run(script, [spec.to_json()], cluster)
            if exit_markers.read(folder.path, attempt) == "REQUEUE":
                return EXIT_SUCCESS
            if status == EXIT_SUCCESS:
                # A run without [[stage]] has one stage, so its success is the end.
                if stage is None or not stage.name:
                    return status
                following = _prepare_following_stage(stage, cluster, reload, prepare)
                if isinstance(following, int):
                    return following
                spec = following
                stage = next_stage(following.config)
            else:
                _mark_unexplained_exit(folder, status, attempt)
                has_progressed = _progress(folder) > previous_progress
                failures_without_progress = 0 if has_progressed else failures_without_progress + 1
                # A signal asked for the end: the scheduler, or a person, decides about the next
                # launch.
                if status in CONCLUSIVE_EXIT_CODES or workers.received_signal:
                    return status
                delay = _restart_delay(
                    config, folder, cluster, launch_index + 1, failures_without_progress
                )
                if delay is None:
                    return status
                workers.interruptible_sleep(delay)
            if workers.received_signal:
                return _exit_on_signal(folder, workers.received_signal.name, attempt)
            launch_index += 1


def _mark_unexplained_exit(folder: RunDir, status: int, attempt: str) -> None:
    """Writes the marker of a failure of which the workers wrote none."""
    has_marker = exit_markers.read(folder.path, attempt) is not None
    if has_marker or status in CONCLUSIVE_EXIT_CODES:
        return
    reason = f"the workers exited with {status} and gave no reason"
    with suppress(OSError):
        exit_markers.write(
            folder.path, failure_ending(status).marker, reason=reason, attempt=attempt
        )


def _exit_on_signal(folder: RunDir, reason: str, attempt: str) -> int:
    """The exit status after a stop signal that arrived while no worker was running."""
    if not folder.committed_checkpoints():
        return EXIT_FAILURE
    exit_markers.write(folder.path, "REQUEUE", reason=reason, attempt=attempt)
    _report(
        folder, f"stopping: {reason}; the same command resumes from {_newest_checkpoint(folder)}"
    )
    return EXIT_SUCCESS


def _restart_delay(
    config: Config,
    folder: RunDir,
    cluster: LaunchWorld,
    launch_index: int,
    failures_without_progress: int,
) -> float | None:
    """Seconds to wait before the restart after a failure; None to give up.

    Reports and logs the decision.
    """
    limits = config.distributed
    for line in summarize_hang(folder.hangs_dir, cluster.world_size):
        _report(folder, line)
    # On several nodes, all launchers would have to restart together.
    if not limits.restarts or cluster.num_nodes > 1:
        return None
    if failures_without_progress > limits.restarts:
        launches = f"{failures_without_progress} consecutive launches without a new checkpoint"
        _report(folder, f"giving up: {launches} (distributed.restarts = {limits.restarts})")
        return None
    # Exponential: a full disk or a busy node gets time to recover. A launch with progress restarts
    # at once.
    backoff = (
        limits.restart_seconds * 2 ** (failures_without_progress - 1)
        if failures_without_progress
        else 0.0
    )
    delay: float = min(backoff, MAX_BACKOFF_SECONDS)
    _report(folder, f"restarting in {delay:g} s from {_newest_checkpoint(folder)}")
    folder.log_event("restart", life=launch_index, without_progress=failures_without_progress)
    return delay


def _prepare_following_stage(
    previous: TrainingStage,
    cluster: LaunchWorld,
    reload: Callable[[], Recipe],
    prepare: Callable[[Recipe, LaunchWorld], RunSpec | int],
) -> RunSpec | int:
    """Prepares the stage after `previous`; returns the exit code if there is none or it cannot
    start.
    """
    try:
        config = reload()
        following = next_stage(config)
    except RunError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.status
    # The same stage again would mean that it ended without a checkpoint; a new launch would repeat
    # it forever.
    if following is None or following.index == previous.index:
        return EXIT_SUCCESS
    return prepare(config, cluster)


def _progress(folder: RunDir) -> int:
    """Step of the newest checkpoint, on disk or in memory; -1 without any."""
    committed = folder.committed_checkpoints()
    return max(
        Newest.read(folder.checkpoints_dir).in_memory, committed[-1][0] if committed else -1
    )


def _newest_checkpoint(folder: RunDir) -> str:
    step = _progress(folder)
    committed = folder.committed_checkpoints()
    if committed and committed[-1][0] == step:
        return str(committed[-1][1])
    return "step 0: there is no checkpoint yet" if step < 0 else f"step {step}, in memory"


def _report(folder: RunDir, line: str) -> None:
    sys.stderr.write(f"{folder.path}: {line}\n")
