"""A long update shows how far it is, on the device and not in what the host has launched, and counts nothing twice."""

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
from tests.system.in_process import configured, rows_of
from tests.system.runs import wait_for, write_run
from trainer.distributed import World
from trainer.metrics.progress import ProgressReporter
from trainer.trainer import Trainer

SOON = 0.006  # seconds between two signs of life


class Standin:
    """What a heartbeat wants of a trainer: each update carries two rows through the model."""

    def __init__(self, *, device: str = "cpu", rank: int = 0) -> None:
        self.world = World(rank, 1, torch.device(device))
        self.stage = SimpleNamespace(last_step=3, total=3)
        self.loader = SimpleNamespace(num_micro_batches=2)
        self.model_parts = {0: small_model()}
        self.step = 0

    def train_steps(self) -> Iterator[SimpleNamespace]:
        while True:
            self.step += 1
            for _ in range(2):
                gradients(self.model_parts[0], packed([5, 3]))
            yield SimpleNamespace(step=self.step)

    def heartbeat(self, interval: float = SOON) -> ProgressReporter:
        return ProgressReporter(cast(Trainer, self), interval=interval)


class Device:
    """An event of a device that has got as far as the test says."""

    recorded = 0
    reached = 0

    def record(self) -> None:
        type(self).recorded += 1
        self.number = self.recorded

    def query(self) -> bool:
        return self.number <= self.reached


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[Device]:
    fresh = type("Fresh", (Device,), {})
    monkeypatch.setattr("torch.cuda.Event", fresh)
    return fresh


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="trainer")
    return caplog


def steps(heartbeat: ProgressReporter, updates: int) -> list[int]:
    return [update.step for _, update in zip(range(updates), heartbeat.train_steps(), strict=False)]


def is_told(told: pytest.LogCaptureFixture, words: str) -> Callable[[], bool]:
    return lambda: any(words in line for line in told.messages)


def beating() -> bool:
    return any(thread.name == "heartbeat" for thread in threading.enumerate())


def counted(run: Path, folder: Path, options: tuple[str, ...]) -> list[tuple[float, float]] | None:
    """On a rank: after each update's backward pass, what of it is counted as done, and what there is to do."""
    config = configured(run, folder, "--training.steps=2", *options)
    world = World(distributed.get_rank(), distributed.get_world_size(), torch.device("cpu"))
    trainer = Trainer(config, world, rows_of(config))
    update, found = trainer.optimizer_step, []

    def last(numbers: Tensor, lr: float) -> Tensor:
        if world.rank == 0:
            assert wait_for(lambda: heartbeat.completed_work >= heartbeat.total_work, 20)
            time.sleep(10 * SOON)  # In which too much would be counted.
            found.append((heartbeat.completed_work, heartbeat.total_work))
        return update(numbers, lr)

    with pytest.MonkeyPatch.context() as patch, ProgressReporter(trainer, interval=SOON) as heartbeat:
        patch.setattr(trainer, "optimizer_step", last)
        assert [done.step for done in heartbeat.train_steps()] == [1, 2]
    return found if world.rank == 0 else None


SPREAD = {
    "one": (1, ()),
    "full": (1, ("--memory.recompute=full",)),
    "keep_attention": (1, ("--memory.recompute=keep_attention",)),
    "offload": (1, ("--memory.recompute=full", "--memory.offload=inputs")),
    "fsdp": (2, ("--memory.recompute=full",)),
    "tp": (2, ("--parallelism.tp=2", "--memory.recompute=keep_attention")),
    "pipeline": (
        2,
        (
            "--parallelism.pp=2",
            "--parallelism.pp_schedule=InterleavedZeroBubble",
            "--model.num_layers=4",
            "--memory.recompute=none",
        ),
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("spread", SPREAD)
def test_every_block_counts_once_forward_and_once_backward(tmp_path: Path, spread: str) -> None:
    ranks, options = SPREAD[spread]
    blocks, micro_batches = 2, 3 if spread == "fsdp" else 6
    work = 3.5 * blocks * micro_batches
    found = run_ranks(counted, ranks, write_run(tmp_path), tmp_path / "run", options)
    assert found == [[(work, work)] * 2, *[None] * (ranks - 1)]


@pytest.mark.parametrize("block", range(SMALL.num_layers))
def test_a_long_update_tells_where_it_is_and_a_short_one_nothing(told: pytest.LogCaptureFixture, block: int) -> None:
    trainer = Standin()
    module = trainer.model_parts[0].blocks[str(block)]
    places = {"forward": f"forward, {block} of 2 blocks done", "backward": f"backward, {1 - block} of 2 blocks done"}
    rows = {"forward": 0, "backward": 0}

    def wait(way: str) -> None:
        rows[way] += 1
        assert wait_for(is_told(told, f"0: micro-batch {rows[way]} of 2, {places[way]}"), 20)

    with trainer.heartbeat() as heartbeat:
        forward = module.register_forward_pre_hook(lambda *_: wait("forward"))
        backward = module.register_full_backward_pre_hook(lambda *_: wait("backward"))
        assert steps(heartbeat, 1) == [1]
        assert rows == {"forward": 2, "backward": 2}
        forward.remove()
        backward.remove()
    assert all(line.startswith("update 1/3 has run for 0:00:") for line in told.messages)
    told.clear()
    with trainer.heartbeat(60.0) as heartbeat:
        assert steps(heartbeat, 9) == [2, 3]
    assert told.messages == []


def test_what_was_launched_is_not_what_was_done(told: pytest.LogCaptureFixture, device: type[Device]) -> None:
    streams: list[weakref.ref[Tensor]] = []
    trainer = Standin(device="cuda")
    with trainer.heartbeat() as heartbeat:
        counting = trainer.model_parts[0].block_boundary_hook

        def between(x: Tensor) -> Tensor:
            streams.append(weakref.ref(x))
            return counting(x)

        trainer.model_parts[0].block_boundary_hook = between
        assert steps(heartbeat, 2) == [1, 2]
        # Begun, ended, and for both rows three places that the stream passes, each way.
        assert device.recorded == 2 * (1 + 2 * 6 + 1)
        assert [stream() for stream in streams] == [None] * 12, "what the device has not reached keeps no tensor"
        assert told.messages == []
        for reached, place in {
            1: "update 1/3 has run for 0:00:00: no block begun",
            3: "micro-batch 1 of 2, forward, 1 of 2 blocks done; about ",
            6: "micro-batch 1 of 2, backward, 1 of 2 blocks done; about ",
            9: "micro-batch 2 of 2, forward, 1 of 2 blocks done; about ",
            13: "micro-batch 2 of 2, backward, 2 of 2 blocks done",
            15: "update 2/3 has run for 0:00:00: no block begun",
        }.items():
            told.clear()
            device.reached = reached
            assert wait_for(is_told(told, place), 20), told.text
        device.reached = device.recorded
        assert wait_for(lambda: heartbeat._step == 0, 20)
        told.clear()
        time.sleep(5 * SOON)
        assert told.messages == [], "between updates there is nothing to tell"


def test_what_is_left_is_told_by_the_update_before_else_by_the_share(
    told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, device: type[Device]
) -> None:
    now = 1000
    monkeypatch.setattr("trainer.metrics.progress.time", SimpleNamespace(monotonic=lambda: now))
    with Standin(device="cuda").heartbeat(0.6) as heartbeat:
        assert steps(heartbeat, 2) == [1, 2]

        def after(seconds: int, *, reached: int, step: int, line: str = "") -> None:
            nonlocal now
            now += seconds
            device.reached = reached
            assert wait_for(lambda: heartbeat._step == step, 20)
            assert not line or wait_for(is_told(told, f"update {step}/3 has run for {line} left"), 20), told.text

        after(0, reached=1, step=1)
        # Of 14 forward passes two are done and then, when one block has gone back, four and a half.
        after(120, reached=4, step=1, line="0:02:00: micro-batch 1 of 2, forward, 2 of 2 blocks done; about 0:12:00")
        after(60, reached=6, step=1, line="0:03:00: micro-batch 1 of 2, backward, 1 of 2 blocks done; about 0:06:20")
        after(420, reached=14, step=0)
        after(0, reached=15, step=2)
        after(60, reached=15, step=2, line="0:01:00: no block begun; about 0:09:00")
        after(720, reached=21, step=2, line="0:13:00: micro-batch 1 of 2, backward, 2 of 2 blocks done; about 0:13:00")


def test_it_ends_with_the_run_and_with_an_error() -> None:
    trainer = Standin()
    with trainer.heartbeat() as heartbeat:
        assert beating()
        assert steps(heartbeat, 9) == [1, 2, 3]
    assert not beating()
    assert trainer.model_parts[0].block_boundary_hook is identity
    with pytest.raises(ZeroDivisionError), trainer.heartbeat():
        raise ZeroDivisionError
    assert not beating()


def test_a_device_that_fails_ends_it_without_a_word(device: type[Device], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Device) -> bool:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(device, "query", fails)
    with Standin(device="cuda").heartbeat() as heartbeat:
        assert steps(heartbeat, 1) == [1]
        assert wait_for(lambda: not beating(), 20)
        recorded = device.recorded
        assert steps(heartbeat, 1) == [2]
        assert device.recorded == recorded, "nobody would look at them"


def test_other_ranks_have_none() -> None:
    trainer = Standin(rank=1)
    with trainer.heartbeat() as heartbeat:
        assert not beating()
        assert trainer.model_parts[0].block_boundary_hook is identity
        assert steps(heartbeat, 9) == [1, 2, 3]
