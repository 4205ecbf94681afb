"""Detectors of anomalies in a live run: loss spikes, repeated non-finite gradients, stragglers,
experts without tokens, and low goodput.

Decisions use values that are equal on all ranks, so all ranks decide alike. Detector state is part
of a checkpoint: a resumed run decides as an uninterrupted one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean, median, pstdev
from typing import Any

from trainer.config.job_config import Config

LOSS_WINDOW = 128
MIN_LOSSES = 32
"""Losses in the window before a loss can count as a spike."""
MAX_ROLLBACKS = 3
"""Rollbacks to one checkpoint, after which spikes are only logged."""
COLLAPSE_STEPS = 10
"""Consecutive logged steps after which a layer's experts count as collapsed."""
MIN_CONSECUTIVE_LAGS = 3
"""Consecutive observations in which a rank must lag to be reported."""


class LossSpikeError(Exception):
    """A loss spike to roll back: that of step `step`, whose sequences end before index
    `next_sequence`.
    """

    def __init__(self, step: int, next_sequence: int) -> None:
        super().__init__(step, next_sequence)
        self.step = step
        self.next_sequence = next_sequence


class LossSpikeDetector:
    """Compares a loss with the mean and standard deviation of the losses before it (OLMo-core's
    rule).
    """

    def __init__(self, config: Config) -> None:
        self._threshold_sigmas = config.health.spike_sigmas
        self._max_consecutive_skips = config.health.max_consecutive_skips
        self._window: deque[float] = deque(maxlen=LOSS_WINDOW)
        self.consecutive_skips = 0

    def observe(self, loss: float, *, skipped: bool) -> float | None:
        """Adds a step.

        Returns its distance above the mean in standard deviations if it is a spike, else None.
        """
        self.consecutive_skips = self.consecutive_skips + 1 if skipped else 0
        # A NaN in the window would hide all spikes until it leaves.
        if not isfinite(loss):
            return None
        # Compared with the losses before it: a spike in its own window would widen the deviation.
        previous = [*self._window]
        self._window.append(loss)
        if len(previous) < MIN_LOSSES:
            return None
        # The floor keeps constant losses from dividing by zero.
        sigmas = (loss - fmean(previous)) / max(pstdev(previous), 1e-12)
        return sigmas if sigmas > self._threshold_sigmas else None

    @property
    def has_diverged(self) -> bool:
        """Whether `health.max_consecutive_skips` consecutive steps were skipped."""
        return self.consecutive_skips >= self._max_consecutive_skips

    def state_dict(self) -> dict[str, Any]:
        return {"losses": [*self._window], "consecutive_skips": self.consecutive_skips}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._window = deque(state_dict["losses"], maxlen=LOSS_WINDOW)
        self.consecutive_skips = state_dict["consecutive_skips"]


class CollapseDetector:
    """Finds layers most of whose experts get no tokens."""

    def __init__(self, max_dead_pct: float) -> None:
        self._max_dead_pct = max_dead_pct
        self._consecutive: dict[int, int] = {}

    def observe(self, loads: Sequence[Sequence[float]]) -> list[int]:
        """Adds a logged step, given the load of each expert of each layer.

        Returns the layers that collapse with it.
        """
        for layer, load in enumerate(loads):
            is_collapsed = 100 * sum(not each for each in load) > self._max_dead_pct * len(load)
            self._consecutive[layer] = self._consecutive.get(layer, 0) + 1 if is_collapsed else 0
        # Equal, not at least: each collapse is reported once.
        return [layer for layer, count in self._consecutive.items() if count == COLLAPSE_STEPS]


@dataclass(frozen=True)
class Straggler:
    """The slowest rank, for which all others wait."""

    rank: int
    host: str
    phase: str
    ratio: float

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} is a straggler: {self.phase} takes {self.ratio:.1f} times the median"


class StragglerDetector:
    """Compares the time that ranks spend outside collectives. Runs on rank 0 only."""

    def __init__(self, ratio: float) -> None:
        self._threshold_ratio = ratio
        self._previous: tuple[int, str] | None = None
        self._consecutive = 0

    def observe(self, ranks: Sequence[Sequence[Any]], interval_seconds: float) -> Straggler | None:
        """Adds a logging interval, given (host, seconds of data wait, seconds of compute) of each
        rank in it.

        Returns a straggler once, at its `MIN_CONSECUTIVE_LAGS`-th consecutive interval.
        """
        hostnames, data_waits, compute_seconds = zip(*ranks, strict=True)
        worst: Straggler | None = None
        # A data wait below 10 % of the interval does not slow the run.
        for phase, seconds_by_rank, min_excess in (
            ("reading data", data_waits, 0.1 * interval_seconds),
            ("computing", compute_seconds, 0.0),
        ):
            slowest = max(seconds_by_rank)
            # The median, because a mean would include the straggler itself.
            median_seconds = median(seconds_by_rank)
            ratio = slowest / max(median_seconds, 1e-9)
            lags = (
                slowest > self._threshold_ratio * median_seconds
                and slowest - median_seconds > min_excess
            )
            if lags and (worst is None or ratio > worst.ratio):
                rank = seconds_by_rank.index(slowest)
                worst = Straggler(rank, hostnames[rank], phase, ratio)
        # Single intervals vary by chance: a rank must lag in the same phase several times in a
        # row.
        current = None if worst is None else (worst.rank, worst.phase)
        self._consecutive = self._consecutive + 1 if current == self._previous else 1
        self._previous = current
        return worst if self._consecutive == MIN_CONSECUTIVE_LAGS else None


class Goodput:
    """The share of time since a run's first launch spent in steps that its checkpoints contain.

    Steps after a launch's newest checkpoint are lost with that launch and do not count.
    """

    def __init__(self) -> None:
        self._start_time = time.time()
        self._productive_seconds = 0.0

    def add_step(self, seconds: float) -> None:
        self._productive_seconds += seconds

    def percent(self) -> float:
        return 100 * self._productive_seconds / max(time.time() - self._start_time, 1e-9)

    def state_dict(self) -> dict[str, Any]:
        return {"start_time": self._start_time, "productive_seconds": self._productive_seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._start_time = state_dict["start_time"]
        self._productive_seconds = state_dict["productive_seconds"]
