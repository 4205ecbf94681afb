"""The trainer: model, optimizer and data on this rank's place in the mesh, and one update after the other.

Shape suffixes: B rows, S tokens on this rank.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from models.batch import Batch
from parallelisms.collectives import sum_over
from parallelisms.fsdp import units_of
from trainer.build import Placed, runner
from trainer.config.job_config import Config, Stage
from trainer.data.loader import Loader
from trainer.data.sequences import Rows
from trainer.distributed import World
from trainer.hardware.device import Numbers, Stopwatch, refuse_nondeterminism
from trainer.metrics.step_metrics import Slots, Tally, means
from trainer.optim.lr_schedule import learning_rate
from trainer.optim.optimizer import Optimizer
from trainer.resilience.anomalies import Losses
from trainer.resilience.goodput import Goodput


@dataclass(frozen=True)
class Update:
    """One update. Its numbers may still be on the device: reading them waits, so they are read one update later."""

    step: int
    lr: float
    rows: int
    """Of the stage, up to and with this update's."""
    data_wait_seconds: float
    stopwatch: Stopwatch
    numbers: Numbers
    slots: Slots

    def read(self) -> Measured:
        """The numbers, over all ranks. Waits for the update."""
        parts = self.slots.parts(self.numbers.read())
        one = {name: values[0] for name, values in parts.items()}
        return Measured(
            loss=one["loss"] / max(1.0, one["targets"]),
            grad_norm=one["grad_norm"],
            skipped=not one["finite"],
            tokens=one["tokens"],
            pairs=one["pairs"],
            tokens_seen=int(one["tokens_seen"]),
            step_seconds=self.stopwatch.seconds(),
            attention_imbalance=one["attention_imbalance"],
            loss_by_position=means(parts["loss_by_position"], parts["targets_by_position"]),
            loss_by_shard=means(parts["loss_by_shard"], parts["targets_by_shard"]) if self.slots.shards > 1 else None,
            loss_by_source=means(parts["loss_by_source"], parts["targets_by_source"]),
            tokens_by_source=parts["tokens_by_source"],
        )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What an update measured, summed or averaged over the global batch."""

    loss: float
    grad_norm: float
    skipped: bool
    tokens: float
    pairs: float
    tokens_seen: int
    step_seconds: float
    attention_imbalance: float
    """Attended pairs of the busiest rank, over the mean of all ranks that hold tokens."""
    loss_by_position: list[float | None]
    loss_by_shard: list[float | None] | None
    """By place among the ranks that share rows; None where none are shared."""
    loss_by_source: list[float | None]
    tokens_by_source: list[float]
    """Since the run began."""


class Trainer:
    def __init__(self, config: Config, world: World, rows: Rows, *, stage: Stage | None = None) -> None:
        """Of a run with stages, `config` and `rows` are those of this one."""
        self.config = config
        self.stage = stage or config.stages[0]
        self.world = world
        self.rows = rows
        if config.training.deterministic:
            refuse_nondeterminism()
        placed = Placed(config, world)
        self.placed, self.mesh, self.parts, self.context = placed, placed.mesh, placed.parts, placed.context
        self.run = runner(config, placed)
        # Some schedules of a pipeline fetch weights before what holds them runs.
        late = config.memory.optimizer_placement == "host" and placed.stages.pp == 1
        self.optimizer = Optimizer(
            [*self.parts.values()],
            config.optimizer,
            moments=torch.bfloat16 if config.memory.optimizer_dtype == "bfloat16" else None,
            units=units_of(self.parts[0]) if late else (),
            total=partial(sum_over, None),
        )
        self.loader = Loader(
            rows,
            rank=self.mesh.data_rank,
            ranks=self.mesh.data_ranks,
            global_batch_size=config.training.global_batch_size,
            micro_batch_size=config.training.micro_batch_size,
            share=placed.share,
            pin_memory=world.device.type == "cuda",
        )
        self.changes: list[str] = []
        """Keys that differ from the checkpoint that the run goes on from."""
        self.step = 0
        self.next_row = 0
        """Of the stage."""
        self.tally = Tally(self.mesh, world.device, sources=len(rows.names))
        self.counts = torch.zeros(2 + len(rows.names), dtype=torch.int64, device=world.device)
        """Tokens seen, updates skipped, and tokens of each source, since the run began."""
        self.losses, self.goodput = Losses(config), Goodput()
        self.earlier: dict[str, int] = {}
        """Tokens of sources, also of those that only earlier stages drew from."""

    def updates(self) -> Iterator[Update]:
        """Runs the updates that are left, one per item."""
        training = self.config.training
        with (
            closing(self.loader.updates(start_row=self.next_row)) as batches,
            _collected(training.gc_interval) as collect,
        ):
            first = True
            while self.step < self.stage.last_step:
                stopwatch = Stopwatch(self.world.device)
                stopwatch.start()
                fetching = time.perf_counter()
                micro_batches = next(batches)
                waited = time.perf_counter() - fetching
                if self.context and (first or training.deterministic):
                    self.context.require_agreement(micro_batches[0].boundaries)
                self.step += 1
                lr = learning_rate(self.stage, self.step)
                numbers = Numbers(self.train_step(micro_batches, lr))
                if first:
                    self.mesh.set_timeout(timedelta(minutes=self.config.distributed.timeout_minutes))
                first = False
                self.next_row += training.global_batch_size
                collect(self.step)
                stopwatch.stop()
                yield Update(self.step, lr, self.next_row, waited, stopwatch, numbers, self.tally.slots)

    def train_step(self, micro_batches: list[Batch], lr: float) -> Tensor:
        """One update from this rank's micro-batches; returns its numbers, by the names of `tally.slots`."""
        numbers = self.accumulate(micro_batches)
        return self.update(numbers, lr)

    def accumulate(self, micro_batches: list[Batch]) -> Tensor:
        """Leaves the gradients of the mean loss of all ranks' micro-batches; returns this rank's numbers."""
        # Every draw of random numbers is a function of the step, so none has to be saved.
        torch.manual_seed(_seed(self.config.training.seed, self.step, self.world.rank))
        device = self.world.device
        # A mean over the targets of the whole step, whichever micro-batch or rank they are in.
        targets = torch.stack([batch.num_targets() for batch in micro_batches]).sum().to(device, non_blocking=True)
        global_targets = sum_over(self.mesh.tokens, targets).clamp(min=1)
        numbers = self.tally.begin()
        self.run((batch.to(device) for batch in micro_batches), global_targets, partial(self.tally.add, numbers))
        return numbers

    def update(self, numbers: Tensor, lr: float) -> Tensor:
        """Moves the weights along the gradients; returns the numbers over all ranks."""
        norm, finite = (found.to(numbers.device, non_blocking=True) for found in self.optimizer.step(lr))
        parts = self.tally.sum_over_ranks(numbers)
        self.counts += torch.cat((parts["tokens"], (~finite).view(1), parts["tokens_by_source"])).long()
        parts["grad_norm"][0], parts["finite"][0], parts["tokens_seen"][0] = norm, finite, self.counts[0]
        parts["tokens_by_source"].copy_(self.counts[2:])
        return numbers

    # ---- state

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of a checkpoint, by a name that does not depend on the mesh; loading writes into them."""
        weights = {f"model.{name}": parameter.detach() for name, parameter in self.optimizer.named.items()}
        return weights | {f"optimizer.{name}": tensor for name, tensor in self.optimizer.tensors().items()}

    def scalars(self) -> dict[str, Any]:
        """Everything else. Waits for the device."""
        tokens, skipped, *drawn = self.counts.tolist()
        sources = self.earlier | dict(zip(self.rows.names, drawn, strict=True))
        judged = {"losses": self.losses.state(), "goodput": self.goodput.state()}
        counted = {"tokens": tokens, "skipped": skipped, "sources": sources}
        return {"step": self.step, "next_row": self.next_row, **counted, **judged}

    def restore(self, scalars: dict[str, Any]) -> None:
        """What `scalars` gave, in this stage or in the one before, whose rows are not this one's."""
        self.step, self.earlier = scalars["step"], scalars["sources"]
        self.goodput.restore(scalars["goodput"])
        self.next_row, self.losses = 0, Losses(self.config)
        if self.step > self.stage.first_step:
            self.next_row = scalars["next_row"]
            self.losses.restore(scalars["losses"])
        drawn = [self.earlier.get(name, 0) for name in self.rows.names]
        self.counts.copy_(torch.tensor([scalars["tokens"], scalars["skipped"], *drawn]))


@contextmanager
def _collected(interval: int) -> Iterator[Callable[[int], None]]:
    """Collects Python's garbage at fixed updates instead of at random ones, when other ranks would have to wait."""
    gc.collect()
    gc.freeze()
    gc.disable()

    def collect(step: int) -> None:
        if step % interval == 0:
            gc.collect(1)

    try:
        yield collect
    finally:
        gc.enable()
        gc.unfreeze()


def _seed(*parts: int) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1
