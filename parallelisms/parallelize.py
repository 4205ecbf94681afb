"""Applies every parallelism to a model, in the only valid order: context, tensor, recomputation,
compile, FSDP.
"""

from __future__ import annotations

from models.attention import Attention
from models.attention_core import LocalAttentionCore
from models.transformer import Transformer
from parallelisms import activation_checkpoint, expert_parallel, fsdp, tensor_parallel
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.context.context_parallel import ContextParallel
from parallelisms.fsdp import FSDPConfig
from parallelisms.mesh.mesh import Mesh


def parallelize(
    model: Transformer,
    mesh: Mesh,
    *,
    core: LocalAttentionCore | ContextParallel,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
    recompute_config: RecomputeConfig,
    fsdp_config: FSDPConfig,
    compiled: bool = False,
) -> None:
    """Changes the model in place; its parameters may still be on the meta device."""
    set_attention_core(model, core)
    # Tensor and expert parallelism make DTensors, which FSDP shards further. Recomputation calls
    # their collectives, and FSDP wraps what is compiled.
    tensor_parallel.apply(
        model, mesh.tp_mesh, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel
    )
    if model.config.has_experts:
        expert_parallel.apply(model, mesh, sequence_parallel=sequence_parallel)
    activation_checkpoint.apply(model, recompute_config)
    # Recomputed blocks compile their tile operations.
    if compiled and recompute_config.policy == "none":
        model.compile_blocks()
    if compiled:
        model.compile_pieces(recompute_config.tiling.compile)
    stored_dtype = next(model.parameters()).dtype
    if (
        mesh.fsdp_mesh.size() == 1
        and fsdp_config.param_dtype == stored_dtype
        and not fsdp_config.cpu_offload
    ):
        return  # Nothing to shard, cast or offload.
    expert_mesh = None if mesh.ep_group is None else mesh.expert_fsdp_mesh
    fsdp.apply(model, mesh.fsdp_mesh, fsdp_config, expert_mesh=expert_mesh)


def set_attention_core(model: Transformer, core: LocalAttentionCore | ContextParallel) -> None:
    """Sets the attention core of every block, with the block's scores.

    Raises ValueError for a mixer that is not attention: no context-parallel method knows what it
    needs of other ranks.
    """
    is_local = isinstance(core, LocalAttentionCore)
    for block in model.transformer_blocks():
        if isinstance(block.attention, Attention):
            block.attention.core = core.with_scores(block.kind.scores)
        elif not is_local:
            raise ValueError(
                f'mixer "{block.kind.mixer}" has no context parallelism: parallelism.cp must be 1'
            )
