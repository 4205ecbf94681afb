"""A report as text: plain tables that say the same on a terminal, in a file and without colour."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from textwrap import fill

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from trainer.plan.axes import short
from trainer.plan.document import Bars, Curve, Report, Table, as_table, curve_figure, figure, numeric, places, points

WIDTH = 100
GAP = 2  # blanks between columns
COLUMNS = 4  # bars that are shown side by side; of more the first, the fullest and the last
ROWS = 12  # points of a curve
STARS = 24  # the longest row of marks


def show(report: Report, console: Console | None = None) -> None:
    """Writes it at most WIDTH wide. On something narrower tables turn into blocks of lines; no value is cut."""
    console = console or Console(width=None if sys.stdout.isatty() else WIDTH)
    for text, is_heading in _pieces(report, console):
        console.out(text, style="bold" if is_heading else None, highlight=False)


def _pieces(report: Report, console: Console) -> Iterator[tuple[str, bool]]:
    """Text, and whether it is a heading."""
    width = min(console.width, WIDTH)
    yield fill(report.title, width), True
    yield fill(f"{'FITS' if report.fits else 'DOES NOT FIT'}: {report.verdict}", width), True
    if report.facts:
        yield "\n" + _text(Table(title="", columns=["", ""], rows=report.facts), console), False
    for part in report.parts:
        table, notes = _tabulate(part)
        yield "\n" + fill(part.title, width), True
        yield _text(table, console), False
        yield from ((fill(note, width), False) for note in notes)
    if report.notes:
        yield "\nnotes", True
        for note in report.notes:
            yield fill(note, width, initial_indent="- ", subsequent_indent="  "), False
    if report.toml:
        yield "\nto paste", True
        yield report.toml.rstrip("\n"), False


def _tabulate(part: Bars | Table | Curve) -> tuple[Table, list[str]]:
    """As a table, with what is said below it."""
    if isinstance(part, Bars):
        return _bars(part)
    if isinstance(part, Curve):
        return _curve(part)
    marked = ["* the best"] * (part.best is not None) + [part.note] * bool(part.note)
    return part, marked


def _bars(bars: Bars) -> tuple[Table, list[str]]:
    if len(bars.bars) == 1:
        return _marked(bars), _misfits(bars)
    if len(bars.bars) <= COLUMNS:
        return as_table(bars, range(len(bars.bars))), _misfits(bars)
    shown = sorted({0, bars.fullest, len(bars.bars) - 1})
    left = f"the first, the fullest and the last of {len(bars.bars)}; {len(bars.bars) - len(shown)} are left out"
    return as_table(bars, shown), [left, *_misfits(bars)]


def _marked(bars: Bars) -> Table:
    """A single bar, with its parts drawn in marks."""
    plain, parts = as_table(bars, [0]), [bars.bars[0].parts[kind] for kind in bars.kinds]
    marks = ["#" * round(STARS * part / max(parts)) for part in parts]
    marks += [""] * (len(plain.rows) - len(marks))
    rows = [[*row, drawn] for row, drawn in zip(plain.rows, marks, strict=True)]
    return Table(title=bars.title, columns=[*plain.columns, ""], rows=rows)


def _misfits(bars: Bars) -> list[str]:
    beyond = [bar for bar in bars.bars if not bar.fits]
    if not beyond:
        return []
    worst = bars.bars[bars.fullest]
    much = figure(worst.total - (worst.limit or 0), bars.places)
    return [f"{len(beyond)} of {len(bars.bars)} beyond the limit, {worst.label} by {much} {bars.unit}"]


def _curve(curve: Curve) -> tuple[Table, list[str]]:
    """A row for each x, a column for each line; what is beyond the limit is marked."""
    found = points(curve)
    shown = found
    if len(found) > ROWS:
        shown = [found[round(n * (len(found) - 1) / (ROWS - 1))] for n in range(ROWS)]
    rows = [[short(x), *(_cell(curve, dict(line).get(x)) for line in curve.lines.values())] for x in shown]
    notes = [f"{curve.y} by {curve.x}"]
    if curve.limit is not None:
        notes.append(f"* beyond the limit of {figure(curve.limit, places([curve.limit]))}")
    if len(shown) < len(found):
        notes.append(f"{len(found) - len(shown)} of {len(found)} rows are left out")
    return Table(title=curve.title, columns=[curve.x, *curve.lines], rows=rows), ["; ".join(notes)]


def _cell(curve: Curve, y: float | None) -> str:
    """Stands below its neighbours whether it is marked or not."""
    if y is None:
        return "-" + " " * (curve.limit is not None)
    told = curve_figure(curve, y)
    return told if curve.limit is None else told + ("*" if y > curve.limit else " ")


# ---- laying out


def _text(table: Table, console: Console) -> str:
    """As a grid if its columns have room side by side, else row for row."""
    if not table.rows:
        return "(nothing)"
    if table.best is not None:
        marks = [["*" if index == table.best else "", *row] for index, row in enumerate(table.rows)]
        table = Table(title=table.title, columns=["", *table.columns], rows=marks)
    width = min(console.width, WIDTH)
    widths = _widths(table, width)
    return _blocks(table, width) if widths is None else _grid(table, widths, console)


def _widths(table: Table, room: int) -> list[int] | None:
    """Of columns, the widest made narrower until all have room; None if that takes breaking a number or a word."""
    columns = [*zip(table.columns, *table.rows, strict=True)]
    widths = [max(map(cell_len, column)) for column in columns]
    least = [
        max(cell_len(whole) for whole in (*name.split(), *(cells if numeric(cells) else " ".join(cells).split()), ""))
        for name, *cells in columns
    ]
    while sum(widths) + GAP * (len(widths) - 1) > room:
        slack = [width if width > lowest else 0 for width, lowest in zip(widths, least, strict=True)]
        if not any(slack):
            return None
        widths[slack.index(max(slack))] -= 1
    return widths


def _grid(table: Table, widths: Sequence[int], console: Console) -> str:
    """Without escapes, and without blanks at the ends of lines."""
    whole = sum(widths) + GAP * (len(widths) - 1)
    grid = Grid(box=box.SIMPLE_HEAD, show_header=any(table.columns), show_edge=False, padding=(0, GAP - 1, 0, 0))
    for width, name, *cells in zip(widths, table.columns, *table.rows, strict=True):
        grid.add_column(Text(name), justify="right" if numeric(cells) else "left", width=width, overflow="fold")
    for row in table.rows:
        grid.add_row(*map(Text, row))
    # The last column has a gap behind it, which is cut off.
    text = "".join(segment.text for segment in console.render(grid, console.options.update(width=whole + GAP)))
    return "\n".join(line[:whole].rstrip() for line in text.splitlines())


def _blocks(table: Table, width: int) -> str:
    """Each row as lines of a name and its value."""
    names = max(map(cell_len, table.columns)) + GAP
    return "\n\n".join(
        "\n".join(
            fill(f"{name:<{names}}{cell.strip()}" if name else cell, width, subsequent_indent=" " * names)
            for name, cell in zip(table.columns, row, strict=True)
            if cell.strip()
        )
        for row in table.rows
    )
