"""Stacked bars and curves as inline SVG that grows with its place while its text stays as large as the page's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from trainer.plan.axes import Axis, axis, labels, short, steps
from trainer.plan.document import Bar, Bars, Curve, curve_figure, figure
from trainer.plan.style import LINES, ON_DARK

THICK, THIN = 26, 15  # pixels of a bar, and of one among many
MANY, STRIP = 10, 6
INSIDE = 0.065  # of the width, from which a part has room for its figure
NEAR = 0.12  # of the width, within which two numbers below a bar may touch
EDGE = 0.96  # of the width, from which a number stands to the left of its tick
HEIGHT = 260  # pixels of a curve
APART = 16  # pixels between names


class Made(str):
    """Markup: text in which everything is escaped already."""

    __slots__ = ()


def tag(name: str, *inside: str, **attributes: object) -> Made:
    """An element. Text in it and its attributes are escaped; `class_` is class, `stroke_width` is stroke-width."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Made(
        f"<{name}{told}>{''.join(part if isinstance(part, Made) else escape(part) for part in inside)}</{name}>"
    )


# ---- bars


def span(bars: Bars) -> float:
    """What the width stands for: the longest bar, or a limit beyond it."""
    return max((max(bar.total, bar.limit or 0) for bar in bars.bars), default=0) or 1.0


def bar(bars: Bars, which: Bar, colours: Mapping[str, int]) -> Made:
    """A rectangle for each part, a line for the limit; what is beyond it stands on a hatched strip."""
    full, thick = span(bars), THICK if len(bars.bars) <= MANY else THIN
    parts, at = list[Made](), 0.0
    for kind in bars.kinds:
        if value := which.parts.get(kind, 0):
            hint = tag("title", f"{kind}: {figure(value, bars.places)} {bars.unit}")
            place = {"x": _percent(at / full), "y": 0, "width": _percent(value / full), "height": thick}
            parts.append(tag("rect", hint, class_=f"part k{colours[kind]}", data_kind=kind, **place))
            if value / full >= INSIDE and thick == THICK:
                ink = "ink on-dark" if colours[kind] in ON_DARK else "ink"
                middle = {"x": _percent((at + value / 2) / full), "y": thick / 2, "dy": "0.35em"}
                parts.append(tag("text", figure(value, bars.places), class_=ink, **middle))
            at += value
    if which.limit is not None:
        if not which.fits:
            place = {"x": _percent(which.limit / full), "width": _percent((at - which.limit) / full)}
            parts.append(tag("rect", class_="beyond", y=thick - STRIP, height=STRIP, **place))
        at_limit = _percent(which.limit / full)
        parts.append(tag("line", class_="limit", x1=at_limit, x2=at_limit, y1=-5, y2=thick + 5))
    names = ", ".join(f"{kind} {figure(which.parts.get(kind, 0), bars.places) or 0}" for kind in bars.kinds)
    told = [tag("title", f"{which.label}: {sum_of(bars, which)}"), tag("desc", f"{names} {bars.unit}")]
    return tag("svg", *told, *parts, role="img", height=thick, class_="bar")


def sum_of(bars: Bars, which: Bar) -> str:
    """In words; a cross stands before what is too much."""
    total = "\u2717 " * (not which.fits) + (figure(which.total, bars.places) or "0")
    if which.limit is None:
        return f"{total} {bars.unit}"
    return f"{total} of {figure(which.limit, bars.places)} {bars.unit}"


def scale(bars: Bars) -> Made:
    """Round numbers below the bars, and their limit if they share one; it hides numbers that are too near."""
    full, limits = span(bars), {which.limit for which in bars.bars}
    limit = limits.pop() if len(limits) == 1 else None
    made = [tag("line", class_="tick", x1=0, x2="100%", y1=0.5, y2=0.5)]
    if limit is not None:
        made.append(_below(figure(limit, bars.places), limit / full, "label bad"))
    ticks = steps(full)
    for tick, label in zip(ticks, labels(ticks), strict=True):
        made.append(tag("line", class_="tick", x1=_percent(tick / full), x2=_percent(tick / full), y1=0, y2=4))
        if limit is None or abs(tick - limit) / full > NEAR:
            made.append(_below(label, tick / full, "label"))
    return tag("svg", *made, height=22, class_="scale", aria_hidden="true")


def _below(text: str, at: float, kind: str) -> Made:
    return tag("text", text, class_=kind, x=_percent(at), y=17, text_anchor="end" if at > EDGE else "middle")


# ---- curves


def curve(drawn: Curve) -> Made:
    """Lines with their names at their ends, grid lines at round numbers, the limit dashed."""
    across = axis([x for line in drawn.lines.values() for x, _ in line], logarithmic=drawn.log_x)
    heights = [y for line in drawn.lines.values() for _, y in line]
    up = axis([*heights, *([] if drawn.limit is None else [drawn.limit])], logarithmic=drawn.log_y)
    made = [*_grid(across, up)]
    ends = dict[int, float]()
    for number, (name, line) in enumerate(drawn.lines.items()):
        dots = [
            (px, HEIGHT * (1 - py), f"{name}: {curve_figure(drawn, y)} at {short(x)}")
            for x, y in line
            if (px := across.at(x)) is not None and (py := up.at(y)) is not None
        ]
        made += _line(number, dots)
        if dots:
            ends[number] = dots[-1][1]
    made += _names([*drawn.lines], ends)
    if drawn.limit is not None and (at := up.at(drawn.limit)) is not None:
        y = HEIGHT * (1 - at)
        made.append(tag("line", class_="limit dashed", x1=0, x2="100%", y1=y, y2=y))
        told = f"limit {curve_figure(drawn, drawn.limit)}"
        made.append(tag("text", told, class_="label bad haloed", x=6, y=y - 6))
    told = f"{drawn.y} by {drawn.x}; " + "; ".join(
        f"{name}: " + ", ".join(f"{curve_figure(drawn, y)} at {short(x)}" for x, y in line)
        for name, line in drawn.lines.items()
    )
    return tag(
        "svg", tag("title", drawn.title), tag("desc", told), *made, role="img", height=HEIGHT + 24, class_="curve"
    )


def margins(drawn: Curve) -> dict[str, int]:
    """Pixels at the left for figures and at the right for names, roughly: letters are about 7 wide."""
    return {"left": 52, "right": 28 + min(190, max((7 * len(name) for name in drawn.lines), default=0))}


def _grid(across: Axis, up: Axis) -> list[Made]:
    made = []
    for tick, label in zip(up.ticks, up.labels, strict=True):
        y = HEIGHT * (1 - (up.at(tick) or 0))
        made.append(tag("line", class_="grid", x1=0, x2="100%", y1=y, y2=y))
        made.append(tag("text", label, class_="label", x=-8, y=y, dy="0.35em", text_anchor="end"))
    for tick, label in zip(across.ticks, across.labels, strict=True):
        x = _percent(across.at(tick) or 0)
        made.append(tag("line", class_="tick", x1=x, x2=x, y1=HEIGHT, y2=HEIGHT + 5))
        made.append(tag("text", label, class_="label", x=x, y=HEIGHT + 19, text_anchor="middle"))
    return made


def _line(number: int, dots: Sequence[tuple[float, float, str]]) -> list[Made]:
    """Of dots their place across, from 0 to 1, their pixels down, and what they tell."""
    colour = f"l{number % len(LINES)}"
    stroke = f"line {colour}" + " dashed" * (number >= len(LINES))
    places = [(_percent(x), round(y, 1)) for x, y, _ in dots]
    pieces = [
        tag("line", class_=stroke, x1=x, y1=y, x2=next_x, y2=next_y) for (x, y), (next_x, next_y) in pairwise(places)
    ]
    circles = [
        tag("circle", tag("title", told), class_=f"dot {colour}", r=3.2, cx=x, cy=y)
        for (x, y), (_, _, told) in zip(places, dots, strict=True)
    ]
    return pieces + circles


def _names(lines: Sequence[str], ends: Mapping[int, float]) -> list[Made]:
    """At the ends of lines, but APART at least, and above the axis as far as there is room."""
    order = sorted(ends, key=lambda number: ends[number])
    heights = [ends[number] for number in order]
    for index in range(1, len(heights)):
        heights[index] = max(heights[index], heights[index - 1] + APART)
    for index in reversed(range(len(heights))):
        heights[index] = min(heights[index], HEIGHT - APART * (len(heights) - 1 - index))
    return [
        tag("text", tag("tspan", "\u25cf ", class_=f"l{number % len(LINES)}"), lines[number],
            class_="name", x="100%", dx=10, y=round(height, 1), dy="0.35em")
        for number, height in zip(order, heights, strict=True)
    ]  # fmt: skip


def _percent(part: float) -> str:
    return f"{100 * part:.4g}%"
