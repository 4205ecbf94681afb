"""The model on this rank's place in the mesh, and how batches go through it.

Shape suffixes: B rows, S tokens on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.batch import Batch
from models.transformer import Part, Transformer
from models.view import unchanged
from parallelisms import tensor_parallel
from parallelisms.activation_checkpoint import Recompute
from parallelisms.activation_offload import HostMemory
from parallelisms.block_recompute import Bodies, Pieces, compiled_bodies
from parallelisms.context import ContextParallel
from parallelisms.init_weights import initialize
from parallelisms.mesh import Mesh
from parallelisms.parallelize import parallelize
from parallelisms.pipeline import Pipeline, pass_on
from parallelisms.pipeline_plan import PipelinePlan
from trainer.config.job_config import Config
from trainer.data.sequences import Share, Whole
from trainer.distributed import World
from trainer.hardware.device import GIB, attention_kernel, require_peers

Record = Callable[[Tensor, Batch], None]
Judged = Callable[[Tensor, Tensor, Batch], None]
Runner = Callable[[Iterable[Batch], Tensor, Record], None]


class Placed:
    """The mesh of a configuration, and what this rank holds of the model. Collective."""

    def __init__(self, config: Config, world: World) -> None:
        plan = config.context_plan()
        self.device = world.device
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
            tensor_parallel.overlap(self.mesh.tp)
        self.context = context_parallel(config, self.mesh, self.kernel) if plan.cp > 1 else None
        """Where ranks share rows."""
        self.share: Share = self.context or Whole(plan.multiple)
        """Which tokens of a row are this rank's."""
        self._stream: Any = {"shared_by": plan.tp, "dtype": getattr(torch, config.training.dtype)}
        self._is_compiled = config.training.compile
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

    @torch.no_grad()
    def judge(self, batches: Iterable[Batch], record: Judged) -> None:
        """Forward only, of rows of any length. Where the last stage is, `record` gets of each batch the losses [B, S],
        and as [B, S] 1 where the target was the most likely token, else 0.

        All ranks hand in as many batches; those of a pipeline the same.
        """
        with self._judging():
            for batch in batches:
                there = batch.to(self.device)
                found_BS2 = pass_on(self.parts, self.stages, self.mesh.pp, there, **self._stream)
                if found_BS2 is not None:
                    losses_BS, hits_BS = found_BS2.unbind(-1)
                    record(losses_BS, hits_BS, there)

    @contextmanager
    def _judging(self) -> Iterator[None]:
        parts = [*self.parts.values()]
        heads = [part.head for part in parts if part.head is not None]
        told = [part.between for part in parts]
        for part in parts:
            part.between = unchanged  # It is told how far an update is.
        for head in heads:
            head.judges = True
        try:
            # Rows of another length would be one more graph, or make those of training slower.
            with torch.compiler.set_stance("force_eager") if self._is_compiled else nullcontext():
                yield
        finally:
            for head in heads:
                head.judges = False
            for part, each in zip(parts, told, strict=True):
                part.between = each


def runner(config: Config, placed: Placed) -> Runner:
    """How the micro-batches of an update go through the model, forward and backward."""
    if placed.stages.pp == 1:
        return partial(one_by_one, placed.parts[0])
    context, training = config.context_plan(), config.training
    tokens = context.padded(training.seq_len) // (context.cp * context.tp)
    shape, dtype = (training.micro_batch_size, tokens, config.model.build().dim), getattr(torch, training.dtype)
    return Pipeline(placed.parts, placed.stages, placed.mesh.pp, device=placed.device, shape=shape, dtype=dtype).run


def one_by_one(
    model: Transformer, batches: Iterable[Batch], targets: Tensor, record: Callable[[Tensor, Batch], None]
) -> None:
    """Forward and backward of the sum of all losses over `targets`; `record` gets each batch's losses."""
    for batch in batches:
        losses_BS = model(batch)
        (losses_BS.sum() / targets).backward()
        record(losses_BS.detach(), batch)
        del losses_BS  # Its graph would live through the next forward pass.


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
        built, chunk = config.model.build(), config.memory.head_chunk_mib
        model = Transformer(built, part=part, seq_len=training.seq_len, head_chunk_mib=chunk).to(stored)
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
