"""Numbers along axes are round, and places between them right."""

from __future__ import annotations

from itertools import pairwise
from math import floor, inf, isclose, log10, nan

import pytest

from trainer.plan.axes import format_tokens, make_axis, round_ticks, tick_labels

TOPS = [
    factor * 10.0**power for power in range(-6, 8) for factor in (1, 1.0001, 1.3, 1.7, 2.74, 2.75, 3.3, 5.5, 7.91, 9.99)
]


def test_steps_are_round_few_and_end_below_the_top() -> None:
    for top in TOPS:
        found = round_ticks(top)
        assert found[0] == 0
        assert 3 <= len(found) <= 6
        assert top - found[1] < found[-1] <= top * (1 + 1e-8)
        mantissa = found[1] / 10.0 ** floor(log10(found[1]) + 1e-9)
        assert any(isclose(mantissa, factor) for factor in (1, 2, 5))
        assert all(isclose(tick, found[1] * count) for count, tick in enumerate(found))


def test_labels_are_apart_and_no_longer_than_that_takes() -> None:
    for found in map(round_ticks, TOPS):
        told = tick_labels(found)
        assert len(set(told)) == len(told)
        assert [float(label.replace(",", "")) for label in told] == pytest.approx(found, rel=1e-9)
        assert not any(label.endswith("0") for label in told[1:2] if "." in label)


def test_a_plain_axis_begins_at_nothing_and_ends_round() -> None:
    made = make_axis([24.1, 39.4], logarithmic=False)
    assert (made.low, made.high) == (0, 40)
    assert made.labels == ["0", "10", "20", "30", "40"]
    assert made.position(10) == 0.25
    assert make_axis([41.0], logarithmic=False).high == 50
    assert make_axis([0.0, 0.0], logarithmic=False).high == 1


def test_tokens_are_told_in_powers_of_two() -> None:
    made = make_axis([32768.0, 1536 * 1024.0, 4 * 1048576.0], logarithmic=True)
    assert made.labels == ["32K", "64K", "128K", "256K", "512K", "1M", "2M", "4M"]
    assert made.position(32768) == 0
    assert made.position(4 * 1048576) == 1
    assert make_axis([8.0, 16.0, 16384.0], logarithmic=True).labels == ["16", "64", "256", "1K", "4K", "16K"]
    assert make_axis([8.0, 16.0, 8192.0], logarithmic=True).labels == ["8", "32", "128", "512", "2K", "8K"]


def test_equal_factors_are_equally_far() -> None:
    made = make_axis([3.0, 900.0], logarithmic=True)
    places = [made.position(5.0 * 4**n) or nan for n in range(4)]
    assert [after - before for before, after in pairwise(places)] == pytest.approx([places[1] - places[0]] * 3)


def test_a_logarithmic_axis_tells_fewer_numbers_the_farther_it_goes() -> None:
    assert make_axis([3.0, 900.0], logarithmic=True).labels == [
        "2",
        "5",
        "10",
        "20",
        "50",
        "100",
        "200",
        "500",
        "1,000",
    ]
    assert make_axis([3.0, 90_000.0], logarithmic=True).labels == ["10", "100", "1,000", "10,000", "100,000"]
    assert make_axis([0.3, 0.4], logarithmic=True).labels == ["0.2", "0.5"]
    assert len(make_axis([1e-9, 1e12], logarithmic=True).labels) <= 9


@pytest.mark.parametrize("value", [1.0, 3.0, 10.0, 1000.0, 1024.0, 0.001])
@pytest.mark.parametrize("logarithmic", [False, True])
def test_one_value_has_a_place(value: float, *, logarithmic: bool) -> None:
    assert 0 <= (make_axis([value], logarithmic=logarithmic).position(value) or 0.0) <= 1


def test_what_an_axis_cannot_show_has_no_place() -> None:
    made = make_axis([nan, inf, 0.0, -1.0, 10.0, 1000.0], logarithmic=True)
    assert (made.low, made.high) == (10, 1000)
    assert [made.position(value) for value in (nan, inf, 0.0, -1.0)] == [None] * 4
    assert make_axis([nan, 7.0], logarithmic=False).position(nan) is None
    assert make_axis([], logarithmic=True).position(1.0) == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (8, "8"),
        (1000, "1,000"),
        (1024, "1K"),
        (1536, "1,536"),
        (1 << 20, "1M"),
        (3 << 19, "1.5M"),
        (1_025_024, "1,001K"),
        (5 << 18, "1.25M"),
        (0.25, "0.25"),
    ],
)
def test_numbers_are_as_short_as_people_say_them(value: float, text: str) -> None:
    assert format_tokens(value) == text
