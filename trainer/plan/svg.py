"""Stacked bars and curves as inline SVG that grows with its place while its text stays as large as the page's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from trainer.plan.axes import Axis, axis, labels, short, steps
from trainer.plan.report import Bar, Bars, Curve, curve_figure, figure
from trainer.plan.style import LINES, ON_DARK

THICK, THIN = 26, 15  # pixels of a bar, and of one among many
MANY = 10
INSIDE = 0.065  # of the width, from which a part has room for its figure
NEAR = 0.12  # of the width, within which two numbers below a bar may touch
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
    """A rectangle for each part, a line for the limit; what is beyond it is hatched."""
    full, thick = span(bars), THICK if len(bars.bars) <= MANY else THIN
    parts, at = list[Made](), 0.0
    for kind in bars.kinds:
        if value := which.parts.get(kind, 0):
            told = f"{kind}: {figure(value, bars.places)} {bars.unit}"
            place = {"x": _percent(at / full), "y": 0, "width": _percent(value / full), "height": thick}
            parts.append(tag("rect", tag("title", told), class_=f"part k{colours[kind]}", data_kind=kind, **place))
            if value / full >= INSIDE and thick == THICK:
                ink = "ink on-dark" if colours[kind] in ON_DARK else "ink"
                middle = {"x": _percent((at + value / 2) / full), "y": thick / 2, "dy": "0.35em"}
                parts.append(tag("text", figure(value, bars.places), class_=ink, **middle))
            at += value
    if which.limit is not None:
        if not which.fits:
            place = {"x": _percent(which.limit / full), "width": _percent((at - which.limit) / full)}
            parts.append(tag("rect", class_="beyond", y=0, height=thick, **place))
        at_limit = _percent(which.limit / full)
        parts.append(tag("line", class_="limit", x1=at_limit, x2=at_limit, y1=-4, y2=thick + 4))
    names = ", ".join(f"{kind} {figure(which.parts.get(kind, 0), bars.places) or 0}" for kind in bars.kinds)
    told = tag("title", f"{which.label}: {sum_of(bars, which)}"), tag("desc", f"{names} {bars.unit}")
    return tag("svg", *told, *parts, role="img", height=thick, class_="bar")


def sum_of(bars: Bars, which: Bar) -> str:
    total = figure(which.total, bars.places) or "0"
    if which.limit is None:
        return f"{total} {bars.unit}"
    return f"{total} of {figure(which.limit, bars.places)} {bars.unit}"


def scale(bars: Bars) -> Made:
    """Round numbers below the bars, and their limit if they share one; it hides numbers that are too near."""
    full, limits = span(bars), {which.limit for which in bars.bars}
    limit = limits.pop() if len(limits) == 1 else None
    made = [tag("line", class_="tick", x1=0, x2="100%", y1=0.5, y2=0.5)]
    if limit is not None:
        told = figure(limit, bars.places)
        made.append(tag("text", told, class_="label bad", x=_percent(limit / full), y=17, text_anchor="middle"))
    ticks = steps(full)
    for tick, label in zip(ticks, labels(ticks), strict=True):
        x = _percent(tick / full)
        made.append(tag("line", class_="tick", x1=x, x2=x, y1=0, y2=4))
        if limit is None or abs(tick - limit) / full > NEAR:
            made.append(tag("text", label, class_="label", x=x, y=17, text_anchor="middle"))
    return tag("svg", *made, height=22, class_="scale", aria_hidden="true")


# ---- curves


def curve(drawn: Curve) -> Made:
    """Lines with their names at their ends, grid lines at round numbers, the limit dashed."""
    across = axis([x for line in drawn.lines.values() for x, _ in line], logarithmic=drawn.log_x)
    heights = [y for line in drawn.lines.values() for _, y in line]
    up = axis([*heights, *([] if drawn.limit is None else [drawn.limit])], logarithmic=drawn.log_y)
    made = [*_grid(across, up)]
    if drawn.limit is not None and (at := up.at(drawn.limit)) is not None:
        y = HEIGHT * (1 - at)
        made.append(tag("line", class_="limit dashed", x1=0, x2="100%", y1=y, y2=y))
        told = f"limit {curve_figure(drawn, drawn.limit)}"
        made.append(tag("text", told, class_="label bad", x=6, y=y - 6))
    ends = dict[str, float]()
    for number, (name, line) in enumerate(drawn.lines.items()):
        places = [(px, py) for x, y in line if (px := across.at(x)) is not None and (py := up.at(y)) is not None]
        made += _line(number, places)
        made += _dots(drawn, name, number, line, across, up)
        if places:
            ends[name] = HEIGHT * (1 - places[-1][1])
    made += _names([*drawn.lines], ends)
    told = f"{drawn.y} by {drawn.x}; " + "; ".join(
        f"{name}: " + ", ".join(f"{curve_figure(drawn, y)} at {short(x)}" for x, y in line)
        for name, line in drawn.lines.items()
    )
    return tag(
        "svg", tag("title", drawn.title), tag("desc", told), *made, role="img", height=HEIGHT + 24, class_="curve"
    )


def margins(drawn: Curve) -> dict[str, int]:
    """Pixels at the left for figures and at the right for names, roughly: letters are about 7 wide."""
    return {"left": 52, "right": 14 + min(190, max((7 * len(name) for name in drawn.lines), default=0))}


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


def _line(number: int, places: Sequence[tuple[float, float]]) -> list[Made]:
    """Pieces in percent across and pixels down."""
    return [
        tag(
            "line",
            class_=f"line l{number % len(LINES)}" + " dashed" * (number >= len(LINES)),
            x1=_percent(x),
            y1=_pixel(y),
            x2=_percent(x2),
            y2=_pixel(y2),
        )
        for (x, y), (x2, y2) in pairwise(places)
    ]


def _dots(
    drawn: Curve, name: str, number: int, line: Sequence[tuple[float, float]], across: Axis, up: Axis
) -> list[Made]:
    made = []
    for x, y in line:
        px, py = across.at(x), up.at(y)
        if px is not None and py is not None:
            told = tag("title", f"{name}: {curve_figure(drawn, y)} at {short(x)}")
            place = {"cx": _percent(px), "cy": _pixel(py)}
            made.append(tag("circle", told, class_=f"dot l{number % len(LINES)}", r=3.2, data_line=name, **place))
    return made


def _names(lines: Sequence[str], ends: Mapping[str, float]) -> list[Made]:
    """At the ends of lines, APART at least."""
    made, free = [], -APART / 2
    for name in sorted(ends, key=lambda name: ends[name]):
        y = max(ends[name], free)
        free = y + APART
        place = {"x": "100%", "dx": 10, "y": round(y, 1), "dy": "0.35em"}
        mark = tag("tspan", "\u25cf ", class_=f"l{lines.index(name) % len(LINES)}")
        made.append(tag("text", mark, name, class_="name", **place))
    return made


def _percent(part: float) -> str:
    return f"{100 * part:.4g}%"


def _pixel(height: float) -> float:
    return round(HEIGHT * (1 - height), 1)
