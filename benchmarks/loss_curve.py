"""Draws the loss of runs as an SVG.

    python benchmarks/loss_curve.py outputs/debug/metrics.jsonl docs/debug_loss.svg
    python benchmarks/loss_curve.py --mean 10 --skip 50 outputs/A/metrics.jsonl outputs/B/metrics.jsonl two.svg

Each run is named by the folder of its file. `--mean N` draws means of N steps, and `--skip N`
leaves the first N out.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

WIDTH = 720
HEIGHT = 260
LEFT = 44
BOTTOM = 34
TOP = 14
COLORS = ("#2463a8", "#c0504d", "#4f8a4c")
Curve = Sequence[tuple[float, float]]
"""Step and loss."""


def draw(curves: Mapping[str, Curve], captions: Sequence[str], *, is_cut: bool) -> str:
    """From a loss of 0, or only the part that the curves have if they are cut."""
    losses = [loss for curve in curves.values() for _, loss in curve]
    tick = 0.1 if is_cut else 1.0
    low = math.floor(min(losses) / tick) * tick if is_cut else 0.0
    high = math.ceil(max(losses) / tick) * tick
    first, last = (
        end(step for curve in curves.values() for step, _ in curve) for end in (min, max)
    )

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 10) * (step - first) / (last - first)

    def y(loss: float) -> float:
        return TOP + (HEIGHT - BOTTOM - TOP) * (high - loss) / (high - low)

    grid = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#ddd"/>'
        f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:g}</text>'
        for loss in (
            round(low + number * tick, 6) for number in range(round((high - low) / tick) + 1)
        )
    )
    every = max(1, 10 ** (len(str(int(last - first))) - 1) // 2)
    ticks = "".join(
        f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{step}</text>'
        for step in range(every * math.ceil(first / every), int(last) + 1, every)
    )
    lines = "".join(
        f'<polyline points="{" ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in curve)}" '
        f'fill="none" stroke="{color}" stroke-width="1.6"/>'
        f'<text x="{WIDTH - 14}" y="{TOP + 14 + 16 * number}" text-anchor="end" fill="{color}">{caption}</text>'
        for number, (curve, caption, color) in enumerate(
            zip(curves.values(), captions, COLORS, strict=False)
        )
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="#444"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{grid}{ticks}{lines}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("metrics", nargs="+", type=Path, help="at most three")
    parser.add_argument("svg", type=Path)
    parser.add_argument("--mean", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0)
    options = parser.parse_args()
    curves = dict[str, Curve]()
    captions = list[str]()
    for path in options.metrics:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        name = path.parent.name
        kept = records[options.skip :]
        size = options.mean
        parts = [kept[end - size : end] for end in range(size, len(kept) + 1, size)]
        curves[name] = [
            (part[-1]["step"], sum(each["loss"] for each in part) / size) for part in parts
        ]
        ends = f"{curves[name][0][1]:.2f} to {curves[name][-1][1]:.2f}"
        captions.append(f"{name}: loss {ends}, {records[-1]['tokens']:,} tokens")
    options.svg.write_text(draw(curves, captions, is_cut=options.skip > 0))


if __name__ == "__main__":
    main()
