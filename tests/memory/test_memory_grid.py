"""The memory estimate against dry runs of drawn configurations: a sample of `python -m benchmarks.memory_grid`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from benchmarks import memory_grid

SAMPLE = len(memory_grid.PIPELINES)
"""One case of every schedule, and several without a pipeline."""
LONG = (0, 1, 5, 9)
"""Of these, dry runs of more than three seconds."""


def cases_in(name: str) -> list[str]:
    return [line for line in Path(__file__).with_name(name).read_text().splitlines() if line[:1] != "#"]


FOUND = cases_in("memory_cases.txt")
"""Cases of other seeds in which a tensor was missing."""
KINDS = cases_in("kind_cases.txt")
FAST_KINDS = (4, 7)
"""Norms of outputs, and a halo with sinks."""


@pytest.mark.parametrize(
    "index", [pytest.param(index, marks=pytest.mark.slow if index in LONG else ()) for index in range(SAMPLE)]
)
def test_estimates_equal_dry_runs_within_3_percent(index: int) -> None:
    (case,) = islice(memory_grid.draw_cases(seed=0), index, index + 1)
    found = memory_grid.compare(case)
    assert found.error <= memory_grid.LIMIT, str(found)


@pytest.mark.parametrize("text", FOUND, ids=range(len(FOUND)))
def test_tensors_once_missing_are_counted(text: str) -> None:
    found = memory_grid.compare(memory_grid.parse_case(text))
    assert found.error <= memory_grid.LIMIT, str(found)


@pytest.mark.parametrize(
    "index",
    [pytest.param(index, marks=() if index in FAST_KINDS else pytest.mark.slow) for index in range(len(KINDS))],
)
def test_kinds_of_layers_are_counted(index: int) -> None:
    found = memory_grid.compare(memory_grid.parse_case(KINDS[index]))
    assert found.error <= memory_grid.LIMIT, str(found)


def test_a_printed_case_can_be_run_again() -> None:
    for case in islice(memory_grid.draw_cases(seed=1), 4):
        again = memory_grid.parse_case(str(case))
        assert dict(again.changes) == {key: str(value) for key, value in case.changes} | memory_grid.BASE
        assert (again.world_size, again.rank, again.pp_rank) == (case.world_size, case.rank, case.pp_rank)
