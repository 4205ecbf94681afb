"""A report as one page that needs nothing else: no script, no font, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from trainer.plan import svg
from trainer.plan.axes import short
from trainer.plan.document import Bars, Curve, Report, Table, as_table, curve_figure, numeric, points
from trainer.plan.style import LINES, PALETTE, sheet
from trainer.plan.svg import Made, tag

FACTS = 6  # side by side
WORDS = 28  # letters from which a cell may take several lines
HATCH = Made(
    '<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs>'
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="3" height="6" fill="#b3261e"></rect><rect x="3" width="3" height="6" fill="#ffffff"></rect>'
    "</pattern></defs></svg>"
)


def html(report: Report) -> str:
    colours = _colours(report)
    body = "\n".join(
        (
            HATCH,
            tag("header", *_head(report)),
            *(_part(part, colours) for part in report.parts),
            *([_section("Notes", tag("ul", *(tag("li", note) for note in report.notes)))] if report.notes else []),
            *([_section("To paste", tag("pre", report.toml, tabindex=0))] if report.toml else []),
        )
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{escape(report.title)}</title>\n'
        f"<style>\n{sheet()}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _colours(report: Report) -> dict[tuple[str, str], int]:
    """Of each unit and kind its number in the palette: a kind looks the same in all bars of a report."""
    counts, found = dict[str, int](), dict[tuple[str, str], int]()
    pairs = [(part.unit, kind) for part in report.parts if isinstance(part, Bars) for kind in part.kinds]
    for unit, kind in dict.fromkeys(pairs):
        counts[unit] = counts.get(unit, -1) + 1
        found[unit, kind] = counts[unit] % len(PALETTE)
    return found


def _head(report: Report) -> list[Made]:
    word = tag("b", "\u2713 Fits" if report.fits else "\u2717 Does not fit", class_="good" if report.fits else "bad")
    facts = [tag("div", tag("dt", name), tag("dd", value)) for name, value in report.facts]
    across = -(-len(facts) // -(-len(facts) // FACTS)) if facts else 0
    return [
        tag("h1", report.title),
        tag("p", word, report.verdict, class_="verdict"),
        *([tag("dl", *facts, style=f"--across: {across}")] if facts else []),
    ]


def _section(title: str, *inside: Made) -> Made:
    return tag("section", tag("h2", title), *inside)


def _part(part: Bars | Table | Curve, colours: Mapping[tuple[str, str], int]) -> Made:
    if isinstance(part, Bars):
        return _section(part.title, *_bars(part, {kind: colours[part.unit, kind] for kind in part.kinds}))
    if isinstance(part, Curve):
        return _section(part.title, *_curve(part))
    notes = [tag("p", part.note, class_="note")] if part.note else []
    return _section(part.title, _table(part), *notes)


def _bars(bars: Bars, colours: Mapping[str, int]) -> list[Made]:
    """Bars, and below them the table of their parts, which is their key."""
    if not bars.bars:
        return []
    rows = list[Made]()
    for bar in bars.bars:
        total = tag("span", svg.sum_of(bars, bar), class_="sum" + " bad" * (not bar.fits))
        rows += [tag("span", bar.label, class_="of"), svg.bar(bars, bar, colours), total]
    rows.append(svg.scale(bars))
    drawn = tag("div", *rows, class_="bars" + " many" * (len(bars.bars) > svg.MANY))
    return [drawn, _table(as_table(bars, range(len(bars.bars))), [f"k{colours[kind]}" for kind in bars.kinds])]


def _curve(curve: Curve) -> list[Made]:
    sides = svg.margins(curve)
    key = [
        tag("li", tag("span", class_=f"swatch l{number % len(LINES)}"), name) for number, name in enumerate(curve.lines)
    ]
    inside = tag("p", curve.y, class_="unit"), svg.curve(curve), tag("p", curve.x, class_="unit")
    plot = tag("div", *inside, class_="plot", style=f"padding:0 {sides['right']}px 0 {sides['left']}px")
    values = [dict(line) for line in curve.lines.values()]
    rows = [[short(x), *(curve_figure(curve, line[x]) if x in line else "-" for line in values)] for x in points(curve)]
    table = _table(Table(title=curve.title, columns=[curve.x, *curve.lines], rows=rows))
    return [plot, tag("ul", *key, class_="key"), tag("details", tag("summary", "the numbers"), table)]


def _table(table: Table, swatches: Sequence[str] = ()) -> Made:
    """Scrolls by itself where it is too wide. Its first rows have these classes of colours; what follows are sums."""
    sides = [_side(cells) for cells in zip(*table.rows, strict=True)] or [None] * len(table.columns)
    heads = [tag("th", name, scope="col", class_=side) for name, side in zip(table.columns, sides, strict=True)]
    rows = []
    for index, (first, *others) in enumerate(table.rows):
        mark = [tag("span", class_=f"swatch {swatches[index]}")] if index < len(swatches) else []
        mark += [Made("\u25b8 ")] * (index == table.best)
        cells = [tag("td", cell, class_=side) for cell, side in zip(others, sides[1:], strict=True)]
        kind = "best" if index == table.best else "sums" if swatches and index == len(swatches) else None
        rows.append(tag("tr", tag("th", *mark, first, scope="row", class_=sides[0]), *cells, class_=kind))
    made = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows))
    return tag("div", made, class_="wide", role="region", aria_label=table.title, tabindex=0)


def _side(cells: Sequence[str]) -> str | None:
    return "n" if numeric(cells) else "words" if max(map(len, cells)) > WORDS else None
