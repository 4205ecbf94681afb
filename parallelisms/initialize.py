"""Initial weights: the same seed gives bitwise the same weights on every mesh, and each rank makes only its own rows.

A parameter is filled in blocks of rows, each from its own generator, seeded by (seed, name, block). Which rank holds
a row has no part in it. Values are drawn on the host in float32, so they do not depend on device or dtype either.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor, nn

from models.transformer import Transformer

BLOCK_ELEMENTS = 1 << 16


def initialize(model: Transformer, *, seed: int, device: torch.device) -> None:
    """Gives a model built on the meta device its storage and initial weights."""
    _materialise(model, device)
    for name, parameter in model.named_parameters():
        std = model.init_std(name)
        with torch.no_grad():
            if std is None:
                parameter.fill_(1.0)
            else:
                shard = _local(parameter)
                first, last = _local_rows(parameter)
                shard.copy_(normal_rows(parameter.shape, std=std, key=f"{seed}/{name}", first=first, last=last))


def _materialise(model: nn.Module, device: torch.device) -> None:
    """What `nn.Module.to_empty` does, but a parameter that two modules share stays one."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in made:
                made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device))
            setattr(module, name, made[parameter])


def normal_rows(shape: torch.Size, *, std: float, key: str, first: int, last: int) -> Tensor:
    """Rows [first, last) of the normal matrix of this shape that `key` names, float32 on the host."""
    rows, width = shape
    height = max(1, BLOCK_ELEMENTS // width)
    blocks = range(first // height, -(-last // height))
    out = torch.empty(last - first, width)
    for block in blocks:
        start = block * height
        values = torch.empty(min(height, rows - start), width)
        digest = blake2b(f"{key}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        values.normal_(std=std, generator=generator)
        low, high = max(first, start), min(last, start + values.shape[0])
        out[low - first : high - first] = values[low - start : high - start]
    return out


def _local(parameter: Tensor) -> Tensor:
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()


def _local_rows(parameter: Tensor) -> tuple[int, int]:
    """The rows [first, last) of a parameter that this rank holds."""
    placements = getattr(parameter, "placements", None)
    if placements is None:
        return 0, parameter.shape[0]
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor) or any(place.is_shard() and not place.is_shard(0) for place in placements):
        raise NotImplementedError(f"initial weights of a parameter placed as {placements}")
    indices = torch.arange(parameter.shape[0], device=parameter.to_local().device)
    held = distribute_tensor(indices, parameter.device_mesh, placements, src_data_rank=None).to_local()
    return (int(held[0]), int(held[-1]) + 1) if held.numel() else (0, 0)
