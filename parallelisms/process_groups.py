"""The process groups of a mesh: their ranks, and the nodes that they span. Imports no torch.

`Mesh` creates its groups from `process_group_ranks`; `parallelisms/topology.py` prints the same ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from parallelisms.parallel_dims import AXES

MAX_SHOWN_GROUPS = 4


def rank_groups(degrees: Mapping[str, int], *axes: str) -> list[range]:
    """The groups of ranks that differ only in `axes`, which must be adjacent; the last mesh dimension varies fastest."""
    stride, size = _stride(degrees, axes[-1]), prod(degrees.values())
    span = stride * prod(degrees[axis] for axis in axes)
    return [range(base + i, base + i + span, stride) for base in range(0, size, span) for i in range(stride)]


def process_group_ranks(degrees: Mapping[str, int], ulysses_degree: int | None = None) -> dict[str, list[range]]:
    """The ranks of every process group by name, in the order in which a mesh creates them.

    `pp` and `tp` carry activations, `fsdp` and `dp_replicate` weights and gradients. Attention has separate groups, so
    that its messages never queue behind FSDP's: `cp`, or for `hybrid` `exchange` (heads, among `ulysses_degree`
    neighbours) and `rotate` (KV). `dp_cp` reduces over a stage's part of the global batch, `loss` also over stages.
    """
    return {name: rank_groups(within, *axes) for name, (within, axes) in _group_axes(degrees, ulysses_degree).items()}


def rank_zero_groups(degrees: Mapping[str, int], ulysses_degree: int | None = None) -> dict[str, range]:
    """Rank 0's group of every name, without listing the thousands of others."""
    first_groups = {}
    for name, (axis_sizes, axes) in _group_axes(degrees, ulysses_degree).items():
        stride = _stride(axis_sizes, axes[-1])
        first_groups[name] = range(0, stride * prod(axis_sizes[axis] for axis in axes), stride)
    return first_groups


def _group_axes(
    degrees: Mapping[str, int], ulysses_degree: int | None
) -> dict[str, tuple[Mapping[str, int], tuple[str, ...]]]:
    """For each group the mesh degrees, and the adjacent dimensions in which its ranks differ."""
    axes_by_group: dict[str, tuple[str, ...]] = {
        "pp": ("pp",),
        "dp_replicate": ("dp_replicate",),
        "fsdp": ("dp_shard", "cp"),  # cp ranks hold the same weights, so FSDP shards over them too.
        "tp": ("tp",),
        "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    }
    if degrees["pp"] > 1:
        axes_by_group["loss"] = ("pp", *axes_by_group["dp_cp"])
    if degrees["cp"] > 1 and ulysses_degree is None:
        axes_by_group["cp"] = ("cp",)
    degrees_and_axes: dict[str, tuple[Mapping[str, int], tuple[str, ...]]] = {
        name: (degrees, axes) for name, axes in axes_by_group.items()
    }
    if degrees["cp"] > 1 and ulysses_degree is not None:
        outer = {axis: degrees[axis] for axis in AXES[:3]}
        split_degrees = outer | {
            "rotate": degrees["cp"] // ulysses_degree,
            "exchange": ulysses_degree,
            "tp": degrees["tp"],
        }
        degrees_and_axes |= {name: (split_degrees, (name,)) for name in ("rotate", "exchange")}
    return degrees_and_axes


def coordinate(degrees: Mapping[str, int], rank: int) -> dict[str, int]:
    """The coordinate of a rank on every mesh dimension."""
    return {axis: rank // _stride(degrees, axis) % size for axis, size in degrees.items()}


def format_ranks(ranks: range) -> str:
    """`0-7`, `0,4,8` or `0,2,..,30`."""
    if len(ranks) == 1:
        return str(ranks[0])
    if ranks.step == 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= MAX_SHOWN_GROUPS:
        return ",".join(map(str, ranks))
    return f"{ranks[0]},{ranks[1]},..,{ranks[-1]}"


def _stride(degrees: Mapping[str, int], axis: str) -> int:
    """The distance in ranks between neighbours along a mesh dimension."""
    return prod(list(degrees.values())[list(degrees).index(axis) + 1 :])
