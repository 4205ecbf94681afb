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
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from models.batch import IGNORE, Batch
from models.transformer import Transformer
from parallelisms.collectives import sum_over
from parallelisms.initialize import initialize
from parallelisms.mesh import Mesh
from parallelisms.parallelize import parallelize
from trainer.config import Config
from trainer.data.loader import Loader
from trainer.data.rows import Rows
from trainer.distributed import World
from trainer.hardware import Numbers, Stopwatch, refuse_nondeterminism
from trainer.optimizer import Optimizer
from trainer.schedule import factor

# Losses are also reported by position in the document: below 256, below 1K, ..., and the rest.
POSITIONS = tuple(4**power for power in range(4, 11))
SUMS = ("loss", "targets", "tokens", "pairs")


@dataclass(frozen=True)
class Update:
    """One update. Its numbers may still be on the device: reading them waits, so they are read one update later."""

    step: int
    lr: float
    data_wait_seconds: float
    stopwatch: Stopwatch
    numbers: Numbers

    def read(self) -> Measured:
        """The numbers, over all ranks. Waits for the update."""
        values = self.numbers.read()
        sums = dict(zip(SUMS, values, strict=False))
        buckets = len(POSITIONS) + 1
        by_position = values[len(SUMS) : len(SUMS) + 2 * buckets]
        norm, finite, tokens_seen = values[-3:]
        return Measured(
            loss=sums["loss"] / max(1.0, sums["targets"]),
            grad_norm=norm,
            skipped=not finite,
            tokens=sums["tokens"],
            pairs=sums["pairs"],
            tokens_seen=int(tokens_seen),
            step_seconds=self.stopwatch.seconds(),
            loss_by_position=[
                total / count if count else None
                for total, count in zip(by_position[:buckets], by_position[buckets:], strict=True)
            ],
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
    loss_by_position: list[float | None]


class Trainer:
    def __init__(self, config: Config, world: World, rows: Rows) -> None:
        self.config = config
        self.world = world
        self.rows = rows
        if config.training.deterministic:
            refuse_nondeterminism()
        self.mesh = Mesh(
            world.device.type,
            config.parallelism.degrees(world.size),
            rank=world.rank,
            timeout=timedelta(minutes=config.distributed.timeout_minutes),
        )
        self.model = build_model(config, self.mesh, world.device)
        self.optimizer = Optimizer(self.model, config.optimizer)
        self.loader = Loader(
            rows,
            rank=self.mesh.data_rank,
            ranks=self.mesh.data_ranks,
            global_batch_size=config.training.global_batch_size,
            micro_batch_size=config.training.micro_batch_size,
            pin_memory=world.device.type == "cuda",
        )
        self.changes: list[str] = []
        """Keys that differ from the checkpoint that the run goes on from."""
        self.step = 0
        self.next_row = 0
        self.position_edges = torch.tensor(POSITIONS, device=world.device)
        self.counts = torch.zeros(2, dtype=torch.int64, device=world.device)
        """Tokens seen and updates skipped, since the run began."""

    def updates(self) -> Iterator[Update]:
        """Runs the updates that are left, one per item."""
        training = self.config.training
        with (
            closing(self.loader.updates(start_row=self.next_row)) as batches,
            _collected(training.gc_interval) as collect,
        ):
            while self.step < training.steps:
                stopwatch = Stopwatch(self.world.device)
                stopwatch.start()
                fetching = time.perf_counter()
                micro_batches = next(batches)
                waited = time.perf_counter() - fetching
                self.step += 1
                lr = self.config.optimizer.lr * factor(self.config.schedule, step=self.step, steps=training.steps)
                numbers = Numbers(self.train_step(micro_batches, lr))
                self.next_row += training.global_batch_size
                collect(self.step)
                stopwatch.stop()
                yield Update(self.step, lr, waited, stopwatch, numbers)

    def train_step(self, micro_batches: list[Batch], lr: float) -> Tensor:
        """One update from this rank's micro-batches; returns its numbers, float64, in the order `Update.read` takes."""
        # Every draw of random numbers is a function of the step, so none has to be saved.
        torch.manual_seed(_seed(self.config.training.seed, self.step, self.world.rank))
        device, group = self.world.device, self.mesh.tokens
        # A mean over the targets of the whole step, whichever micro-batch or rank they are in.
        targets = torch.stack([batch.num_targets() for batch in micro_batches]).sum().to(device, non_blocking=True)
        global_targets = sum_over(group, targets).clamp(min=1)
        sums = torch.zeros(len(SUMS) + 2 * (len(POSITIONS) + 1), dtype=torch.float64, device=device)
        for batch in (batch.to(device) for batch in micro_batches):
            losses_BS = self.model(batch)
            (losses_BS.sum() / global_targets).backward()
            sums += self._sums(losses_BS.detach(), batch)
        norm, finite = self.optimizer.step(lr)
        sums = sum_over(group, sums)
        self.counts += torch.stack((sums[SUMS.index("tokens")].long(), (~finite).long()))
        return torch.cat((sums, torch.stack((norm.double(), finite.double(), self.counts[0].double()))))

    def _sums(self, losses_BS: Tensor, batch: Batch) -> Tensor:
        """The sums over the global batch, this rank's share; ranks that share a row (cp) count it once."""
        share = 1 / self.mesh.degrees["cp"]
        is_target = (batch.labels != IGNORE).flatten().double()
        losses = losses_BS.double().flatten()
        bucket = torch.bucketize(batch.positions.flatten(), self.position_edges, right=True)
        by_position = torch.zeros(2, len(POSITIONS) + 1, dtype=torch.float64, device=losses.device)
        by_position.index_add_(1, bucket, torch.stack((losses, is_target)))
        rows = torch.tensor((batch.num_tokens * share, batch.num_pairs * share), dtype=torch.float64)
        totals = torch.stack((losses.sum(), is_target.sum()))
        return torch.cat((totals, rows.to(losses.device, non_blocking=True), by_position.flatten()))

    # ---- state

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of a checkpoint, by a name that does not depend on the mesh; loading writes into them."""
        weights = {f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        return weights | {f"optimizer.{name}": tensor for name, tensor in self.optimizer.tensors().items()}

    def scalars(self) -> dict[str, Any]:
        """Everything else. Waits for the device."""
        tokens, skipped = self.counts.tolist()
        return {"step": self.step, "next_row": self.next_row, "tokens": tokens, "skipped": skipped}

    def restore(self, scalars: dict[str, Any]) -> None:
        self.step, self.next_row = scalars["step"], scalars["next_row"]
        self.counts.copy_(torch.tensor([scalars["tokens"], scalars["skipped"]]))


def build_model(config: Config, mesh: Mesh, device: torch.device) -> Transformer:
    """The model of this run, spread over the mesh, with its initial weights."""
    training = config.training
    compute = getattr(torch, training.dtype)
    stored = torch.float64 if compute == torch.float64 else torch.float32
    reduced = getattr(torch, training.reduce_dtype) if compute == torch.bfloat16 else stored
    with torch.device("meta"):
        model = Transformer(config.model.build(), head_chunk_mib=config.memory.head_chunk_mib).to(stored)
    parallelize(
        model,
        mesh,
        policy=config.memory.recompute,
        compiled=training.compile,
        param_dtype=compute,
        reduce_dtype=reduced,
        reshard_after_forward=config.parallelism.reshard_after_forward,
    )
    initialize(model, seed=training.seed, device=device)
    return model


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
