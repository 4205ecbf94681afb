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
from models.transformer import StageSpec, Transformer
from models.view import identity
from parallelisms import tensor_parallel
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.activation_offload import HostActivationPool
from parallelisms.block_recompute import TileOps, Tiling, compile_tile_ops
from parallelisms.context import ContextParallel
from parallelisms.init_weights import initialize
from parallelisms.mesh import Mesh
from parallelisms.parallelize import parallelize
from parallelisms.pipeline import Pipeline, pipeline_forward
from parallelisms.pipeline_plan import PipelinePlan
from trainer.config.job_config import Config
from trainer.data.sequences import FullSequence, SequenceShard
from trainer.distributed import World
from trainer.hardware.device import GIB, choose_attention_kernel, require_peer_access

LossCallback = Callable[[Tensor, Batch], None]
EvaluationCallback = Callable[[Tensor, Tensor, Batch], None]
ForwardBackward = Callable[[Iterable[Batch], Tensor, LossCallback], None]


class ParallelModel:
    """The mesh of a configuration, and what this rank holds of the model. Collective."""

    def __init__(self, config: Config, world: World) -> None:
        context_plan = config.context_plan()
        self.device = world.device
        self.mesh = Mesh(
            world.device.type,
            config.parallelism.degrees(world.size),
            rank=world.rank,
            ulysses_degree=context_plan.ulysses_degree if context_plan.resolved_method == "hybrid" else None,
            timeout=timedelta(minutes=config.distributed.start_timeout_minutes),
        )
        self.kernel = choose_attention_kernel(config, world.device)
        if config.parallelism.async_tp:
            require_peer_access(world.device)
            tensor_parallel.enable_async_tp(self.mesh.tp_mesh)
        self.context_parallel = build_context_parallel(config, self.mesh, self.kernel) if context_plan.cp > 1 else None
        """Where ranks share rows."""
        self.sequence_shard: SequenceShard = self.context_parallel or FullSequence(context_plan.seq_len_divisor)
        """Which tokens of a row are this rank's."""
        self._residual_options: Any = {"shared_by": context_plan.tp, "dtype": getattr(torch, config.training.dtype)}
        self._is_compiled = config.training.compile
        self.pipeline_plan = config.pipeline_plan(world.size)
        build_stage = partial(
            build_model,
            config,
            self.mesh,
            world.device,
            core=self.context_parallel,
            kernel=self.kernel,
            host=build_host_pool(config, world, self.pipeline_plan, rank=self.mesh.coordinate["pp"]),
        )
        self.stage_modules = {
            stage: build_stage(self.pipeline_plan.stage_module(stage))
            for stage in self.pipeline_plan.stages_of(self.mesh.coordinate["pp"])
        }
        """What this rank holds of the model, by stage of the pipeline; one that is not cut has one."""

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], on_losses: EvaluationCallback) -> None:
        """Forward only, of rows of any length. Where the last stage is, `record` gets of each batch the losses [B, S],
        and as [B, S] 1 where the target was the most likely token, else 0.

        All ranks hand in as many batches; those of a pipeline the same.
        """
        with self._evaluation_mode():
            for batch in batches:
                device_batch = batch.to(self.device)
                output_BS2 = pipeline_forward(
                    self.stage_modules, self.pipeline_plan, self.mesh.pp_group, device_batch, **self._residual_options
                )
                if output_BS2 is not None:
                    losses_BS, hits_BS = output_BS2.unbind(-1)
                    on_losses(losses_BS, hits_BS, device_batch)

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        stage_modules = [*self.stage_modules.values()]
        heads = [part.head for part in stage_modules if part.head is not None]
        hooks = [part.block_boundary_hook for part in stage_modules]
        for part in stage_modules:
            part.block_boundary_hook = identity  # It is told how far an update is.
        for head in heads:
            head.reports_correct = True
        try:
            # Rows of another length would be one more graph, or make those of training slower.
            with torch.compiler.set_stance("force_eager") if self._is_compiled else nullcontext():
                yield
        finally:
            for head in heads:
                head.reports_correct = False
            for part, hook in zip(stage_modules, hooks, strict=True):
                part.block_boundary_hook = hook


def build_forward_backward(config: Config, parallel_model: ParallelModel) -> ForwardBackward:
    """How the micro-batches of an update go through the model, forward and backward."""
    if parallel_model.pipeline_plan.pp == 1:
        return partial(forward_backward, parallel_model.stage_modules[0])
    context_plan, training = config.context_plan(), config.training
    local_tokens = context_plan.padded_length(training.seq_len) // (context_plan.cp * context_plan.tp)
    shape, dtype = (training.micro_batch_size, local_tokens, config.model.build().dim), getattr(torch, training.dtype)
    return Pipeline(
        parallel_model.stage_modules,
        parallel_model.pipeline_plan,
        parallel_model.mesh.pp_group,
        device=parallel_model.device,
        shape=shape,
        dtype=dtype,
    ).run


def forward_backward(
    model: Transformer, batches: Iterable[Batch], num_targets: Tensor, on_losses: Callable[[Tensor, Batch], None]
) -> None:
    """Forward and backward of the sum of all losses over `targets`; `record` gets each batch's losses."""
    for batch in batches:
        losses_BS = model(batch)
        (losses_BS.sum() / num_targets).backward()
        on_losses(losses_BS.detach(), batch)
        del losses_BS  # Its graph would live through the next forward pass.


def build_context_parallel(config: Config, mesh: Mesh, kernel: str) -> ContextParallel:
    """What the plan of the configuration makes of the mesh. Collective."""
    plan = config.context_plan()
    return ContextParallel(
        mesh.cp_mesh,
        method=plan.resolved_method,
        layout=plan.resolved_layout,
        outer_method=plan.rotate_method if plan.resolved_method == "hybrid" and plan.rotate_method else "auto",
        heads=plan.heads,
        kv_heads=plan.kv_heads,
        head_dim=plan.head_dim,
        reduce_dtype=getattr(torch, config.parallelism.cp_reduce_dtype),
        kernel=kernel,
    )


def build_host_pool(config: Config, world: World, plan: PipelinePlan, *, rank: int) -> HostActivationPool | None:
    """What this rank has of its node's memory for what blocks keep; None where they keep it on the device."""
    memory = config.memory
    if memory.offload == "none":
        return None
    blocks = sum(-(-plan.blocks_per_stage[stage] // memory.blocks_per_checkpoint) for stage in plan.stages_of(rank))
    budget = None
    if memory.host_budget_gib is not None:
        budget = int(memory.host_budget_gib * GIB) // max(1, world.size // world.num_nodes)
    return HostActivationPool(max_inputs=blocks * plan.max_in_flight, budget=budget)


def build_recompute_config(config: Config, host_pool: HostActivationPool | None) -> RecomputeConfig:
    """What blocks keep between their passes."""
    memory = config.memory
    if memory.recompute == "auto":
        raise ValueError('memory.recompute = "auto" is to be settled before a model is built')
    ops = compile_tile_ops() if config.training.compile else TileOps()
    tile_bytes = None if memory.mlp_tile_mib is None else memory.mlp_tile_mib << 20
    return RecomputeConfig(
        policy=memory.recompute,
        host_pool=host_pool,
        offload_attention=memory.offload == "inputs_and_attention",
        blocks_per_checkpoint=memory.blocks_per_checkpoint,
        tiling=Tiling(memory.head_groups, tile_bytes, ops),
        reshard_after_forward=reshard_after_forward(config),
    )


def reshard_after_forward(config: Config) -> bool:
    # A pipeline would gather the weights again for each micro-batch.
    return config.parallelism.reshard_after_forward and config.parallelism.pp == 1


def build_model(
    config: Config,
    mesh: Mesh,
    device: torch.device,
    part: StageSpec | None = None,
    *,
    core: ContextParallel | None = None,
    kernel: str = "auto",
    host: HostActivationPool | None = None,
) -> Transformer:
    """The model of this run, or a part of it, spread over the mesh, with its initial weights if they are drawn."""
    training = config.training
    compute_dtype = getattr(torch, training.dtype)
    stored_dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
    reduce_dtype = getattr(torch, training.reduce_dtype) if compute_dtype == torch.bfloat16 else stored_dtype
    cpu_offload = config.memory.optimizer_placement == "host"
    with torch.device("meta"):
        model_config, chunk = config.model.build(), config.memory.loss_chunk_mib
        model = Transformer(model_config, stage=part, seq_len=training.seq_len, loss_chunk_mib=chunk).to(stored_dtype)
    parallelize(
        model,
        mesh,
        core=core,
        kernel=kernel,
        sequence_parallel=config.parallelism.sequence_parallel,
        loss_parallel=config.parallelism.loss_parallel,
        recompute_config=build_recompute_config(config, host),
        compiled=training.compile,
        param_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=reshard_after_forward(config),
        cpu_offload=cpu_offload,
    )
    seed = training.seed if config.checkpoint.initial_load_path is None else None
    initialize(model, seed=seed, device=torch.device("cpu") if cpu_offload else device)
    return model
