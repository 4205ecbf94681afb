"""The process groups of a mesh: their ranks, and the nodes that they span. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from parallelisms.mesh.context_plan import ContextPlan
from parallelisms.mesh.parallel_dims import AXES

MAX_SHOWN_GROUPS = 4


def rank_groups(degrees: Mapping[str, int], *axes: str) -> Iterator[range]:
    """The groups of ranks that differ only in `axes`, which must be adjacent; the last mesh
    dimension varies fastest.
    """
    # The stride is that of the last of these axes; a span of all of them holds `stride` groups.
    stride = _stride(degrees, axes[-1])
    span = stride * prod(degrees[axis] for axis in axes)
    return (
        range(base + i, base + i + span, stride)
        for base in range(0, prod(degrees.values()), span)
        for i in range(stride)
    )


def process_group_ranks(
    degrees: Mapping[str, int], ulysses_degree: int | None = None, ep: int = 1
) -> dict[str, list[range]]:
    """The ranks of every process group by name, in the order in which a mesh creates them.

    `pp` and `tp` carry activations, `fsdp` and `dp_replicate` weights and gradients. Attention has
    separate groups, so that its messages never queue behind FSDP's: `cp`, or for `hybrid`
    `exchange` (heads, among `ulysses_degree` neighbours) and `rotate` (KV). With experts on `ep`
    ranks, `ep` carries tokens, and `efsdp` the weights and gradients of experts. `dp_cp` reduces
    over a stage's part of the global batch, `metrics` also over stages.
    """
    return {name: [*groups] for name, groups in _named_groups(degrees, ulysses_degree, ep).items()}


def rank_zero_groups(
    degrees: Mapping[str, int], ulysses_degree: int | None = None, ep: int = 1
) -> dict[str, range]:
    """Rank 0's group of every name, without listing the thousands of others."""
    return {
        name: next(groups) for name, groups in _named_groups(degrees, ulysses_degree, ep).items()
    }


def _named_groups(
    degrees: Mapping[str, int], ulysses_degree: int | None, ep: int
) -> dict[str, Iterator[range]]:
    cp = ("rotate", "exchange")
    split_cp = {"rotate": degrees["cp"] // (ulysses_degree or 1), "exchange": ulysses_degree or 1}
    # In the order of the mesh, because strides follow from it.
    split_degrees = {axis: degrees[axis] for axis in AXES[:3]} | split_cp | {"tp": degrees["tp"]}
    axes_by_group: dict[str, tuple[str, ...]] = {
        "pp": ("pp",),
        "dp_replicate": ("dp_replicate",),
        # cp ranks hold the same weights, so FSDP shards over them too.
        "fsdp": ("dp_shard", *cp),
        "tp": ("tp",),
        "dp_cp": ("dp_replicate", "dp_shard", *cp),
    }
    if degrees["pp"] > 1:
        axes_by_group["metrics"] = ("pp", *axes_by_group["dp_cp"])
    if degrees["cp"] > 1:
        axes_by_group |= {"cp": cp} if ulysses_degree is None else {axis: (axis,) for axis in cp}
    groups = {name: rank_groups(split_degrees, *axes) for name, axes in axes_by_group.items()}
    if ep > 1:
        with_experts = expert_degrees(degrees, ep)
        groups |= {name: rank_groups(with_experts, name) for name in ("efsdp", "ep")}
    return groups


def expert_degrees(degrees: Mapping[str, int], ep: int) -> dict[str, int]:
    """The mesh dimensions over which experts are sharded: dp_shard x cp, split into `efsdp` and
    `ep`.
    """
    outer = {axis: degrees[axis] for axis in ("pp", "dp_replicate")}
    return outer | {
        "efsdp": degrees["dp_shard"] * degrees["cp"] // ep,
        "ep": ep,
        "tp": degrees["tp"],
    }


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


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A mesh on a cluster whose fast links join every `ranks_per_node` neighbouring ranks, as
    configured.

    `num_nodes` counts the machines of the launch; it only checks `ranks_per_node`.
    """

    degrees: Mapping[str, int]
    context_plan: ContextPlan
    ranks_per_node: int
    num_nodes: int = 1

    def diagram(self) -> list[str]:
        """A table of the mesh dimensions above size 1 with their links and ranks; empty for one
        rank.
        """
        groups = process_group_ranks(self.degrees, self.context_plan.hybrid_ulysses_degree)
        rows: dict[str, list[range]] = {}
        for axis in AXES:
            rows[axis] = [*rank_groups(self.degrees, axis)]
            if axis == "cp":
                rows |= {
                    f"  {name}": groups[name] for name in ("rotate", "exchange") if name in groups
                }
        rows["fsdp (dp_shard x cp)"] = groups["fsdp"]
        lines = [
            self._format_row(name, grouped)
            for name, grouped in rows.items()
            if len(grouped[0]) > 1
        ]
        return (
            [f"{'dimension':<20}{'size':>6}  {'links':<16}  groups of ranks", *lines]
            if lines
            else []
        )

    def warnings(self) -> list[str]:
        """Layouts that are valid but slow, or probably unintended."""
        tp = self.degrees["tp"]
        groups = process_group_ranks(self.degrees, self.context_plan.hybrid_ulysses_degree)
        method = self.context_plan.resolved_method
        processes_per_node = prod(self.degrees.values()) // self.num_nodes
        exchange_groups = groups.get(
            "exchange", groups.get("cp", []) if method == "ulysses" else []
        )
        crosses = f"crosses nodes of {self.ranks_per_node} ranks (parallelism.ranks_per_node): every layer waits for the network"
        messages = []
        if self._max_nodes_spanned(groups["tp"]) > 1:
            messages.append(f"parallelism.tp = {tp} {crosses}")
        if self._max_nodes_spanned(exchange_groups) > 1:
            ranks = f"{len(exchange_groups[0])} ranks x tp {tp}"
            messages.append(
                f'parallelism.cp_method "{method}" exchanges heads among {ranks} and {crosses}'
            )
        if self.num_nodes > 1 and processes_per_node % self.ranks_per_node:
            messages.append(
                f"parallelism.ranks_per_node = {self.ranks_per_node} does not match {self.num_nodes} nodes of "
                f"{processes_per_node} processes: cp_method and this table assume {self.ranks_per_node} ranks per node"
            )
        return messages

    def _max_nodes_spanned(self, grouped_ranks: Sequence[range]) -> int:
        """The largest number of nodes that one of the groups spans."""
        return max(
            (len({rank // self.ranks_per_node for rank in ranks}) for ranks in grouped_ranks),
            default=0,
        )

    def _format_row(self, name: str, grouped_ranks: Sequence[range]) -> str:
        num_nodes = self._max_nodes_spanned(grouped_ranks)
        links = "inside a node" if num_nodes == 1 else f"across {num_nodes:,} nodes"
        shown = "  ".join(map(format_ranks, grouped_ranks[:MAX_SHOWN_GROUPS]))
        more = (
            f" ... ({len(grouped_ranks):,} groups)"
            if len(grouped_ranks) > MAX_SHOWN_GROUPS
            else ""
        )
        return f"{name:<20}{len(grouped_ranks[0]):>6}  {links:<16}  {shown}{more}"
