"""The page of Markdown has the whole report, and texts that mean nothing in Markdown."""

from __future__ import annotations

from dataclasses import replace

from tests.plan.sample_documents import SAMPLE, SEARCH
from trainer.plan.markdown import render_markdown


def test_a_page_has_every_text_of_the_report() -> None:
    page = render_markdown(SAMPLE).replace("\\", "")
    texts = [SAMPLE.title, SAMPLE.verdict, *SAMPLE.notes]
    texts += [text for row in (*SAMPLE.facts, *SEARCH.rows, SEARCH.columns) for text in row]
    assert [text for text in texts if text not in page] == []
    titles = [section.title.capitalize() for section in SAMPLE.sections]
    assert [title for title in titles if f"### {title}\n" not in page] == []


def test_a_table_has_as_many_cells_in_every_row_whatever_its_texts() -> None:
    lines = render_markdown(replace(SAMPLE, facts=[("a | b", "<b>1</b>")])).splitlines()
    assert "| a \\| b | \\<b>1\\</b> |" in lines
    rows = [line for line in lines if line.startswith("|")]
    counts = [line.replace("\\|", "").count("|") for line in rows]
    rules = [index for index, line in enumerate(rows) if "---" in line]
    assert len(rules) == 1 + len(SAMPLE.sections)
    # The heading, the rule and the first row.
    assert all(counts[index - 1] == counts[index] == counts[index + 1] for index in rules)
