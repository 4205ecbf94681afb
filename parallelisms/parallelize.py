"""The recipe that spreads a model over a mesh, in its one order: context -> tensor -> recompute -> compile -> shard."""

from __future__ import annotations

import torch

from models.transformer import Transformer
from parallelisms import context, fsdp, offload, recompute, tensor
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
    policy: recompute.Policy,
    mlp_tile_mib: int | None = None,
    compiled: bool,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    keep: offload.What = "none",
    host: offload.HostMemory | None = None,
    state_on_host: bool = False,
) -> None:
    """Changes the model in place; its parameters may still be on the meta device."""
    context.install(model, core, kernel=kernel)
    tensor.apply(model, mesh.tp, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    if host is None:
        recompute.apply(model, policy=policy)
    else:
        offload.apply(model, host=host, what=keep, keep_attention=policy == "keep_attention")
    recompute.apply_tiles(model, mib=mlp_tile_mib)
    if compiled:
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
