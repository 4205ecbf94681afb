"""Initial weights: the same seed gives bitwise the same weights on every mesh, and each rank makes only its own rows.

A parameter is filled in blocks of rows, each from its own generator, seeded by (seed, name, block). Which rank holds
a row has no part in it. Values are drawn on the host in float32, so they do not depend on device or dtype either.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, cast

import torch
from torch import Tensor, nn

from models.transformer import Transformer
from parallelisms.collectives import to_local

BLOCK_ELEMENTS = 1 << 16


def initialize(model: Transformer, *, seed: int | None, device: torch.device) -> None:
    """Gives a model built on the meta device its storage and initial weights: without a seed NaN, for who loads them."""
    materialize(model, device)
    for name, parameter in model.named_parameters():
        std = model.init_std(name)
        with torch.no_grad():
            if seed is None:
                parameter.fill_(torch.nan)
            elif std is None:
                parameter.fill_(1.0)
            else:
                rows, columns = local_ranges(parameter)
                values = normal_rows(
                    parameter.shape, std=std, key=f"{seed}/{name}", first_row=rows.start, end_row=rows.stop
                )
                to_local(parameter).copy_(values[:, columns.start : columns.stop])


def materialize(model: nn.Module, device: torch.device) -> None:
    """What `nn.Module.to_empty` does, but a parameter that two modules share stays one."""
    materialized: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in materialized:
                materialized[parameter] = nn.Parameter(torch.empty_like(parameter, device=device))
            setattr(module, name, materialized[parameter])


def normal_rows(shape: torch.Size, *, std: float, key: str, first_row: int, end_row: int) -> Tensor:
    """Rows [first, last) of the normal matrix of this shape that `key` names, float32 on the host."""
    rows, width = shape
    rows_per_block = max(1, BLOCK_ELEMENTS // width)
    blocks = range(first_row // rows_per_block, -(-end_row // rows_per_block))
    out = torch.empty(end_row - first_row, width)
    for block in blocks:
        start = block * rows_per_block
        values = torch.empty(min(rows_per_block, rows - start), width)
        digest = blake2b(f"{key}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        values.normal_(std=std, generator=generator)
        low, high = max(first_row, start), min(end_row, start + values.shape[0])
        out[low - first_row : high - first_row] = values[low - start : high - start]
    return out


def local_ranges(parameter: Tensor) -> list[range]:
    """The rows, and columns, that this rank holds of a parameter that is cut along tp first and then by FSDP."""
    ranges = [range(size) for size in parameter.shape]
    placements = getattr(parameter, "placements", ())
    # The inner axes of the mesh cut first, the outer ones cut what is left; pieces are those of torch.chunk.
    for axis, placement in reversed(list(enumerate(placements))):
        shard_dim: int | None = getattr(placement, "dim", None)
        if shard_dim is not None:
            mesh = cast(Any, parameter).device_mesh
            shard_size = -(-len(ranges[shard_dim]) // mesh.size(axis))
            first = mesh.get_local_rank(axis) * shard_size
            ranges[shard_dim] = ranges[shard_dim][first : first + shard_size]
    return ranges
