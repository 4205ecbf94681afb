"""Applies every parallelism to a model, in the only valid order: context, tensor, recomputation, compile, FSDP."""

from __future__ import annotations

from typing import Any

import torch

from models.attention import Attention
from models.attention_core import LocalAttentionCore
from models.transformer import Transformer
from parallelisms import activation_checkpoint, expert_parallel, fsdp, tensor_parallel
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.context.context_parallel import ContextParallel
from parallelisms.mesh.mesh import Mesh


def parallelize(
    model: Transformer,
    mesh: Mesh,
    *,
    core: ContextParallel | None = None,
    kernel: str = "auto",
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
    recompute_config: RecomputeConfig,
    compiled: bool = False,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    cpu_offload: bool = False,
) -> None:
    """Changes the model in place; its parameters may still be on the meta device."""
    set_attention_core(model, core, kernel=kernel)
    tensor_parallel.apply(model, mesh.tp_mesh, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    if model.config.has_experts:
        expert_parallel.apply(model, mesh, sequence_parallel=sequence_parallel)
    activation_checkpoint.apply(model, recompute_config)
    if compiled and recompute_config.policy == "none":  # Recomputed blocks compile their tile operations.
        for block in model.transformer_blocks():
            block.compile(fullgraph=block.kind.feed_forward != "moe")  # The host waits for the counts of experts.
    if compiled:
        model.compile_pieces(recompute_config.tiling.compile)
    stored_dtype = next(model.parameters()).dtype
    if mesh.fsdp_mesh.size() == 1 and param_dtype == stored_dtype and not cpu_offload:
        return  # Nothing to shard, cast or offload.
    fsdp.apply(
        model,
        mesh.fsdp_mesh,
        expert_mesh=None if mesh.ep_group is None else mesh.expert_fsdp_mesh,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=reshard_after_forward,
        cpu_offload=cpu_offload,
    )


def set_attention_core(model: Transformer, core: ContextParallel | None, *, kernel: str) -> None:
    """Sets the attention core of every block, with its window and soft cap; None: full sequences on each rank.

    Raises ValueError for a mixer that is not attention: no context-parallel method knows what it needs of other ranks.
    """
    for block in model.transformer_blocks():
        if isinstance(block.attention, Attention):
            options: Any = {"window": block.kind.window, "softcap": block.kind.softcap}
            block.attention.core = (
                LocalAttentionCore(kernel, **options) if core is None else core.with_options(**options)
            )
        elif core is not None:
            raise ValueError(f'mixer "{block.kind.mixer}" has no context parallelism: parallelism.cp must be 1')
