"""Loss spikes, non-finite gradients, and stragglers."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models.batch import IGNORE_INDEX, Batch
from tests.system.in_process import configured, run_here
from tests.system.runs import write_run
from trainer.config.job_config import Config
from trainer.data.sequences import BlendedDataset
from trainer.errors import DivergedError
from trainer.resilience.anomalies import (
    LOSS_WINDOW,
    MIN_CONSECUTIVE_LAGS,
    MIN_LOSSES,
    LossSpikeDetector,
    StragglerDetector,
)

HOSTS = ("a", "a", "b", "b")


def detector(**health: Any) -> LossSpikeDetector:
    return LossSpikeDetector(Config.model_validate({"health": health}))


def noisy_losses(count: int) -> list[float]:
    draw = random.Random(0)
    return [3 + draw.gauss(0, 0.1) for _ in range(count)]


def test_a_loss_far_above_the_window_is_a_spike_and_one_far_below_is_not() -> None:
    spikes = detector()
    assert [spikes.observe(loss, skipped=False) for loss in noisy_losses(LOSS_WINDOW)] == [
        None
    ] * LOSS_WINDOW
    assert spikes.observe(1.0, skipped=False) is None
    above = spikes.observe(6.0, skipped=False)
    assert above is not None
    assert above > 6


def test_a_short_window_reports_no_spike() -> None:
    spikes = detector()
    for loss in noisy_losses(MIN_LOSSES - 1):
        spikes.observe(loss, skipped=False)
    assert spikes.observe(50.0, skipped=False) is None
    assert detector().observe(50.0, skipped=False) is None


def test_spike_sigmas_sets_the_threshold() -> None:
    strict = detector(spike_sigmas=2.0)
    lenient = detector(spike_sigmas=60.0)
    for loss in noisy_losses(LOSS_WINDOW):
        strict.observe(loss, skipped=False)
        lenient.observe(loss, skipped=False)
    assert strict.observe(3.5, skipped=False) is not None
    assert lenient.observe(3.5, skipped=False) is None


def test_a_resumed_detector_equals_an_uninterrupted_one() -> None:
    whole = detector()
    first = detector()
    for loss in noisy_losses(200):
        whole.observe(loss, skipped=False)
    for loss in noisy_losses(200)[:150]:
        first.observe(loss, skipped=False)
    resumed = detector()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for loss in noisy_losses(200)[150:]:
        resumed.observe(loss, skipped=False)
    assert resumed.observe(3.9, skipped=False) == whole.observe(3.9, skipped=False)
    assert len(whole.state_dict()["losses"]) == LOSS_WINDOW


def test_consecutive_skipped_steps_mean_divergence() -> None:
    spikes = detector(max_consecutive_skips=3)
    for skipped, diverged in (
        (True, False),
        (True, False),
        (False, False),
        (True, False),
        (True, False),
        (True, True),
    ):
        assert spikes.observe(float("nan") if skipped else 3.0, skipped=skipped) is None
        assert spikes.has_diverged == diverged


def test_non_finite_losses_stay_out_of_the_window() -> None:
    spikes = detector()
    spikes.observe(float("nan"), skipped=True)
    spikes.observe(float("inf"), skipped=True)
    assert spikes.state_dict()["losses"] == []


def test_a_straggler_is_reported_once_after_three_consecutive_intervals() -> None:
    stragglers = StragglerDetector(1.3)
    reports = [
        stragglers.observe([*zip(HOSTS, [0.0] * 4, [1.0, 1.1, 1.6, 1.0], strict=True)], 2.0)
        for _ in range(MIN_CONSECUTIVE_LAGS + 3)
    ]
    assert [report is not None for report in reports] == [False] * (MIN_CONSECUTIVE_LAGS - 1) + [
        True
    ] + [False] * 3
    assert (
        str(reports[MIN_CONSECUTIVE_LAGS - 1])
        == "rank 2 on b is a straggler: computing takes 1.5 times the median"
    )


def test_an_occasional_lag_is_not_reported() -> None:
    stragglers = StragglerDetector(1.3)
    for compute_seconds in (
        [1.0, 2.0, 1.0, 1.0],
        [1.0, 2.0, 1.0, 1.0],
        [1.0, 1.0, 1.0, 1.0],
        [2.0, 1.0, 1.0, 1.0],
    ) * 3:
        assert (
            stragglers.observe([*zip(HOSTS, [0.0] * 4, compute_seconds, strict=True)], 2.0) is None
        )


def test_a_data_wait_counts_above_a_tenth_of_the_interval() -> None:
    stragglers = StragglerDetector(1.3)
    idle = StragglerDetector(1.3)
    reports = [
        stragglers.observe([*zip(HOSTS, [0.0, 0.0, 0.0, 0.5], [1.0] * 4, strict=True)], 2.0)
        for _ in range(MIN_CONSECUTIVE_LAGS)
    ]
    assert reports[-1] is not None
    assert (reports[-1].rank, reports[-1].phase) == (3, "reading data")
    assert [
        idle.observe([*zip(HOSTS, [0.0, 0.0, 0.0, 0.1], [1.0] * 4, strict=True)], 2.0)
        for _ in range(5)
    ] == [None] * 5


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_straggler_of_two_ranks_is_found_and_a_single_rank_is_none(ranks: int) -> None:
    stragglers = StragglerDetector(1.3)
    reports = [
        stragglers.observe(
            [*zip(HOSTS[:ranks], [0.0] * ranks, [1.0, 3.0][:ranks], strict=True)], 3.0
        )
        for _ in range(MIN_CONSECUTIVE_LAGS)
    ]
    assert (reports[-1] is not None) == (ranks == 2)


# ---- a step that learns nothing


def test_a_step_without_a_target_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = BlendedDataset.read

    def read_without_targets(self: BlendedDataset, *args: Any) -> Batch:
        batch = read(self, *args)
        return replace(batch, labels=torch.full_like(batch.labels, IGNORE_INDEX))

    monkeypatch.setattr(BlendedDataset, "read", read_without_targets)
    with pytest.raises(
        DivergedError,
        match=r"step 1 has no target: each token of its batch is padding or ends a document",
    ):
        run_here(configured(write_run(tmp_path), tmp_path / "run"))
