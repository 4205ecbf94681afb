"""Checks random configurations, or a given one, against one process; shrinks those that fail.

Imports no torch.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from pathlib import Path
from statistics import median
from typing import Protocol

from trainer.command_table import typed
from trainer.commands import print_lines
from trainer.errors import RankFailedError
from trainer.launch.cluster import pluralize
from trainer.selfcheck.comparison import (
    SCALAR_TOLERANCE,
    TENSOR_TOLERANCE,
    TOLERANCES,
    StepDifference,
    comparison_table,
    errors_by_kind,
    within_tolerance,
    worst_over_ranks,
)
from trainer.selfcheck.launches import Launch, state_path
from trainer.selfcheck.random_configs import (
    FIRST_RUN,
    Case,
    Pair,
    all_pairs,
    first_launches,
    format_case,
    launches_of,
    minimize,
    pairs,
    reference_launches,
    world_size,
)

MAX_SHRUNK_FAILURES = 3
PROGRESS_SECONDS = 30.0


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
    """Runs a case and its reference on the documents in `folder`, which also takes their
    checkpoints.
    """
    reference = folder / "tensors"
    first = folder / "first tensors"
    for run in (reference, first, *(folder / name for name in (FIRST_RUN, "mesh", "reference"))):
        # A launch would resume from the checkpoints of the previous case.
        shutil.rmtree(run, ignore_errors=True)
    try:
        before = first_launches(case, folder)
        for each in before:
            pool.run(each, reference=first)
        references = reference_launches(
            case, folder, weights=state_path(first, 1) if before else None
        )
        expected = [step for each in references for step in pool.run(each, reference=reference)[0]]
        launches = [pool.run(launch, reference=reference) for launch in launches_of(case, folder)]
    except RankFailedError as error:
        return CaseResult(f"FAILED: {error}")
    if (steps := sum(len(ranks[0]) for ranks in launches)) != len(expected):
        return CaseResult(f"MISMATCH: {steps} steps, one process {len(expected)}")
    # The reference's steps are dealt to the launches: one stage may be several launches of the
    # mesh.
    left = iter(expected)
    mesh = [
        step
        for ranks in launches
        for step in worst_over_ranks([*islice(left, len(ranks[0]))], ranks)
    ]
    problem = "" if within_tolerance(expected, mesh) else "MISMATCH"
    return CaseResult(problem, errors_by_kind(expected, mesh), comparison_table(expected, mesh))


class RandomCheck:
    """Checks cases one after the other, reports failures, and counts.

    `options` are those of the printed command.
    """

    def __init__(self, pool: Pool, folder: Path, *, options: str = "") -> None:
        self._pool = pool
        self._folder = folder
        self._options = options
        self._deadline = inf
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
        self._deadline = inf if max_seconds is None else time.monotonic() + max_seconds
        for case in cases:
            self.check(case)
            if time.monotonic() - self._last_report > PROGRESS_SECONDS:
                self._last_report = time.monotonic()
                print_lines(
                    f"{self.num_cases} of {total} cases, {len(self.failed)} failed, {self.seconds:.0f} s"
                )
            if self.num_cases >= total:
                return
            if time.monotonic() > self._deadline:
                print_lines(f"the time limit is reached: {self.num_cases} of {total} cases")
                return

    def check(self, case: Case) -> None:
        result = check_case(case, self._pool, self._folder)
        self.num_cases += 1
        self.met.update(pairs(case))
        self.largest_errors |= {
            kind: max(error, self.largest_errors[kind]) for kind, error in result.errors.items()
        }
        if not result.problem:
            return
        self.failed.append(case)
        # Shrinking runs the case many times; later failures often have the same cause.
        if len(self.failed) <= MAX_SHRUNK_FAILURES:
            print_lines(f"{result.problem} with {pluralize(len(case), 'setting')}; shrinking them")
            case = minimize(case, self._still_fails)
            result = check_case(case, self._pool, self._folder)
        command = f'{typed("selfcheck")}{self._options} --case "{format_case(case)}"'
        print_lines(
            f"{result.problem} on {pluralize(world_size(case), 'process', 'es')}:",
            *result.table,
            f"  {command}",
        )

    def _still_fails(self, case: Case) -> bool:
        """Whether a smaller case fails, too; False beyond the time limit, which ends the
        search.
        """
        return time.monotonic() < self._deadline and bool(
            check_case(case, self._pool, self._folder).problem
        )

    def summary(self) -> list[str]:
        counts = [self.met[pair] for pair in all_pairs()]
        errors = ", ".join(f"{kind} {error:.1e}" for kind, error in self.largest_errors.items())
        return [
            f"{pluralize(self.num_cases, 'case')}, {len(self.failed)} failed, {self.seconds:.0f} s",
            f"largest relative errors: {errors} (allowed: {SCALAR_TOLERANCE:g}; of weights and moments {TENSOR_TOLERANCE:g})",
            f"pairs of settings: {sum(count > 0 for count in counts):,} of {len(counts):,} met, "
            f"{median(counts):.0f} times in the median",
        ]
