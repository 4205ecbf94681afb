"""The recipe that spreads a model over a mesh, in its one order: context -> tensor -> recompute -> compile -> shard."""

from __future__ import annotations

import torch

from models.transformer import Transformer
from parallelisms import activation_checkpoint, context, fsdp, tensor_parallel
from parallelisms.activation_checkpoint import Recompute
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
    keep: Recompute,
    compiled: bool = False,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    state_on_host: bool = False,
) -> None:
    """Changes the model in place; its parameters may still be on the meta device."""
    context.install(model, core, kernel=kernel)
    tensor_parallel.apply(model, mesh.tp, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    activation_checkpoint.apply(model, keep)
    if compiled and keep.policy == "none":  # Other blocks compile what they compute of a tile.
        for block in model.layers():
            block.compile(fullgraph=True)
    stored = next(model.parameters()).dtype
    if mesh.fsdp.size() == 1 and param_dtype == stored and not state_on_host:
        return  # Nothing to shard, to cast or to fetch.
    fsdp.apply(
        model,
        mesh.fsdp,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=reshard_after_forward,
        offload=state_on_host,
    )
