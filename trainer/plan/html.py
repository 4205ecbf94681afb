"""Renders a plan report as one self-contained HTML page, without scripts or external resources
(`report.html.j2`). Style, tables and charts of `charts.html.j2` serve the page of a run, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import ceil, floor, isfinite, log2, log10
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from trainer.plan.document import (
    BarChart,
    LineChart,
    PlanReport,
    Table,
    bars_to_table,
    format_number,
    format_x,
    format_y,
    is_numeric,
    lines_to_table,
)

PALETTE = (
    "#264b6d", "#3a89c1", "#8cb4dd",  # blue
    "#13795b", "#5aac98",  # green
    "#9f6401", "#e3ad59",  # amber
    "#775994", "#b0b8c0",
    # red comes late because it also marks the limit
    "#82293c", "#cf7784",
    "#52585e",
)  # fmt: skip
"""Segment colours in drawing order: dark and light alternate, and colour-blind readers can tell
them apart.
"""
DARK_COLOURS = {0, 3, 5, 7, 9, 11}
"""Palette entries that need white labels."""
LINE_COLOURS = (1, 5, 10, 3, 7)
"""Palette entries visible on both white and black."""
MIN_LABELLED_PERCENT = 6.5
"""Narrower bar segments carry no number."""
PLOT_WIDTH = 700
PLOT_HEIGHT = 260
MAX_TICKS = 9
MIN_SPAN = 1e-200
MIN_RELATIVE_SPAN = 1e-9
"""Values that differ by less are drawn as equal: their ticks would be the same number."""
MAX_DOTS = 60
"""A line of more points is drawn without a dot for each."""
MIN_LEFT = 56
TICK_CHAR_WIDTH = 7
LEGEND_CHAR_WIDTH = 7
LEGEND_ROW_HEIGHT = 16
LEGEND_TOP = 40
"""Space above the plot for the y axis' name and one row of the legend."""
WRAP_FROM = 28
"""Characters from which a table cell may wrap."""


def render_html(report: PlanReport) -> str:
    return template("report.html.j2").render(report=report, colours=_segment_colours(report))


@cache
def template(name: str) -> Template:
    """A template of this folder, which escapes all that it is given."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "bars_to_table": bars_to_table,
        "lines_to_table": lines_to_table,
        "number": format_number,
        "full_value": _full_value,
        "column_classes": _column_classes,
        "scale": _scale,
        "palette": PALETTE,
        "dark_colours": DARK_COLOURS,
        "line_colours": LINE_COLOURS,
        "min_labelled_percent": MIN_LABELLED_PERCENT,
        "max_dots": MAX_DOTS,
    }
    return environment.get_template(name)


def _segment_colours(report: PlanReport) -> dict[str, dict[str, int]]:
    """Palette index by unit and segment name: a name has one colour in all charts of a unit."""
    colours: dict[str, dict[str, int]] = {}
    for chart in (section for section in report.sections if isinstance(section, BarChart)):
        of_unit = colours.setdefault(chart.unit, {})
        for name in chart.segment_names:
            of_unit.setdefault(name, len(of_unit) % len(PALETTE))
    return colours


def _full_value(chart: BarChart) -> float:
    """The value at the right end of a chart."""
    return max(max(bar.total, bar.limit or 0) for bar in chart.bars) or 1.0


def _column_classes(table: Table) -> list[str]:
    columns = [*zip(*table.rows, strict=True)] or [()] * len(table.columns)
    return [
        "n" if is_numeric(cells) else "wrap" if max(map(len, cells), default=0) > WRAP_FROM else ""
        for cells in columns
    ]


# ---- line charts


def _scale(chart: LineChart, width: int = PLOT_WIDTH, height: int = PLOT_HEIGHT) -> dict[str, Any]:
    """Ticks, points, legend and limit of a chart in the coordinates of its SVG."""
    limit = [] if chart.limit is None else [chart.limit]
    x_ticks = axis_ticks(
        [x for line in chart.lines.values() for x, _ in line],
        log=chart.log_x,
        from_zero=chart.x_from_zero,
        min_step=0.0 if chart.x_is_tokens else 1.0,
    )
    y_ticks = axis_ticks(
        [*(y for line in chart.lines.values() for _, y in line), *limit],
        log=chart.log_y,
        from_zero=chart.y_from_zero,
    )

    def to_x(value: float) -> float:
        return round(width * _axis_position(value, x_ticks, log=chart.log_x), 1)

    # The y axis of an SVG points down.
    def to_y(value: float) -> float:
        return round(height * (1 - _axis_position(value, y_ticks, log=chart.log_y)), 1)

    lines = list[dict[str, Any]]()
    legend_x = 0
    row = 0
    for name, points in chart.lines.items():
        dots = [
            (to_x(x), to_y(y), f"{name}: {format_y(chart, y)} at {format_x(chart, x)}")
            for x, y in points
            if _is_drawable(x, log=chart.log_x) and _is_drawable(y, log=chart.log_y)
        ]
        space = LEGEND_CHAR_WIDTH * len(name) + 36
        if legend_x and legend_x + space > width:
            legend_x = 0
            row += 1
        lines.append({"name": name, "dots": dots, "legend_x": legend_x, "row": row})
        legend_x += space
    for line in lines:
        line["legend_y"] = -12 - LEGEND_ROW_HEIGHT * (row - line["row"])
    y_labels = [f"{tick:,.10g}" for tick in y_ticks]
    return {
        "width": width,
        "height": height,
        "top": LEGEND_TOP + LEGEND_ROW_HEIGHT * row,
        "left": max(MIN_LEFT, 8 + TICK_CHAR_WIDTH * max(map(len, y_labels))),
        "x_ticks": [(to_x(tick), format_x(chart, tick)) for tick in x_ticks],
        "y_ticks": [*zip(map(to_y, y_ticks), y_labels, strict=True)],
        "lines": lines,
        "limit": None
        if chart.limit is None
        else (to_y(chart.limit), f"limit {format_y(chart, chart.limit)}"),
    }


def axis_ticks(
    values: Sequence[float], *, log: bool, from_zero: bool = True, min_step: float = 0.0
) -> list[float]:
    """At most nine round ticks whose first and last span all drawable values: powers of two on a
    log axis, else multiples of 1, 2 or 5 times a power of ten, from 0 if `from_zero`.
    """
    drawable = [value for value in values if _is_drawable(value, log=log)] or [1.0]
    if log:
        first = floor(log2(min(drawable)))
        last = ceil(log2(max(drawable)))
        # Every `stride`-th power of two, so that no more than MAX_TICKS remain.
        stride = -(-(max(last - first, 1) + 1) // MAX_TICKS)
        return [2.0**power for power in range(first, max(last, first + 1) + stride, stride)]
    bottom = min(drawable)
    top = max(drawable)
    # A line at one height says more with the distance to 0.
    if from_zero or top - bottom <= MIN_RELATIVE_SPAN * max(abs(top), abs(bottom)):
        bottom = min(bottom, 0.0)
        top = max(top, 0.0)
    span = top - bottom if top - bottom > MIN_SPAN else 1.0
    power = 10.0 ** floor(log10(span / 5))
    step = power * next(factor for factor in (1, 2, 5, 10) if span / (power * factor) < 5.5)
    step = max(step, min_step)
    # Rounding may leave a value a hair outside its tick, which must not add another.
    first = floor(bottom / step + 1e-9)
    last = max(ceil((bottom + span) / step - 1e-9), first + 1)
    digits = 11 - floor(log10(step))
    return [round(step * count, digits) for count in range(first, last + 1)]


def _is_drawable(value: float, *, log: bool) -> bool:
    return isfinite(value) and (value > 0 or not log)


def _axis_position(value: float, ticks: Sequence[float], *, log: bool) -> float:
    """0 at the first tick, 1 at the last."""
    low = ticks[0]
    high = ticks[-1]
    return log2(value / low) / log2(high / low) if log else (value - low) / (high - low)
