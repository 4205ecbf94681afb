"""Anomalies in a run: skipped steps, rollbacks, and divergence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.artifacts import content, forge
from tests.system.in_process import configured, run_here
from tests.system.runs import forked, lines, metrics, reseal, state, steps, write_run
from trainer.resilience.anomalies import MAX_ROLLBACKS, LossSpikeDetector

OPTIONS = ("--training.steps", "9", "--checkpoint.interval", "4", "--schedule.kind", "constant")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def inject_spikes(monkeypatch: pytest.MonkeyPatch, *spike_calls: int) -> None:
    """Makes these calls of the detector, counted over the whole test, report a spike."""
    calls = iter(range(1, 1000))
    real = LossSpikeDetector.observe

    def observe(self: LossSpikeDetector, loss: float, *, skipped: bool) -> float | None:
        real(self, loss, skipped=skipped)
        return 9.0 if next(calls) in spike_calls else None

    monkeypatch.setattr(LossSpikeDetector, "observe", observe)


@pytest.mark.ranks
def test_a_spike_is_rolled_back_and_its_sequences_are_skipped(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject_spikes(monkeypatch, 7)
    run_here(configured(run, tmp_path / "run", *OPTIONS, "--health.on_spike", "roll_back"))
    folder = tmp_path / "run"
    assert steps(folder) == list(range(1, 10))
    events = {event["event"]: event for event in lines(folder / "events.jsonl")}
    assert events["spike"]["step"] == 7
    # Step 7 ended before sequence 42; the newest checkpoint is that of step 4.
    assert events["rolled_back"]["without_rows"] == [24, 42]
    assert events["rolled_back"]["to"].endswith("step-4")
    assert state(folder / "checkpoints" / "step-9")["trainer"]["next_sequence"] == 42 + 5 * 6


@pytest.mark.slow
@pytest.mark.ranks
def test_a_rollback_equals_a_run_without_the_skipped_sequences(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject_spikes(monkeypatch, 7)
    run_here(configured(run, tmp_path / "rolled", *OPTIONS, "--health.on_spike", "roll_back"))
    config = configured(run, tmp_path / "cut", *OPTIONS, "--training.steps", "4")
    run_here(config)
    path = tmp_path / "cut" / "checkpoints" / "step-4" / "state.json"
    forge(path, lambda state: state["trainer"].update(next_sequence=42))
    reseal(path.parent)
    run_here(configured(run, tmp_path / "cut", *OPTIONS))
    keys = ("step", "loss", "grad_norm", "tokens")
    assert metrics(tmp_path / "rolled", *keys) == metrics(tmp_path / "cut", *keys)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "options", [(), ("--health.on_spike", "roll_back", "--checkpoint.interval", "100")]
)
def test_a_spike_is_only_logged_by_default_and_without_a_checkpoint(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    inject_spikes(monkeypatch, 7)
    run_here(configured(run, tmp_path / "run", *OPTIONS, *options))
    told = [event["event"] for event in lines(tmp_path / "run" / "events.jsonl")]
    assert told.count("spike") == 1
    assert "rolled_back" not in told
    assert state(tmp_path / "run" / "checkpoints" / "step-9")["trainer"]["next_sequence"] == 54


@pytest.mark.ranks
@pytest.mark.slow
def test_rollbacks_are_limited(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject_spikes(monkeypatch, *range(5, 100))
    run_here(configured(run, tmp_path / "run", *OPTIONS, "--health.on_spike", "roll_back"))
    told = [event["event"] for event in lines(tmp_path / "run" / "events.jsonl")]
    assert told.count("rolled_back") >= MAX_ROLLBACKS
    assert steps(tmp_path / "run") == list(range(1, 10))


@pytest.mark.ranks
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_with_only_non_finite_gradients_fails_permanently(
    run: Path, tmp_path: Path, processes: int
) -> None:
    options = ("--optimizer.lr", "1e38", "--schedule.warmup_steps", "0", "--training.steps", "30")
    done = forked(
        run, tmp_path / "run", *options, "--health.max_consecutive_skips", "4", processes=processes
    )
    assert set(done.statuses) == {78}
    assert "had a non-finite gradient (health.max_consecutive_skips = 4)" in done.said
    assert "non-finite gradient" in content(tmp_path / "run" / "STOP")["reason"]
    skipped = [
        event["step"]
        for event in lines(tmp_path / "run" / "events.jsonl")
        if event["event"] == "skipped"
    ]
    assert len(skipped) == 4
    assert steps(tmp_path / "run")[-1] == skipped[-1]
