"""Initial weights: one seed gives bitwise the same weights on every mesh, and each rank draws only
its own rows.

Each block of rows of a parameter has its own generator, seeded by (seed, name, block), whichever
rank holds the rows. Values are drawn on the host in float32, so they do not depend on device or
dtype either.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, cast

import torch
from torch import Tensor, nn

from models.transformer import Transformer
from parallelisms.mesh.collectives import to_local

# Part of the format of a seed: another size would give other weights. Small enough that a rank
# draws few numbers of its neighbours' rows.
BLOCK_ELEMENTS = 1 << 16


def initialize(model: Transformer, *, seed: int | None, device: torch.device) -> None:
    """Allocates a model built on the meta device and draws its weights; seed None fills NaN, for
    weights to be loaded.
    """
    materialize(model, device)
    for name, parameter in model.named_parameters():
        mean, std = model.init_mean_std(name)
        with torch.no_grad():
            if seed is None:
                parameter.fill_(torch.nan)
            elif std == 0:
                parameter.fill_(mean)
            else:
                *experts, rows, columns = local_ranges(parameter)
                keys = (
                    [f"{seed}/{name}/{index}" for index in experts[0]]
                    if experts
                    else [f"{seed}/{name}"]
                )
                local = to_local(parameter)
                for key, matrix in zip(keys, local if experts else [local], strict=True):
                    values = normal_rows(
                        parameter.shape[-2:],
                        std=std,
                        key=key,
                        first_row=rows.start,
                        end_row=rows.stop,
                    )
                    matrix.copy_(values[:, columns.start : columns.stop])
    for name, buffer in model.named_buffers():
        buffer.fill_(model.init_mean_std(name)[0])


def materialize(model: nn.Module, device: torch.device) -> None:
    """`nn.Module.to_empty`, but a parameter that two modules share stays shared."""
    # Buffers have no sharing to preserve; parameters may have it (tied embeddings).
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))
    materialized: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in materialized:
                materialized[parameter] = nn.Parameter(torch.empty_like(parameter, device=device))
            setattr(module, name, materialized[parameter])


def normal_rows(
    shape: torch.Size, *, std: float, key: str, first_row: int, end_row: int
) -> Tensor:
    """Rows [first_row, end_row) of a normal matrix of this shape, determined by `key`: float32 on
    the host.
    """
    rows, width = shape
    rows_per_block = max(1, BLOCK_ELEMENTS // width)
    blocks = range(first_row // rows_per_block, -(-end_row // rows_per_block))
    out = torch.empty(end_row - first_row, width)
    for block in blocks:
        start = block * rows_per_block
        values = torch.empty(min(rows_per_block, rows - start), width)
        digest = blake2b(f"{key}/{block}".encode(), digest_size=8).digest()
        # The shift leaves 63 bits: a seed that fits a signed integer.
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        values.normal_(std=std, generator=generator)
        low = max(first_row, start)
        high = min(end_row, start + values.shape[0])
        out[low - first_row : high - first_row] = values[low - start : high - start]
    return out


def local_ranges(parameter: Tensor) -> list[range]:
    """The index range of each dimension that this rank holds of a parameter sharded by tp first,
    then by FSDP.
    """
    ranges = [range(size) for size in parameter.shape]
    placements = getattr(parameter, "placements", ())
    # Inner mesh dimensions shard first, outer ones shard the result; shards are sized as by
    # torch.chunk.
    for mesh_dim, placement in reversed(list(enumerate(placements))):
        shard_dim: int | None = getattr(placement, "dim", None)
        if shard_dim is not None:
            mesh = cast(Any, parameter).device_mesh
            shard_size = -(-len(ranges[shard_dim]) // mesh.size(mesh_dim))
            first = mesh.get_local_rank(mesh_dim) * shard_size
            ranges[shard_dim] = ranges[shard_dim][first : first + shard_size]
    return ranges
