"""A report as one page that needs nothing else: no script, no font, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from trainer.plan import svg
from trainer.plan.axes import format_tokens
from trainer.plan.document import BarChart, LineChart, PlanReport, Table, bars_to_table, format_y, is_numeric, x_values
from trainer.plan.style import LINE_COLOURS, PALETTE, stylesheet
from trainer.plan.svg import Markup, tag

MAX_FACTS_PER_ROW = 6  # side by side
WRAP_FROM = 28  # letters from which a cell may take several lines
HATCH = Markup(
    '<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs>'
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="3" height="6" fill="#b3261e"></rect><rect x="3" width="3" height="6" fill="#ffffff"></rect>'
    "</pattern></defs></svg>"
)


def render_html(report: PlanReport) -> str:
    colours = _colours(report)
    body = "\n".join(
        (
            HATCH,
            tag("header", *_header(report)),
            *(_render_section(part, colours) for part in report.sections),
            *([_section("Notes", tag("ul", *(tag("li", note) for note in report.notes)))] if report.notes else []),
            *([_section("To paste", tag("pre", report.toml, tabindex=0))] if report.toml else []),
        )
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{escape(report.title)}</title>\n'
        f"<style>\n{stylesheet()}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _colours(report: PlanReport) -> dict[tuple[str, str], int]:
    """Of each unit and kind its number in the palette: a kind looks the same in all bars of a report."""
    counts, colour_index = dict[str, int](), dict[tuple[str, str], int]()
    pairs = [(part.unit, kind) for part in report.sections if isinstance(part, BarChart) for kind in part.segment_names]
    for unit, kind in dict.fromkeys(pairs):
        counts[unit] = counts.get(unit, -1) + 1
        colour_index[unit, kind] = counts[unit] % len(PALETTE)
    return colour_index


def _header(report: PlanReport) -> list[Markup]:
    verdict_badge = tag(
        "b", "\u2713 Fits" if report.fits else "\u2717 Does not fit", class_="good" if report.fits else "bad"
    )
    facts = [tag("div", tag("dt", name), tag("dd", value)) for name, value in report.facts]
    facts_per_row = -(-len(facts) // -(-len(facts) // MAX_FACTS_PER_ROW)) if facts else 0
    return [
        tag("h1", report.title),
        tag("p", verdict_badge, report.verdict, class_="verdict"),
        *([tag("dl", *facts, style=f"--across: {facts_per_row}")] if facts else []),
    ]


def _section(title: str, *inside: Markup) -> Markup:
    return tag("section", tag("h2", title), *inside)


def _render_section(section: BarChart | Table | LineChart, colours: Mapping[tuple[str, str], int]) -> Markup:
    if isinstance(section, BarChart):
        return _section(
            section.title, *_render_bars(section, {kind: colours[section.unit, kind] for kind in section.segment_names})
        )
    if isinstance(section, LineChart):
        return _section(section.title, *_render_curve(section))
    notes = [tag("p", section.note, class_="note")] if section.note else []
    return _section(section.title, _render_table(section), *notes)


def _render_bars(bars: BarChart, colours: Mapping[str, int]) -> list[Markup]:
    """Bars, and below them the table of their parts, which is their key."""
    if not bars.bars:
        return []
    rows = list[Markup]()
    for bar in bars.bars:
        total = tag("span", svg.total_text(bars, bar), class_="sum" + " bad" * (not bar.fits))
        rows += [tag("span", bar.label, class_="of"), svg.render_bar(bars, bar, colours), total]
    rows.append(svg.render_scale(bars))
    drawn = tag("div", *rows, class_="bars" + " many" * (len(bars.bars) > svg.MAX_THICK_BARS))
    return [
        drawn,
        _render_table(bars_to_table(bars, range(len(bars.bars))), [f"k{colours[kind]}" for kind in bars.segment_names]),
    ]


def _render_curve(curve: LineChart) -> list[Markup]:
    padding = svg.margins(curve)
    key = [
        tag("li", tag("span", class_=f"swatch l{number % len(LINE_COLOURS)}"), name)
        for number, name in enumerate(curve.lines)
    ]
    inside = tag("p", curve.y, class_="unit"), svg.render_curve(curve), tag("p", curve.x, class_="unit")
    plot = tag("div", *inside, class_="plot", style=f"padding:0 {padding['right']}px 0 {padding['left']}px")
    values = [dict(line) for line in curve.lines.values()]
    rows = [
        [format_tokens(x), *(format_y(curve, line[x]) if x in line else "-" for line in values)]
        for x in x_values(curve)
    ]
    table = _render_table(Table(title=curve.title, columns=[curve.x, *curve.lines], rows=rows))
    return [plot, tag("ul", *key, class_="key"), tag("details", tag("summary", "the numbers"), table)]


def _render_table(table: Table, swatches: Sequence[str] = ()) -> Markup:
    """Scrolls by itself where it is too wide. Its first rows have these classes of colours; what follows are sums."""
    cell_classes = [_cell_class(cells) for cells in zip(*table.rows, strict=True)] or [None] * len(table.columns)
    heads = [tag("th", name, scope="col", class_=side) for name, side in zip(table.columns, cell_classes, strict=True)]
    rows = []
    for index, (first, *others) in enumerate(table.rows):
        mark = [tag("span", class_=f"swatch {swatches[index]}")] if index < len(swatches) else []
        mark += [Markup("\u25b8 ")] * (index == table.best)
        cells = [tag("td", cell, class_=side) for cell, side in zip(others, cell_classes[1:], strict=True)]
        kind = "best" if index == table.best else "sums" if swatches and index == len(swatches) else None
        rows.append(tag("tr", tag("th", *mark, first, scope="row", class_=cell_classes[0]), *cells, class_=kind))
    made = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows))
    return tag("div", made, class_="wide", role="region", aria_label=table.title, tabindex=0)


def _cell_class(cells: Sequence[str]) -> str | None:
    return "n" if is_numeric(cells) else "words" if max(map(len, cells)) > WRAP_FROM else None
