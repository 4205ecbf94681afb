"""FSDP2 and HSDP: parameters, gradients and optimizer state in shards (Zhao et al., 2023; torch.distributed.fsdp)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from models.transformer import Transformer


def apply(
    model: Transformer,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    cpu_offload: bool = False,
) -> None:
    """Shards the model over a 1-D mesh, or over the second axis of a 2-D one with replicas along the first.

    Units are the embedding, each block, and the head; a tied head shares the embedding's. Gradients are *summed*:
    the loss is already divided by the global number of targets. With `offload` shards lie in host memory, gradients
    and optimizer state too, and each unit is fetched when it runs.
    """
    # Imported here: it takes as long as the rest of torch, and one process does without.
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # Inputs stay as they are: casting would round the rotation table, and its float64 angles for nothing.
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    offload_policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    units: list[tuple[nn.Module, bool]] = [(block, reshard_after_forward) for block in model.layers()]
    if not model.config.tie_embeddings:
        embedding_and_head = ((model.embed, reshard_after_forward), (model.head, False))
        # The head is the last to run forward and the first backward: resharding it would only gather it twice.
        units += [(unit, reshard) for unit, reshard in embedding_and_head if unit is not None]
    for unit, reshard in [*units, (model, False)]:
        fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=offload_policy, reshard_after_forward=reshard)
    if isinstance(model.embed, FSDPModule):
        model.embed.set_unshard_in_backward(False)
    for unit in fsdp_modules(model):
        unit.set_gradient_divide_factor(1.0)
        # gloo cannot multiply while it sums (PREMUL_SUM), which a divide factor alone would ask for.
        unit.set_force_sum_reduction_for_comms(True)


def fsdp_modules(model: nn.Module) -> list[Any]:
    """What is gathered at once, outer ones before those inside them."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]
