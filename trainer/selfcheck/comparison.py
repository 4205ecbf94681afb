"""What the ranks of a mesh saw of a run, beside what one process saw of it, and how far these may be apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

NUMBERS = 1e-10
"""Of a loss or the norm of a gradient, relative."""
TENSORS = 1e-9
"""Of a gradient or a weight, relative to the largest value of its tensor."""
WORST = 3
HEADING = ("update", "loss: one process", "mesh", "norm: one process", "mesh", "tensors")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """An update, on one rank or, of each number the farthest from one process, on any."""

    loss: float
    norm: float
    """Of the whole gradient, before clipping."""
    far: dict[str, float]
    """By tensor, gradients and then weights: the largest difference from one process over its largest value."""


def farthest(alone: Sequence[Seen], ranks: Sequence[Sequence[Seen]]) -> list[Seen]:
    """The updates of a mesh. A tensor that no rank has, or only the mesh, is infinitely far."""
    return [
        Seen(
            loss=max((rank.loss for rank in update), key=lambda loss: relative(loss, one.loss)),
            norm=max((rank.norm for rank in update), key=lambda norm: relative(norm, one.norm)),
            far={name: math.inf for name in one.far if not any(name in rank.far for rank in update)}
            | {name: max(rank.far.get(name, 0.0) for rank in update) for held in update for name in held.far},
        )
        for one, *update in zip(alone, *ranks, strict=True)
    ]


def same(alone: Sequence[Seen], mesh: Sequence[Seen]) -> bool:
    return all(
        relative(ours.loss, theirs.loss) <= NUMBERS
        and relative(ours.norm, theirs.norm) <= NUMBERS
        and max(ours.far.values()) <= TENSORS
        for ours, theirs in zip(mesh, alone, strict=True)
    )


def table(alone: Sequence[Seen], mesh: Sequence[Seen]) -> list[str]:
    """A line for each update, and one with the tensors that differ most."""
    rows = [
        (f"{step}", *(f"{value:.12g}" for value in (theirs.loss, ours.loss, theirs.norm, ours.norm)), f"{far:.1e}")
        for step, (ours, theirs) in enumerate(zip(mesh, alone, strict=True), start=1)
        for far in [max(ours.far.values())]
    ]
    lines = [
        f"{update:<6}{loss:>21}{mesh_loss:>19}{norm:>21}{mesh_norm:>19}{far:>11}"
        for update, loss, mesh_loss, norm, mesh_norm, far in (HEADING, *rows)
    ]
    worst = {name: max(update.far[name] for update in mesh) for name in mesh[0].far}
    names = sorted(worst, key=lambda name: worst[name], reverse=True)[:WORST]
    return [*lines, f"farthest: {', '.join(f'{name} {worst[name]:.1e}' for name in names)}"]


def relative(ours: float, theirs: float) -> float:
    """How far a number is from another; infinite if one of them is none."""
    if ours == theirs:
        return 0.0
    far = abs(ours - theirs) / abs(theirs) if theirs else math.inf
    return far if math.isfinite(far) else math.inf
