"""The contents of a plan report, independent of its rendering: facts, stacked bars, tables and
line charts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from math import floor, isfinite, log10

from trainer.hardware.host import GIB
from trainer.metrics.loggers import format_tokens

NUMBER_PATTERN = re.compile(r"[<>~+-]*\s*\d")


@dataclass(frozen=True, kw_only=True)
class StackedBar:
    """Raises ValueError for a negative or non-finite segment, and for a limit that is not
    positive.
    """

    label: str
    segments: Mapping[str, float]
    """Value by name, in the chart's unit."""
    limit: float | None = None
    """A bar whose total exceeds it does not fit."""

    def __post_init__(self) -> None:
        for kind, value in self.segments.items():
            if not (isfinite(value) and value >= 0):
                raise ValueError(
                    f"{kind} = {value} of bar {self.label!r} must be finite and at least 0"
                )
        if self.limit is not None and not (isfinite(self.limit) and self.limit > 0):
            raise ValueError(
                f"limit = {self.limit} of bar {self.label!r} must be finite and above 0, or None"
            )

    @property
    def total(self) -> float:
        return sum(self.segments.values())

    @property
    def fits(self) -> bool:
        return self.limit is None or self.total <= self.limit


@dataclass(frozen=True, kw_only=True)
class BarChart:
    title: str
    unit: str
    bars: Sequence[StackedBar]
    focus: int | None = None
    """Index of the bar that the report is about. Left out: the worst."""

    @property
    def segment_names(self) -> list[str]:
        """Names with a nonzero value in some bar, in drawing order."""
        named = dict.fromkeys(kind for bar in self.bars for kind in bar.segments)
        return [kind for kind in named if any(bar.segments.get(kind) for bar in self.bars)]

    @property
    def decimals(self) -> int:
        """Decimal places of all its values."""
        return decimal_places(
            [*(bar.total for bar in self.bars), *(bar.limit or 0 for bar in self.bars)]
        )

    @property
    def worst(self) -> int:
        """Index of the bar in focus: that with the least headroom, or the longest if none has a
        limit.
        """
        if self.focus is not None:
            return self.focus
        limited = [index for index, bar in enumerate(self.bars) if bar.limit is not None]
        return max(
            limited or range(len(self.bars)),
            key=lambda index: self.bars[index].total - (self.bars[index].limit or 0),
        )


@dataclass(frozen=True, kw_only=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """With one cell per column."""
    note: str = ""
    best: int | None = None
    """Index of the row to highlight."""


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """Points with a non-finite y are not drawn, and printed as a dash."""

    title: str
    x: str
    y: str
    log_x: bool
    log_y: bool
    lines: Mapping[str, Sequence[tuple[float, float]]]
    """(x, y) points by line name."""
    limit: float | None = None
    """Upper limit of y."""
    x_is_tokens: bool = True
    """Whether x counts tokens, in K and M; else it is a plain number."""
    x_from_zero: bool = True
    """Whether an axis that is not logarithmic begins at 0."""
    y_from_zero: bool = True

    @cached_property
    def decimals(self) -> int:
        """Decimal places of all its values."""
        return decimal_places(y for line in self.lines.values() for _, y in line)


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    title: str
    verdict: str
    fits: bool
    facts: Sequence[tuple[str, str]]
    """(label, value with unit)."""
    sections: Sequence[BarChart | Table | LineChart]
    notes: Sequence[str] = ()
    suggestions: Sequence[str] = ()
    """Changes that would help."""
    configurations: Sequence[str] = ()
    """Sections of alternative configurations to paste, each a valid TOML by itself."""

    @property
    def titled_configurations(self) -> list[tuple[str, str]]:
        """The configurations, each with the heading that keeps it apart from the others."""
        title = "configuration to paste"
        count = len(self.configurations)
        if count == 1:
            return [(title, self.configurations[0])]
        return [
            (f"{title}, {number} of {count}", text)
            for number, text in enumerate(self.configurations, 1)
        ]


# ---- numbers as text


def decimal_places(values: Iterable[float]) -> int:
    """Decimals that show three significant digits of the largest value: at least one below 1,000,
    none from there.
    """
    largest = max((abs(value) for value in values if isfinite(value)), default=0.0)
    if largest == 0 or largest >= 1000:
        return 0
    return max(1, 2 - floor(log10(largest)))


def format_number(value: float, decimals: int) -> str:
    """With thousands separators; "" for 0, and "<0.1" for a positive value that would round to
    0.
    """
    if not value:
        return ""
    smallest_shown = 10.0**-decimals
    return (
        f"<{smallest_shown:.{decimals}f}"
        if 0 < value <= smallest_shown / 2
        else f"{value:,.{decimals}f}"
    )


def format_gib(size: float) -> str:
    return f"{size / GIB:,.1f}" if size < 1000 * GIB else f"{size / GIB:,.0f}"


def format_seconds(seconds: float) -> str:
    return (
        f"{1e3 * seconds:.3g} ms"
        if seconds < 1
        else f"{seconds:.3g} s"
        if seconds < 1000
        else f"{seconds:,.0f} s"
    )


def is_numeric(cells: Iterable[str]) -> bool:
    """Whether a column holds numbers, apart from empty cells and dashes, and is therefore
    right-aligned.
    """
    nonempty = [cell for cell in cells if cell.strip("- ")]
    return bool(nonempty) and all(NUMBER_PATTERN.match(cell) for cell in nonempty)


def bars_to_table(chart: BarChart, indices: Sequence[int] | None = None) -> Table:
    """One row per segment, one column per selected bar, then total, limit and headroom.

    A chart with a single bar also gets each segment's share of the total.
    """
    bars = chart.bars if indices is None else [chart.bars[index] for index in indices]
    decimals = chart.decimals
    if not bars:
        return Table(title=chart.title, columns=[chart.unit], rows=[])
    names = chart.segment_names
    rows = [
        [name, *(format_number(bar.segments.get(name, 0), decimals) for bar in bars)]
        for name in names
    ]
    rows.append(["total", *(format_number(bar.total, decimals) or "0" for bar in bars)])
    if any(bar.limit is not None for bar in bars):
        rows.append(["limit", *(format_number(bar.limit or 0, decimals) for bar in bars)])
        rows.append(["headroom", *(_headroom(bar, decimals) for bar in bars)])
    columns = [chart.unit, *(bar.label for bar in bars)]
    if len(chart.bars) == 1:
        columns.append("share")
        # The rows below the segments have no name, and so no share.
        for name, row in zip_longest(names, rows):
            value = bars[0].segments.get(name, 0)
            row.append(f"{format_number(100 * value / bars[0].total, 1)} %" if value else "")
    return Table(title=chart.title, columns=columns, rows=rows)


def _headroom(bar: StackedBar, decimals: int) -> str:
    if bar.limit is None:
        return ""
    sign = "" if bar.fits else "-"
    return sign + (format_number(abs(bar.limit - bar.total), decimals) or "0")


def lines_to_table(
    chart: LineChart, *, max_rows: int | None = None, mark_limit: bool = False
) -> Table:
    """One row per x, one column per line; the first, the last and evenly spaced rows if there are
    more than `max_rows`.

    Values over a marked limit end with a star, and all others with a blank, so that numbers align.
    """
    xs = x_values(chart)
    lines = [dict(line) for line in chart.lines.values()]
    if max_rows is not None and len(xs) > max_rows:
        xs = [xs[round(n * (len(xs) - 1) / (max_rows - 1))] for n in range(max_rows)]
    limit = chart.limit if mark_limit else None

    def cell(y: float | None) -> str:
        text = "-" if y is None else format_y(chart, y)
        return text if limit is None else text + ("*" if y is not None and y > limit else " ")

    rows = [[format_x(chart, x), *(cell(line.get(x)) for line in lines)] for x in xs]
    return Table(title=chart.title, columns=[chart.x, *chart.lines], rows=rows)


def x_values(chart: LineChart) -> list[float]:
    """All x of all lines, sorted."""
    return sorted({x for line in chart.lines.values() for x, _ in line})


def format_x(chart: LineChart, x: float) -> str:
    return format_tokens(x) if chart.x_is_tokens else f"{x:,.10g}"


def format_y(chart: LineChart, y: float) -> str:
    """Three significant digits on a log axis, else the decimals of the largest value; "-" if not
    finite.
    """
    if not isfinite(y):
        return "-"
    return format_number(y, decimal_places([y]) if chart.log_y else chart.decimals) or "0"
