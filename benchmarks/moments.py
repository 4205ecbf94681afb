"""How far moments that are kept in bfloat16 go from those in float32: python benchmarks/moments.py

Gradients are normally distributed; after 3,000 updates they shrink to a tenth for 3,000 more. Shown are means over 4,000
numbers: the root of the second moment over that of float32, and how far the first is off, as roots of mean squares.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

NUMBERS, UPDATES = 4000, 3000
Rounding = Callable[[Tensor, torch.Generator], Tensor]


def exact(x: Tensor, _: torch.Generator) -> Tensor:
    return x


def nearest(x: Tensor, _: torch.Generator) -> Tensor:
    return x.bfloat16().float()


def at_random(x: Tensor, generator: torch.Generator) -> Tensor:
    """Up or down, with the chances that make it right on average: what is cut off is first filled by chance."""
    bits = x.view(torch.int32)
    return ((bits + torch.randint(0, 1 << 16, bits.shape, generator=generator, dtype=torch.int32)) & -65536).view(
        x.dtype
    )


def moments(beta: float, rounding: Rounding, power: int) -> list[Tensor]:
    """Of powers of gradients, before they shrink and at the end. First moments have a mean to find."""
    draw, chance = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    moment, found = torch.zeros(NUMBERS), []
    for size in (1.0, 0.1):
        for _ in range(UPDATES):
            gradient = size * (torch.randn(NUMBERS, generator=draw) + (0.5 if power == 1 else 0))
            moment = rounding(beta * moment + (1 - beta) * gradient**power, chance)
        found.append(moment)
    return found


def main() -> None:
    torch.set_num_threads(1)
    sys.stdout.write("| | to nearest | then | at random | then |\n|---|---|---|---|---|\n")
    for power, betas in ((2, (0.95, 0.98, 0.99, 0.995, 0.998, 0.999)), (1, (0.9, 0.99, 0.999))):
        for beta in betas:
            cells = []
            for rounding in (nearest, at_random):
                for ours, theirs in zip(moments(beta, rounding, power), moments(beta, exact, power), strict=True):
                    off = ((ours - theirs).square().mean() / theirs.square().mean()).sqrt()
                    cells.append(f"{(ours / theirs).sqrt().mean() if power == 2 else off:.3f}")
            sys.stdout.write(f"| beta{power} = {beta} | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
