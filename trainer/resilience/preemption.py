"""When to save and when to leave: every rank has its reasons, and all do so after the same update."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from signal import Signals

from parallelisms.collectives import max_over_ranks
from trainer.config.job_config import Config
from trainer.errors import START_TIME_ENV
from trainer.resilience.signals import SignalHandler

CHECK_INTERVAL_SECONDS = 1.0
"""How long a request may wait for the ranks to ask each other, as far as updates are that short."""
MARGIN_SECONDS = 5.0
"""Kept before the end of the time that a run has, beside what two updates and two checkpoints take."""


DEFAULT_SAVE_SECONDS = 300.0
"""Taken for a checkpoint before there was one, or a tenth of the time that is left, if that is less."""


@dataclass(frozen=True)
class Decision:
    """What all ranks do after an update."""

    stop_reason: str = ""
    """Why they leave; empty if they do not."""
    should_save: bool = False
    """Whether the clock asks for a checkpoint."""


class Preemption:
    """Asks all ranks between updates: at each of them, or once a second where updates are shorter."""

    def __init__(
        self, config: Config, signals: SignalHandler, *, is_leader: bool, deadline: float | None = None
    ) -> None:
        """`limit` is the time at which the run has to be gone. The clock of the leading rank decides."""
        self._signals = signals
        self._save_interval_minutes = config.checkpoint.interval_minutes
        self._deadline, self._is_leader = (deadline if is_leader else None), is_leader
        self._steps_since_check, self._steps_per_check = 0, 1
        self._last_check = self._last_save = time.monotonic()
        self._default_save_seconds = (
            DEFAULT_SAVE_SECONDS
            if self._deadline is None
            else min(DEFAULT_SAVE_SECONDS, 0.1 * (self._deadline - time.time()))
        )

    def record_save(self) -> None:
        """A checkpoint was begun."""
        self._last_save = time.monotonic()

    def check(self, save_seconds: float | None) -> Decision:
        """What all ranks do now; a checkpoint took so long, if there was one. Collective, after some updates."""
        self._steps_since_check += 1
        if self._steps_since_check < self._steps_per_check:
            return Decision()
        now = time.monotonic()
        step_seconds = (now - self._last_check) / self._steps_since_check
        steps_per_check = min(max(1, int(CHECK_INTERVAL_SECONDS / max(step_seconds, 1e-6))), 2 * self._steps_per_check)
        expected_save_seconds = self._default_save_seconds if save_seconds is None else save_seconds
        seconds_needed = 2 * step_seconds * steps_per_check + 2 * expected_save_seconds + MARGIN_SECONDS
        deadline_near = self._deadline is not None and time.time() + seconds_needed >= self._deadline
        save_due = (
            self._is_leader
            and self._save_interval_minutes is not None
            and now - self._last_save >= 60 * self._save_interval_minutes
        )
        signal_number, any_deadline_near, any_save_due, negated_steps = max_over_ranks(
            None, [float(self._signals.signal or 0), deadline_near, save_due, -steps_per_check]
        )
        self._last_check, self._steps_since_check, self._steps_per_check = time.monotonic(), 0, int(-negated_steps)
        if signal_number:
            return Decision(Signals(int(signal_number)).name)
        return Decision("its time is over" if any_deadline_near else "", bool(any_save_due))


def job_deadline(config: Config, environ: Mapping[str, str]) -> float | None:
    """When this run has to be gone, as a time: by `job.max_minutes` since its launcher began, or by SLURM."""
    deadlines = []
    if config.job.max_minutes is not None:
        deadlines.append(float(environ.get(START_TIME_ENV) or time.time()) + 60 * config.job.max_minutes)
    if environ.get("SLURM_JOB_END_TIME", "").isdecimal():
        deadlines.append(float(environ["SLURM_JOB_END_TIME"]))
    return min(deadlines, default=None)
