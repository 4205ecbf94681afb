"""Report contents: validation and number formats."""

from __future__ import annotations

from math import inf, nan

import pytest

from tests.plan.sample_documents import MEMORY, SEARCH, TIME, stages
from trainer.metrics.loggers import format_tokens
from trainer.plan.document import (
    BarChart,
    LineChart,
    StackedBar,
    bars_to_table,
    decimal_places,
    format_number,
    format_y,
    is_numeric,
)


@pytest.mark.parametrize("value", [-0.1, nan, inf])
def test_segments_must_be_finite_and_nonnegative(value: float) -> None:
    with pytest.raises(
        ValueError, match=rf"^loss head = {value} of bar 'stage 4' must be finite and at least 0$"
    ):
        StackedBar(label="stage 4", segments={"reserve": 4.0, "loss head": value})


@pytest.mark.parametrize("limit", [0.0, -1.0, nan, inf])
def test_limits_must_be_finite_and_positive(limit: float) -> None:
    with pytest.raises(
        ValueError,
        match=rf"^limit = {limit} of bar 'stage 4' must be finite and above 0, or None$",
    ):
        StackedBar(label="stage 4", segments={}, limit=limit)


def test_a_bar_equal_to_its_limit_fits() -> None:
    assert StackedBar(label="", segments={"a": 1.5, "b": 0.5}, limit=2.0).fits
    assert not StackedBar(label="", segments={"a": 1.5, "b": 0.5}, limit=1.999).fits
    assert StackedBar(label="", segments={"a": 1e9}).fits


def test_segment_names_keep_order_and_omit_zeros() -> None:
    assert "pipeline bubble" in TIME.bars[0].segments
    assert "pipeline bubble" not in TIME.segment_names
    assert MEMORY.segment_names[-2:] == ["reserve", "loss head"]
    assert MEMORY.segment_names[:3] == ["parameters", "gradients", "optimizer states"]


def test_the_worst_bar_has_least_headroom() -> None:
    assert stages(16).worst == 2
    first = StackedBar(label="", segments={"a": 9}, limit=20)
    second = StackedBar(label="", segments={"a": 8}, limit=10)
    without = StackedBar(label="", segments={"a": 30})
    assert BarChart(title="", unit="", bars=[first, second, without]).worst == 1
    assert (
        BarChart(title="", unit="", bars=[without, StackedBar(label="", segments={"a": 31})]).worst
        == 1
    )


@pytest.mark.parametrize(
    ("largest", "decimals"),
    [(0, 0), (0.00123, 5), (0.5, 3), (1.5, 2), (57.0, 1), (312.0, 1), (1203.4, 0), (nan, 0)],
)
def test_decimals_show_three_significant_digits(largest: float, decimals: int) -> None:
    assert decimal_places([0.0, largest / 2, -largest]) == decimals


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (0, 1, ""),
        (0.05, 1, "<0.1"),
        (0.06, 1, "0.1"),
        (0.5, 0, "<1"),
        (1234.56, 1, "1,234.6"),
        (-2.94, 1, "-2.9"),
    ],
)
def test_small_values_are_not_rounded_to_zero(value: float, decimals: int, text: str) -> None:
    assert format_number(value, decimals) == text


def test_non_finite_points_are_dashes() -> None:
    curve = LineChart(
        title="",
        x="",
        y="",
        log_x=False,
        log_y=False,
        lines={"a": [(1, nan), (2, inf), (3, 12.0)]},
    )
    assert [format_y(curve, y) for _, y in curve.lines["a"]] == ["-", "-", "12.0"]


def test_numeric_columns_are_detected() -> None:
    known = {
        name: is_numeric(cells)
        for name, cells in zip(SEARCH.columns, zip(*SEARCH.rows, strict=True), strict=True)
    }
    assert [name for name, is_number in known.items() if is_number] == [
        "GiB",
        "s",
        "tokens/s",
        "MFU",
    ]
    assert is_numeric(["<0.1", "-2.9", "+3", "~5 s", "", "-"])
    assert not is_numeric(["-", ""])


def test_bar_tables_have_totals() -> None:
    table = bars_to_table(stages(3), [0, 2])
    assert table.columns == ["GiB", "stage 1 of 3", "stage 3 of 3"]
    sums = {row[0]: row[1:] for row in table.rows}
    assert sums["total"] == ["56.5", "74.2"]
    assert sums["limit"] == ["79.1", "79.1"]
    assert sums["headroom"] == ["22.6", "4.9"]
    assert sums["loss head"] == ["", "9.5"]


def test_headroom_is_negative_even_for_a_tiny_excess() -> None:
    bars = [
        StackedBar(label="", segments={"a": size}, limit=80.0) for size in (83.0, 80.001, 80.0)
    ]
    (headroom,) = (
        row
        for row in bars_to_table(BarChart(title="", unit="", bars=bars), [0, 1, 2]).rows
        if row[0] == "headroom"
    )
    assert headroom == ["headroom", "-3.0", "-<0.1", "0"]


def test_a_single_bar_has_shares() -> None:
    shares = {row[0]: row[2] for row in bars_to_table(TIME, [0]).rows}
    assert shares["attention"] == "67.0 %"
    assert shares["optimizer"] == "<0.1 %"
    assert shares["total"] == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (8192, "8K"),
        (1536 * 1024, "1.5M"),
        (1 << 20, "1M"),
        (1000, "1,000"),
        (1500, "1,500"),
        (3 << 10, "3K"),
        (1 << 30, "1,024M"),
    ],
)
def test_token_counts_use_binary_units(value: float, text: str) -> None:
    assert format_tokens(value) == text
