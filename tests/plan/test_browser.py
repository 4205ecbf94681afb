"""A page in a real browser: everything is laid out, and nothing sticks out on a telephone or on a desk."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from tests.plan.sample_documents import SAMPLE, SEARCH, stages
from trainer.plan.document import BarChart, PlanReport, StackedBar
from trainer.plan.html import render_html

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--window-size=1700,2000", "--virtual-time-budget=5000", "--dump-dom",
]  # fmt: skip
WIDE, NARROW = 1200, 400
MEASURE = """
addEventListener("load", () => {
  const box = element => { const r = element.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom] }
  const told = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, all = kind => [...page.querySelectorAll(kind)]
    all("details").forEach(each => { each.open = true })
    return {
      width: page.documentElement.clientWidth, needs: page.documentElement.scrollWidth,
      bars: all("svg.bar").map(svg => ({ place: box(svg), parts: [...svg.querySelectorAll(".part")].map(box) })),
      labels: all(".bars .of").map(box), sums: all(".bars .sum").map(box),
      curves: all("svg.curve").map(box), names: all("svg .name").map(box).filter(place => place[2] > place[0]),
      keys: all(".key").filter(each => each.offsetHeight > 0).length,
      tables: all(".wide").map(each => each.querySelectorAll("tbody tr").length),
      boxes: all(".wide").map(box), facts: all("dd").map(box),
      patterns: all(".beyond").map(each => page.defaultView.getComputedStyle(each).fill),
      asked: page.defaultView.performance.getEntriesByType("resource").map(each => each.name),
      scripts: page.scripts.length,
    }
  })
  document.body.innerHTML = ""
  document.body.append(Object.assign(document.createElement("pre"), { id: "told", textContent: JSON.stringify(told) }))
})
"""
FAR = BarChart(
    title="Far beyond, below a title that is as long as titles become when somebody explains everything in them",
    unit="GiB",
    bars=[
        StackedBar(
            label="a label that wraps on its way because it is long", segments={"kept": 1190.0, "rest": 9.0}, limit=79.1
        ),
        StackedBar(label="b", segments={"kept": 75.0}, limit=79.1),
    ],
)
CROWDED = PlanReport(
    title="a_configuration_with_a_name_that_knows_no_blanks_at_all_and_goes_on_and_on",
    verdict="82.0 of 79.1 GiB",
    fits=False,
    facts=[(f"the fact number {n}", f"{n},000,000,000") for n in range(8)],
    sections=[stages(4), stages(16), FAR, replace(SEARCH, rows=[*SEARCH.rows, ["much " * 20] * len(SEARCH.columns)])],
    notes=["memory.a_key_without_blanks_that_is_longer_than_a_telephone_is_wide = 1"],
    toml='[model]\nname = "' + "x" * 200 + '"\n',
)
Box = list[float]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a browser says of two reports, each wide and narrow."""
    if BROWSER is None:
        pytest.skip("no chromium here: apt-get install --no-install-recommends chromium fonts-dejavu-core")
    folder = tmp_path_factory.mktemp("browser")
    frames = [
        f'<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{escape(render_html(report))}"></iframe>'
        for report in (SAMPLE, CROWDED)
        for width in (WIDE, NARROW)
    ]
    page = folder / "page.html"
    page.write_text(f'<!DOCTYPE html><meta charset="utf-8"><body>{"".join(frames)}<script>{MEASURE}</script></body>')
    return measured(BROWSER, page)


def measured(browser: str, page: Path) -> list[dict[str, Any]]:
    command = [browser, *OPTIONS, f"--user-data-dir={page.parent / 'user'}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    found = re.search('<pre id="told">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    answer: list[dict[str, Any]] = json.loads(unescape(found[1]))
    return answer


def apart(boxes: list[Box]) -> bool:
    """Whether none lies over another, but for a pixel."""
    return not any(
        one[0] < other[2] - 1 and other[0] < one[2] - 1 and one[1] < other[3] - 1 and other[1] < one[3] - 1
        for index, one in enumerate(boxes)
        for other in boxes[:index]
    )


def test_pages_are_as_wide_as_there_is_room(told: list[dict[str, Any]]) -> None:
    assert [page["width"] for page in told] == [WIDE, NARROW] * 2
    assert [page["needs"] for page in told] == [WIDE, NARROW] * 2


def test_a_page_asks_for_nothing_and_runs_nothing(told: list[dict[str, Any]]) -> None:
    assert [(page["asked"], page["scripts"]) for page in told] == [([], 0)] * 4


def test_every_bar_is_there_and_as_long_as_what_it_stands_for(told: list[dict[str, Any]]) -> None:
    for page, report in zip(told, (SAMPLE, SAMPLE, CROWDED, CROWDED), strict=True):
        shown = [(bars, bar) for bars in report.sections if isinstance(bars, BarChart) for bar in bars.bars]
        assert len(page["bars"]) == len(shown)
        for drawn, (bars, bar) in zip(page["bars"], shown, strict=True):
            full = max(max(each.total, each.limit or 0) for each in bars.bars)
            left, top, right, bottom = drawn["place"]
            assert right - left > 150
            assert bottom - top in (15, 26)
            lengths = [end - start for start, _, end, _ in drawn["parts"]]
            expected = [bar.segments[kind] for kind in bars.segment_names if bar.segments.get(kind)]
            assert lengths == pytest.approx([(right - left) * each / full for each in expected], abs=0.5)


def test_labels_sums_and_bars_lie_beside_each_other(told: list[dict[str, Any]]) -> None:
    for page in told:
        assert apart([*page["labels"], *page["sums"], *(bar["place"] for bar in page["bars"])])
        assert len(page["labels"]) == len(page["sums"]) == len(page["bars"])
        assert apart(page["facts"])
        for label, total, bar in zip(page["labels"], page["sums"], page["bars"], strict=True):
            left, top, right, bottom = bar["place"]
            middle = (top + bottom) / 2
            if page["width"] == WIDE:
                assert label[0] < left < right < total[0]
                assert label[1] < middle < label[3]
                assert total[1] < middle < total[3]
            else:
                assert label[0] == pytest.approx(left)
                assert total[2] == pytest.approx(right)
                assert top - 6 < label[3] <= top
                assert top - 6 - (label[3] - label[1]) / 2 < total[3] <= top


def test_lines_are_named_at_their_ends_or_below_where_there_is_no_room(told: list[dict[str, Any]]) -> None:
    wide, narrow = told[:2]
    assert (len(wide["names"]), wide["keys"]) == (5, 0)
    assert (len(narrow["names"]), narrow["keys"]) == (0, 2)
    assert apart(wide["names"])
    assert all(right <= WIDE for _, _, right, _ in wide["names"])
    assert all(right - left > 280 for left, _, right, _ in [*wide["curves"], *narrow["curves"]])


def test_tables_scroll_by_themselves(told: list[dict[str, Any]]) -> None:
    for page in told:
        assert all(left >= 0 and right <= page["width"] for left, _, right, _ in page["boxes"])
    assert told[0]["tables"] == told[1]["tables"] == [12, 5, 8, 8, 8, 8]


def test_what_is_beyond_a_limit_is_hatched(told: list[dict[str, Any]]) -> None:
    assert told[0]["patterns"] == []
    assert told[2]["patterns"] == told[3]["patterns"] == ['url("#hatch")'] * 2
