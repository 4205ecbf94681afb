"""Losses that jump, gradients that are not finite, ranks that lag behind."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from trainer.config.job_config import Config
from trainer.resilience.anomalies import (
    LOSS_WINDOW,
    MIN_CONSECUTIVE_LAGS,
    MIN_LOSSES,
    LossSpikeDetector,
    StragglerDetector,
)

HOSTS = ("a", "a", "b", "b")


def losses(**health: Any) -> LossSpikeDetector:
    return LossSpikeDetector(Config.model_validate({"health": health}))


def calm(count: int) -> list[float]:
    draw = random.Random(0)
    return [3 + draw.gauss(0, 0.1) for _ in range(count)]


def test_a_loss_far_above_those_before_is_a_spike_and_one_below_is_none() -> None:
    judge = losses()
    assert [judge.observe(loss, skipped=False) for loss in calm(LOSS_WINDOW)] == [None] * LOSS_WINDOW
    assert judge.observe(1.0, skipped=False) is None
    above = judge.observe(6.0, skipped=False)
    assert above is not None
    assert above > 6


def test_without_enough_losses_nothing_is_a_spike() -> None:
    judge = losses()
    for loss in calm(MIN_LOSSES - 1):
        judge.observe(loss, skipped=False)
    assert judge.observe(50.0, skipped=False) is None
    assert losses().observe(50.0, skipped=False) is None


def test_how_far_is_configured() -> None:
    strict, lenient = losses(spike_sigmas=2.0), losses(spike_sigmas=60.0)
    for loss in calm(LOSS_WINDOW):
        strict.observe(loss, skipped=False)
        lenient.observe(loss, skipped=False)
    assert strict.observe(3.5, skipped=False) is not None
    assert lenient.observe(3.5, skipped=False) is None


def test_a_resumed_judge_judges_as_an_undisturbed_one() -> None:
    whole, first = losses(), losses()
    for loss in calm(200):
        whole.observe(loss, skipped=False)
    for loss in calm(200)[:150]:
        first.observe(loss, skipped=False)
    resumed = losses()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for loss in calm(200)[150:]:
        resumed.observe(loss, skipped=False)
    assert resumed.observe(3.9, skipped=False) == whole.observe(3.9, skipped=False)
    assert len(whole.state_dict()["losses"]) == LOSS_WINDOW


def test_so_many_skipped_updates_in_a_row_are_too_many() -> None:
    judge = losses(max_consecutive_skips=3)
    for skipped, lost in ((True, False), (True, False), (False, False), (True, False), (True, False), (True, True)):
        assert judge.observe(float("nan") if skipped else 3.0, skipped=skipped) is None
        assert judge.has_diverged == lost


def test_what_is_not_finite_is_no_loss_to_judge_by() -> None:
    judge = losses()
    judge.observe(float("nan"), skipped=True)
    judge.observe(float("inf"), skipped=True)
    assert judge.state_dict()["losses"] == []


def test_a_rank_that_lags_three_lines_in_a_row_is_told_once() -> None:
    pace = StragglerDetector(1.3)
    told = [
        pace.observe(HOSTS, data_waits=[0.0] * 4, compute_seconds=[1.0, 1.1, 1.6, 1.0], interval_seconds=2.0)
        for _ in range(MIN_CONSECUTIVE_LAGS + 3)
    ]
    assert [found is not None for found in told] == [False] * (MIN_CONSECUTIVE_LAGS - 1) + [True] + [False] * 3
    assert str(told[MIN_CONSECUTIVE_LAGS - 1]) == "rank 2 on b lags behind: computing takes 1.5 times the median"


def test_a_rank_that_lags_now_and_then_is_not_told() -> None:
    pace = StragglerDetector(1.3)
    for worked in ([1.0, 2.0, 1.0, 1.0], [1.0, 2.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [2.0, 1.0, 1.0, 1.0]) * 3:
        assert pace.observe(HOSTS, data_waits=[0.0] * 4, compute_seconds=worked, interval_seconds=2.0) is None


def test_waiting_for_data_counts_where_it_is_noticed() -> None:
    pace, idle = StragglerDetector(1.3), StragglerDetector(1.3)
    told = [
        pace.observe(HOSTS, data_waits=[0.0, 0.0, 0.0, 0.5], compute_seconds=[1.0] * 4, interval_seconds=2.0)
        for _ in range(MIN_CONSECUTIVE_LAGS)
    ]
    assert told[-1] is not None
    assert (told[-1].rank, told[-1].phase) == (3, "reading data")
    assert [
        idle.observe(HOSTS, data_waits=[0.0, 0.0, 0.0, 0.1], compute_seconds=[1.0] * 4, interval_seconds=2.0)
        for _ in range(5)
    ] == [None] * 5


@pytest.mark.parametrize("ranks", [1, 2])
def test_few_ranks_are_compared_too(ranks: int) -> None:
    pace = StragglerDetector(1.3)
    told = [
        pace.observe(HOSTS[:ranks], data_waits=[0.0] * ranks, compute_seconds=[1.0, 3.0][:ranks], interval_seconds=3.0)
        for _ in range(MIN_CONSECUTIVE_LAGS)
    ]
    assert (told[-1] is not None) == (ranks == 2)
