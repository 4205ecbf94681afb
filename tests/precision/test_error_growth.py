"""The bfloat16 error of N parts is at most 1.5 times the error of one part, for every accumulator
of the product.
"""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from tests.precision.errors import LAW, Accumulator, errors, factor
from tests.precision.grid import ACCUMULATORS, EXCEPTIONS

pytestmark = pytest.mark.ranks


def cases(accumulators: list[Accumulator]) -> list[ParameterSet]:
    return [
        pytest.param(each, parts, id=f"{each.name}-{parts}", marks=marks)
        for each in accumulators
        for numbers, marks in ((each.parts, ()), (each.slow_parts, pytest.mark.slow))
        for parts in numbers
    ]


@pytest.mark.parametrize(("accumulator", "parts"), cases(ACCUMULATORS))
def test_error_does_not_grow_with_parts(accumulator: Accumulator, parts: int) -> None:
    row = factor(accumulator, parts)
    assert row.factor <= LAW, row


@pytest.mark.parametrize("accumulator", ACCUMULATORS, ids=lambda accumulator: accumulator.name)
def test_one_part_costs_at_most_five_roundings(accumulator: Accumulator) -> None:
    """Otherwise a sum that loses its float32 for one part too would obey the law."""
    for name, (error, rounding) in errors(accumulator, 1).items():
        assert error <= 5 * rounding, (name, error, rounding)


@pytest.mark.parametrize(("accumulator", "parts"), cases(EXCEPTIONS))
def test_exceptions_cost_one_and_a_half_to_three_and_a_half_roundings(
    accumulator: Accumulator, parts: int
) -> None:
    row = factor(accumulator, parts)
    assert LAW < row.factor < 3.5, row
