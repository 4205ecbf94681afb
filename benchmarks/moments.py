"""How far AdamW moments in bfloat16 drift from those in float32: python -m benchmarks.moments
[--steps 3000]

Gradients are normally distributed; after 3,000 steps they shrink to a tenth for 3,000 more. The
table has means over 4,000 numbers: the root of the second moment over that of float32, and the
root mean square error of the first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor

NUMBERS = 4000
Rounding = Callable[[Tensor, torch.Generator], Tensor]


def exact(x: Tensor, _: torch.Generator) -> Tensor:
    return x


def nearest(x: Tensor, _: torch.Generator) -> Tensor:
    return x.bfloat16().float()


def stochastic(x: Tensor, generator: torch.Generator) -> Tensor:
    """Unbiased: random bits are added to those that truncation drops."""
    bits = x.view(torch.int32)
    return (
        (bits + torch.randint(0, 1 << 16, bits.shape, generator=generator, dtype=torch.int32))
        & -65536
    ).view(x.dtype)


def moments(beta: float, rounding: Rounding, power: int, steps: int) -> list[Tensor]:
    """Running means of a power of the gradients, before they shrink and at the end.

    Power 1 has a mean of 0.5.
    """
    draw = torch.Generator().manual_seed(1)
    chance = torch.Generator().manual_seed(2)
    moment = torch.zeros(NUMBERS)
    found = []
    for size in (1.0, 0.1):
        for _ in range(steps):
            gradient = size * (torch.randn(NUMBERS, generator=draw) + (0.5 if power == 1 else 0))
            moment = rounding(beta * moment + (1 - beta) * gradient**power, chance)
        found.append(moment)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    sys.stdout.write("| | to nearest | then | stochastic | then |\n|---|---|---|---|---|\n")
    for power, betas in ((2, (0.95, 0.98, 0.99, 0.995, 0.998, 0.999)), (1, (0.9, 0.99, 0.999))):
        for beta in betas:
            cells = []
            for rounding in (nearest, stochastic):
                for ours, theirs in zip(
                    moments(beta, rounding, power, steps),
                    moments(beta, exact, power, steps),
                    strict=True,
                ):
                    off = ((ours - theirs).square().mean() / theirs.square().mean()).sqrt()
                    cells.append(f"{(ours / theirs).sqrt().mean() if power == 2 else off:.3f}")
            sys.stdout.write(f"| beta{power} = {beta} | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
