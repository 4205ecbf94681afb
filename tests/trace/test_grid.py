"""Whole steps that follow from short ones against dry runs of drawn configurations: a sample of
`python -m benchmarks.memory_grid`.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks import memory_grid

SAMPLE = len(memory_grid.PIPELINES)
"""One case of every schedule, and several without a pipeline."""
QUICK = ()


def cases_in(name: str) -> list[str]:
    return [
        line for line in Path(__file__).with_name(name).read_text().splitlines() if line[:1] != "#"
    ]


FOUND = cases_in("memory_cases.txt")
"""Cases of other seeds whose peaks a tensor decides that is small elsewhere."""
QUICK_FOUND = (7,)
KINDS = cases_in("kind_cases.txt")
QUICK_KINDS = (4,)
"""Norms of outputs."""


def some_slow(count: int, quick: tuple[int, ...]) -> list[Any]:
    """Indices, all slow but those of quick dry runs."""
    return [
        pytest.param(index, marks=[pytest.mark.slow] * (index not in quick))
        for index in range(count)
    ]


def require_right(case: memory_grid.GridCase) -> None:
    found = memory_grid.compare(memory_grid.deepened(case))
    assert not found.is_wrong, str(found)


@pytest.mark.parametrize("index", some_slow(SAMPLE, QUICK))
def test_drawn_steps_follow_from_short_ones(index: int) -> None:
    (case,) = islice(memory_grid.draw_cases(seed=0), index, index + 1)
    require_right(case)


@pytest.mark.parametrize("index", some_slow(len(FOUND), QUICK_FOUND))
def test_tensors_that_decide_few_peaks_are_traced(index: int) -> None:
    require_right(memory_grid.parse_case(FOUND[index]))


@pytest.mark.parametrize("index", some_slow(len(KINDS), QUICK_KINDS))
def test_kinds_of_layers_are_traced(index: int) -> None:
    require_right(memory_grid.parse_case(KINDS[index]))


def test_a_printed_case_can_be_run_again() -> None:
    for case in islice(memory_grid.draw_cases(seed=1), 4):
        again = memory_grid.parse_case(str(case))
        assert (
            dict(again.changes)
            == {key: str(value) for key, value in case.changes} | memory_grid.BASE
        )
        assert (again.world_size, again.rank, again.pp_rank) == (
            case.world_size,
            case.rank,
            case.pp_rank,
        )
