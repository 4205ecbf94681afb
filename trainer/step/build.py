"""Builds this rank's part of the model from the configuration, and runs batches forward through
it.

Shape suffixes: B sequences, S tokens on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from math import prod

import torch
from torch import Tensor

from models.attention import Attention
from models.attention_core import LocalAttentionCore
from models.batch import Batch
from models.config import StageSpec
from models.linear import identity
from models.tiling import eager
from models.transformer import Transformer
from parallelisms import tensor_parallel
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.activation_offload import HostActivationPool
from parallelisms.block_recompute import Tiling, compiler
from parallelisms.context.context_parallel import ContextParallel
from parallelisms.fsdp import FSDPConfig
from parallelisms.gradient_check import verify_gradients
from parallelisms.init_weights import initialize
from parallelisms.mesh.mesh import Mesh
from parallelisms.mesh.pipeline_plan import PipelinePlan
from parallelisms.parallelize import parallelize
from parallelisms.pipeline import Pipeline, pipeline_forward
from trainer.config import extension
from trainer.config.job_config import Config
from trainer.data.sequences import FullSequence, SequenceShard
from trainer.errors import EXIT_BAD_CONFIG, RankFailedError
from trainer.hardware.device import choose_attention_kernel, require_peer_access
from trainer.hardware.host import GIB
from trainer.step.process_group import World

EvaluationCallback = Callable[[Tensor, Tensor, Batch], None]
"""Receives the losses [B, S] of a batch, and 1 where the target was the most likely token, else
0.
"""


class ParallelModel:
    """The mesh, and this rank's stages of the model, parallelized over it. Collective.

    `kernel`: of attention, if it was verified elsewhere; None: the configured one, verified here.
    """

    def __init__(self, config: Config, world: World, *, kernel: str | None = None) -> None:
        context_plan = config.context_plan()
        self._config = config
        self.device = world.device
        self._is_compiled = compiles(config, world.device)
        self.mesh = Mesh(
            world.device.type,
            config.parallelism.degrees(world.size),
            rank=world.rank,
            ulysses_degree=context_plan.hybrid_ulysses_degree,
            ep=config.parallelism.ep,
            timeout=timedelta(minutes=config.distributed.start_timeout_minutes),
        )
        self.kernel = kernel or choose_attention_kernel(config, world.device)
        if config.parallelism.async_tp:
            require_peer_access(world.device)
            tensor_parallel.enable_async_tp(self.mesh.tp_mesh)
        self.context_parallel = (
            build_context_parallel(config, self.mesh, self.kernel) if context_plan.cp > 1 else None
        )
        self.sequence_shard: SequenceShard = self.context_parallel or FullSequence(
            context_plan.seq_len_divisor
        )
        """Selects this rank's tokens of a sequence."""
        self.pipeline_plan = config.pipeline_plan(world.size)
        pp_rank = self.mesh.coordinate["pp"]
        self._host_pool = build_host_pool(config, world, self.pipeline_plan, rank=pp_rank)
        self.stage_modules = {
            stage: self._build_stage(self.pipeline_plan.stage_module(stage))
            for stage in self.pipeline_plan.stages_of(pp_rank)
        }
        """The model by pipeline stage; without a pipeline, stage 0 is the whole model."""

    def pin_input_memory(self) -> None:
        """Starts to pin the host memory that offloaded block inputs take in training.

        An added layer that is not in pieces saves its input by torch's means, on the device.
        """
        kinds = self._config.model.build().layer_kinds
        in_pieces = all(kind.in_pieces for kind in kinds)
        if self._host_pool is not None and self.device.type == "cuda" and in_pieces:
            self._host_pool.reserve_inputs(residual_bytes(self._config), self.device)

    def _build_stage(self, stage: StageSpec | None) -> Transformer:
        """A pipeline stage, parallelized over the mesh.

        Weights to be loaded from a file are NaN.
        """
        config = self._config
        training = self._config.training
        compute_dtype = _compute_dtype(config)
        # Weights are stored in float32 as master weights; FSDP casts them to the compute dtype.
        stored_dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
        recompute_config = build_recompute_config(
            config, self._host_pool, compiled=self._is_compiled
        )
        cpu_offload = config.memory.optimizer_placement == "host"
        # Built without memory and sharded first: no device need hold the whole model.
        with torch.device("meta"):
            model_config = config.model.build()
            chunk_mib = config.memory.loss_chunk_bytes >> 20
            model = Transformer(
                model_config, stage=stage, seq_len=training.seq_len, loss_chunk_mib=chunk_mib
            )
            model.cast(stored_dtype)
        if model.head is not None:
            model.head.loss = extension.added_loss(training.loss)
        fsdp_config = FSDPConfig(
            param_dtype=compute_dtype,
            # Gradients in float32 or float64 are reduced as they are; only bfloat16 leaves a
            # choice.
            reduce_dtype=getattr(torch, training.reduce_dtype)
            if compute_dtype == torch.bfloat16
            else stored_dtype,
            reshard_after_forward=recompute_config.reshard_after_forward,
            cpu_offload=cpu_offload,
        )
        parallelize(
            model,
            self.mesh,
            core=self.context_parallel or LocalAttentionCore(self.kernel),
            sequence_parallel=config.parallelism.sequence_parallel,
            loss_parallel=config.parallelism.loss_parallel,
            recompute_config=recompute_config,
            fsdp_config=fsdp_config,
            compiled=self._is_compiled,
        )
        # Without a seed weights are NaN, so that one that no file provides is noticed.
        seed = training.seed if config.checkpoint.initial_load_path is None else None
        initialize(model, seed=seed, device=torch.device("cpu") if cpu_offload else self.device)
        return model

    def plan_attention(self, boundaries_BD: Tensor) -> tuple[object, ...]:
        """Precomputes the host-side attention plans of the layers for sequences with these
        boundaries.
        """
        blocks = [
            block
            for module in self.stage_modules.values()
            for block in module.transformer_blocks()
        ]
        # Layers with the same score pattern, such as one window, share a plan: one of each is
        # asked.
        by_scores = {
            block.kind.scores: block.attention
            for block in blocks
            if isinstance(block.attention, Attention)
        }
        return tuple(attention.core.prepare(boundaries_BD) for attention in by_scores.values())

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], on_losses: EvaluationCallback) -> None:
        """Runs batches forward only; sequences may have any length. The rank of the last stage
        calls `on_losses`.

        Every rank must pass the same number of batches, and all ranks of a pipeline the same
        batches.
        """
        tp = self._config.context_plan().tp
        dtype = getattr(torch, self._config.training.dtype)
        with self._evaluation_mode():
            for batch in (each.to(self.device) for each in batches):
                output_BS2 = pipeline_forward(
                    self.stage_modules,
                    self.pipeline_plan,
                    self.mesh.pp_group,
                    batch,
                    tp=tp,
                    dtype=dtype,
                )
                if output_BS2 is not None:
                    losses_BS, hits_BS = output_BS2.unbind(-1)
                    on_losses(losses_BS, hits_BS, batch)

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        stage_modules = [*self.stage_modules.values()]
        # Stage modules are the trainer's own: what evaluation changes is put back, also after an
        # error.
        heads = [module.head for module in stage_modules if module.head is not None]
        hooks = [module.block_boundary_hook for module in stage_modules]
        for module in stage_modules:
            # It tracks the progress of a training step.
            module.block_boundary_hook = identity
        for head in heads:
            head.reports_correct = True
        try:
            # Other sequence lengths would add graphs, or turn those of training into slower
            # dynamic ones.
            with torch.compiler.set_stance("force_eager") if self._is_compiled else nullcontext():
                yield
        finally:
            for head in heads:
                head.reports_correct = False
            for module, hook in zip(stage_modules, hooks, strict=True):
                module.block_boundary_hook = hook


def build_pipeline(config: Config, parallel_model: ParallelModel) -> Pipeline | None:
    """Builds the pipeline of this rank's stages; None without pipeline parallelism."""
    if parallel_model.pipeline_plan.pp == 1:
        return None
    return Pipeline(
        parallel_model.stage_modules,
        parallel_model.pipeline_plan,
        parallel_model.mesh.pp_group,
        device=parallel_model.device,
        shape=residual_shape(config),
        dtype=_compute_dtype(config),
    )


def residual_shape(config: Config) -> tuple[int, int, int]:
    """[B, S, E] of the residual stream of a micro-batch on a rank: cp and sequence parallelism split
    its tokens.
    """
    context_plan = config.context_plan()
    local_tokens = context_plan.padded_length(config.training.seq_len) // (
        context_plan.cp * context_plan.tp
    )
    return config.training.micro_batch_size, local_tokens, config.model.build().dim


def residual_bytes(config: Config) -> int:
    """Bytes of the residual stream of a micro-batch on a rank."""
    return prod(residual_shape(config)) * _compute_dtype(config).itemsize


def _compute_dtype(config: Config) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, config.training.dtype)
    return dtype


def build_context_parallel(config: Config, mesh: Mesh, kernel: str) -> ContextParallel:
    """Context parallelism as planned by the configuration. Collective."""
    reduce_dtype = getattr(torch, config.parallelism.cp_reduce_dtype)
    return ContextParallel(
        mesh.cp_mesh, config.context_plan(), reduce_dtype=reduce_dtype, kernel=kernel
    )


def build_host_pool(
    config: Config, world: World, plan: PipelinePlan, *, rank: int
) -> HostActivationPool | None:
    """The host memory of this rank for activation offload; None without offload."""
    memory = config.memory
    if memory.offload == "none":
        return None
    # The pool holds one saved input per checkpointed group of blocks and micro-batch in flight.
    blocks = sum(
        -(-plan.blocks_per_stage[stage] // memory.blocks_per_checkpoint)
        for stage in plan.stages_of(rank)
    )
    budget = None
    if memory.host_budget_gib is not None:
        # The key is a budget of the node, which its ranks share.
        budget = int(memory.host_budget_gib * GIB) // max(1, world.size // world.num_nodes)
    return HostActivationPool(max_inputs=blocks * plan.max_in_flight, budget=budget)


def compiles(config: Config, device: torch.device) -> bool:
    """Whether blocks are compiled on a device."""
    return config.training.compile is True or (device.type == "cuda" and config.compiles_on_gpu)


def require_right_gradients(config: Config) -> None:
    """Checks the gradients of the model's blocks under recomputation and compilation.

    Raises RankFailedError if either changes them.
    """
    options = build_recompute_config(config, None, compiled=config.training.compile is True)
    try:
        verify_gradients(config.model.build(), options.policy, options.tiling)
    except Exception as error:
        culprit = extension.describe_error(error)
        if culprit is None and not isinstance(error, (ValueError, RuntimeError)):
            raise
        given = f'memory.recompute = "{options.policy}"'
        if config.training.compile is True:
            given += ", training.compile = true"
        if options.tiling.head_groups > 1:
            given += f", memory.head_groups = {options.tiling.head_groups}"
        raise RankFailedError(
            EXIT_BAD_CONFIG, f"{given} cannot be used here: {culprit or error}"
        ) from error


def build_recompute_config(
    config: Config, host_pool: HostActivationPool | None, *, compiled: bool
) -> RecomputeConfig:
    memory = config.memory
    if memory.recompute == "auto":
        raise ValueError('memory.recompute = "auto" must be resolved before the model is built')
    compile_piece = compiler() if compiled else eager
    tile_bytes = None if memory.mlp_tile_mib is None else memory.mlp_tile_mib << 20
    return RecomputeConfig(
        policy=memory.recompute,
        host_pool=host_pool,
        offload_attention=memory.offload == "inputs_and_attention",
        blocks_per_checkpoint=memory.blocks_per_checkpoint,
        tiling=Tiling(memory.head_groups, tile_bytes, compile_piece),
        # A pipeline would repeat the all-gather for every micro-batch.
        reshard_after_forward=config.parallelism.reshard_after_forward
        and config.parallelism.pp == 1,
    )
