"""Checks random configurations, or a given one, against one process; shrinks those that fail. Imports no torch."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Protocol

from trainer.commands import print_lines
from trainer.errors import RankFailedError
from trainer.selfcheck.comparison import (
    TOLERANCES,
    StepDifference,
    comparison_table,
    errors_by_kind,
    within_tolerance,
    worst_over_ranks,
)
from trainer.selfcheck.launches import Launch
from trainer.selfcheck.random_configs import (
    Case,
    Pair,
    all_pairs,
    format_case,
    launches_of,
    minimize,
    pairs,
    reference_launches,
    world_size,
)

MAX_SHRUNK_FAILURES = 3
PROGRESS_SECONDS = 30.0
COMMAND = "python -m trainer.selfcheck --case"


class Pool(Protocol):
    """Runs launches on ranks, as `processes.RankPool`."""

    def run(self, launch: Launch, *, reference: Path) -> list[list[StepDifference]]: ...


@dataclass(frozen=True)
class CaseResult:
    """`problem` is empty if the mesh matches one process."""

    problem: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    table: list[str] = field(default_factory=list)


def check_case(case: Case, pool: Pool, folder: Path) -> CaseResult:
    """Runs a case and its reference on the documents in `folder`, which also takes their checkpoints."""
    reference = folder / "tensors"
    for run in (reference, folder / "mesh", folder / "reference"):
        shutil.rmtree(run, ignore_errors=True)
    try:
        expected = [
            step for each in reference_launches(case, folder) for step in pool.run(each, reference=reference)[0]
        ]
        launches = [pool.run(launch, reference=reference) for launch in launches_of(case, folder)]
    except RankFailedError as error:
        return CaseResult(f"FAILED: {error}")
    if (steps := sum(len(ranks[0]) for ranks in launches)) != len(expected):
        return CaseResult(f"MISMATCH: {steps} steps, one process {len(expected)}")
    left = iter(expected)
    mesh = [step for ranks in launches for step in worst_over_ranks([*islice(left, len(ranks[0]))], ranks)]
    problem = "" if within_tolerance(expected, mesh) else "MISMATCH"
    return CaseResult(problem, errors_by_kind(expected, mesh), comparison_table(expected, mesh))


class RandomCheck:
    """Checks cases one after the other, reports failures, and counts."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self._start_time = self._last_report = time.monotonic()
        self.failed: list[Case] = []
        self.num_cases = 0
        self.largest_errors = dict.fromkeys(TOLERANCES, 0.0)
        self.met: Counter[Pair] = Counter()
        """How many cases had each pair of levels."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start_time

    def run(self, cases: Iterable[Case], *, total: int, max_seconds: float | None = None) -> None:
        """Checks `total` cases, or as many as begin within `max_seconds`."""
        for case in cases:
            self.check(case)
            if time.monotonic() - self._last_report > PROGRESS_SECONDS:
                self._last_report = time.monotonic()
                print_lines(f"{self.num_cases} of {total} cases, {len(self.failed)} failed, {self.seconds:.0f} s")
            if self.num_cases >= total or (max_seconds is not None and self.seconds > max_seconds):
                return

    def check(self, case: Case) -> None:
        result = check_case(case, self._pool, self._folder)
        self.num_cases += 1
        self.met.update(pairs(case))
        if not result.problem:
            self.largest_errors = {kind: max(error, result.errors[kind]) for kind, error in self.largest_errors.items()}
            return
        self.failed.append(case)
        if len(self.failed) <= MAX_SHRUNK_FAILURES:
            print_lines(f"{result.problem} with {len(case)} settings; shrinking them")
            case = minimize(case, lambda smaller: bool(check_case(smaller, self._pool, self._folder).problem))
            result = check_case(case, self._pool, self._folder)
        print_lines(
            f"{result.problem} on {world_size(case)} processes:", *result.table, f'  {COMMAND} "{format_case(case)}"'
        )

    def summary(self) -> list[str]:
        counts = [self.met[pair] for pair in all_pairs()]
        errors = ", ".join(f"{kind} {error:.1e}" for kind, error in self.largest_errors.items())
        return [
            f"{self.num_cases} cases, {len(self.failed)} failed, {self.seconds:.0f} s",
            f"largest relative errors: {errors}",
            f"pairs of settings: {sum(count > 0 for count in counts):,} of {len(counts):,} met, "
            f"{median(counts):.0f} times in the median",
        ]
