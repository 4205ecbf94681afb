"""A page shows what a report tells, in the right places, and holds nothing that somebody else wrote."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations, pairwise
from math import dist, inf, nan
from xml.etree import ElementTree

import pytest

from tests.plan.sample_documents import HOST, MEMORY, MFU, SAMPLE, SEARCH, TIME, TOKENS, stages
from trainer.plan.document import BarChart, LineChart, PlanReport, StackedBar, Table
from trainer.plan.html import render_html
from trainer.plan.style import DARK, DARK_COLOURS, LIGHT, LINE_COLOURS, PALETTE, stylesheet

EVIL = "<script>alert('x')</script> & \"q\" <b onclick=\"x\"> ' onload='x' --><![CDATA[ </style></svg>"


class Page(HTMLParser):
    """Elements with their attributes; raises AssertionError where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.texts = list[str](), list[tuple[str, dict[str, str | None]]](), list[str]()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data)


def page(*parts: BarChart | Table | LineChart) -> str:
    return render_html(PlanReport(title="a plan", verdict="it fits", fits=True, facts=[], sections=parts))


def pictures(text: str, kind: str) -> list[ElementTree.Element]:
    """The SVGs of a class."""
    found = [ElementTree.fromstring(made) for made in re.findall("<svg.*?</svg>", text, re.DOTALL)]
    return [svg for svg in found if svg.get("class") == kind]


def of(svg: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [element for element in svg.iter() if kind in (element.get("class") or "").split()]


def number(element: ElementTree.Element, name: str) -> float:
    return float((element.get(name) or "").rstrip("%"))


def evil() -> PlanReport:
    bars = BarChart(title=EVIL, unit=EVIL, bars=[StackedBar(label=EVIL, segments={EVIL: 1.0}, limit=0.5)])
    table = Table(title=EVIL, columns=[EVIL], rows=[[EVIL]], note=EVIL, best=0)
    curve = LineChart(title=EVIL, x=EVIL, y=EVIL, log_x=False, log_y=False, lines={EVIL: [(1, 2), (2, 3)]}, limit=1)
    return PlanReport(
        title=EVIL,
        verdict=EVIL,
        fits=False,
        facts=[(EVIL, EVIL)],
        sections=[bars, table, curve],
        notes=[EVIL],
        toml=f"{EVIL}\n{EVIL}",
    )


# ---- the page


@pytest.mark.parametrize("report", [SAMPLE, replace(SAMPLE, fits=False, sections=[stages(4), stages(16)]), evil()])
def test_every_tag_is_closed_and_every_picture_is_xml(report: PlanReport) -> None:
    text = render_html(report)
    assert text.startswith("<!DOCTYPE html>\n")
    assert ("html", {"lang": "en"}) in Page(text).elements
    assert ("meta", {"charset": "utf-8"}) in Page(text).elements
    for svg in re.findall("<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)


def test_text_is_text_wherever_it_stands() -> None:
    known, found = Page(render_html(SAMPLE)), Page(render_html(evil()))
    assert "script" not in {tag for tag, _ in found.elements}
    assert {tag for tag, _ in found.elements} <= {tag for tag, _ in known.elements}
    names = {name for _, attributes in known.elements for name in attributes}
    assert {name for _, attributes in found.elements for name in attributes} <= names
    assert sum(EVIL in text for text in found.texts) >= 24
    assert EVIL in [value for _, attributes in found.elements for value in attributes.values()]


def test_a_page_needs_nothing_from_elsewhere() -> None:
    text = render_html(SAMPLE)
    for word in ("http", "//", "@import", "@font-face", "<script", "<link", "<img", "<base", "src=", "href="):
        assert word not in text
    assert set(re.findall(r"url\([^)]*\)", text)) == {"url(#hatch)"}
    assert 'id="hatch"' in text


def test_everything_that_a_report_tells_is_there() -> None:
    told = "\n".join(Page(render_html(SAMPLE)).texts)
    cells = [cell for row in SEARCH.rows for cell in row]
    facts = [text for fact in SAMPLE.facts for text in fact]
    titles = [part.title for part in SAMPLE.sections]
    kinds = [*MEMORY.segment_names, *HOST.segment_names, *TIME.segment_names, *TOKENS.lines, *MFU.lines]
    for text in (
        SAMPLE.title,
        SAMPLE.verdict,
        *facts,
        *titles,
        *cells,
        *kinds,
        SEARCH.note,
        *SAMPLE.notes,
        SAMPLE.toml,
    ):
        assert text in told


def test_the_verdict_is_in_words() -> None:
    assert "\u2713 Fits" in Page(render_html(SAMPLE)).texts
    assert "\u2717 Does not fit" in Page(render_html(replace(SAMPLE, fits=False))).texts


def test_nothing_is_shown_of_nothing() -> None:
    empty = page(
        BarChart(title="none", unit="s", bars=[]), Table(title="", columns=["a"], rows=[]), replace(MFU, lines={})
    )
    assert pictures(empty, "bar") == []
    assert len(pictures(empty, "curve")) == 1
    assert of(pictures(page(replace(HOST, bars=[StackedBar(label="", segments={"a": 0.0})])), "bar")[0], "part") == []
    assert "<dl" not in empty
    assert "<ul" not in empty.replace('<ul class="key">', "")
    assert "<pre" not in empty


def test_the_best_row_and_no_other_is_stressed() -> None:
    stressed = re.findall(r'<tr class="best">.*?</tr>', page(replace(SEARCH, best=3)))
    assert len(stressed) == 1
    assert "61.0" in stressed[0]
    assert "\u25b8" in stressed[0]
    assert "best" not in re.sub("<style>.*</style>", "", page(replace(SEARCH, best=None, note="")), flags=re.DOTALL)


def test_numbers_stand_at_the_right() -> None:
    text = page(SEARCH)
    assert '<td class="n">1,203.4</td>' in text
    assert '<th scope="col" class="n">MFU</th>' in text
    assert "<td>hybrid 8 x 4</td>" in text


# ---- bars


@pytest.mark.parametrize("bars", [MEMORY, HOST, TIME, stages(16), stages(4)])
def test_parts_are_as_long_as_what_they_stand_for_and_touch(bars: BarChart) -> None:
    drawn = pictures(page(bars), "bar")
    assert len(drawn) == len(bars.bars)
    full = max(max(bar.total, bar.limit or 0) for bar in bars.bars)
    for svg, bar in zip(drawn, bars.bars, strict=True):
        parts = {part.get("data-kind"): part for part in of(svg, "part")}
        assert list(parts) == [kind for kind in bars.segment_names if bar.segments.get(kind)]
        at = 0.0
        for kind, part in parts.items():
            assert number(part, "width") == pytest.approx(100 * bar.segments[str(kind)] / full, rel=1e-3)
            assert number(part, "x") == pytest.approx(at, abs=0.01)
            at += 100 * bar.segments[str(kind)] / full


def test_the_longest_bar_or_the_farthest_limit_is_as_wide_as_there_is_room() -> None:
    (update,) = pictures(page(TIME), "bar")
    last = of(update, "part")[-1]
    assert number(last, "x") + number(last, "width") == pytest.approx(100, abs=0.02)
    (node,) = pictures(page(HOST), "bar")
    assert number(of(node, "limit")[0], "x1") == 100


def test_a_bar_beyond_the_limit_is_marked_and_no_other() -> None:
    text = page(stages(16))
    full = stages(16).bars[2].total
    for index, svg in enumerate(pictures(text, "bar")):
        (line,), beyond = of(svg, "limit"), of(svg, "beyond")
        assert number(line, "x1") == number(line, "x2") == pytest.approx(100 * 79.1 / full, abs=0.01)
        assert len(beyond) == (index == 2)
        for strip in beyond:
            assert number(strip, "x") == number(line, "x1")
            assert number(strip, "x") + number(strip, "width") == pytest.approx(100, abs=0.02)
    assert re.findall('<span class="sum bad">(.*?)</span>', text) == ["\u2717 82.0 of 79.1 GiB"]
    assert text.count('class="sum"') == 15


def test_bars_without_a_limit_have_no_line() -> None:
    (svg,) = pictures(page(TIME), "bar")
    assert of(svg, "limit") == []
    assert '<span class="sum">117.0 s</span>' in page(TIME)


def test_a_picture_is_told_in_words() -> None:
    svg = pictures(page(MEMORY), "bar")[1]
    assert svg.get("role") == "img"
    assert svg.findtext("title") == "in the head: 41.8 of 79.1 GiB"
    assert (svg.findtext("desc") or "").startswith("parameters 0.9, gradients 0.9, optimizer states 1.9, ")
    assert of(svg, "part")[0].findtext("title") == "parameters: 0.9 GiB"


def test_figures_stand_in_parts_that_have_room() -> None:
    first, _, _ = pictures(page(MEMORY), "bar")
    assert [text.text for text in of(first, "ink")] == ["31.7", "15.9"]
    assert not any(of(svg, "ink") for svg in pictures(page(stages(16)), "bar"))


def test_a_kind_has_one_colour_in_all_bars_and_others_have_others() -> None:
    shown = [part for svg in pictures(page(MEMORY, HOST, stages(16)), "bar") for part in of(svg, "part")]
    colours = {(part.get("data-kind"), part.get("class")) for part in shown}
    assert len(colours) == len(dict(colours)) == len({colour for _, colour in colours}) >= 10
    swatches = re.findall(r'class="swatch (k\d+)"></span>(.*?)</th>', page(MEMORY, HOST, stages(16)))
    assert {(kind, f"part {colour}") for colour, kind in swatches} == colours
    update = pictures(page(MEMORY, TIME), "bar")[-1]
    assert of(update, "part")[0].get("class") == "part k0"  # Seconds are another matter.


def test_the_scale_is_round_and_tells_the_limit() -> None:
    (svg,) = pictures(page(MEMORY), "scale")
    labels = {text.text: number(text, "x") for text in of(svg, "label")}
    assert [*labels] == ["79.1", "0", "20", "40", "60"]
    (crowded,) = pictures(page(stages(16)), "scale")
    assert [text.text for text in of(crowded, "label")] == [*labels]
    assert labels["60"] == pytest.approx(100 * 60 / 79.1, abs=0.01)
    (svg,) = pictures(
        page(replace(MEMORY, bars=[*MEMORY.bars, StackedBar(label="", segments={}, limit=40.0)])), "scale"
    )
    assert of(svg, "bad") == []


# ---- curves


def test_equal_factors_are_equally_far() -> None:
    (svg,) = pictures(page(TOKENS), "curve")
    dots = [dot for dot in of(svg, "dot") if (dot.findtext("title") or "").startswith("keep_attention, offload: ")]
    places = [number(dot, "cx") for dot in dots]
    assert places == pytest.approx([100 * n / 7 for n in range(8)], abs=0.02)
    assert dots[0].findtext("title") == "keep_attention, offload: 7.49 at 32K"


def test_a_plain_axis_begins_at_nothing() -> None:
    (svg,) = pictures(page(MFU), "curve")
    heights = {text.text: number(text, "y") for text in of(svg, "label") if text.get("x") == "-8"}
    dots = {(dot.findtext("title") or "").partition(" at ")[0]: number(dot, "cy") for dot in of(svg, "dot")}
    per_unit = (heights["0"] - heights["40"]) / 40
    assert heights["0"] - dots["full: 21.2"] == pytest.approx(21.2 * per_unit, abs=0.1)
    assert heights["0"] - dots["keep_attention, offload: 24.1"] == pytest.approx(24.1 * per_unit, abs=0.1)


def test_lines_go_through_their_points() -> None:
    (svg,) = pictures(page(TOKENS), "curve")
    dots = [(number(dot, "cx"), number(dot, "cy")) for dot in of(svg, "dot")]
    ends = {
        ((number(line, "x1"), number(line, "y1")), (number(line, "x2"), number(line, "y2"))) for line in of(svg, "line")
    }
    assert ends == {*pairwise(dots[:8]), *pairwise(dots[8:16]), *pairwise(dots[16:])}


def test_the_limit_of_a_curve_lies_where_its_value_does() -> None:
    (svg,) = pictures(page(replace(TOKENS, limit=100.0)), "curve")
    heights = {text.text: number(text, "y") for text in of(svg, "label") if text.get("x") == "-8"}
    (line,) = of(svg, "limit")
    assert number(line, "y1") == number(line, "y2") == heights["100"]
    assert "limit 100.0" in [text.text for text in of(svg, "bad")]
    (svg,) = pictures(page(replace(MFU, limit=500.0)), "curve")
    assert 0 <= number(of(svg, "limit")[0], "y1") < 260


def test_what_cannot_be_drawn_is_left_out_and_told() -> None:
    text = page(replace(MFU, log_y=True, lines={"all": [(1024.0, nan), (2048.0, 4.0), (4096.0, inf), (8192.0, 8.0)]}))
    (svg,) = pictures(text, "curve")
    assert len(of(svg, "dot")) == 2
    assert re.findall(r"<td.*?>(.*?)</td>", text) == ["-", "4.00", "-", "8.00"]


@pytest.mark.parametrize("values", [(0.0, 0.1, 0.2, 20.0), (20.0, 19.9, 19.8, 0.0), (10.0, 10.1, 10.2, 10.3)])
def test_names_at_the_ends_of_lines_do_not_touch(values: tuple[float, ...]) -> None:
    lines = {f"line {y}": [(1.0, 5.0), (2.0, y)] for y in values}
    (svg,) = pictures(page(replace(MFU, lines=lines)), "curve")
    heights = sorted((number(name, "y"), (next(iter(name)).tail or "")) for name in of(svg, "name"))
    assert all(after - before >= 16 for (before, _), (after, _) in pairwise(heights))
    assert heights[-1][0] <= 260
    assert [name for _, name in heights] == [f"line {y}" for y in sorted(values, reverse=True)]


def test_more_lines_than_colours_differ_in_their_strokes() -> None:
    lines = {f"line {n}": [(1.0, n), (2.0, n)] for n in range(2 * len(LINE_COLOURS))}
    (svg,) = pictures(page(replace(MFU, lines=lines)), "curve")
    assert len({line.get("class") for line in of(svg, "line")}) == 2 * len(LINE_COLOURS)


# ---- colours

RED_BLIND = ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998))
GREEN_BLIND = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))
BLUE_BLIND = ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900))
ALL_SEEN = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
Vector = tuple[float, ...]


def linear(colour: str) -> Vector:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return tuple(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)


def luminance(colour: str) -> float:
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def lab(colour: Vector) -> Vector:
    rows = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0178, 0.1095, 0.8727))
    x, y, z = (sum(weight * part for weight, part in zip(row, colour, strict=True)) for row in rows)
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("eyes", [ALL_SEEN, RED_BLIND, GREEN_BLIND, BLUE_BLIND])
def test_any_two_kinds_are_told_apart_with_any_eyes(eyes: tuple[Vector, ...]) -> None:
    """Eyes as simulated by Machado, Oliveira and Fernandes, 2009; 2.3 is the least difference that is seen."""
    seen = [
        tuple(
            min(1.0, max(0.0, sum(weight * part for weight, part in zip(row, linear(colour), strict=True))))
            for row in eyes
        )
        for colour in PALETTE
    ]
    assert min(dist(lab(one), lab(other)) for one, other in combinations(seen, 2)) > 10


def test_neighbours_differ_on_grey_paper() -> None:
    assert min(contrast(one, other) for one, other in pairwise(PALETTE)) > 1.5


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
def test_text_and_colours_stand_out_from_the_page(scheme: dict[str, str]) -> None:
    for text in ("ink", "soft", "good", "bad"):
        assert contrast(scheme[text], scheme["paper"]) > 4.5
    assert contrast(scheme["ink"], scheme["tint"]) > 4.5
    assert min(contrast(colour, scheme["paper"]) for colour in PALETTE) > 1.9
    assert min(contrast(PALETTE[line], scheme["paper"]) for line in LINE_COLOURS) > 3


def test_figures_stand_out_from_the_parts_in_which_they_are() -> None:
    assert "svg .ink { fill: #14171a;" in stylesheet()
    assert "svg .ink.on-dark { fill: #fff }" in stylesheet()
    for number_of, colour in enumerate(PALETTE):
        assert contrast(colour, "#ffffff" if number_of in DARK_COLOURS else "#14171a") > 4.5
