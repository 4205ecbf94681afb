"""The memory estimate against dry runs of drawn configurations: a sample of `python -m benchmarks.memory_grid`."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks import memory_grid

SAMPLE = len(memory_grid.PIPELINES)
"""One case of every schedule, and several without a pipeline."""


@pytest.mark.parametrize("index", range(SAMPLE))
def test_estimates_equal_dry_runs_within_3_percent(index: int) -> None:
    (case,) = islice(memory_grid.draw_cases(seed=0), index, index + 1)
    found = memory_grid.compare(case)
    assert found.error <= memory_grid.LIMIT, str(found)
