"""Validation has no side effects on training, and its events."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from models.batch import Batch
from tests.build_datasets import build_validation_sets
from tests.system.in_process import configured, run_here, trainer_of
from tests.system.runs import lines, metrics, write_run
from trainer.run.progress import ProgressReporter
from trainer.run.validation import (
    ValidationMetrics,
    ValidationResult,
    Validator,
    evaluate_set,
    format_validation,
)
from trainer.step.build import EvaluationCallback, ParallelModel
from trainer.storage.run_dir import RunDir

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
def test_validation_leaves_no_trace_even_if_it_fails(
    run: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    config = configured(run, run.with_suffix(""))
    (validation_set,) = build_validation_sets(config)

    with trainer_of(config) as trainer, ProgressReporter(trainer):
        (module,) = trainer.stage_modules.values()
        boundary_hook = module.block_boundary_hook
        generator = torch.get_rng_state()
        weights = {name: parameter.clone() for name, parameter in module.named_parameters()}
        assert module.head is not None
        if fails:
            monkeypatch.setattr(trainer.parallel_model, "sequence_shard", None)
            with pytest.raises(AttributeError):
                evaluate_set(validation_set, trainer.parallel_model, step=0, max_tokens=64)
        else:
            assert (
                evaluate_set(
                    validation_set, trainer.parallel_model, step=0, max_tokens=64
                ).longest_context.loss
                > 5
            )
        assert module.block_boundary_hook is boundary_hook
        assert module.head.reports_correct is False
        assert torch.equal(torch.get_rng_state(), generator)
        for name, parameter in module.named_parameters():
            assert parameter.grad is None
            assert torch.equal(parameter, weights[name])


def test_validation_runs_at_intervals_and_at_the_end_of_a_stage(run: Path) -> None:
    config = configured(run, run.with_suffix(""), "--validation.interval=4", "--training.steps=10")
    with trainer_of(config) as trainer:
        validation = Validator(trainer, ())
        assert [step for step in range(1, 11) if validation.should_validate(step)] == [4, 8, 10]
        assert [*validation.validate()] == []


def test_the_batch_size_does_not_change_the_metrics(run: Path) -> None:
    config = configured(run, run.with_suffix(""), "--training.dtype=float64")
    (validation_set,) = build_validation_sets(config)
    with trainer_of(config) as trainer:
        one, three, all_at_once = (
            evaluate_set(
                validation_set, trainer.parallel_model, step=0, max_tokens=max_tokens
            ).longest_context
            for max_tokens in (1, 150, 10_000)
        )
    assert (
        one.loss
        == pytest.approx(three.loss, rel=1e-13)
        == pytest.approx(all_at_once.loss, rel=1e-13)
    )
    assert (one.targets, one.accuracy) == (three.targets, three.accuracy)


def test_validation_time_is_not_part_of_the_step_time(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validation takes an hour by the clock that steps are timed with; a busy machine takes no
    step so long.
    """
    evaluate = ParallelModel.evaluate
    clock = time.perf_counter
    passed = 0.0

    def slow(self: ParallelModel, batches: Iterable[Batch], record: EvaluationCallback) -> None:
        nonlocal passed
        passed += 3600
        evaluate(self, batches, record)

    monkeypatch.setattr(ParallelModel, "evaluate", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + passed)
    folder = run.with_suffix("")
    config = configured(run, folder, "--validation.interval=1", "--training.steps=2")
    run_here(config)
    validated_steps = [
        event["step"] for event in lines(folder / "events.jsonl") if event["event"] == "validation"
    ]
    assert validated_steps == [0, 1, 2]
    assert max(seconds for (seconds,) in metrics(folder, "step_seconds")) < 600


def test_the_first_validation_loss_ignores_torn_and_other_events(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert run_dir.first_validation_loss("a") is None
    run_dir.log_event("validation", set="b", loss=1.0)
    with run_dir.events_path.open("a") as file:
        file.write('{"event": "validation", "set": "a", "by_position": {"0-256": 1.0}')
    run_dir.log_event("other", set="a", validation="validation", loss=4.0)
    run_dir.log_event("validation", set="a", loss=2.0)
    run_dir.log_event("validation", set="a", loss=3.0)
    assert run_dir.first_validation_loss("a") == 2.0


def test_a_non_finite_loss_is_null_and_shown_as_a_dash() -> None:
    metrics = ValidationMetrics(
        loss=float("nan"), accuracy=0.0, targets=3, loss_by_position=[None] * 8
    )
    event = ValidationResult("a", 4, {8: metrics, 16: metrics}).event(1.0)
    assert event["loss"] is event["regression"] is event["gain"] is None
    line = "validation a at step 4: loss - (- since the first)  accuracy 0.0%  by context 8: - 16: -, gain -"
    assert format_validation(event) == line


def test_the_first_validation_loss_is_reset_when_the_run_starts_over(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.log_event("start", step=0)
    run_dir.log_event("validation", set="a", step=0, loss=5.0)
    run_dir.log_event("start", step=3)
    run_dir.log_event("validation", set="a", step=6, loss=4.0)
    assert run_dir.first_validation_loss("a") == 5.0, "a resume keeps it"
    run_dir.log_event("start", step=0)
    assert run_dir.first_validation_loss("a") is None
    run_dir.log_event("validation", set="a", step=0, loss=3.0)
    assert run_dir.first_validation_loss("a") == 3.0
