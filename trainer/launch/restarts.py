"""The lives of a run: its workers are started again, in fresh processes, until it is done, must not go on, or gets nowhere.

Only checkpoints count as getting on: a run that fails every hour for weeks is kept alive, and one that fails at once is
given up. Imports no torch.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from trainer.checkpoint.run_dir import ResumeError, RunFolder, next_stage
from trainer.config.job_config import Config, Stage
from trainer.config.parse import load
from trainer.errors import BAD_CONFIGURATION, BEGAN, DONE, FAILED, NO_RETRY, ConfigError, RunError
from trainer.launch.cluster import Cluster
from trainer.launch.workers import TELLING_CODES, Workers
from trainer.resilience import exit_markers
from trainer.resilience.hang_report import suspects

LONGEST_BACK_OFF = 300.0


def live(config: Config, argv: Sequence[str], cluster: Cluster, script: Path) -> int:
    """Runs what is left of the stages, each in processes of its own; returns the exit status."""
    folder, workers = RunFolder(config.output_dir), Workers()
    began, stuck, stage = time.time(), 0, next_stage(config)
    os.environ.setdefault(BEGAN, str(began))
    with workers.listening():
        for life in count():
            attempt = os.environ[exit_markers.ATTEMPT] = f"{socket.gethostname()}-{os.getpid()}-{began:.0f}.{life}"
            before = folder.committed()[-1:]
            status = workers.start(script, argv, cluster)
            if exit_markers.read(folder.path, attempt) == "REQUEUE":
                return DONE
            if status == DONE:
                stage, status = _after(stage, argv)
                if stage is None:
                    return status
            else:
                stuck = 0 if folder.committed()[-1:] != before else stuck + 1
                if status in TELLING_CODES or workers.asked:
                    return status
                seconds = _pause(config, folder, cluster, life + 1, stuck)
                if seconds is None:
                    return status
                workers.pause(seconds)
            if workers.asked:
                return _leave(folder, workers.asked.name, attempt)
    raise AssertionError("lives do not end by themselves")


def _leave(folder: RunFolder, reason: str, attempt: str) -> int:
    """Asked to while no worker was there to save anything; returns the exit status."""
    if not folder.committed():
        return FAILED
    exit_markers.write(folder.path, "REQUEUE", reason=reason, attempt=attempt)
    _say(folder, f"leaving: {reason}; the same command goes on from {_newest(folder)}")
    return DONE


def _pause(config: Config, folder: RunFolder, cluster: Cluster, life: int, stuck: int) -> float | None:
    """Seconds until the start after a failure, the `stuck`-th in a row without a new checkpoint; None for no start."""
    patience = config.distributed
    for line in suspects(folder.hangs, cluster.world_size):
        _say(folder, line)
    # Nodes would have to fail, and to start again, at the same time.
    if not patience.restarts or cluster.nodes > 1:
        return None
    if stuck > patience.restarts:
        _say(folder, f"given up: {stuck} starts in a row without a new checkpoint (distributed.restarts)")
        return None
    seconds: float = min(patience.restart_seconds * 2 ** max(0, stuck - 1), LONGEST_BACK_OFF)
    _say(folder, f"starting again in {seconds:g} s from {_newest(folder)}")
    folder.event("restart", life=life, without_progress=stuck)
    return seconds


def _after(before: Stage | None, argv: Sequence[str]) -> tuple[Stage | None, int]:
    """The stage that follows one that ended well, if there is one; else the exit status."""
    if before is None or not before.name:
        return None, DONE
    try:
        after = next_stage(load(argv))  # What is still to come may have been changed meanwhile.
    except (ConfigError, ResumeError, RunError) as error:
        sys.stderr.write(f"error: {error}\n")
        return None, {ConfigError: BAD_CONFIGURATION, ResumeError: NO_RETRY}.get(type(error), FAILED)
    return (None if after is None or after.index == before.index else after), DONE


def _newest(folder: RunFolder) -> str:
    committed = folder.committed()
    return str(committed[-1][1]) if committed else "the beginning: there is no checkpoint yet"


def _say(folder: RunFolder, line: str) -> None:
    sys.stderr.write(f"{folder.path}: {line}\n")
