"""Compares the steps of a run on a mesh with those of one process, and defines the tolerances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest

from trainer.commands import format_table

SCALAR_TOLERANCE = 1e-10
"""Relative tolerance of a loss or gradient norm: float64 sums in another order."""
TENSOR_TOLERANCE = 1e-9
"""Tolerance of a weight or moment, relative to the largest absolute value of the reference
tensor.
"""
KINDS = {"loss": "loss", "grad_norm": "gradient norm", "model": "weights", "optimizer": "moments"}
"""The kind of a result by the first part of its name."""
TOLERANCES = dict.fromkeys(
    ("loss", "gradient norm", "other metrics"), SCALAR_TOLERANCE
) | dict.fromkeys(("weights", "moments"), TENSOR_TOLERANCE)
NUM_WORST_TENSORS = 3
HEADER = ("step", "loss: one process", "mesh", "norm: one process", "mesh", "tensors")


@dataclass(frozen=True, kw_only=True)
class StepDifference:
    """A step's results on one rank, or the worst of all ranks compared with one process."""

    values: dict[str, float]
    """The loss, the global norm before clipping (`grad_norm`) and other metrics of the step."""
    tensor_errors: dict[str, float]
    """Error of each weight and moment: the largest difference from one process, over its largest
    value.
    """


def worst_over_ranks(
    reference: Sequence[StepDifference], steps_per_rank: Sequence[Sequence[StepDifference]]
) -> list[StepDifference]:
    """The worst value of each metric over ranks.

    A tensor missing on either side has an infinite error.
    """
    worst = []
    for expected, *ranks in zip(reference, *steps_per_rank, strict=True):
        names = dict.fromkeys(name for step in (expected, *ranks) for name in step.tensor_errors)
        errors = {
            name: max(
                (rank.tensor_errors[name] for rank in ranks if name in rank.tensor_errors),
                default=math.inf,
            )
            for name in names
        }
        values = {
            name: max(
                # A missing value becomes NaN, whose error is infinite.
                (rank.values.get(name, math.nan) for rank in ranks),
                key=partial(relative_error, expected=value),
            )
            for name, value in expected.values.items()
        }
        worst.append(StepDifference(values=values, tensor_errors=errors))
    return worst


def within_tolerance(reference: Sequence[StepDifference], mesh: Sequence[StepDifference]) -> bool:
    """Whether every step matches."""
    return all(
        error <= TOLERANCES[kind] for kind, error in errors_by_kind(reference, mesh).items()
    )


def errors_by_kind(
    reference: Sequence[StepDifference], mesh: Sequence[StepDifference]
) -> dict[str, float]:
    """The largest error of each kind of result, of all steps."""
    largest = dict.fromkeys(TOLERANCES, 0.0)
    for actual, expected in zip(mesh, reference, strict=True):
        errors = {
            name: relative_error(actual.values[name], value)
            for name, value in expected.values.items()
        }
        for name, error in (errors | actual.tensor_errors).items():
            kind = KINDS.get(name.partition(".")[0], "other metrics")
            largest[kind] = max(largest[kind], error)
    return largest


def comparison_table(
    reference: Sequence[StepDifference], mesh: Sequence[StepDifference]
) -> list[str]:
    """One line per step, and one with the tensors that differ most."""
    rows = [
        (
            f"{step}",
            *(
                f"{each.values[name]:.12g}"
                for name in ("loss", "grad_norm")
                for each in (expected, actual)
            ),
            f"{max(actual.tensor_errors.values()):.1e}" if actual.tensor_errors else "-",
        )
        for step, (actual, expected) in enumerate(zip(mesh, reference, strict=True), start=1)
    ]
    worst = {
        name: max(step.tensor_errors.get(name, 0.0) for step in mesh)
        for name in mesh[-1].tensor_errors
    }
    largest = nlargest(NUM_WORST_TENSORS, worst, key=lambda name: worst[name])
    others = [
        f"step {step}: {name} {actual.values[name]:.12g}, one process {value:.12g}"
        for step, (actual, expected) in enumerate(zip(mesh, reference, strict=True), start=1)
        for name, value in expected.values.items()
        if name not in ("loss", "grad_norm")
        and relative_error(actual.values[name], value) > SCALAR_TOLERANCE
    ]
    tensors = ", ".join(f"{name} {worst[name]:.1e}" for name in largest)
    return [*format_table(HEADER, *rows), f"largest: {tensors}", *others]


def relative_error(actual: float, expected: float) -> float:
    """Relative difference; infinite if it or a value is not finite."""
    # Equal infinities are a failure, too, and 0 must not be divided by 0.
    if actual == expected and math.isfinite(actual):
        return 0.0
    error = abs(actual - expected) / abs(expected) if expected else math.inf
    return error if math.isfinite(error) else math.inf
