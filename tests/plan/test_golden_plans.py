"""Plans of the shipped files are those that are checked in: a change of what a run costs is seen in review."""

from __future__ import annotations

import pytest

from benchmarks.plans import PLANS, names, told


def test_each_shipped_file_has_a_plan() -> None:
    assert sorted(path.stem for path in PLANS.glob("*.txt")) == names()


@pytest.mark.parametrize("name", names())
def test_a_plan_is_the_one_that_is_checked_in(name: str) -> None:
    assert told(name) == (PLANS / f"{name}.txt").read_text(), "if that is meant: python -m benchmarks.plans"
