"""How a page looks: colours that are told apart with any eyes, in grey and on paper, and the style sheet."""

from __future__ import annotations

PALETTE = (
    "#264b6d", "#3a89c1", "#8cb4dd",  # blue
    "#13795b", "#5aac98",  # green
    "#9f6401", "#e3ad59",  # amber
    "#775994", "#b0b8c0",
    "#82293c", "#cf7784",  # red comes late: it is the limit's
    "#52585e",
)  # fmt: skip
"""Of kinds, in their order: neighbours are one light and one dark."""
DARK_COLOURS = {0, 3, 5, 7, 9, 11}
"""Colours on which figures are white."""
LINE_COLOURS = (1, 5, 10, 3, 7)
"""Colours of curves: those that are seen on white and on black."""

LIGHT = {"paper": "#ffffff", "ink": "#1b1f23", "soft": "#5c646c", "rule": "#dde1e5", "tint": "#f3f5f7"}
LIGHT |= {"good": "#13694e", "bad": "#b3261e"}
DARK = {"paper": "#15181b", "ink": "#e6e9ec", "soft": "#a2abb3", "rule": "#343a40", "tint": "#1f2428"}
DARK |= {"good": "#6cc7a8", "bad": "#ff8a80"}

CSS_RULES = """
* { box-sizing: border-box }
html { background: var(--paper); color: var(--ink); -webkit-text-size-adjust: 100% }
body { font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
  max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; font-variant-numeric: tabular-nums }
h1 { font-size: 1.5rem; line-height: 1.25; font-weight: 600; margin: 0 0 .4rem; overflow-wrap: anywhere }
h2 { font-size: 1rem; font-weight: 600; margin: 0 0 .8rem; overflow-wrap: anywhere }
section { margin-top: 2.75rem; break-inside: avoid }
p, ul { margin: .4rem 0 0; max-width: 44rem; overflow-wrap: anywhere }
ul { padding-left: 1.1rem }
.verdict { font-size: 1.05rem }
.verdict b { margin-right: .5rem }
.good { color: var(--good) } .bad { color: var(--bad) }
.note, summary, .unit { color: var(--soft); font-size: .87rem }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(max(7rem, 100% / var(--across) - 1.5rem), 1fr));
  gap: 1.1rem 1.5rem;  margin: 1.6rem 0 0; padding: 1rem 0; border: solid var(--rule); border-width: 1px 0 }
dt { color: var(--soft); font-size: .82rem; line-height: 1.3 }
dd { margin: .1rem 0 0; font-size: 1.3rem; line-height: 1.3; overflow-wrap: anywhere }
dl > div { display: flex; flex-direction: column; justify-content: space-between }
.bars { display: grid; grid-template-columns: fit-content(34%) minmax(0, 1fr) max-content; gap: .55rem .9rem;
  align-items: center; font-size: .87rem; line-height: 1.25 }
.bars.many { row-gap: .2rem; font-size: .8rem }
.bars { grid-auto-flow: dense } .bars > * { overflow-wrap: anywhere }
.bars .of { grid-column: 1 } .bars > svg { grid-column: 2 } .bars .sum { grid-column: 3; text-align: right }
svg { display: block; width: 100%; overflow: visible; font-size: 12px }
svg text { fill: var(--ink) } svg .label { fill: var(--soft) } svg .bad { fill: var(--bad) }
.part { stroke: var(--paper); stroke-width: 1 }
svg .ink { fill: #14171a; text-anchor: middle; pointer-events: none } svg .ink.on-dark { fill: #fff }
.beyond { fill: url(#hatch); pointer-events: none }
.limit { stroke: var(--bad); stroke-width: 2 } .dashed { stroke-dasharray: 5 4 }
svg .haloed { paint-order: stroke; stroke: var(--paper); stroke-width: 4px }
.grid, .tick { stroke: var(--rule) }
.line { stroke-width: 2; stroke-linecap: round } .dot { stroke: var(--paper) }
.plot > .unit { margin: 0 0 .6rem } .plot svg + .unit { margin: 0; text-align: center }
.key { display: none; list-style: none; padding: 0; font-size: .87rem }
.wide { overflow-x: auto; margin-top: 1rem }
table { border-collapse: collapse; font-size: .87rem; line-height: 1.35 }
th, td { padding: .28rem .9rem .28rem 0; text-align: left; vertical-align: baseline; font-weight: 400; white-space: nowrap }
td:last-child, th:last-child { padding-right: .3rem }
.n { text-align: right } .words { white-space: normal; min-width: 13rem }
thead th { white-space: normal; color: var(--soft); border-bottom: 1px solid var(--ink); vertical-align: bottom }
tbody tr + tr > * { border-top: 1px solid var(--rule) }
tr.sums > * { border-top: 1px solid var(--ink) !important; font-weight: 600 }
tbody th { position: sticky; left: 0; background: var(--paper) }
th:has(.swatch) { padding-left: 1.25em; text-indent: -1.25em } th .swatch { text-indent: 0 }
tbody tr.best > * { background: var(--tint); font-weight: 600 }
.swatch { display: inline-block; width: .75em; height: .75em; margin-right: .5em; border-radius: 2px }
details { margin-top: .9rem } summary { cursor: pointer; width: max-content }
pre { background: var(--tint); padding: .9rem 1.1rem; overflow-x: auto; user-select: all; font-size: .87rem; margin: 0 }
:focus-visible { outline: 2px solid var(--ink); outline-offset: 2px }
@media (max-width: 40rem) {
  body { padding-top: 1.25rem } svg .ink, svg .name { display: none }
  .plot { padding-right: 14px !important } .key { display: block }
  .bars { grid-template-columns: 1fr max-content; row-gap: .2rem }
  .bars > svg { grid-column: 1 / -1 } .bars > svg.bar { margin: .1rem 0 .7rem } .bars .sum { grid-column: 2 }
}
@media print {
  body { max-width: none; padding: 0; font-size: 10pt } section { margin-top: 1.5rem }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact }
  .wide { overflow: visible } tbody th { position: static } pre { white-space: pre-wrap }
}
"""


def stylesheet() -> str:
    """The style sheet: dark where the reader's screen is, but on paper light."""
    fills = "".join(f".k{n} {{ fill: {colour}; background: {colour} }}\n" for n, colour in enumerate(PALETTE))
    lines = "".join(
        f"line.l{n} {{ stroke: {PALETTE[colour]} }} svg .dot.l{n}, svg tspan.l{n} {{ fill: {PALETTE[colour]} }} "
        f".swatch.l{n} {{ background: {PALETTE[colour]} }}\n"
        for n, colour in enumerate(LINE_COLOURS)
    )
    dark = f"@media screen and (prefers-color-scheme: dark) {{ {_css_variables(DARK)} }}"
    return f"{_css_variables(LIGHT)}\n{dark}\n{fills}{lines}{CSS_RULES}"


def _css_variables(colours: dict[str, str]) -> str:
    return ":root { " + "; ".join(f"--{name}: {colour}" for name, colour in colours.items()) + " }"
