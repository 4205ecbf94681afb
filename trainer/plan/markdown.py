"""Renders a plan report as a page of Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from trainer.plan.document import (
    BarChart,
    LineChart,
    PlanReport,
    Table,
    bars_to_table,
    is_numeric,
    lines_to_table,
)

SPECIAL = re.compile(r"([\\|<*`\[\]])")
"""Characters that a text of a report means as they are."""


def render_markdown(report: PlanReport) -> str:
    """The report without its configurations."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: PlanReport) -> Iterator[str]:
    yield f"## {escape(report.title)}"
    yield ""
    yield f"{'Fits' if report.fits else 'Does not fit'}: {escape(report.verdict)}."
    yield ""
    yield from _table_lines(Table(title="", columns=["", ""], rows=report.facts))
    for section in report.sections:
        yield ""
        yield f"### {escape(section.title.capitalize())}"
        yield ""
        yield from _table_lines(_to_table(section))
    for heading, texts in (("Suggestions", report.suggestions), ("Notes", report.notes)):
        if texts:
            yield ""
            yield f"### {heading}"
            yield ""
            yield from (f"- {escape(text)}" for text in texts)


def _to_table(section: BarChart | Table | LineChart) -> Table:
    if isinstance(section, BarChart):
        return bars_to_table(section)
    return lines_to_table(section) if isinstance(section, LineChart) else section


def _table_lines(table: Table) -> Iterator[str]:
    cells = zip(*table.rows, strict=True) if table.rows else ()
    alignments = ["---:" if is_numeric(column) else "---" for column in cells]
    yield _row(table.columns)
    yield _row(alignments or ["---"] * len(table.columns), literal=True)
    yield from map(_row, table.rows)


def _row(cells: Sequence[str], *, literal: bool = False) -> str:
    return f"| {' | '.join(cell if literal else escape(cell) for cell in cells)} |"


def escape(text: str) -> str:
    return SPECIAL.sub(r"\\\1", text)
