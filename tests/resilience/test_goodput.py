"""Goodput: the share of time since the first launch in steps that checkpoints contain."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.system.runs import forked, metrics, state, write_run
from trainer.resilience import anomalies
from trainer.resilience.anomalies import Goodput


def test_goodput_is_the_time_in_saved_steps_over_the_time_since_the_first_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(anomalies, "time", SimpleNamespace(time=lambda: clock.now))
    first = Goodput()
    first.add_step(30.0)
    clock.now += 60
    assert first.percent() == 50
    saved = first.state_dict()
    first.add_step(30.0)  # Lost with the process.
    clock.now += 40
    second = Goodput()
    second.load_state_dict(saved)
    assert second.percent() == 30
    second.add_step(20.0)
    assert second.percent() == 50


@pytest.mark.ranks
def test_all_launches_count_and_lost_steps_do_not(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    folder = tmp_path / "run"
    assert forked(
        config, folder, "--training.steps", "4", "--checkpoint.interval", "4"
    ).statuses == [0]
    first = state(folder / "checkpoints" / "step-4")["trainer"]["goodput"]
    productive = sum(seconds for (seconds,) in metrics(folder, "step_seconds"))
    assert first["productive_seconds"] == pytest.approx(productive)
    assert first["start_time"] < time.time()
    time.sleep(1)
    assert forked(
        config, folder, "--training.steps", "6", "--checkpoint.interval", "4"
    ).statuses == [0]
    second = state(folder / "checkpoints" / "step-6")["trainer"]["goodput"]
    assert second["start_time"] == first["start_time"]
    assert second["productive_seconds"] == pytest.approx(
        sum(seconds for (seconds,) in metrics(folder, "step_seconds"))
    )
    percents = [percent for (percent,) in metrics(folder, "goodput_pct")]
    assert all(0 < percent < 100 for percent in percents)
    assert percents[4] < percents[3], "the pause between launches counts"
