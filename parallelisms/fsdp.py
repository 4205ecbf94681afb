"""FSDP2 and HSDP: shard parameters, gradients and optimizer state (Zhao et al., 2023;
torch.distributed.fsdp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models.transformer import Transformer
from parallelisms.mesh.collectives import to_local


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """The dtypes of gathered weights and of summed gradients, and where shards of weights are
    kept.
    """

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    reshard_after_forward: bool
    """Whether a block's gathered weights are freed until its backward pass."""
    cpu_offload: bool = False
    """Whether sharded weights, gradients and optimizer state are kept in host memory."""


def _units(model: Transformer, config: FSDPConfig) -> list[tuple[nn.Module, bool]]:
    """(module, whether it reshards after forward) of each FSDP unit inside the root."""
    reshard = config.reshard_after_forward
    units: list[tuple[nn.Module, bool]] = [
        (block, reshard) for block in model.transformer_blocks()
    ]
    if not model.config.tie_embeddings and model.embed is not None:
        units.append((model.embed, reshard))
    if not model.config.tie_embeddings and model.head is not None:
        # The head runs last in forward and first in backward: resharding it would only repeat the
        # all-gather.
        units.append((model.head, False))
    return units


def apply(
    model: Transformer,
    mesh: DeviceMesh,
    config: FSDPConfig,
    *,
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shards the model over a 1-D mesh, or over the second dimension of a 2-D one whose first
    holds replicas.

    FSDP units are the embedding, each block and the head; tied weights belong to the root. With
    expert parallelism the experts of a block are a unit of their own, sharded over `expert_mesh`.
    Gradients are *summed*: the loss is already divided by the global number of targets.
    """
    # A slow import that a single process does not need.
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    # Casting inputs would round the RoPE table.
    precision = MixedPrecisionPolicy(
        param_dtype=config.param_dtype, reduce_dtype=config.reduce_dtype, cast_forward_inputs=False
    )
    offload_policy = (
        CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if config.cpu_offload
        else OffloadPolicy()
    )
    options: dict[str, Any] = {"mp_policy": precision, "offload_policy": offload_policy}
    # Inner units first: a block's unit then leaves out the experts, which have a mesh of their
    # own.
    for layer in [] if expert_mesh is None else model.expert_layers():
        experts = layer.get_submodule("experts")
        place = partial(_expert_placement, num_shards=cast(DeviceMesh, expert_mesh).size(-1))
        fully_shard(
            experts,
            mesh=expert_mesh,
            shard_placement_fn=place,
            reshard_after_forward=config.reshard_after_forward,
            **options,
        )
    for unit, reshard in [*_units(model, config), (model, False)]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, **options)
    # The backward pass of an embedding does not read its weight.
    if isinstance(model.embed, FSDPModule):
        model.embed.set_unshard_in_backward(False)
    for unit in fsdp_modules(model):
        # Also without a factor, by which it would divide in a pass of its own.
        if mesh.size() == 1:
            unit.set_custom_reduce_scatter(OneBuffer())
        else:
            unit.set_gradient_divide_factor(1.0)
        # Without it the divide factor makes FSDP2 use PREMUL_SUM, which gloo lacks.
        unit.set_force_sum_reduction_for_comms(True)


class OneBuffer:
    """The reduce-scatter of a single rank, for which FSDP2 asks for a buffer and then for that of
    the result, to copy one to the other: both are the same.
    """

    def __init__(self) -> None:
        self._input: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        result = self._input
        self._input = None
        if result is None:
            result = self._input = torch.empty(*size, dtype=dtype, device=device)
        elif device.type == "cuda":
            # FSDP2 adds it to earlier gradients on the stream of this call.
            result.record_stream(torch.cuda.current_stream(device))
        return result

    def __call__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("a single rank reduces nothing")


def _expert_placement(parameter: nn.Parameter, *, num_shards: int) -> Any:
    """Whole experts if they are enough, else parts of each, along a dimension that nothing else
    shards.
    """
    from torch.distributed.tensor import Shard

    sharded = {
        placement.dim for placement in cast(Any, parameter).placements if placement.is_shard()
    }
    sizes = to_local(parameter).shape
    # FSDP2 pads shards along dimension 0 only, so another dimension must divide evenly.
    dims = [0, *(dim for dim in range(len(sizes)) if dim not in sharded)]
    return Shard(next((dim for dim in dims if sizes[dim] % num_shards == 0), 0))


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The FSDP units, outer before inner."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def set_gradient_reduction(model: nn.Module, *, reduces: bool) -> None:
    """Whether the next backward pass reduces the gradients over ranks.

    The weights stay gathered until `reshard`: gathering them ahead follows the order of all
    forward passes, and would gather again what the pass has finished with.
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(reduces)
        model.set_is_last_backward(reduces)
        model.set_reshard_after_backward(False)


def unshard(model: nn.Module) -> None:
    """Gathers the weights."""
    for unit in fsdp_modules(model):
        unit.unshard()


def reshard(model: nn.Module) -> None:
    """Frees the gathered weights."""
    for unit in fsdp_modules(model):
        unit.reshard()
