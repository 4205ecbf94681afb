"""The HTML page in a real browser: layout on a phone and on a desktop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.plan.browser import are_disjoint, measure
from tests.plan.sample_documents import SAMPLE, SEARCH, stages
from trainer.plan.document import BarChart, PlanReport
from trainer.plan.html import render_html

WIDE = 1200
NARROW = 400
CROWDED = PlanReport(
    title="a_configuration_with_a_very_long_name_and_without_any_blanks_" * 3,
    verdict="82.0 of 79.1 GiB",
    fits=False,
    facts=[(f"fact number {n}", f"{n},000,000,000") for n in range(8)],
    sections=[
        stages(4),
        stages(16),
        replace(SEARCH, rows=[*SEARCH.rows, ["long " * 20] * len(SEARCH.columns)]),
    ],
    notes=["memory.a_key_without_blanks_that_is_wider_than_the_screen_of_a_phone = 1"],
    configurations=['[model]\nname = "' + "x" * 200 + '"\n'],
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Browser measurements of two reports, each at a wide and a narrow width."""
    documents = [render_html(report) for report in (SAMPLE, CROWDED)]
    return measure(documents, (WIDE, NARROW), tmp_path_factory.mktemp("browser"))


def test_pages_do_not_scroll_sideways(pages: list[dict[str, Any]]) -> None:
    assert [page["width"] for page in pages] == [WIDE, NARROW] * 2
    assert [page["scrollWidth"] for page in pages] == [WIDE, NARROW] * 2
    for page in pages:
        assert all(left >= 0 and right <= page["width"] for left, _, right, _ in page["scrollers"])


def test_pages_load_no_resources_and_run_no_scripts(pages: list[dict[str, Any]]) -> None:
    assert [(page["resources"], page["scripts"]) for page in pages] == [([], 0)] * 4


def test_bars_are_drawn_to_scale(pages: list[dict[str, Any]]) -> None:
    for page, report in zip(pages, (SAMPLE, SAMPLE, CROWDED, CROWDED), strict=True):
        expected = [
            (chart, bar)
            for chart in report.sections
            if isinstance(chart, BarChart)
            for bar in chart.bars
        ]
        assert len(page["bars"]) == len(expected)
        for drawn, (chart, bar) in zip(page["bars"], expected, strict=True):
            full = max(max(each.total, each.limit or 0) for each in chart.bars)
            left, _, right, _ = drawn["place"]
            assert right - left > 150
            lengths = [end - start for start, _, end, _ in drawn["segments"]]
            values = [bar.segments[kind] for kind in chart.segment_names if bar.segments.get(kind)]
            assert lengths == pytest.approx(
                [(right - left) * value / full for value in values], abs=0.5
            )


def test_labels_totals_and_bars_do_not_overlap(pages: list[dict[str, Any]]) -> None:
    for page in pages:
        assert are_disjoint(
            [*page["labels"], *page["sums"], *(bar["place"] for bar in page["bars"])]
        )
        assert len(page["labels"]) == len(page["sums"]) == len(page["bars"])
        assert are_disjoint(page["facts"])
