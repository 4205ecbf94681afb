"""Golden plans of the shipped configurations make every change of predicted cost visible in
review.
"""

from __future__ import annotations

import re

import pytest

from benchmarks.plans import PLANS, names, told


def test_each_shipped_configuration_has_a_golden_plan() -> None:
    assert sorted(path.stem for path in PLANS.glob("*.txt")) == names()


QUICK = ("debug", "debug_moe", "debug_window")
"""Those whose traces take a second."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names()],
)
def test_plans_match_the_golden_files(name: str) -> None:
    assert told(name) == (PLANS / f"{name}.txt").read_text(), (
        "if intended, run python -m benchmarks.plans"
    )


def test_the_scaling_page_is_complete() -> None:
    page = (PLANS.parent / "scaling.md").read_text()
    lines = page.splitlines()
    for before, rule, after in zip(lines, lines[1:], lines[2:], strict=False):
        if rule.startswith("|---"):
            assert after.startswith("| "), f"the table of {before} is empty"
    assert all(
        name in page
        for name in (
            "### 8B",
            "### 70B",
            "### 405B",
            "4,096 GPUs",
            "| 405B | 16,384 |",
            "| 16M |",
            "| 8K |",
        )
    )
    assert all(
        (PLANS.parent / name).exists() for name in re.findall(r"\((scaling\w*\.svg)\)", page)
    )
