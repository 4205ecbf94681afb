"""The page of a run in a real browser: layout on a phone and on a desktop, and its refresh."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.plan.browser import are_disjoint, dump, measure
from tests.watch.invented_runs import EVENTS, record, write_invented_run, write_lines
from tests.watch.test_server import serving
from trainer.watch import __main__ as command
from trainer.watch import server
from trainer.watch.page import RunView
from trainer.watch.server import PageServer

WIDTHS = (1280, 420)
LONG = "a_word_without_blanks_that_is_wider_than_a_phone_" * 5


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Measurements of a usual run and of one with long names, each at both widths."""
    root = tmp_path_factory.mktemp("runs")
    usual = write_invented_run(root / "usual")
    crowded = write_invented_run(root / LONG[:200], steps=2000, name=LONG[:200])
    write_lines(
        crowded / "events.jsonl",
        [{**EVENTS[2], "set": f"{LONG}{number}"} for number in range(20)]
        + [{"event": "upload_failed", "reason": LONG}, {"event": LONG}],
    )
    large = {"tokens": 10**15, "tokens_per_second_per_device": 1.5e9, "grad_norm": 1e12}
    write_lines(crowded / "metrics.jsonl", [record(2001) | large])
    documents = [command.render(RunView(folder)) for folder in (usual, crowded)]
    return measure(documents, WIDTHS, tmp_path_factory.mktemp("browser"))


def test_pages_do_not_scroll_sideways(pages: list[dict[str, Any]]) -> None:
    assert [page["width"] for page in pages] == [*WIDTHS, *WIDTHS]
    assert [page["scrollWidth"] for page in pages] == [*WIDTHS, *WIDTHS]
    for page in pages:
        assert len(page["scrollers"]) > 20
        assert all(left >= 0 and right <= page["width"] for left, _, right, _ in page["scrollers"])
        assert are_disjoint(page["facts"])


def test_a_written_page_loads_nothing_and_runs_no_script(pages: list[dict[str, Any]]) -> None:
    assert [(page["resources"], page["scripts"]) for page in pages] == [([], 0)] * 4


def test_the_served_page_follows_the_run_without_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(command, "REFRESH_SECONDS", 1)
    folder = write_invented_run(tmp_path / "run", steps=10)
    view = RunView(folder)
    step = 10

    def render(nonce: str) -> str:
        nonlocal step
        step += 1
        write_lines(folder / "metrics.jsonl", [record(step)])
        return command.render(view, nonce=nonce)

    pages = PageServer(render, 0)
    with serving(pages):
        document, errors = dump(pages.url, tmp_path, "--enable-logging=stderr")
    assert "CONSOLE" not in errors
    shown = re.search(
        r"<title>long_code: interrupted: [^<]*, step (\d+) of 2,000</title>", document
    )
    assert shown, document[:2000]
    assert int(shown[1]) > 12, "it was refreshed"
    assert f"<dd>{shown[1]} of 2,000</dd>" in document
    assert json.dumps(step) >= shown[1]
