"""A long step reports the progress of the device, not of launches, and counts every block once."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, distributed

from models.linear import identity
from tests.models.small_models import SMALL, gradients, packed, small_model
from tests.ranks import run_ranks
from tests.system.in_process import configured, dataset_of
from tests.system.runs import wait_for, write_run
from trainer.run.progress import ProgressReporter
from trainer.step.process_group import World
from trainer.step.trainer import Trainer

INTERVAL = 0.006  # seconds between two progress reports


class FakeTrainer:
    """The attributes that a progress reporter uses; a step has two micro-batches of one
    sequence.
    """

    def __init__(self, *, device: str = "cpu", rank: int = 0) -> None:
        self.world = World(rank, 1, torch.device(device))
        self.stage = SimpleNamespace(end_step=3, total_steps=3)
        self.loader = SimpleNamespace(num_micro_batches=2)
        self.stage_modules = {0: small_model()}
        self.step = 0

    def train_steps(self) -> Iterator[SimpleNamespace]:
        while True:
            self.step += 1
            for _ in range(2):
                gradients(self.stage_modules[0], packed([5, 3]))
            yield SimpleNamespace(step=self.step)

    def progress(self, interval: float = INTERVAL) -> ProgressReporter:
        return ProgressReporter(cast(Trainer, self), interval=interval)


class FakeEvent:
    """A CUDA event that is complete once `reached` of all events are."""

    recorded = 0
    reached = 0

    def record(self) -> None:
        type(self).recorded += 1
        self.number = self.recorded

    def query(self) -> bool:
        return self.number <= self.reached


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[FakeEvent]:
    fresh = type("FreshEvent", (FakeEvent,), {})
    monkeypatch.setattr("torch.cuda.Event", fresh)
    return fresh


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="trainer")
    return caplog


def take_steps(progress: ProgressReporter, count: int) -> list[int]:
    return [result.step for _, result in zip(range(count), progress.train_steps(), strict=False)]


def is_logged(log: pytest.LogCaptureFixture, text: str) -> Callable[[], bool]:
    return lambda: any(text in line for line in log.messages)


def is_polling() -> bool:
    return any(thread.name == "progress" for thread in threading.enumerate())


def completed_and_total_work(
    run: Path, folder: Path, options: tuple[str, ...]
) -> list[tuple[float, float]] | None:
    """Runs on each rank; rank 0 returns both after each step's backward."""
    config = configured(run, folder, "--training.steps=2", *options)
    world = World(distributed.get_rank(), distributed.get_world_size(), torch.device("cpu"))
    trainer = Trainer(config, world, dataset_of(config))
    optimizer_step = trainer.optimizer_step
    found = []

    def check_then_step(values: Tensor, lr: float) -> Tensor:
        if world.rank == 0:
            assert wait_for(lambda: progress.completed_work >= progress.total_work, 20)
            time.sleep(10 * INTERVAL)  # Extra markers would be counted now.
            found.append((progress.completed_work, progress.total_work))
        return optimizer_step(values, lr)

    with (
        pytest.MonkeyPatch.context() as patch,
        ProgressReporter(trainer, interval=INTERVAL) as progress,
    ):
        patch.setattr(trainer, "optimizer_step", check_then_step)
        assert [result.step for result in progress.train_steps()] == [1, 2]
    return found if world.rank == 0 else None


MESHES = {
    "one rank": (1, ()),
    "full": (1, ("--memory.recompute=full",)),
    "keep_attention": (1, ("--memory.recompute=keep_attention",)),
    "offload": (1, ("--memory.recompute=full", "--memory.offload=inputs")),
    "fsdp": (2, ("--memory.recompute=full",)),
    "tp": (2, ("--parallelism.tp=2", "--memory.recompute=keep_attention")),
    "pipeline": (
        2,
        (
            "--parallelism.pp=2",
            "--parallelism.pp_schedule=Interleaved1F1B",
            "--model.num_layers=4",
        ),
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(mesh, marks=() if mesh in ("offload", "pipeline") else pytest.mark.slow)
        for mesh in MESHES
    ],
)
def test_every_block_counts_once_forward_and_once_backward(tmp_path: Path, mesh: str) -> None:
    ranks, options = MESHES[mesh]
    blocks = 2
    micro_batches = 3 if mesh == "fsdp" else 6
    work = 3.5 * blocks * micro_batches
    found = run_ranks(
        completed_and_total_work, ranks, write_run(tmp_path), tmp_path / "run", options
    )
    assert found == [[(work, work)] * 2, *[None] * (ranks - 1)]


@pytest.mark.parametrize("block", range(SMALL.num_layers))
def test_a_long_step_reports_its_position_and_a_short_one_nothing(
    log: pytest.LogCaptureFixture, block: int
) -> None:
    trainer = FakeTrainer()
    module = trainer.stage_modules[0].blocks[str(block)]
    positions = {
        "forward": f"forward, {block} of 2 blocks done",
        "backward": f"backward, {1 - block} of 2 blocks done",
    }
    micro_batches = {"forward": 0, "backward": 0}

    def wait(direction: str) -> None:
        micro_batches[direction] += 1
        line = f"0: micro-batch {micro_batches[direction]} of 2, {positions[direction]}"
        assert wait_for(is_logged(log, line), 20)

    with trainer.progress() as progress:
        forward = module.register_forward_pre_hook(lambda *_: wait("forward"))
        backward = module.register_full_backward_pre_hook(lambda *_: wait("backward"))
        assert take_steps(progress, 1) == [1]
        assert micro_batches == {"forward": 2, "backward": 2}
        forward.remove()
        backward.remove()
    assert all(line.startswith("step 1/3 running for 0:00:") for line in log.messages)
    log.clear()
    with trainer.progress(60.0) as progress:
        assert take_steps(progress, 9) == [2, 3]
    assert log.messages == []


def test_progress_follows_the_device_not_the_launches(
    log: pytest.LogCaptureFixture, device: type[FakeEvent]
) -> None:
    residuals: list[weakref.ref[Tensor]] = []
    trainer = FakeTrainer(device="cuda")
    with trainer.progress() as progress:
        track_block = trainer.stage_modules[0].block_boundary_hook

        def hook(x: Tensor) -> Tensor:
            residuals.append(weakref.ref(x))
            return track_block(x)

        trainer.stage_modules[0].block_boundary_hook = hook
        assert take_steps(progress, 2) == [1, 2]
        # Start, end, and three block boundaries in each direction for both micro-batches.
        assert device.recorded == 2 * (1 + 2 * 6 + 1)
        assert [residual() for residual in residuals] == [None] * 12, (
            "pending markers must not keep activations"
        )
        assert log.messages == []
        for reached, position in {
            1: "step 1/3 running for 0:00:00: before the first block",
            3: "micro-batch 1 of 2, forward, 1 of 2 blocks done; eta ",
            6: "micro-batch 1 of 2, backward, 1 of 2 blocks done; eta ",
            9: "micro-batch 2 of 2, forward, 1 of 2 blocks done; eta ",
            13: "micro-batch 2 of 2, backward, 2 of 2 blocks done",
            15: "step 2/3 running for 0:00:00: before the first block",
        }.items():
            log.clear()
            device.reached = reached
            assert wait_for(is_logged(log, position), 20), log.text
        device.reached = device.recorded
        assert wait_for(lambda: progress._step == 0, 20)
        log.clear()
        time.sleep(5 * INTERVAL)
        assert log.messages == [], "nothing is logged between steps"


def test_the_eta_is_from_the_previous_step_else_from_completed_work(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, device: type[FakeEvent]
) -> None:
    now = 1000
    monkeypatch.setattr("trainer.run.progress.time", SimpleNamespace(monotonic=lambda: now))
    with FakeTrainer(device="cuda").progress(0.6) as progress:
        assert take_steps(progress, 2) == [1, 2]

        def after(seconds: int, *, reached: int, step: int, line: str = "") -> None:
            nonlocal now
            now += seconds
            device.reached = reached
            assert wait_for(lambda: progress._step == step, 20)
            assert not line or wait_for(is_logged(log, f"step {step}/3 running for {line}"), 20), (
                log.text
            )

        after(0, reached=1, step=1)
        # Completed work of 14 block forwards: 2, then 4.5 after the backward of one block.
        after(
            120,
            reached=4,
            step=1,
            line="0:02:00: micro-batch 1 of 2, forward, 2 of 2 blocks done; eta 0:12:00",
        )
        after(
            60,
            reached=6,
            step=1,
            line="0:03:00: micro-batch 1 of 2, backward, 1 of 2 blocks done; eta 0:06:20",
        )
        after(420, reached=14, step=0)
        after(0, reached=15, step=2)
        after(60, reached=15, step=2, line="0:01:00: before the first block; eta 0:09:00")
        after(
            720,
            reached=21,
            step=2,
            line="0:13:00: micro-batch 1 of 2, backward, 2 of 2 blocks done; eta 0:13:00",
        )


def test_polling_stops_with_the_run_and_with_an_error() -> None:
    trainer = FakeTrainer()
    with trainer.progress() as progress:
        assert is_polling()
        assert take_steps(progress, 9) == [1, 2, 3]
    assert not is_polling()
    assert trainer.stage_modules[0].block_boundary_hook is identity
    with pytest.raises(ZeroDivisionError), trainer.progress():
        raise ZeroDivisionError
    assert not is_polling()


def test_a_failed_device_stops_polling_silently(
    device: type[FakeEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: FakeEvent) -> bool:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(device, "query", fail)
    with FakeTrainer(device="cuda").progress() as progress:
        assert take_steps(progress, 1) == [1]
        assert wait_for(lambda: not is_polling(), 20)
        recorded = device.recorded
        assert take_steps(progress, 1) == [2]
        assert device.recorded == recorded, "no thread would poll new events"


def test_other_ranks_do_not_poll() -> None:
    trainer = FakeTrainer(rank=1)
    with trainer.progress() as progress:
        assert not is_polling()
        assert trainer.stage_modules[0].block_boundary_hook is identity
        assert take_steps(progress, 9) == [1, 2, 3]
