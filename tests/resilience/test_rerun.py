"""A step whose loss jumps is computed again before its update: the data or the hardware is to
blame.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest
import torch
from torch import Tensor

from models.batch import Batch
from tests.system.in_process import configured, run_here
from tests.system.runs import checkpoints, forked, lines, metrics, train_rank, write_run
from trainer.data.sequences import BlendedDataset
from trainer.resilience import anomalies
from trainer.run import train_loop
from trainer.step.rerun import UnstableStepError
from trainer.step.trainer import Trainer

BATCH = 4
STEPS = (
    "--training.steps=12",
    f"--training.global_batch_size={BATCH}",
    "--health.spike_sigmas=2",
    "--checkpoint.interval=4",
    "--schedule.kind=constant",
    "--schedule.warmup_steps=0",
)
DETERMINISTIC = (*STEPS, "--training.deterministic=true")
BAD_STEP = 9


@pytest.fixture(autouse=True)
def short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anomalies, "MIN_LOSSES", 4)


def events(folder: Path, kind: str) -> list[Mapping[str, Any]]:
    return [event for event in lines(folder / "events.jsonl") if event["event"] == kind]


def with_bad_batch(read: Callable[..., Batch]) -> Callable[..., Batch]:
    """One batch has one token as every label, which the model has not learned to expect."""

    def read_bad(self: BlendedDataset, indices: list[int | None], *args: Any) -> Batch:
        batch = read(self, indices, *args)
        is_bad = (indices[0] or 0) // BATCH == BAD_STEP - 1
        return replace(batch, labels=torch.full_like(batch.labels, 255)) if is_bad else batch

    return read_bad


def once(trainer_class: type[Any], rank: int, spoil: Callable[[Tensor], Tensor]) -> type[Any]:
    """A trainer that computes the losses of `BAD_STEP` wrongly on a rank, the first time."""

    class Faulty(trainer_class):  # type: ignore[misc]
        is_spoiled = False

        def accumulate_gradients(self, micro_batches: list[Batch]) -> Tensor:
            values: Tensor = super().accumulate_gradients(micro_batches)
            if (self.world.rank, self.step) == (rank, BAD_STEP) and not self.is_spoiled:
                self.is_spoiled = True
                values = spoil(values)
            return values

    return Faulty


def with_more_loss(values: Tensor) -> Tensor:
    """`values` begin with the sum of losses."""
    return torch.cat([values[:1] + 1e5, values[1:]])


def train_and_spoil(rank: int, argv: list[str]) -> int:
    anomalies.MIN_LOSSES = 4
    vars(train_loop)["Trainer"] = once(Trainer, rank, with_more_loss)
    return train_rank(argv)


def test_a_step_with_strange_data_gives_the_same_result_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlendedDataset, "read", with_bad_batch(BlendedDataset.read))
    run = write_run(tmp_path)
    for name, options in {
        "on": DETERMINISTIC,
        "off": (*DETERMINISTIC, "--health.rerun_suspicious=false"),
    }.items():
        run_here(configured(run, tmp_path / name, *options))
    steps = [event["step"] for event in events(tmp_path / "on", "rerun")]
    assert BAD_STEP in steps
    assert events(tmp_path / "off", "rerun") == []
    values = [metrics(tmp_path / name, "step", "loss", "grad_norm") for name in ("on", "off")]
    assert values[0] == values[1], "a step that is computed twice is applied once"


def test_without_deterministic_kernels_a_jump_says_that_it_cannot_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(BlendedDataset, "read", with_bad_batch(BlendedDataset.read))
    run_here(configured(write_run(tmp_path), tmp_path / "run", *STEPS))
    assert events(tmp_path / "run", "rerun") == []
    assert "without training.deterministic, data or hardware may be the cause" in caplog.text


def test_another_result_stops_the_run_before_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        train_loop, "Trainer", once(Trainer, 0, lambda values: values * float("nan"))
    )
    with pytest.raises(
        UnstableStepError, match=rf"rank 0 on {gethostname()} \(losses\); suspect the hardware"
    ):
        run_here(configured(write_run(tmp_path), tmp_path / "run", *DETERMINISTIC))
    assert checkpoints(tmp_path / "run") == ["step-4", "step-8"]


@pytest.mark.ranks
def test_the_rank_that_computes_otherwise_is_named_and_the_run_resumes(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    folder = tmp_path / "run"
    done = forked(run, folder, *DETERMINISTIC, processes=2, train=partial(train_and_spoil, 1))
    assert done.statuses == [1, 1], done.said
    assert f"rank 1 on {gethostname()} (losses); suspect the hardware" in done.said
    assert "Traceback" not in done.said
    (event,) = events(folder, "unstable_step")
    assert (event["step"], event["ranks"]) == (
        9,
        [{"rank": 1, "host": gethostname(), "differs": "losses"}],
    )
    again = forked(run, folder, *DETERMINISTIC, processes=2)
    assert again.statuses == [0, 0], again.said
