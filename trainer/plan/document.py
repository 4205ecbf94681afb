"""What the planner tells, whatever shows it: facts, stacked bars, tables and curves. Without torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10

NUMBER_PATTERN = re.compile(r"[<>~+-]*\s*\d")


@dataclass(frozen=True, kw_only=True)
class StackedBar:
    """One stacked bar, or one column of a table with these parts. Raises ValueError for a part that has no length."""

    label: str
    segments: Mapping[str, float]
    """Of each kind so many GiB, or seconds."""
    limit: float | None = None
    """A bar that is longer does not fit."""

    def __post_init__(self) -> None:
        for kind, value in self.segments.items():
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{kind} = {value} of bar {self.label!r} must be a finite number, 0 at least")
        if self.limit is not None and not (isfinite(self.limit) and self.limit > 0):
            raise ValueError(f"limit = {self.limit} of bar {self.label!r} must be finite and above 0, or None")

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

    @property
    def segment_names(self) -> list[str]:
        """Those that some bar has more than nothing of, in the order in which bars name them: that of drawing."""
        named = dict.fromkeys(kind for bar in self.bars for kind in bar.segments)
        return [kind for kind in named if any(bar.segments.get(kind) for bar in self.bars)]

    @property
    def decimals(self) -> int:
        """Of the decimals with which all its figures are written."""
        return decimal_places([*(bar.total for bar in self.bars), *(bar.limit or 0 for bar in self.bars)])

    @property
    def worst(self) -> int:
        """The bar with the least room; where none has a limit, the longest."""
        limited = [index for index, bar in enumerate(self.bars) if bar.limit is not None]
        return max(
            limited or range(len(self.bars)), key=lambda index: self.bars[index].total - (self.bars[index].limit or 0)
        )


@dataclass(frozen=True, kw_only=True)
class Table:
    """Raises ValueError for a row that has not one cell for each column, and for a best row that is not there."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    best: int | None = None
    """The row to stress."""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"row {list(row)} of table {self.title!r} must have {len(self.columns)} cells")
        if self.best is not None and not 0 <= self.best < len(self.rows):
            raise ValueError(f"best = {self.best} of table {self.title!r} must be below {len(self.rows)}, its rows")


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """Points whose y is no number are told as a dash, and not drawn."""

    title: str
    x: str
    y: str
    log_x: bool
    log_y: bool
    lines: Mapping[str, Sequence[tuple[float, float]]]
    """Of each name its points, (x, y)."""
    limit: float | None = None
    """Of y."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    title: str
    verdict: str
    fits: bool
    facts: Sequence[tuple[str, str]]
    """What is told, and its value with its unit."""
    sections: Sequence[BarChart | Table | LineChart]
    notes: Sequence[str] = ()
    toml: str = ""
    """To paste."""


# ---- figures as text


def decimal_places(values: Iterable[float]) -> int:
    """Decimals that give the largest of them three digits; none from 1,000 on, and one at least below."""
    largest = max((abs(value) for value in values if isfinite(value)), default=0.0)
    if largest == 0 or largest >= 1000:
        return 0
    return max(1, 2 - floor(log10(largest)))


def format_number(value: float, decimals: int) -> str:
    """With commas between thousands; what is too little to be seen is less than the last digit, and 0 is nothing."""
    if not value:
        return ""
    smallest_shown = 10.0**-decimals
    return f"<{smallest_shown:.{decimals}f}" if 0 < value <= smallest_shown / 2 else f"{value:,.{decimals}f}"


def is_numeric(cells: Iterable[str]) -> bool:
    """Whether a column holds numbers, and stands at its right edge. Cells that are empty or a dash do not count."""
    nonempty = [cell for cell in cells if cell.strip("- ")]
    return bool(nonempty) and all(NUMBER_PATTERN.match(cell) for cell in nonempty)


def bars_to_table(bars: BarChart, indices: Sequence[int]) -> Table:
    """A row for each kind, a column for each bar that is shown; then their sums, and what is left below limits.

    A single bar has a column more, of shares.
    """
    selected, decimals = [bars.bars[index] for index in indices], bars.decimals
    if not selected:
        return Table(title=bars.title, columns=[bars.unit], rows=[])
    rows = [
        [kind, *(format_number(bar.segments.get(kind, 0), decimals) for bar in selected)] for kind in bars.segment_names
    ]
    rows.append(["together", *(format_number(bar.total, decimals) or "0" for bar in selected)])
    if any(bar.limit is not None for bar in selected):
        rows.append(["limit", *(format_number(bar.limit or 0, decimals) for bar in selected)])
        rows.append(["room", *(_headroom(bar, decimals) for bar in selected)])
    columns = [bars.unit, *(bar.label for bar in selected)]
    if len(bars.bars) > 1:
        return Table(title=bars.title, columns=columns, rows=rows)
    shares = [_percent_of_total(bars.bars[0], kind) for kind in bars.segment_names] + [""] * (
        len(rows) - len(bars.segment_names)
    )
    rows = [[*row, share] for row, share in zip(rows, shares, strict=True)]
    return Table(title=bars.title, columns=[*columns, "share"], rows=rows)


def _headroom(bar: StackedBar, decimals: int) -> str:
    if bar.limit is None:
        return ""
    return "-" * (not bar.fits) + (format_number(abs(bar.limit - bar.total), decimals) or "0")


def _percent_of_total(bar: StackedBar, kind: str) -> str:
    value = bar.segments.get(kind, 0)
    return f"{format_number(100 * value / bar.total, 1)} %" if value else ""


def x_values(curve: LineChart) -> list[float]:
    """Every x of any line, in order."""
    return sorted({x for line in curve.lines.values() for x, _ in line})


def format_y(curve: LineChart, y: float) -> str:
    """With three digits of its own where the axis is logarithmic, else with the decimals of the largest."""
    if not isfinite(y):
        return "-"
    all_values = [other for line in curve.lines.values() for _, other in line]
    return format_number(y, decimal_places([y] if curve.log_y else all_values)) or "0"
