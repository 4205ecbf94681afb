"""The recipe that spreads a model over a mesh, in its one order: context -> recompute -> compile -> shard."""

from __future__ import annotations

import torch

from models.transformer import Transformer
from parallelisms import context, fsdp, recompute
from parallelisms.context import ContextParallel
from parallelisms.mesh import Mesh


def parallelize(
    model: Transformer,
    mesh: Mesh,
    *,
    core: ContextParallel | None = None,
    kernel: str = "auto",
    policy: recompute.Policy,
    compiled: bool,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
) -> None:
    """Changes the model in place; its parameters may still be on the meta device."""
    context.install(model, core, kernel=kernel)
    recompute.apply(model, policy=policy)
    if compiled:
        for block in model.layers():
            block.compile(fullgraph=True)
    fsdp.apply(
        model,
        mesh.fsdp,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=reshard_after_forward,
    )
