"""Prints a plan report as plain-text tables, the same on a terminal and in a file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from textwrap import fill

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from trainer.plan.document import (
    BarChart,
    LineChart,
    PlanReport,
    Table,
    bars_to_table,
    decimal_places,
    format_number,
    is_numeric,
    lines_to_table,
    x_values,
)

MAX_WIDTH = 100
COLUMN_GAP = 2
MAX_BAR_COLUMNS = 4
"""Most bars that are shown. Of more, only the first, the fullest or busiest, and the last are."""
MAX_CURVE_ROWS = 12
MAX_MARKS = 24
"""Characters of the longest mark bar."""


def show(report: PlanReport, console: Console | None = None) -> None:
    """Prints at most MAX_WIDTH columns.

    On a narrower console, a table becomes name/value lines; no value is cut.
    """
    console = console or _console()
    _print(_report_blocks(report, console), console)


def show_suggestions(suggestions: Sequence[str]) -> None:
    """Prints what `show` has left out because it was not known yet."""
    console = _console()
    _print(_list_blocks("suggestions", suggestions, min(console.width, MAX_WIDTH)), console)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else MAX_WIDTH)


def _print(blocks: Iterable[tuple[str, bool]], console: Console) -> None:
    for text, is_heading in blocks:
        console.out(text, style="bold" if is_heading else None, highlight=False)


def _report_blocks(report: PlanReport, console: Console) -> Iterator[tuple[str, bool]]:
    """(text, whether it is a heading)."""
    width = min(console.width, MAX_WIDTH)
    yield fill(report.title, width), True
    yield fill(f"{'FITS' if report.fits else 'DOES NOT FIT'}: {report.verdict}", width), True
    if report.facts:
        yield (
            "\n" + _render_table(Table(title="", columns=["", ""], rows=report.facts), console),
            False,
        )
    for section in report.sections:
        table, notes = _to_table(section)
        yield "\n" + fill(section.title, width), True
        yield _render_table(table, console), False
        yield from ((fill(note, width), False) for note in notes)
    yield from _list_blocks("notes", report.notes, width)
    for title, toml in report.titled_configurations:
        yield f"\n{title}", True
        yield toml.rstrip("\n"), False
    yield from _list_blocks("suggestions", report.suggestions, width)


def _list_blocks(heading: str, texts: Sequence[str], width: int) -> Iterator[tuple[str, bool]]:
    if texts:
        yield f"\n{heading}", True
    for text in texts:
        yield fill(text, width, initial_indent="- ", subsequent_indent="  "), False


def _to_table(section: BarChart | Table | LineChart) -> tuple[Table, list[str]]:
    """The section as a table, and the notes below it."""
    if isinstance(section, BarChart):
        return _bars_table(section)
    if isinstance(section, LineChart):
        return _curve_table(section)
    notes = [] if section.best is None else ["* the best"]
    if section.note:
        notes.append(section.note)
    return section, notes


def _bars_table(chart: BarChart) -> tuple[Table, list[str]]:
    notes = _limit_notes(chart)
    bars = chart.bars
    if len(bars) == 1:
        # A single bar leaves room for a column of marks proportional to its segments.
        table = bars_to_table(chart)
        parts = [bars[0].segments[name] for name in chart.segment_names]
        marks = ["#" * round(MAX_MARKS * part / max(parts)) for part in parts]
        rows = [[*row, mark] for row, mark in zip_longest(table.rows, marks, fillvalue="")]
        return Table(title=chart.title, columns=[*table.columns, ""], rows=rows), notes
    if len(bars) <= MAX_BAR_COLUMNS:
        return bars_to_table(chart), notes
    shown = sorted({0, chart.worst, len(bars) - 1})
    worst = "fullest" if chart.focus is None else "busiest"
    between = f", the {worst}" if len(shown) > 2 else ""
    omitted = f"the first{between} and the last of {len(bars)}; {len(bars) - len(shown)} omitted"
    return bars_to_table(chart, shown), [omitted, *notes]


def _limit_notes(chart: BarChart) -> list[str]:
    num_over = sum(not bar.fits for bar in chart.bars)
    if not num_over:
        return []
    worst = chart.bars[chart.worst]
    excess = format_number(worst.total - (worst.limit or 0), chart.decimals)
    return [
        f"{num_over} of {len(chart.bars)} over the limit, {worst.label} by {excess} {chart.unit}"
    ]


def _curve_table(chart: LineChart) -> tuple[Table, list[str]]:
    table = lines_to_table(chart, max_rows=MAX_CURVE_ROWS, mark_limit=True)
    num_rows = len(x_values(chart))
    notes = [f"{chart.y} by {chart.x}"]
    if chart.limit is not None:
        notes.append(
            f"* over the limit of {format_number(chart.limit, decimal_places([chart.limit]))}"
        )
    if len(table.rows) < num_rows:
        notes.append(f"{num_rows - len(table.rows)} of {num_rows} rows omitted")
    return table, ["; ".join(notes)]


# ---- layout


def _render_table(table: Table, console: Console) -> str:
    if not table.rows:
        return "(nothing)"
    if table.best is not None:
        marks = [
            ["*" if index == table.best else "", *row] for index, row in enumerate(table.rows)
        ]
        table = Table(title=table.title, columns=["", *table.columns], rows=marks)
    width = min(console.width, MAX_WIDTH)
    widths = _column_widths(table, width)
    return (
        _render_records(table, width) if widths is None else _render_grid(table, widths, console)
    )


def _column_widths(table: Table, available_width: int) -> list[int] | None:
    """Column widths, the widest shrunk first; None if only breaking a number or a word would make
    them fit.
    """
    columns = [*zip(table.columns, *table.rows, strict=True)]
    widths = [max(map(cell_len, column)) for column in columns]
    min_widths = [
        max(
            map(
                cell_len,
                (*name.split(), *(cells if is_numeric(cells) else " ".join(cells).split()), ""),
            )
        )
        for name, *cells in columns
    ]
    while sum(widths) + COLUMN_GAP * (len(widths) - 1) > available_width:
        # Only columns whose words would still fit can shrink: no number or word may break.
        slack = [
            width if width > lowest else 0
            for width, lowest in zip(widths, min_widths, strict=True)
        ]
        if not any(slack):
            return None
        widths[slack.index(max(slack))] -= 1
    return widths


def _render_grid(table: Table, widths: Sequence[int], console: Console) -> str:
    grid = Grid(
        box=box.SIMPLE_HEAD,
        show_header=any(table.columns),
        show_edge=False,
        pad_edge=False,
        padding=(0, COLUMN_GAP - 1, 0, 0),
    )
    for width, name, *cells in zip(widths, table.columns, *table.rows, strict=True):
        grid.add_column(
            Text(name),
            justify="right" if is_numeric(cells) else "left",
            width=width,
            overflow="fold",
        )
    for row in table.rows:
        grid.add_row(*map(Text, row))
    text = "".join(
        segment.text for segment in console.render(grid, console.options.update(width=MAX_WIDTH))
    )
    return "\n".join(line.rstrip() for line in text.splitlines())


def _render_records(table: Table, width: int) -> str:
    """Each row as one line per cell: column name and value."""
    name_width = max(map(cell_len, table.columns)) + COLUMN_GAP
    return "\n\n".join(
        "\n".join(
            fill(
                f"{name:<{name_width}}{cell.strip()}" if name else cell,
                width,
                subsequent_indent=" " * name_width,
            )
            for name, cell in zip(table.columns, row, strict=True)
            if cell.strip()
        )
        for row in table.rows
    )
