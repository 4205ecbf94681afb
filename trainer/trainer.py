"""The trainer: model, optimizer and data on this rank's place in the mesh, and one update after the other.

Shape suffixes: B rows, S tokens on this rank.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from models.batch import Batch, padded
from models.transformer import Part, Transformer
from parallelisms import tensor
from parallelisms.collectives import sum_over
from parallelisms.context import ContextParallel
from parallelisms.fsdp import units_of
from parallelisms.halves import Bodies, Pieces, compiled_bodies
from parallelisms.initialize import initialize
from parallelisms.mesh import Mesh
from parallelisms.offload import HostMemory
from parallelisms.parallelize import parallelize
from parallelisms.pipeline import Pipeline
from parallelisms.recompute import Recompute
from parallelisms.stages import PipelinePlan
from trainer.config import Config
from trainer.data.copy import CopyRows
from trainer.data.loader import Loader
from trainer.data.rows import Rows
from trainer.distributed import World
from trainer.hardware import GIB, Numbers, Stopwatch, attention_kernel, refuse_nondeterminism, require_peers
from trainer.numbers import Slots, Tally, means
from trainer.optimizer import Optimizer
from trainer.schedule import factor

Runner = Callable[[Iterable[Batch], Tensor, Callable[[Tensor, Batch], None]], None]


@dataclass(frozen=True)
class Update:
    """One update. Its numbers may still be on the device: reading them waits, so they are read one update later."""

    step: int
    lr: float
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


class Trainer:
    def __init__(self, config: Config, world: World, rows: Rows | CopyRows) -> None:
        self.config = config
        self.world = world
        self.rows = rows
        if config.training.deterministic:
            refuse_nondeterminism()
        plan = config.context_plan()
        self.mesh = Mesh(
            world.device.type,
            config.parallelism.degrees(world.size),
            rank=world.rank,
            ulysses=plan.ulysses if plan.chosen == "hybrid" else None,
            timeout=timedelta(minutes=config.distributed.start_timeout_minutes),
        )
        self.kernel = attention_kernel(config, world.device)
        if config.parallelism.async_tp:
            require_peers(world.device)
            tensor.overlap(self.mesh.tp)
        self.context = context_parallel(config, self.mesh, self.kernel) if plan.cp > 1 else None
        """Where ranks share rows."""
        self.stages = config.pipeline_plan(world.size)
        build = partial(
            build_model,
            config,
            self.mesh,
            world.device,
            core=self.context,
            kernel=self.kernel,
            host=host_memory_of(config, world, self.stages, rank=self.mesh.place["pp"]),
        )
        self.parts = {stage: build(self.stages.part(stage)) for stage in self.stages.stages_of(self.mesh.place["pp"])}
        """What this rank holds of the model, by stage of the pipeline; one that is not cut has one."""
        self.run = runner(config, self.mesh, world.device, self.stages, self.parts)
        # Some schedules of a pipeline fetch weights before what holds them runs.
        late = config.memory.optimizer_placement == "host" and self.stages.pp == 1
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
            shard=partial(share, multiple=plan.multiple, context=self.context),
            pin_memory=world.device.type == "cuda",
        )
        self.changes: list[str] = []
        """Keys that differ from the checkpoint that the run goes on from."""
        self.step = 0
        self.next_row = 0
        self.tally = Tally(self.mesh, world.device)
        self.counts = torch.zeros(2, dtype=torch.int64, device=world.device)
        """Tokens seen and updates skipped, since the run began."""

    def updates(self) -> Iterator[Update]:
        """Runs the updates that are left, one per item."""
        training = self.config.training
        with (
            closing(self.loader.updates(start_row=self.next_row)) as batches,
            _collected(training.gc_interval) as collect,
        ):
            first = True
            while self.step < training.steps:
                stopwatch = Stopwatch(self.world.device)
                stopwatch.start()
                fetching = time.perf_counter()
                micro_batches = next(batches)
                waited = time.perf_counter() - fetching
                if self.context and (first or training.deterministic):
                    self.context.require_agreement(micro_batches[0].boundaries)
                self.step += 1
                lr = self.config.optimizer.lr * factor(self.config.schedule, step=self.step, steps=training.steps)
                numbers = Numbers(self.train_step(micro_batches, lr))
                if first:
                    self.mesh.set_timeout(timedelta(minutes=self.config.distributed.timeout_minutes))
                first = False
                self.next_row += training.global_batch_size
                collect(self.step)
                stopwatch.stop()
                yield Update(self.step, lr, waited, stopwatch, numbers, self.tally.slots)

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
        self.counts += torch.cat((parts["tokens"].long(), (~finite).long().view(1)))
        parts["grad_norm"][0], parts["finite"][0], parts["tokens_seen"][0] = norm, finite, self.counts[0]
        return numbers

    # ---- state

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of a checkpoint, by a name that does not depend on the mesh; loading writes into them."""
        weights = {f"model.{name}": parameter.detach() for name, parameter in self.optimizer.named.items()}
        return weights | {f"optimizer.{name}": tensor for name, tensor in self.optimizer.tensors().items()}

    def scalars(self) -> dict[str, Any]:
        """Everything else. Waits for the device."""
        tokens, skipped = self.counts.tolist()
        return {"step": self.step, "next_row": self.next_row, "tokens": tokens, "skipped": skipped}

    def restore(self, scalars: dict[str, Any]) -> None:
        self.step, self.next_row = scalars["step"], scalars["next_row"]
        self.counts.copy_(torch.tensor([scalars["tokens"], scalars["skipped"]]))


def context_parallel(config: Config, mesh: Mesh, kernel: str) -> ContextParallel:
    """What the plan of the configuration makes of the mesh. Collective."""
    plan = config.context_plan()
    return ContextParallel(
        mesh.context,
        method=plan.chosen,
        layout=plan.kind,
        outer=plan.rotation if plan.chosen == "hybrid" and plan.rotation else "auto",
        heads=plan.heads,
        kv_heads=plan.kv_heads,
        head_dim=plan.head_dim,
        reduce_dtype=getattr(torch, config.parallelism.cp_reduce_dtype),
        kernel=kernel,
    )


def share(batch: Batch, *, multiple: int, context: ContextParallel | None) -> Batch:
    """What this rank holds of a batch, whose rows are made to divide."""
    batch = padded(batch, multiple)
    return context.shard_batch(batch) if context else batch


def runner(
    config: Config, mesh: Mesh, device: torch.device, plan: PipelinePlan, parts: dict[int, Transformer]
) -> Runner:
    """How the micro-batches of an update go through the model."""
    if plan.pp == 1:
        return partial(one_by_one, parts[0])
    context, training = config.context_plan(), config.training
    tokens = context.padded(training.seq_len) // (context.cp * context.tp)
    shape = (training.micro_batch_size, tokens, config.model.build().dim)
    return Pipeline(parts, plan, mesh.pp, device=device, shape=shape, dtype=getattr(torch, training.dtype)).run


def one_by_one(
    model: Transformer, batches: Iterable[Batch], targets: Tensor, record: Callable[[Tensor, Batch], None]
) -> None:
    """Forward and backward of the sum of all losses over `targets`; `record` gets each batch's losses."""
    for batch in batches:
        losses_BS = model(batch)
        (losses_BS.sum() / targets).backward()
        record(losses_BS.detach(), batch)
        del losses_BS  # Its graph would live through the next forward pass.


def host_memory_of(config: Config, world: World, plan: PipelinePlan, *, rank: int) -> HostMemory | None:
    """What this rank has of its node's memory for what blocks keep; None where they keep it on the device."""
    section = config.memory
    if section.offload == "none":
        return None
    blocks = sum(-(-plan.blocks[stage] // section.input_every) for stage in plan.stages_of(rank))
    budget = None
    if section.host_budget_gib is not None:
        budget = int(section.host_budget_gib * GIB) // max(1, world.size // world.nodes)
    return HostMemory(inputs=blocks * plan.most_in_flight, budget=budget)


def recompute_of(config: Config, host: HostMemory | None) -> Recompute:
    """What blocks keep between their passes."""
    memory = config.memory
    if memory.recompute == "auto":
        raise ValueError('memory.recompute = "auto" is to be settled before a model is built')
    bodies = compiled_bodies() if config.training.compile else Bodies()
    tile = None if memory.mlp_tile_mib is None else memory.mlp_tile_mib << 20
    return Recompute(
        policy=memory.recompute,
        host=host,
        attention_on_host=memory.offload == "inputs_and_attention",
        every=memory.input_every,
        pieces=Pieces(memory.head_groups, tile, bodies),
        reshards=reshards(config),
    )


def reshards(config: Config) -> bool:
    # A pipeline would gather the weights again for each micro-batch.
    return config.parallelism.reshard_after_forward and config.parallelism.pp == 1


def build_model(
    config: Config,
    mesh: Mesh,
    device: torch.device,
    part: Part | None = None,
    *,
    core: ContextParallel | None = None,
    kernel: str = "auto",
    host: HostMemory | None = None,
) -> Transformer:
    """The model of this run, or a part of it, spread over the mesh, with its initial weights if they are drawn."""
    training = config.training
    compute = getattr(torch, training.dtype)
    stored = torch.float64 if compute == torch.float64 else torch.float32
    reduced = getattr(torch, training.reduce_dtype) if compute == torch.bfloat16 else stored
    on_host = config.memory.optimizer_placement == "host"
    with torch.device("meta"):
        model = Transformer(config.model.build(), part=part, head_chunk_mib=config.memory.head_chunk_mib).to(stored)
    parallelize(
        model,
        mesh,
        core=core,
        kernel=kernel,
        sequence_parallel=config.parallelism.sequence_parallel,
        loss_parallel=config.parallelism.loss_parallel,
        keep=recompute_of(config, host),
        compiled=training.compile,
        param_dtype=compute,
        reduce_dtype=reduced,
        reshard_after_forward=reshards(config),
        state_on_host=on_host,
    )
    seed = training.seed if config.checkpoint.initial is None else None
    initialize(model, seed=seed, device=torch.device("cpu") if on_host else device)
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
