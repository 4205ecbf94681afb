"""Preemption: all ranks save or stop after the same step, whichever rank was signalled or is out
of time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from signal import Signals

from parallelisms.mesh.collectives import max_over_ranks
from trainer.config.job_config import Config
from trainer.errors import START_TIME_ENV
from trainer.hardware.host import boot_id, seconds_since_boot
from trainer.resilience.signals import SignalHandler

CHECK_INTERVAL_SECONDS = 1.0
"""Upper bound on the delay between a stop signal and the next check, unless one step takes
longer.
"""
MARGIN_SECONDS = 5.0
"""Reserve before the deadline, on top of two check intervals and two checkpoints."""

DEFAULT_SAVE_SECONDS = 300.0
"""Assumed duration of the first checkpoint, or a tenth of the remaining time if that is less."""


@dataclass(frozen=True)
class Decision:
    """The action of all ranks after a step."""

    stop_reason: str = ""
    """Why the run stops; empty if it continues."""
    should_save: bool = False
    """Whether `checkpoint.interval_minutes` have passed."""


class Preemption:
    """Agrees across ranks on saving and stopping: after each step, or about once a second if steps
    are shorter.
    """

    def __init__(
        self,
        config: Config,
        signals: SignalHandler,
        *,
        is_leader: bool,
        deadline: float | None = None,
    ) -> None:
        """The run must have exited by `deadline`, in `seconds_since_boot`.

        The leader's clock decides.
        """
        self._signals = signals
        self._is_leader = is_leader
        self._save_interval_minutes = config.checkpoint.interval_minutes
        # Other ranks have no deadline: clocks differ, and the collective passes the leader's
        # verdict on.
        seconds_left = (
            deadline - seconds_since_boot() if is_leader and deadline is not None else inf
        )
        self._deadline = time.monotonic() + seconds_left
        self._steps_since_check = 0
        self._steps_per_check = 1
        self._last_check = self._last_save = time.monotonic()
        self._default_save_seconds = min(DEFAULT_SAVE_SECONDS, 0.1 * seconds_left)

    def record_save(self) -> None:
        """Restarts the `checkpoint.interval_minutes` clock."""
        self._last_save = time.monotonic()

    def check(self, save_seconds: float | None) -> Decision:
        """The common decision.

        `save_seconds` is the duration of the last checkpoint. Collective on some steps only.
        """
        self._steps_since_check += 1
        if self._steps_since_check < self._steps_per_check:
            return Decision()
        now = time.monotonic()
        step_seconds = (now - self._last_check) / self._steps_since_check
        # At most doubled: one step that was fast by chance must not put the next check off for
        # long.
        steps_per_check = min(
            max(1, int(CHECK_INTERVAL_SECONDS / max(step_seconds, 1e-6))),
            2 * self._steps_per_check,
        )
        expected_save_seconds = (
            self._default_save_seconds if save_seconds is None else save_seconds
        )
        # A save may be in progress, which the last one must wait for: time for two. The next
        # chance to decide is a whole check interval away.
        seconds_needed = (
            2 * step_seconds * steps_per_check + 2 * expected_save_seconds + MARGIN_SECONDS
        )
        deadline_near = now + seconds_needed >= self._deadline
        save_due = (
            self._is_leader
            and self._save_interval_minutes is not None
            and now - self._last_save >= 60 * self._save_interval_minutes
        )
        # One collective for all questions. The maximum of the negated count is the least count of
        # all ranks, which all of them adopt: they must check after the same step.
        signal_number, any_deadline_near, any_save_due, negated_steps = max_over_ranks(
            None, [float(self._signals.signal or 0), deadline_near, save_due, -steps_per_check]
        )
        # Read again: the wait for slower ranks in the collective is not time of a step.
        self._last_check = time.monotonic()
        self._steps_since_check = 0
        self._steps_per_check = int(-negated_steps)
        if signal_number:
            return Decision(Signals(int(signal_number)).name)
        return Decision("time limit reached" if any_deadline_near else "", bool(any_save_due))


def job_deadline(config: Config, environ: Mapping[str, str]) -> float | None:
    """The earlier of `job.max_minutes` after the launcher's start and SLURM's end time, in
    `seconds_since_boot`.

    The wall clock is read once, for SLURM's limit: it may be set while the run goes.
    """
    deadlines = []
    now = seconds_since_boot()
    if config.job.max_minutes is not None:
        host, _, seconds = environ.get(START_TIME_ENV, "").partition(" ")
        deadlines.append(
            # The launcher may run on another host, whose time since boot means nothing here.
            (float(seconds) if host == boot_id() else now) + 60 * config.job.max_minutes
        )
    if environ.get("SLURM_JOB_END_TIME", "").isdecimal():
        deadlines.append(now + float(environ["SLURM_JOB_END_TIME"]) - time.time())
    return min(deadlines, default=None)
