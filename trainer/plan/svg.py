"""Stacked bars and curves as inline SVG that grows with its place while its text stays as large as the page's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from trainer.plan.axes import Axis, format_tokens, make_axis, round_ticks, tick_labels
from trainer.plan.document import BarChart, LineChart, StackedBar, format_number, format_y
from trainer.plan.style import DARK_COLOURS, LINE_COLOURS

BAR_HEIGHT, NARROW_BAR_HEIGHT = 26, 15  # pixels of a bar, and of one among many
MAX_THICK_BARS, OVERFLOW_HEIGHT = 10, 6
MIN_LABELLED_WIDTH = 0.065  # of the width, from which a part has room for its figure
MIN_LABEL_DISTANCE = 0.12  # of the width, within which two numbers below a bar may touch
RIGHT_ALIGN_FROM = 0.96  # of the width, from which a number stands to the left of its tick
CURVE_HEIGHT = 260  # pixels of a curve
NAME_SPACING = 16  # pixels between names


class Markup(str):
    """Markup: text in which everything is escaped already."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """An element. Text in it and its attributes are escaped; `class_` is class, `stroke_width` is stroke-width."""
    attribute_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(
        f"<{name}{attribute_text}>{''.join(part if isinstance(part, Markup) else escape(part) for part in children)}</{name}>"
    )


# ---- bars


def full_width_value(bars: BarChart) -> float:
    """What the width stands for: the longest bar, or a limit beyond it."""
    return max((max(bar.total, bar.limit or 0) for bar in bars.bars), default=0) or 1.0


def render_bar(bars: BarChart, stacked_bar: StackedBar, colours: Mapping[str, int]) -> Markup:
    """A rectangle for each part, a line for the limit; what is beyond it stands on a hatched strip."""
    full_value, thick = full_width_value(bars), BAR_HEIGHT if len(bars.bars) <= MAX_THICK_BARS else NARROW_BAR_HEIGHT
    parts, offset = list[Markup](), 0.0
    for kind in bars.segment_names:
        if value := stacked_bar.segments.get(kind, 0):
            hint = tag("title", f"{kind}: {format_number(value, bars.decimals)} {bars.unit}")
            geometry = {
                "x": _percent(offset / full_value),
                "y": 0,
                "width": _percent(value / full_value),
                "height": thick,
            }
            parts.append(tag("rect", hint, class_=f"part k{colours[kind]}", data_kind=kind, **geometry))
            if value / full_value >= MIN_LABELLED_WIDTH and thick == BAR_HEIGHT:
                ink = "ink on-dark" if colours[kind] in DARK_COLOURS else "ink"
                middle = {"x": _percent((offset + value / 2) / full_value), "y": thick / 2, "dy": "0.35em"}
                parts.append(tag("text", format_number(value, bars.decimals), class_=ink, **middle))
            offset += value
    if stacked_bar.limit is not None:
        if not stacked_bar.fits:
            geometry = {
                "x": _percent(stacked_bar.limit / full_value),
                "width": _percent((offset - stacked_bar.limit) / full_value),
            }
            parts.append(tag("rect", class_="beyond", y=thick - OVERFLOW_HEIGHT, height=OVERFLOW_HEIGHT, **geometry))
        at_limit = _percent(stacked_bar.limit / full_value)
        parts.append(tag("line", class_="limit", x1=at_limit, x2=at_limit, y1=-5, y2=thick + 5))
    names = ", ".join(
        f"{kind} {format_number(stacked_bar.segments.get(kind, 0), bars.decimals) or 0}" for kind in bars.segment_names
    )
    description = [
        tag("title", f"{stacked_bar.label}: {total_text(bars, stacked_bar)}"),
        tag("desc", f"{names} {bars.unit}"),
    ]
    return tag("svg", *description, *parts, role="img", height=thick, class_="bar")


def total_text(bars: BarChart, stacked_bar: StackedBar) -> str:
    """In words; a cross stands before what is too much."""
    total = "\u2717 " * (not stacked_bar.fits) + (format_number(stacked_bar.total, bars.decimals) or "0")
    if stacked_bar.limit is None:
        return f"{total} {bars.unit}"
    return f"{total} of {format_number(stacked_bar.limit, bars.decimals)} {bars.unit}"


def render_scale(bars: BarChart) -> Markup:
    """Round numbers below the bars, and their limit if they share one; it hides numbers that are too near."""
    full_value, limits = full_width_value(bars), {which.limit for which in bars.bars}
    limit = limits.pop() if len(limits) == 1 else None
    made = [tag("line", class_="tick", x1=0, x2="100%", y1=0.5, y2=0.5)]
    if limit is not None:
        made.append(_scale_label(format_number(limit, bars.decimals), limit / full_value, "label bad"))
    ticks = round_ticks(full_value)
    for tick, label in zip(ticks, tick_labels(ticks), strict=True):
        made.append(
            tag("line", class_="tick", x1=_percent(tick / full_value), x2=_percent(tick / full_value), y1=0, y2=4)
        )
        if limit is None or abs(tick - limit) / full_value > MIN_LABEL_DISTANCE:
            made.append(_scale_label(label, tick / full_value, "label"))
    return tag("svg", *made, height=22, class_="scale", aria_hidden="true")


def _scale_label(text: str, position: float, kind: str) -> Markup:
    return tag(
        "text",
        text,
        class_=kind,
        x=_percent(position),
        y=17,
        text_anchor="end" if position > RIGHT_ALIGN_FROM else "middle",
    )


# ---- curves


def render_curve(chart: LineChart) -> Markup:
    """Lines with their names at their ends, grid lines at round numbers, the limit dashed."""
    x_axis = make_axis([x for line in chart.lines.values() for x, _ in line], logarithmic=chart.log_x)
    y_values = [y for line in chart.lines.values() for _, y in line]
    y_axis = make_axis([*y_values, *([] if chart.limit is None else [chart.limit])], logarithmic=chart.log_y)
    made = [*_grid(x_axis, y_axis)]
    ends = dict[int, float]()
    for number, (name, line) in enumerate(chart.lines.items()):
        dots = [
            (px, CURVE_HEIGHT * (1 - py), f"{name}: {format_y(chart, y)} at {format_tokens(x)}")
            for x, y in line
            if (px := x_axis.position(x)) is not None and (py := y_axis.position(y)) is not None
        ]
        made += _line(number, dots)
        if dots:
            ends[number] = dots[-1][1]
    made += _series_names([*chart.lines], ends)
    if chart.limit is not None and (at := y_axis.position(chart.limit)) is not None:
        y = CURVE_HEIGHT * (1 - at)
        made.append(tag("line", class_="limit dashed", x1=0, x2="100%", y1=y, y2=y))
        description = f"limit {format_y(chart, chart.limit)}"
        made.append(tag("text", description, class_="label bad haloed", x=6, y=y - 6))
    description = f"{chart.y} by {chart.x}; " + "; ".join(
        f"{name}: " + ", ".join(f"{format_y(chart, y)} at {format_tokens(x)}" for x, y in line)
        for name, line in chart.lines.items()
    )
    return tag(
        "svg",
        tag("title", chart.title),
        tag("desc", description),
        *made,
        role="img",
        height=CURVE_HEIGHT + 24,
        class_="curve",
    )


def margins(chart: LineChart) -> dict[str, int]:
    """Pixels at the left for figures and at the right for names, roughly: letters are about 7 wide."""
    return {"left": 52, "right": 28 + min(190, max((7 * len(name) for name in chart.lines), default=0))}


def _grid(x_axis: Axis, y_axis: Axis) -> list[Markup]:
    made = []
    for tick, label in zip(y_axis.ticks, y_axis.labels, strict=True):
        y = CURVE_HEIGHT * (1 - (y_axis.position(tick) or 0))
        made.append(tag("line", class_="grid", x1=0, x2="100%", y1=y, y2=y))
        made.append(tag("text", label, class_="label", x=-8, y=y, dy="0.35em", text_anchor="end"))
    for tick, label in zip(x_axis.ticks, x_axis.labels, strict=True):
        x = _percent(x_axis.position(tick) or 0)
        made.append(tag("line", class_="tick", x1=x, x2=x, y1=CURVE_HEIGHT, y2=CURVE_HEIGHT + 5))
        made.append(tag("text", label, class_="label", x=x, y=CURVE_HEIGHT + 19, text_anchor="middle"))
    return made


def _line(number: int, dots: Sequence[tuple[float, float, str]]) -> list[Markup]:
    """Of dots their place across, from 0 to 1, their pixels down, and what they tell."""
    colour = f"l{number % len(LINE_COLOURS)}"
    stroke = f"line {colour}" + " dashed" * (number >= len(LINE_COLOURS))
    places = [(_percent(x), round(y, 1)) for x, y, _ in dots]
    segments = [
        tag("line", class_=stroke, x1=x, y1=y, x2=next_x, y2=next_y) for (x, y), (next_x, next_y) in pairwise(places)
    ]
    circles = [
        tag("circle", tag("title", hint), class_=f"dot {colour}", r=3.2, cx=x, cy=y)
        for (x, y), (_, _, hint) in zip(places, dots, strict=True)
    ]
    return segments + circles


def _series_names(lines: Sequence[str], ends: Mapping[int, float]) -> list[Markup]:
    """At the ends of lines, but APART at least, and above the axis as far as there is room."""
    order = sorted(ends, key=lambda number: ends[number])
    heights = [ends[number] for number in order]
    for index in range(1, len(heights)):
        heights[index] = max(heights[index], heights[index - 1] + NAME_SPACING)
    for index in reversed(range(len(heights))):
        heights[index] = min(heights[index], CURVE_HEIGHT - NAME_SPACING * (len(heights) - 1 - index))
    return [
        tag("text", tag("tspan", "\u25cf ", class_=f"l{number % len(LINE_COLOURS)}"), lines[number],
            class_="name", x="100%", dx=10, y=round(height, 1), dy="0.35em")
        for number, height in zip(order, heights, strict=True)
    ]  # fmt: skip


def _percent(part: float) -> str:
    return f"{100 * part:.4g}%"
