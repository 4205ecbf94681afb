"""The recipe that spreads a model over a mesh, in its one order: context -> tensor -> recompute -> compile -> shard."""

from __future__ import annotations

import torch

from models.transformer import Transformer
from parallelisms import activation_checkpoint, context, fsdp, tensor_parallel
from parallelisms.activation_checkpoint import RecomputeConfig
from parallelisms.context import ContextParallel
from parallelisms.mesh import Mesh


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
    context.set_attention_core(model, core, kernel=kernel)
    tensor_parallel.apply(model, mesh.tp_mesh, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    activation_checkpoint.apply(model, recompute_config)
    if compiled and recompute_config.policy == "none":  # Other blocks compile what they compute of a tile.
        for block in model.layers():
            block.compile(fullgraph=True)
    stored_dtype = next(model.parameters()).dtype
    if mesh.fsdp_mesh.size() == 1 and param_dtype == stored_dtype and not cpu_offload:
        return  # Nothing to shard, to cast or to fetch.
    fsdp.apply(
        model,
        mesh.fsdp_mesh,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=reshard_after_forward,
        cpu_offload=cpu_offload,
    )
