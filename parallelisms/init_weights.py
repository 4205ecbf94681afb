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
from parallelisms.collectives import local

BLOCK_ELEMENTS = 1 << 16


def initialize(model: Transformer, *, seed: int | None, device: torch.device) -> None:
    """Gives a model built on the meta device its storage and initial weights: without a seed NaN, for who loads them."""
    materialise(model, device)
    for name, parameter in model.named_parameters():
        std = model.init_std(name)
        with torch.no_grad():
            if seed is None:
                parameter.fill_(torch.nan)
            elif std is None:
                parameter.fill_(1.0)
            else:
                rows, columns = held(parameter)
                values = normal_rows(parameter.shape, std=std, key=f"{seed}/{name}", first=rows.start, last=rows.stop)
                local(parameter).copy_(values[:, columns.start : columns.stop])


def materialise(model: nn.Module, device: torch.device) -> None:
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


def held(parameter: Tensor) -> list[range]:
    """The rows, and columns, that this rank holds of a parameter that is cut along tp first and then by FSDP."""
    sides = [range(size) for size in parameter.shape]
    placements = getattr(parameter, "placements", ())
    # The inner axes of the mesh cut first, the outer ones cut what is left; pieces are those of torch.chunk.
    for axis, placement in reversed(list(enumerate(placements))):
        cut: int | None = getattr(placement, "dim", None)
        if cut is not None:
            mesh = cast(Any, parameter).device_mesh
            piece = -(-len(sides[cut]) // mesh.size(axis))
            first = mesh.get_local_rank(axis) * piece
            sides[cut] = sides[cut][first : first + piece]
    return sides
