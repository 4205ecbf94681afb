"""Renders a plan report as one self-contained HTML page, without scripts or external resources (`report.html.j2`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import ceil, floor, isfinite, log2, log10
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from trainer.plan.document import (
    BarChart,
    LineChart,
    PlanReport,
    StackedBar,
    Table,
    bars_to_table,
    format_number,
    format_tokens,
    format_y,
    is_numeric,
    lines_to_table,
)

PALETTE = (
    "#264b6d", "#3a89c1", "#8cb4dd",  # blue
    "#13795b", "#5aac98",  # green
    "#9f6401", "#e3ad59",  # amber
    "#775994", "#b0b8c0",
    "#82293c", "#cf7784",  # red comes late because it also marks the limit
    "#52585e",
)  # fmt: skip
"""Segment colours in drawing order: dark and light alternate, and colour-blind readers can tell them apart."""
DARK_COLOURS = {0, 3, 5, 7, 9, 11}
"""Palette entries that need white labels."""
LINE_COLOURS = (1, 5, 10, 3, 7)
"""Palette entries visible on both white and black."""
MIN_LABELLED_PERCENT = 6.5
"""Narrower bar segments carry no number."""
PLOT_WIDTH, PLOT_HEIGHT = 700, 260
MAX_TICKS = 9
LEGEND_CHAR_WIDTH = 7
WRAP_FROM = 28
"""Characters from which a table cell may wrap."""

View = dict[str, Any]


def render_html(report: PlanReport) -> str:
    colours = _segment_colours(report)
    return _template().render(
        report=report,
        sections=[_section_view(section, colours) for section in report.sections],
        palette=PALETTE,
        dark_colours=DARK_COLOURS,
    )


def render_svg(chart: LineChart) -> str:
    """The line chart as a standalone SVG file."""
    macro = _template().make_module({"report": None, "sections": [], "palette": PALETTE, "dark_colours": DARK_COLOURS})
    svg: str = macro.line_chart(_chart_view(chart), standalone=True)  # type: ignore[attr-defined]
    return str(svg).strip() + "\n"


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2")


def _segment_colours(report: PlanReport) -> dict[tuple[str, str], int]:
    """Palette index by (unit, segment name): a name has one colour in all charts of a unit."""
    colours = dict[tuple[str, str], int]()
    for chart in (section for section in report.sections if isinstance(section, BarChart)):
        for name in chart.segment_names:
            num_used = sum(unit == chart.unit for unit, _ in colours)
            colours.setdefault((chart.unit, name), num_used % len(PALETTE))
    return colours


def _section_view(section: BarChart | Table | LineChart, colours: Mapping[tuple[str, str], int]) -> View:
    if isinstance(section, BarChart):
        kinds = {name: colours[section.unit, name] for name in section.segment_names}
        full_value = max((max(bar.total, bar.limit or 0) for bar in section.bars), default=0) or 1.0
        bars = [_bar_view(section, bar, kinds, full_value) for bar in section.bars]
        view: View = {"kind": "bars", "bars": bars, "table": _table_view(bars_to_table(section), [*kinds.values()])}
    elif isinstance(section, LineChart):
        view = {"kind": "lines", "chart": _chart_view(section), "table": _table_view(lines_to_table(section))}
    else:
        view = {"kind": "table", "table": _table_view(section), "note": section.note}
    return view | {"title": section.title}


def _bar_view(chart: BarChart, bar: StackedBar, colours: Mapping[str, int], full_value: float) -> View:
    segments = [
        {
            "name": name,
            "text": format_number(value, chart.decimals),
            "percent": 100 * value / full_value,
            "colour": colour,
            "labelled": 100 * value / full_value >= MIN_LABELLED_PERCENT,
        }
        for name, colour in colours.items()
        if (value := bar.segments.get(name, 0))
    ]
    total = format_number(bar.total, chart.decimals) or "0"
    limit = "" if bar.limit is None else f" of {format_number(bar.limit, chart.decimals)}"
    return {
        "label": bar.label,
        "fits": bar.fits,
        "total": f"{total}{limit} {chart.unit}",
        "unit": chart.unit,
        "limit": None if bar.limit is None else 100 * bar.limit / full_value,
        "end": 100 * bar.total / full_value,
        "segments": segments,
    }


def _table_view(table: Table, colours: Sequence[int] = ()) -> View:
    """`colours` are the swatches of the first rows; the rows after them are totals."""
    columns = [*zip(*table.rows, strict=True)] or [()] * len(table.columns)
    classes = ["n" if is_numeric(cells) else "wrap" if max(map(len, cells), default=0) > WRAP_FROM else "" for cells in columns]  # fmt: skip
    rows = [
        {
            "cells": [*zip(row, classes, strict=True)],
            "colour": colours[index] if index < len(colours) else None,
            "kind": "best" if index == table.best else "total" if colours and index == len(colours) else "",
        }
        for index, row in enumerate(table.rows)
    ]
    return {"title": table.title, "columns": [*zip(table.columns, classes, strict=True)], "rows": rows}


# ---- line charts


def _chart_view(chart: LineChart) -> View:
    limit = [] if chart.limit is None else [chart.limit]
    x_ticks = axis_ticks([x for line in chart.lines.values() for x, _ in line], log=chart.log_x)
    y_ticks = axis_ticks([*(y for line in chart.lines.values() for _, y in line), *limit], log=chart.log_y)

    def to_x(value: float) -> float:
        return round(PLOT_WIDTH * _axis_position(value, x_ticks, log=chart.log_x), 1)

    def to_y(value: float) -> float:
        return round(PLOT_HEIGHT * (1 - _axis_position(value, y_ticks, log=chart.log_y)), 1)

    lines, legend_x = list[View](), 0
    for index, (name, points) in enumerate(chart.lines.items()):
        dots = [
            {"x": to_x(x), "y": to_y(y), "hint": f"{name}: {format_y(chart, y)} at {format_tokens(x)}"}
            for x, y in points
            if _is_drawable(x, log=chart.log_x) and _is_drawable(y, log=chart.log_y)
        ]
        colour = PALETTE[LINE_COLOURS[index % len(LINE_COLOURS)]]
        lines.append(
            {"name": name, "dots": dots, "colour": colour, "dashed": index >= len(LINE_COLOURS), "legend_x": legend_x}
        )
        legend_x += LEGEND_CHAR_WIDTH * len(name) + 36
    return {
        "title": chart.title,
        "x": chart.x,
        "y": chart.y,
        "width": PLOT_WIDTH,
        "height": PLOT_HEIGHT,
        "x_ticks": [(to_x(tick), format_tokens(tick)) for tick in x_ticks],
        "y_ticks": [(to_y(tick), f"{tick:,.10g}") for tick in y_ticks],
        "lines": lines,
        "limit": None if chart.limit is None else (to_y(chart.limit), f"limit {format_y(chart, chart.limit)}"),
    }


def axis_ticks(values: Sequence[float], *, log: bool) -> list[float]:
    """At most nine round ticks whose first and last span all drawable values: powers of two on a log axis, else multiples
    of 1, 2 or 5 times a power of ten from 0.
    """
    drawable = [value for value in values if _is_drawable(value, log=log)] or [1.0]
    if log:
        first, last = floor(log2(min(drawable))), ceil(log2(max(drawable)))
        stride = -(-(max(last - first, 1) + 1) // MAX_TICKS)
        return [2.0**power for power in range(first, max(last, first + 1) + stride, stride)]
    top = max(*drawable, 0.0) or 1.0
    power = 10.0 ** floor(log10(top / 5))
    step = power * next(factor for factor in (1, 2, 5, 10) if top / (power * factor) < 5.5)
    return [round(step * count, 12) for count in range(ceil(top / step - 1e-9) + 1)]


def _is_drawable(value: float, *, log: bool) -> bool:
    return isfinite(value) and (value > 0 or not log)


def _axis_position(value: float, ticks: Sequence[float], *, log: bool) -> float:
    """0 at the first tick, 1 at the last."""
    low, high = ticks[0], ticks[-1]
    return log2(value / low) / log2(high / low) if log else (value - low) / (high - low)
