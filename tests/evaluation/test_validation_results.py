"""What validation leaves behind in the process it runs in: nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from models.batch import Batch
from tests.datasets import build_validation_sets
from tests.system.in_process import configured, run_here, trainer_of
from tests.system.runs import lines, metrics, write_run
from trainer.build import EvaluationCallback, ParallelModel
from trainer.checkpoint.run_dir import RunDir
from trainer.evaluation.validation import (
    ValidationMetrics,
    ValidationResult,
    Validator,
    evaluate_set,
    format_validation,
)
from trainer.metrics.progress import ProgressReporter

SETS = """
[validation.sets.packed]
seq_len = 50
rows = 7
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = write_run(tmp_path)
    config.write_text(config.read_text() + SETS)
    return config


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_of_it_also_where_it_fails(run: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    config = configured(run, run.with_suffix(""))
    (held,) = build_validation_sets(config)

    with trainer_of(config) as trainer, ProgressReporter(trainer):
        (part,) = trainer.stage_modules.values()
        between, generator = part.block_boundary_hook, torch.get_rng_state()
        weights = {name: parameter.clone() for name, parameter in part.named_parameters()}
        assert part.head is not None
        if fails:
            monkeypatch.setattr(trainer.parallel_model, "sequence_shard", None)
            with pytest.raises(AttributeError):
                evaluate_set(held, trainer.parallel_model, max_tokens=64)
        else:
            assert evaluate_set(held, trainer.parallel_model, max_tokens=64)[50].loss > 5
        assert part.block_boundary_hook is between
        assert part.head.reports_correct is False
        assert torch.equal(torch.get_rng_state(), generator)
        for name, parameter in part.named_parameters():
            assert parameter.grad is None
            assert torch.equal(parameter, weights[name])


def test_it_is_due_at_intervals_and_at_a_stages_end(run: Path) -> None:
    config = configured(run, run.with_suffix(""), "--validation.interval=4", "--training.steps=10")
    with trainer_of(config) as trainer:
        validation = Validator(trainer, ())
        assert [step for step in range(1, 11) if validation.should_validate(step)] == [4, 8, 10]
        assert [*validation.validate()] == []


def test_how_many_rows_go_through_at_once_changes_nothing(run: Path) -> None:
    config = configured(run, run.with_suffix(""), "--training.dtype=float64")
    (held,) = build_validation_sets(config)
    with trainer_of(config) as trainer:
        one, three, all_of_them = (
            evaluate_set(held, trainer.parallel_model, max_tokens=most)[50] for most in (1, 150, 10_000)
        )
    assert one.loss == pytest.approx(three.loss, rel=1e-13) == pytest.approx(all_of_them.loss, rel=1e-13)
    assert (one.targets, one.accuracy) == (three.targets, three.accuracy)


def test_its_time_is_in_no_rate(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = ParallelModel.evaluate

    def slow(self: ParallelModel, batches: Iterable[Batch], record: EvaluationCallback) -> None:
        time.sleep(1.0)
        judge(self, batches, record)

    monkeypatch.setattr(ParallelModel, "evaluate", slow)
    folder = run.with_suffix("")
    config = configured(run, folder, "--validation.interval=1", "--training.steps=3")
    run_here(config)
    judged = [event["step"] for event in lines(folder / "events.jsonl") if event["event"] == "validation"]
    assert judged == [0, 1, 2, 3]
    assert max(seconds for (seconds,) in metrics(folder, "step_seconds")) < 0.9


def test_a_torn_event_does_not_hide_where_a_set_began(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    assert folder.first_validation_loss("a") is None
    folder.log_event("validation", set="b", loss=1.0)
    with folder.events_path.open("a") as file:
        file.write('{"event": "validation", "set": "a", "by_position": {"0-256": 1.0}')
    folder.log_event("other", set="a", validation="validation", loss=4.0)
    folder.log_event("validation", set="a", loss=2.0)
    folder.log_event("validation", set="a", loss=3.0)
    assert folder.first_validation_loss("a") == 2.0


def test_a_loss_that_is_not_finite_is_a_dash() -> None:
    seen = ValidationMetrics(loss=float("nan"), accuracy=0.0, targets=3, loss_by_position=[None] * 8)
    event = ValidationResult("a", 4, {8: seen, 16: seen}).event(1.0)
    assert event["loss"] is event["regression"] is event["gain"] is None
    said = "validation a after update 4: loss - (- since the first)  accuracy 0.0%  by context 8: - 16: -, gain -"
    assert format_validation(event) == said
