"""What is wrong with a run that goes on: gradients that are not finite, losses that jump, and ranks that lag behind.

Judged by numbers that are the same on all ranks, so that all do the same. What the judgement rests on is part of a
checkpoint; a resumed run judges as an undisturbed one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean, median, pstdev
from typing import Any

from trainer.config.job_config import Config

WINDOW = 128
LEAST = 32
"""Losses without which nothing is a spike."""
ROLLBACKS = 3
"""From one checkpoint, before spikes are only told."""
LINES = 3
"""In a row that a rank must lag behind."""


class LostError(Exception):
    """A run whose numbers say that it will not recover."""


class SpikeError(Exception):
    """A loss that is to be undone: of update `step`, whose rows end before `row`."""

    def __init__(self, step: int, row: int) -> None:
        super().__init__(step, row)
        self.step, self.row = step, row


class Losses:
    """The losses before the one that is judged (OLMo-core's rule: so many standard deviations above their mean)."""

    def __init__(self, config: Config) -> None:
        self._sigmas = config.health.spike_sigmas
        self._limit = config.health.skipped_in_a_row
        self._window: deque[float] = deque(maxlen=WINDOW)
        self.skipped_in_a_row = 0

    def take(self, loss: float, *, skipped: bool) -> float | None:
        """By how many standard deviations the loss is too high, if it is."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if not isfinite(loss):
            return None
        before = [*self._window]
        self._window.append(loss)
        if len(before) < LEAST:
            return None
        above = (loss - fmean(before)) / max(pstdev(before), 1e-12)
        return above if above > self._sigmas else None

    @property
    def is_lost(self) -> bool:
        """Whether too many updates in a row were skipped."""
        return self.skipped_in_a_row >= self._limit

    def state(self) -> dict[str, Any]:
        return {"losses": [*self._window], "skipped_in_a_row": self.skipped_in_a_row}

    def restore(self, state: dict[str, Any]) -> None:
        self._window = deque(state["losses"], maxlen=WINDOW)
        self.skipped_in_a_row = state["skipped_in_a_row"]


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for."""

    rank: int
    host: str
    phase: str
    ratio: float

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} lags behind: {self.phase} takes {self.ratio:.1f} times the median"


class Pace:
    """Compares what ranks take by themselves. The leading rank's business."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._before: tuple[int, str] | None = None
        self._lines = 0

    def take(
        self, hosts: Sequence[str], *, waited: Sequence[float], worked: Sequence[float], of: float
    ) -> Straggler | None:
        """Of each rank, the seconds of `of` in which it waited for data, and its own work. The third line in a row."""
        found = []
        # A wait for data that nobody would notice is no reason.
        for phase, each, least in (("reading data", waited, 0.1 * of), ("computing", worked, 0.0)):
            slowest, middle = max(range(len(each)), key=each.__getitem__), median(each)
            if each[slowest] > self._ratio * middle and each[slowest] - middle > least:
                found.append(Straggler(slowest, hosts[slowest], phase, each[slowest] / max(middle, 1e-9)))
        worst = max(found, key=lambda straggler: straggler.ratio, default=None)
        mark = None if worst is None else (worst.rank, worst.phase)
        self._lines = self._lines + 1 if mark is not None and mark == self._before else int(mark is not None)
        self._before = mark
        return worst if self._lines == LINES else None
