"""When to save and when to leave: every rank has its reasons, and all do so after the same update."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from signal import Signals

from parallelisms.collectives import max_over
from trainer.config.job_config import Config
from trainer.errors import BEGAN
from trainer.resilience.signals import Requests

PACE_SECONDS = 1.0
"""How long a request may wait for the ranks to ask each other, as far as updates are that short."""
LEAST_SECONDS = 5.0
"""Kept before the end of the time that a run has, beside what two updates and two checkpoints take."""


UNKNOWN = 300.0
"""Taken for a checkpoint before there was one, or a tenth of the time that is left, if that is less."""


@dataclass(frozen=True)
class Verdict:
    """What all ranks do after an update."""

    reason: str = ""
    """Why they leave; empty if they do not."""
    saves: bool = False
    """Whether the clock asks for a checkpoint."""


class Stops:
    """Asks all ranks between updates: at each of them, or once a second where updates are shorter."""

    def __init__(self, config: Config, requests: Requests, *, leading: bool, limit: float | None = None) -> None:
        """`limit` is the time at which the run has to be gone. The clock of the leading rank decides."""
        self._requests = requests
        self._minutes = config.checkpoint.interval_minutes
        self._limit, self._leads = (limit if leading else None), leading
        self._rest, self._updates = 0, 1
        self._asked = self._saved = time.monotonic()
        self._unknown = UNKNOWN if self._limit is None else min(UNKNOWN, 0.1 * (self._limit - time.time()))

    def saved(self) -> None:
        """A checkpoint was begun."""
        self._saved = time.monotonic()

    def ask(self, save_seconds: float | None) -> Verdict:
        """What all ranks do now; a checkpoint took so long, if there was one. Collective, after some updates."""
        self._rest += 1
        if self._rest < self._updates:
            return Verdict()
        now = time.monotonic()
        each = (now - self._asked) / self._rest
        wanted = min(max(1, int(PACE_SECONDS / max(each, 1e-6))), 2 * self._updates)
        saving = self._unknown if save_seconds is None else save_seconds
        need = 2 * each * wanted + 2 * saving + LEAST_SECONDS
        ends = self._limit is not None and time.time() + need >= self._limit
        saves = self._leads and self._minutes is not None and now - self._saved >= 60 * self._minutes
        number, ends_, saves_, pace = max_over(None, [float(self._requests.signal or 0), ends, saves, -wanted])
        self._asked, self._rest, self._updates = time.monotonic(), 0, int(-pace)
        if number:
            return Verdict(Signals(int(number)).name)
        return Verdict("its time is over" if ends_ else "", bool(saves_))


def end_of_time(config: Config, environment: Mapping[str, str]) -> float | None:
    """When this run has to be gone, as a time: by `job.max_minutes` since its launcher began, or by SLURM."""
    found = []
    if config.job.max_minutes is not None:
        found.append(float(environment.get(BEGAN) or time.time()) + 60 * config.job.max_minutes)
    if environment.get("SLURM_JOB_END_TIME", "").isdecimal():
        found.append(float(environment["SLURM_JOB_END_TIME"]))
    return min(found, default=None)
