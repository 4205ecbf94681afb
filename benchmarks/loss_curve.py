"""Draws the loss of a run as an SVG: python benchmarks/loss_curve.py outputs/debug/metrics.jsonl docs/debug_loss.svg"""

from __future__ import annotations

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 260, 44, 34, 14


def draw(records: list[dict[str, float]]) -> str:
    steps = [record["step"] for record in records]
    losses = [record["loss"] for record in records]
    high = int(max(losses)) + 1

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 10) * step / steps[-1]

    def y(loss: float) -> float:
        return TOP + (HEIGHT - BOTTOM - TOP) * (1 - loss / high)

    grid = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#ddd"/>'
        f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>'
        for loss in range(high + 1)
    )
    ticks = "".join(
        f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{step}</text>'
        for step in range(0, int(steps[-1]) + 1, max(1, int(steps[-1]) // 7))
    )
    points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in zip(steps, losses, strict=True))
    caption = f"loss per step: {losses[0]:.2f} to {losses[-1]:.2f}, {records[-1]['tokens']:,} tokens"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="#444"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{grid}{ticks}'
        f'<polyline points="{points}" fill="none" stroke="#2463a8" stroke-width="1.6"/>'
        f'<text x="{WIDTH - 14}" y="{TOP + 14}" text-anchor="end">{caption}</text></svg>\n'
    )


if __name__ == "__main__":
    source, target = sys.argv[1:]
    Path(target).write_text(draw([json.loads(line) for line in Path(source).read_text().splitlines()]))
