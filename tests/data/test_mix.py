"""Weighted round-robin over sources: stateless, exact shares at every index."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from trainer.data.sequences import WeightedRoundRobin, integer_weights

WEIGHTS = some.lists(some.integers(1, 40), min_size=1, max_size=8)


def test_weights_3_1_give_the_documented_order() -> None:
    schedule = WeightedRoundRobin([3, 1])
    assert [schedule.locate(row) for row in range(8)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (0, 2),
        (0, 3),
        (0, 4),
        (1, 1),
        (0, 5),
    ]
    assert [schedule.counts(rows) for rows in range(5)] == [[0, 0], [1, 0], [2, 0], [2, 1], [3, 1]]


def test_equal_weights_alternate_in_list_order() -> None:
    assert [WeightedRoundRobin([0.2, 0.2, 0.2]).locate(row)[0] for row in range(6)] == [
        0,
        1,
        2,
        0,
        1,
        2,
    ]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(WEIGHTS)
def test_indices_within_each_source_are_consecutive(weights: list[int]) -> None:
    schedule = WeightedRoundRobin(weights)
    rows = 2 * schedule.period + schedule.period // 2
    located = [schedule.locate(row) for row in range(rows)]
    for source in range(len(weights)):
        numbers = [number for other, number in located if other == source]
        assert numbers == list(range(len(numbers)))
    assert schedule.counts(rows) == [
        sum(other == source for other, _ in located) for source in range(len(weights))
    ]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(WEIGHTS)
def test_counts_stay_close_to_the_exact_shares(weights: list[int]) -> None:
    schedule = WeightedRoundRobin(weights)
    counts = [0] * len(weights)
    for row in range(schedule.period):
        counts[schedule.locate(row)[0]] += 1
        shares = [Fraction(weight * (row + 1), sum(weights)) for weight in weights]
        assert max(abs(count - share) for count, share in zip(counts, shares, strict=True)) < 1.25
    assert counts == schedule.weights


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([0.3, 0.3, 0.4], [3, 3, 4]),
        ([0.15, 0.15, 0.4, 0.05, 0.25], [3, 3, 8, 1, 5]),
        ([1, 6], [1, 6]),
        ([1e-3, 1.0], [1, 1000]),
        ([7], [1]),
        ([1 / 3, 2 / 3], [1, 2]),
        ([0.1234667, 0.8765333], [12_347, 87_653]),
    ],
)
def test_weights_become_the_smallest_integers(weights: list[float], shares: list[int]) -> None:
    assert integer_weights(weights) == shares


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [1.0, -1.0], [1.0, 1e-9]])
def test_weights_that_draw_nothing_raise(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        WeightedRoundRobin(weights)


def test_locate_agrees_with_counts_at_any_index() -> None:
    schedule = WeightedRoundRobin([5, 2, 3])
    for rounds, place in product((0, 1, 10**12), range(10)):
        source, number = schedule.locate(rounds * 10 + place)
        before = schedule.counts(rounds * 10 + place)
        after = schedule.counts(rounds * 10 + place + 1)
        assert number == before[source]
        assert [new - old for old, new in zip(before, after, strict=True)] == [
            int(n == source) for n in range(3)
        ]
