"""Compares the steps of a run on a mesh with those of one process, and defines the tolerances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest

from trainer.commands import format_table

SCALAR_TOLERANCE = 1e-10
"""Relative, of a loss or gradient norm."""
TENSOR_TOLERANCE = 1e-9
"""Of a gradient or weight, relative to the largest absolute value of the reference tensor."""
NUM_WORST_TENSORS = 3
HEADER = ("step", "loss: one process", "mesh", "norm: one process", "mesh", "tensors")


@dataclass(frozen=True, kw_only=True)
class StepDifference:
    """A step's results on one rank, or the worst of all ranks compared with one process."""

    loss: float
    grad_norm: float
    """Global norm before clipping."""
    tensor_errors: dict[str, float]
    """By tensor, gradients then weights: the largest difference from one process, over its largest value."""


def worst_over_ranks(
    reference: Sequence[StepDifference], steps_per_rank: Sequence[Sequence[StepDifference]]
) -> list[StepDifference]:
    """The worst value of each metric over ranks. A tensor missing on either side has an infinite error."""
    worst = []
    for expected, *ranks in zip(reference, *steps_per_rank, strict=True):
        names = dict.fromkeys(name for step in (expected, *ranks) for name in step.tensor_errors)
        errors = {
            name: max((rank.tensor_errors[name] for rank in ranks if name in rank.tensor_errors), default=math.inf)
            for name in names
        }
        loss = max((rank.loss for rank in ranks), key=partial(relative_error, expected=expected.loss))
        norm = max((rank.grad_norm for rank in ranks), key=partial(relative_error, expected=expected.grad_norm))
        worst.append(StepDifference(loss=loss, grad_norm=norm, tensor_errors=errors))
    return worst


def within_tolerance(reference: Sequence[StepDifference], mesh: Sequence[StepDifference]) -> bool:
    return all(
        relative_error(actual.loss, expected.loss) <= SCALAR_TOLERANCE
        and relative_error(actual.grad_norm, expected.grad_norm) <= SCALAR_TOLERANCE
        and max(actual.tensor_errors.values()) <= TENSOR_TOLERANCE
        for actual, expected in zip(mesh, reference, strict=True)
    )


def comparison_table(reference: Sequence[StepDifference], mesh: Sequence[StepDifference]) -> list[str]:
    """One line per step, and one with the tensors that differ most."""
    rows = [
        (
            f"{step}",
            *(f"{value:.12g}" for value in (expected.loss, actual.loss, expected.grad_norm, actual.grad_norm)),
            f"{max(actual.tensor_errors.values()):.1e}",
        )
        for step, (actual, expected) in enumerate(zip(mesh, reference, strict=True), start=1)
    ]
    worst = {name: max(step.tensor_errors[name] for step in mesh) for name in mesh[0].tensor_errors}
    largest = nlargest(NUM_WORST_TENSORS, worst, key=lambda name: worst[name])
    return [*format_table(HEADER, *rows), f"largest: {', '.join(f'{name} {worst[name]:.1e}' for name in largest)}"]


def relative_error(actual: float, expected: float) -> float:
    """Relative difference; infinite if it is not finite."""
    if actual == expected:
        return 0.0
    error = abs(actual - expected) / abs(expected) if expected else math.inf
    return error if math.isfinite(error) else math.inf
