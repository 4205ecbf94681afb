"""A mesh on a cluster, for people: which links each dimension uses, and what is slow about it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from parallelisms.parallel_dims import AXES, ContextPlan
from parallelisms.process_groups import MAX_SHOWN_GROUPS, format_ranks, process_group_ranks, rank_groups


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A mesh on a cluster whose fast links join every `ranks_per_node` neighbouring ranks, as configured.

    `num_nodes` counts the machines of the launch; it only checks `ranks_per_node`.
    """

    degrees: Mapping[str, int]
    context_plan: ContextPlan
    ranks_per_node: int
    num_nodes: int = 1

    def diagram(self) -> list[str]:
        """A table of the mesh dimensions above size 1 with their links and ranks; empty for one rank."""
        groups = self._process_groups()
        rows: dict[str, list[range]] = {}
        for axis in AXES:
            rows[axis] = rank_groups(self.degrees, axis)
            if axis == "cp":
                rows |= {f"  {name}": groups[name] for name in ("rotate", "exchange") if name in groups}
        rows["fsdp (dp_shard x cp)"] = groups["fsdp"]
        lines = [
            self._format_row(name, grouped_ranks) for name, grouped_ranks in rows.items() if len(grouped_ranks[0]) > 1
        ]
        return [f"{'dimension':<20}{'size':>6}  {'links':<16}  groups of ranks", *lines] if lines else []

    def warnings(self) -> list[str]:
        """Layouts that are valid but slow, or probably unintended."""
        tp, process_groups = self.degrees["tp"], self._process_groups()
        head_exchange_groups = process_groups.get(
            "exchange", process_groups.get("cp", []) if self.context_plan.resolved_method == "ulysses" else []
        )
        cross_node_warning = f"crosses nodes of {self.ranks_per_node} ranks (parallelism.ranks_per_node): every layer waits for the network"
        processes_per_node = prod(self.degrees.values()) // self.num_nodes
        messages = []
        if self._max_nodes_spanned(process_groups["tp"]) > 1:
            messages.append(f"parallelism.tp = {tp} {cross_node_warning}")
        if self._max_nodes_spanned(head_exchange_groups) > 1:
            group_description = f"{len(head_exchange_groups[0])} ranks x tp {tp}"
            messages.append(
                f'parallelism.cp_method "{self.context_plan.resolved_method}" exchanges heads among {group_description} and {cross_node_warning}'
            )
        if self.num_nodes > 1 and processes_per_node % self.ranks_per_node:
            messages.append(
                f"parallelism.ranks_per_node = {self.ranks_per_node} does not match {self.num_nodes} nodes of "
                f"{processes_per_node} processes: cp_method and this table assume {self.ranks_per_node} ranks per node"
            )
        return messages

    def _process_groups(self) -> dict[str, list[range]]:
        return process_group_ranks(
            self.degrees, self.context_plan.ulysses_degree if self.context_plan.resolved_method == "hybrid" else None
        )

    def _max_nodes_spanned(self, grouped_ranks: Sequence[range]) -> int:
        """The largest number of nodes that one of the groups spans."""
        return max((len({rank // self.ranks_per_node for rank in ranks}) for ranks in grouped_ranks), default=0)

    def _format_row(self, name: str, grouped_ranks: Sequence[range]) -> str:
        num_nodes = self._max_nodes_spanned(grouped_ranks)
        links = "inside a node" if num_nodes == 1 else f"across {num_nodes:,} nodes"
        more = f" ... ({len(grouped_ranks):,} groups)" if len(grouped_ranks) > MAX_SHOWN_GROUPS else ""
        return f"{name:<20}{len(grouped_ranks[0]):>6}  {links:<16}  {'  '.join(map(format_ranks, grouped_ranks[:MAX_SHOWN_GROUPS]))}{more}"
