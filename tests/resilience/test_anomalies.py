"""Losses that jump, gradients that are not finite, ranks that lag behind."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from trainer.config.job_config import Config
from trainer.resilience.anomalies import LEAST, LINES, WINDOW, Losses, Pace

HOSTS = ("a", "a", "b", "b")


def losses(**health: Any) -> Losses:
    return Losses(Config.model_validate({"health": health}))


def calm(count: int) -> list[float]:
    draw = random.Random(0)
    return [3 + draw.gauss(0, 0.1) for _ in range(count)]


def test_a_loss_far_above_those_before_is_a_spike_and_one_below_is_none() -> None:
    judge = losses()
    assert [judge.take(loss, skipped=False) for loss in calm(WINDOW)] == [None] * WINDOW
    assert judge.take(1.0, skipped=False) is None
    above = judge.take(6.0, skipped=False)
    assert above is not None
    assert above > 6


def test_without_enough_losses_nothing_is_a_spike() -> None:
    judge = losses()
    for loss in calm(LEAST - 1):
        judge.take(loss, skipped=False)
    assert judge.take(50.0, skipped=False) is None
    assert losses().take(50.0, skipped=False) is None


def test_how_far_is_configured() -> None:
    strict, lenient = losses(spike_sigmas=2.0), losses(spike_sigmas=60.0)
    for loss in calm(WINDOW):
        strict.take(loss, skipped=False)
        lenient.take(loss, skipped=False)
    assert strict.take(3.5, skipped=False) is not None
    assert lenient.take(3.5, skipped=False) is None


def test_a_resumed_judge_judges_as_an_undisturbed_one() -> None:
    whole, first = losses(), losses()
    for loss in calm(200):
        whole.take(loss, skipped=False)
    for loss in calm(200)[:150]:
        first.take(loss, skipped=False)
    resumed = losses()
    resumed.restore(json.loads(json.dumps(first.state())))
    for loss in calm(200)[150:]:
        resumed.take(loss, skipped=False)
    assert resumed.take(3.9, skipped=False) == whole.take(3.9, skipped=False)
    assert len(whole.state()["losses"]) == WINDOW


def test_so_many_skipped_updates_in_a_row_are_too_many() -> None:
    judge = losses(skipped_in_a_row=3)
    for skipped, lost in ((True, False), (True, False), (False, False), (True, False), (True, False), (True, True)):
        assert judge.take(float("nan") if skipped else 3.0, skipped=skipped) is None
        assert judge.is_lost == lost


def test_what_is_not_finite_is_no_loss_to_judge_by() -> None:
    judge = losses()
    judge.take(float("nan"), skipped=True)
    judge.take(float("inf"), skipped=True)
    assert judge.state()["losses"] == []


def test_a_rank_that_lags_three_lines_in_a_row_is_told_once() -> None:
    pace = Pace(1.3)
    told = [pace.take(HOSTS, waited=[0.0] * 4, worked=[1.0, 1.1, 1.6, 1.0], of=2.0) for _ in range(LINES + 3)]
    assert [found is not None for found in told] == [False] * (LINES - 1) + [True] + [False] * 3
    assert str(told[LINES - 1]) == "rank 2 on b lags behind: computing takes 1.5 times the median"


def test_a_rank_that_lags_now_and_then_is_not_told() -> None:
    pace = Pace(1.3)
    for worked in ([1.0, 2.0, 1.0, 1.0], [1.0, 2.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [2.0, 1.0, 1.0, 1.0]) * 3:
        assert pace.take(HOSTS, waited=[0.0] * 4, worked=worked, of=2.0) is None


def test_waiting_for_data_counts_where_it_is_noticed() -> None:
    pace, idle = Pace(1.3), Pace(1.3)
    told = [pace.take(HOSTS, waited=[0.0, 0.0, 0.0, 0.5], worked=[1.0] * 4, of=2.0) for _ in range(LINES)]
    assert told[-1] is not None
    assert (told[-1].rank, told[-1].phase) == (3, "reading data")
    assert [idle.take(HOSTS, waited=[0.0, 0.0, 0.0, 0.1], worked=[1.0] * 4, of=2.0) for _ in range(5)] == [None] * 5


@pytest.mark.parametrize("ranks", [1, 2])
def test_few_ranks_are_compared_too(ranks: int) -> None:
    pace = Pace(1.3)
    told = [pace.take(HOSTS[:ranks], waited=[0.0] * ranks, worked=[1.0, 3.0][:ranks], of=3.0) for _ in range(LINES)]
    assert (told[-1] is not None) == (ranks == 2)
