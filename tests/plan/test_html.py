"""The HTML page of a report: complete, escaped, self-contained, with charts to scale."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations, pairwise
from math import dist, inf, nan
from xml.etree import ElementTree

import pytest

from benchmarks.scaling import render_svg
from tests.plan.sample_documents import HOST, MEMORY, MFU, SAMPLE, SEARCH, TIME, TOKENS, stages
from trainer.plan.document import BarChart, LineChart, PlanReport, StackedBar, Table
from trainer.plan.html import (
    DARK_COLOURS,
    LINE_COLOURS,
    MAX_TICKS,
    PALETTE,
    PLOT_HEIGHT,
    PLOT_WIDTH,
    axis_ticks,
    render_html,
)

EVIL = "<script>alert('x')</script> & \"q\" <b onclick=\"x\"> ' onload='x' --><![CDATA[ </style></svg>"
Attributes = dict[str, str | None]


class Page(HTMLParser):
    """Collects elements and texts; raises AssertionError on mismatched tags."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open = list[str]()
        self.elements = list[tuple[str, Attributes]]()
        self.texts = list[str]()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    def having_class(self, name: str) -> list[Attributes]:
        return [
            attributes
            for _, attributes in self.elements
            if name in (attributes.get("class") or "").split()
        ]


def page(*sections: BarChart | Table | LineChart) -> str:
    return render_html(
        PlanReport(title="a plan", verdict="it fits", fits=True, facts=[], sections=sections)
    )


def evil() -> PlanReport:
    bars = BarChart(
        title=EVIL, unit=EVIL, bars=[StackedBar(label=EVIL, segments={EVIL: 1.0}, limit=0.5)]
    )
    table = Table(title=EVIL, columns=[EVIL], rows=[[EVIL]], note=EVIL, best=0)
    curve = LineChart(
        title=EVIL,
        x=EVIL,
        y=EVIL,
        log_x=False,
        log_y=False,
        lines={EVIL: [(1, 2), (2, 3)]},
        limit=1,
    )
    return PlanReport(
        title=EVIL,
        verdict=EVIL,
        fits=False,
        facts=[(EVIL, EVIL)],
        sections=[bars, table, curve],
        notes=[EVIL],
        configurations=[f"{EVIL}\n{EVIL}"],
    )


# ---- the page


@pytest.mark.parametrize(
    "report", [SAMPLE, replace(SAMPLE, fits=False, sections=[stages(4), stages(16)]), evil()]
)
def test_all_tags_are_closed_and_all_svgs_are_xml(report: PlanReport) -> None:
    text = render_html(report)
    assert text.startswith("<!DOCTYPE html>\n")
    assert ("html", {"lang": "en"}) in Page(text).elements
    for svg in re.findall("<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)


def test_report_texts_are_escaped() -> None:
    known = Page(render_html(SAMPLE))
    found = Page(render_html(evil()))
    assert {tag for tag, _ in found.elements} <= {tag for tag, _ in known.elements} | {"i"}
    names = {name for _, attributes in known.elements for name in attributes}
    assert {name for _, attributes in found.elements for name in attributes} <= names
    assert sum(EVIL in text for text in found.texts) >= 20


def test_a_page_loads_no_external_resources() -> None:
    text = render_html(SAMPLE)
    for word in (
        "http",
        "//",
        "@import",
        "@font-face",
        "<script",
        "<link",
        "<img",
        "<base",
        "src=",
        "href=",
        "url(",
    ):
        assert word not in text


def test_a_page_contains_the_whole_report() -> None:
    shown = "\n".join(Page(render_html(SAMPLE)).texts)
    kinds = [
        *MEMORY.segment_names,
        *HOST.segment_names,
        *TIME.segment_names,
        *TOKENS.lines,
        *MFU.lines,
    ]
    texts = [
        SAMPLE.title,
        SAMPLE.verdict,
        SEARCH.note,
        *SAMPLE.notes,
        *SAMPLE.configurations,
        *kinds,
    ]
    texts += [part.title for part in SAMPLE.sections]
    texts += [text for row in (*SAMPLE.facts, *SEARCH.rows) for text in row]
    assert [text for text in texts if text not in shown] == []


def test_the_verdict_is_in_words() -> None:
    assert "\u2713 Fits" in Page(render_html(SAMPLE)).texts
    assert "\u2717 Does not fit" in Page(render_html(replace(SAMPLE, fits=False))).texts


def test_empty_sections_render_without_content() -> None:
    empty = (
        BarChart(title="none", unit="s", bars=[]),
        Table(title="", columns=["a"], rows=[]),
        replace(MFU, lines={}),
    )
    text = page(*empty)
    assert Page(text).having_class("bar") == []
    assert text.count("<svg") == 1
    assert not re.search("<dl|<ul|<pre", text)
    assert "<polyline" not in text


def test_only_the_best_row_is_highlighted() -> None:
    rows = re.findall(r'<tr class="best">.*?</tr>', page(replace(SEARCH, best=3)))
    assert len(rows) == 1
    assert "\u25b8 cp 8, tp 4" in rows[0]
    assert 'class="best"' not in page(replace(SEARCH, best=None))


def test_numeric_columns_are_right_aligned() -> None:
    text = page(SEARCH)
    assert '<td class="n">1,203.4</td>' in text
    assert '<th scope="col" class="n">MFU</th>' in text
    assert '<td class="">hybrid 8 x 4</td>' in text


# ---- bars


def percent(attributes: Attributes, name: str) -> float:
    found = re.search(rf"{name}: ([\d.]+)%", attributes["style"] or "")
    assert found
    return float(found[1])


def bar_segments(text: str) -> list[tuple[str, str, float]]:
    """(name, colour class, width in percent) of every segment on the page."""
    return [
        (
            (attributes["title"] or "").partition(":")[0],
            attributes["class"] or "",
            percent(attributes, "width"),
        )
        for tag, attributes in Page(text).elements
        if tag == "span" and "title" in attributes
    ]


@pytest.mark.parametrize("bars", [MEMORY, HOST, TIME, stages(16), stages(4)])
def test_segments_are_to_scale(bars: BarChart) -> None:
    full = max(max(bar.total, bar.limit or 0) for bar in bars.bars)
    expected = [
        (kind, 100 * bar.segments[kind] / full)
        for bar in bars.bars
        for kind in bars.segment_names
        if bar.segments.get(kind)
    ]
    shown = bar_segments(page(bars))
    assert [kind for kind, _, _ in shown] == [kind for kind, _ in expected]
    assert [width for _, _, width in shown] == pytest.approx(
        [width for _, width in expected], abs=1e-4
    )


def test_only_a_bar_over_the_limit_is_marked() -> None:
    text = page(stages(16))
    limits = Page(text).having_class("limit")
    over = Page(text).having_class("over")
    limit = 100 * 79.1 / stages(16).bars[2].total
    assert [percent(each, "left") for each in limits] == pytest.approx([limit] * 16, abs=1e-3)
    assert [(percent(each, "left"), percent(each, "width")) for each in over] == [pytest.approx((limit, 100 - limit), abs=1e-3)]  # fmt: skip
    assert re.findall('<span class="sum bad">(.*?)</span>', text) == ["\u2717 82.0 of 79.1 GiB"]


def test_bars_without_a_limit_have_no_limit_line() -> None:
    assert Page(page(TIME)).having_class("limit") == []
    assert '<span class="sum">117.0 s</span>' in page(TIME)


def test_bars_have_labels_for_screen_readers_and_tooltips() -> None:
    assert 'role="img" aria-label="in the loss head: 41.8 of 79.1 GiB"' in page(MEMORY)
    assert 'title="parameters: 0.9 GiB"' in page(MEMORY)


def test_wide_segments_carry_their_value() -> None:
    first = re.findall('<div class="bar".*?</div>', page(MEMORY))[0]
    assert [text for text in re.findall(">([^<]*)</span>", first) if text] == ["31.7", "15.9"]


def test_a_name_has_one_colour_per_unit() -> None:
    colours = {(kind, colour) for kind, colour, _ in bar_segments(page(MEMORY, HOST, stages(16)))}
    assert len(colours) == len(dict(colours)) == len({colour for _, colour in colours}) >= 10
    swatches = re.findall(
        r'class="swatch (k\d+)"></span>(.*?)</th>', page(MEMORY, HOST, stages(16))
    )
    assert {(kind, colour) for colour, kind in swatches} == colours
    assert bar_segments(page(MEMORY, TIME))[-7][1] == "k0"


# ---- line charts


def chart(line_chart: LineChart) -> ElementTree.Element:
    return ElementTree.fromstring(re.findall("<svg.*?</svg>", page(line_chart), re.DOTALL)[0])


def dots(svg: ElementTree.Element) -> dict[str, tuple[float, float]]:
    """Position by tooltip."""
    return {
        circle.findtext("title") or "": (
            float(circle.get("cx") or 0),
            float(circle.get("cy") or 0),
        )
        for circle in svg.iter("circle")
        if circle.find("title") is not None
    }


def test_points_on_log_axes_are_to_scale() -> None:
    places = [
        place
        for hint, place in dots(chart(TOKENS)).items()
        if hint.startswith("keep_attention, offload: ")
    ]
    assert [x for x, _ in places] == pytest.approx(
        [PLOT_WIDTH * n / 7 for n in range(8)], abs=0.06
    )
    assert "keep_attention, offload: 7.49 at 32K" in dots(chart(TOKENS))


def test_a_linear_axis_starts_at_zero() -> None:
    heights = {hint.partition(" at ")[0]: y for hint, (_, y) in dots(chart(MFU)).items()}
    for name, value in (("full", 21.2), ("keep_attention, offload", 24.1)):
        assert heights[f"{name}: {value}"] == pytest.approx(
            PLOT_HEIGHT * (1 - value / 40), abs=0.06
        )


def test_lines_connect_their_points() -> None:
    svg = chart(TOKENS)
    lines = [
        [tuple(map(float, point.split(","))) for point in (line.get("points") or "").split()]
        for line in svg.iter("polyline")
    ]
    assert [point for line in lines for point in line] == [*dots(svg).values()]
    assert [len(line) for line in lines] == [8, 8, 6]


def test_the_limit_is_drawn_at_its_value() -> None:
    svg = chart(replace(MFU, limit=30.0))
    (line,) = (each for each in svg.iter("line") if each.get("class") == "limit")
    assert float(line.get("y1") or 0) == PLOT_HEIGHT * (1 - 30 / 40)
    assert "limit 30.0" in [text.text for text in svg.iter("text")]


def test_undrawable_points_are_omitted_and_shown_as_dashes_in_the_table() -> None:
    gaps = replace(
        MFU,
        log_y=True,
        lines={"all": [(1024.0, nan), (2048.0, 4.0), (4096.0, inf), (8192.0, 8.0)]},
    )
    assert len(dots(chart(gaps))) == 2
    assert re.findall(r"<td.*?>(.*?)</td>", page(gaps)) == ["-", "4.00", "-", "8.00"]


def test_more_lines_than_colours_are_dashed() -> None:
    lines = {f"line {n}": [(1.0, n), (2.0, n)] for n in range(2 * len(LINE_COLOURS))}
    strokes = {(line.get("stroke"), line.get("stroke-dasharray")) for line in chart(replace(MFU, lines=lines)).iter("polyline")}  # fmt: skip
    assert len(strokes) == 2 * len(LINE_COLOURS)


def test_a_standalone_svg_is_xml_with_a_namespace() -> None:
    assert ElementTree.fromstring(render_svg(TOKENS)).tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize(
    "top", [factor * 10.0**power for power in range(-6, 8) for factor in (1, 1.3, 2.74, 5.5, 9.99)]
)
def test_linear_ticks_are_few_round_and_span_the_values(top: float) -> None:
    ticks = axis_ticks([top], log=False)
    assert ticks[0] == 0
    assert 3 <= len(ticks) <= 7
    assert ticks[-2] < top <= ticks[-1] * (1 + 1e-6)
    assert f"{ticks[1]:e}"[:8] in ("1.000000", "2.000000", "5.000000")


@pytest.mark.parametrize(("low", "high"), [(1, 1), (3, 5), (1024, 1024.0 * 2**13), (0.01, 1e6)])
def test_log_ticks_are_powers_of_two_that_span_the_values(low: float, high: float) -> None:
    ticks = axis_ticks([low, high, nan], log=True)
    assert 2 <= len(ticks) <= MAX_TICKS + 1
    assert ticks[0] <= low <= high <= ticks[-1]
    assert len({after / before for before, after in pairwise(ticks)}) == 1


# ---- colours

PROTANOPIA = (
    (0.152286, 1.052583, -0.204868),
    (0.114503, 0.786281, 0.099216),
    (-0.003882, -0.048116, 1.051998),
)
DEUTERANOPIA = (
    (0.367322, 0.860646, -0.227968),
    (0.280085, 0.672501, 0.047413),
    (-0.011820, 0.042940, 0.968881),
)
TRITANOPIA = (
    (1.255528, -0.076749, -0.178779),
    (-0.078411, 0.930809, 0.147602),
    (0.004733, 0.691367, 0.303900),
)
FULL_VISION = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
Vector = tuple[float, ...]


def linear(colour: str) -> Vector:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return tuple(
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )


def luminance(colour: str) -> float:
    return sum(
        weight * part
        for weight, part in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True)
    )


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def lab(colour: Vector) -> Vector:
    rows = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0178, 0.1095, 0.8727))
    x, y, z = (
        sum(weight * part for weight, part in zip(row, colour, strict=True)) for row in rows
    )
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("vision", [FULL_VISION, PROTANOPIA, DEUTERANOPIA, TRITANOPIA])
def test_palette_colours_differ_for_colour_blind_readers(vision: tuple[Vector, ...]) -> None:
    """Simulated as in Machado, Oliveira and Fernandes (2009); 2.3 is the just noticeable
    difference.
    """
    seen = [
        tuple(
            min(
                1.0,
                max(
                    0.0,
                    sum(weight * part for weight, part in zip(row, linear(colour), strict=True)),
                ),
            )
            for row in vision
        )
        for colour in PALETTE
    ]
    assert min(dist(lab(one), lab(other)) for one, other in combinations(seen, 2)) > 10


def test_neighbouring_colours_differ_in_greyscale() -> None:
    assert min(contrast(one, other) for one, other in pairwise(PALETTE)) > 1.5


def test_text_contrast_meets_wcag_in_both_colour_schemes() -> None:
    variables = [
        dict(re.findall(r"--(\w+): (#\w+)", line)) for line in re.findall(":root {.*}", page())
    ]
    assert len(variables) == 2
    for scheme in ({name: colour.replace("#fff", "#ffffff") if len(colour) == 4 else colour for name, colour in each.items()} for each in variables):  # fmt: skip
        assert (
            min(contrast(scheme[text], scheme["paper"]) for text in ("ink", "soft", "good", "bad"))
            > 4.5
        )
        assert contrast(scheme["ink"], scheme["tint"]) > 4.5
        assert min(contrast(colour, scheme["paper"]) for colour in PALETTE) > 1.9
        assert min(contrast(PALETTE[line], scheme["paper"]) for line in LINE_COLOURS) > 3


def test_segment_labels_contrast_with_their_colour() -> None:
    for index, colour in enumerate(PALETTE):
        ink = "#ffffff" if index in DARK_COLOURS else "#14171a"
        assert (
            f".k{index} {{ background: {colour}; color: {ink.replace('#ffffff', '#fff')} }}"
            in page()
        )
        assert contrast(colour, ink) > 4.5
