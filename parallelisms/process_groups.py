"""Which ranks talk to each other, about what and over which links: numbers and words only, without torch.

A mesh makes its process groups from `channels`, so what is told about a run is what the run does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from parallelisms.parallel_dims import AXES, ContextPlan

MAX_SHOWN_GROUPS = 4
MAX_DIAGRAM_RANKS = 64
RANKS_PER_LINE = 32


def rank_groups(degrees: Mapping[str, int], *axes: str) -> list[range]:
    """The ranks that differ along neighbouring `axes` alone; the last axis of a mesh varies fastest."""
    stride, size = _stride(degrees, axes[-1]), prod(degrees.values())
    span = stride * prod(degrees[axis] for axis in axes)
    return [range(base + i, base + i + span, stride) for base in range(0, size, span) for i in range(stride)]


def process_group_ranks(degrees: Mapping[str, int], ulysses_degree: int | None = None) -> dict[str, list[range]]:
    """What is talked about, and by which groups of ranks, in the order in which a mesh makes the groups.

    Activations go along `pp` and `tp`, weights and gradients along `fsdp` and `dp_replicate`. Attention has groups of
    its own: what it sends must not queue behind what FSDP sends. They are `cp`, or for `hybrid` `exchange` (of heads,
    among `ulysses` neighbours) and `rotate`. Sums over `tokens` are sums over a stage's part of the global batch,
    those over `numbers` also over stages.
    """
    return {name: rank_groups(within, *axes) for name, (within, axes) in _group_axes(degrees, ulysses_degree).items()}


def rank_zero_groups(degrees: Mapping[str, int], ulysses_degree: int | None = None) -> dict[str, range]:
    """Of each channel the group of rank 0, without listing the others, of which there may be thousands."""
    first_groups_by_name = {}
    for name, (axis_sizes, axes) in _group_axes(degrees, ulysses_degree).items():
        stride = _stride(axis_sizes, axes[-1])
        first_groups_by_name[name] = range(0, stride * prod(axis_sizes[axis] for axis in axes), stride)
    return first_groups_by_name


def _group_axes(
    degrees: Mapping[str, int], ulysses_degree: int | None
) -> dict[str, tuple[Mapping[str, int], tuple[str, ...]]]:
    """Along which neighbouring axes of which mesh each channel's ranks differ."""
    axes_by_group: dict[str, tuple[str, ...]] = {
        "pp": ("pp",),
        "dp_replicate": ("dp_replicate",),
        "fsdp": ("dp_shard", "cp"),  # Ranks that share rows hold the same weights, so they share them.
        "tp": ("tp",),
        "tokens": ("dp_replicate", "dp_shard", "cp"),
    }
    if degrees["pp"] > 1:
        axes_by_group["numbers"] = ("pp", *axes_by_group["tokens"])
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
    """Where a rank stands on each axis."""
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


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A mesh on a cluster. Fast links join every `node` neighbouring ranks, which is for the configuration to say.

    `hosts` are the machines that really take part; with the links they are only compared.
    """

    degrees: Mapping[str, int]
    context_plan: ContextPlan
    ranks_per_node: int
    num_nodes: int = 1

    def diagram(self) -> list[str]:
        """Every axis with its ranks and links, and where each rank stands if they are few."""
        process_groups = self._process_groups()
        cp_subgroups = {f"  {name}": process_groups[name] for name in ("rotate", "exchange") if name in process_groups}
        rows: dict[str, list[range]] = {}
        for axis in AXES:
            rows |= {axis: rank_groups(self.degrees, axis)} | (cp_subgroups if axis == "cp" else {})
        rows["fsdp (dp_shard x cp)"] = process_groups["fsdp"]
        heading = f"{'axis':<20}{'size':>6}  {'links':<16}  ranks that talk"
        return [heading, *(self._format_row(name, found) for name, found in rows.items()), *self._coordinate_table()]

    def warnings(self) -> list[str]:
        """What is allowed, and slow or seldom meant."""
        tp, process_groups = self.degrees["tp"], self._process_groups()
        head_exchange_groups = process_groups.get(
            "exchange", process_groups.get("cp", []) if self.context_plan.resolved_method == "ulysses" else []
        )
        cross_node_warning = f"crosses nodes of {self.ranks_per_node} ranks (parallelism.ranks_per_node): every layer waits for the slow links"
        ranks_per_host = prod(self.degrees.values()) // self.num_nodes
        messages = []
        if self._max_nodes_spanned(process_groups["tp"]) > 1:
            messages.append(f"parallelism.tp = {tp} {cross_node_warning}")
        if self._max_nodes_spanned(head_exchange_groups) > 1:
            group_description = f"{len(head_exchange_groups[0])} ranks x tp {tp}"
            messages.append(
                f'parallelism.cp_method "{self.context_plan.resolved_method}" exchanges heads among {group_description}, which {cross_node_warning}'
            )
        if self.num_nodes > 1 and ranks_per_host % self.ranks_per_node:
            messages.append(
                f"parallelism.ranks_per_node = {self.ranks_per_node}, but each of {self.num_nodes} nodes runs {ranks_per_host} processes: links are "
                f"told, and cp_method is chosen, as if {self.ranks_per_node} ranks shared a node"
            )
        return messages

    def _process_groups(self) -> dict[str, list[range]]:
        return process_group_ranks(
            self.degrees, self.context_plan.ulysses_degree if self.context_plan.resolved_method == "hybrid" else None
        )

    def _max_nodes_spanned(self, grouped_ranks: Sequence[range]) -> int:
        """The most nodes that one of the groups touches."""
        return max((len({rank // self.ranks_per_node for rank in ranks}) for ranks in grouped_ranks), default=0)

    def _format_row(self, name: str, grouped_ranks: Sequence[range]) -> str:
        size = len(grouped_ranks[0])
        if size == 1:
            return f"{name:<20}{size:>6}  -"
        num_nodes = self._max_nodes_spanned(grouped_ranks)
        links = "inside a node" if num_nodes == 1 else f"across {num_nodes:,} nodes"
        more = f" ... ({len(grouped_ranks):,} groups)" if len(grouped_ranks) > MAX_SHOWN_GROUPS else ""
        return (
            f"{name:<20}{size:>6}  {links:<16}  {'  '.join(map(format_ranks, grouped_ranks[:MAX_SHOWN_GROUPS]))}{more}"
        )

    def _coordinate_table(self) -> list[str]:
        """The place of each rank on every axis that has several, with a bar between nodes."""
        axes = [axis for axis, size in self.degrees.items() if size > 1]
        size = prod(self.degrees.values())
        if len(axes) < 2 or size > MAX_DIAGRAM_RANKS:
            return []
        lines = []
        for first in range(0, size, RANKS_PER_LINE):
            ranks = range(first, min(first + RANKS_PER_LINE, size))
            bars = ["|" if rank % self.ranks_per_node == 0 and rank != first else " " for rank in ranks]
            table = {"rank": list(ranks)} | {
                axis: [coordinate(self.degrees, rank)[axis] for rank in ranks] for axis in axes
            }
            lines += [
                f"{name:<14}" + "".join(f"{bar}{number:>2}" for bar, number in zip(bars, row, strict=True))
                for name, row in table.items()
            ]
        return lines


def _stride(degrees: Mapping[str, int], axis: str) -> int:
    """From a rank to its neighbour along an axis."""
    return prod(list(degrees.values())[list(degrees).index(axis) + 1 :])
