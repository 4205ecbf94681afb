"""Numbers that go wrong: what is skipped, what is undone, and when a run is given up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.in_process import configured, run_here
from tests.system.runs import forked, lines, metrics, reseal, state, steps, write_run
from trainer.resilience.anomalies import MAX_ROLLBACKS, LossSpikeDetector

OPTIONS = ("--training.steps", "9", "--checkpoint.interval", "4", "--schedule.kind", "constant")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def spiking(monkeypatch: pytest.MonkeyPatch, *at: int) -> None:
    """Calls of the judge that find a spike, counted over the whole test."""
    calls = iter(range(1, 1000))
    real = LossSpikeDetector.observe

    def take(self: LossSpikeDetector, loss: float, *, skipped: bool) -> float | None:
        real(self, loss, skipped=skipped)
        return 9.0 if next(calls) in at else None

    monkeypatch.setattr(LossSpikeDetector, "observe", take)


@pytest.mark.ranks
def test_a_spike_is_undone_without_the_rows_that_made_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spiking(monkeypatch, 7)
    run_here(configured(run, tmp_path / "run", *OPTIONS, "--health.on_spike", "roll_back"))
    folder = tmp_path / "run"
    assert steps(folder) == list(range(1, 10))
    events = {event["event"]: event for event in lines(folder / "events.jsonl")}
    assert events["spike"]["step"] == 7
    # Update 7 ended with row 42, and there was a checkpoint after update 4.
    assert events["rolled_back"]["without_rows"] == [24, 42]
    assert events["rolled_back"]["to"].endswith("step-4")
    assert state(folder / "checkpoints" / "step-9")["trainer"]["next_row"] == 42 + 5 * 6


@pytest.mark.ranks
def test_what_follows_are_the_updates_of_a_run_that_never_had_those_rows(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spiking(monkeypatch, 7)
    run_here(configured(run, tmp_path / "rolled", *OPTIONS, "--health.on_spike", "roll_back"))
    config = configured(run, tmp_path / "cut", *OPTIONS, "--training.steps", "4")
    run_here(config)
    path = tmp_path / "cut" / "checkpoints" / "step-4" / "state.json"
    content = json.loads(path.read_text())
    content["trainer"]["next_row"] = 42
    path.write_text(json.dumps(content))
    reseal(path.parent)
    run_here(configured(run, tmp_path / "cut", *OPTIONS))
    keys = ("step", "loss", "grad_norm", "tokens")
    assert metrics(tmp_path / "rolled", *keys) == metrics(tmp_path / "cut", *keys)


@pytest.mark.ranks
@pytest.mark.parametrize("options", [(), ("--health.on_spike", "roll_back", "--checkpoint.interval", "100")])
def test_a_spike_is_only_told_unless_asked_for_or_where_there_is_no_checkpoint(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    spiking(monkeypatch, 7)
    run_here(configured(run, tmp_path / "run", *OPTIONS, *options))
    told = [event["event"] for event in lines(tmp_path / "run" / "events.jsonl")]
    assert told.count("spike") == 1
    assert "rolled_back" not in told
    assert state(tmp_path / "run" / "checkpoints" / "step-9")["trainer"]["next_row"] == 54


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_is_not_rolled_back_for_ever(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spiking(monkeypatch, *range(5, 100))
    run_here(configured(run, tmp_path / "run", *OPTIONS, "--health.on_spike", "roll_back"))
    told = [event["event"] for event in lines(tmp_path / "run" / "events.jsonl")]
    assert told.count("rolled_back") >= MAX_ROLLBACKS
    assert steps(tmp_path / "run") == list(range(1, 10))


@pytest.mark.ranks
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_whose_gradients_stay_infinite_is_given_up(run: Path, tmp_path: Path, processes: int) -> None:
    options = ("--optimizer.lr", "1e38", "--schedule.warmup_steps", "0", "--training.steps", "30")
    done = forked(run, tmp_path / "run", *options, "--health.max_consecutive_skips", "4", processes=processes)
    assert set(done.statuses) == {78}
    assert "had a non-finite gradient (health.max_consecutive_skips = 4)" in done.said
    assert "non-finite gradient" in json.loads((tmp_path / "run" / "STOP").read_text())["reason"]
    skipped = [event["step"] for event in lines(tmp_path / "run" / "events.jsonl") if event["event"] == "skipped"]
    assert len(skipped) == 4
    assert steps(tmp_path / "run")[-1] == skipped[-1]
