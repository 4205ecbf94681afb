"""Which ranks talk to each other, about what and over which links: numbers and words only, without torch.

A mesh makes its process groups from `channels`, so what is told about a run is what the run does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from parallelisms.parallel_dims import AXES, ContextPlan

SHOWN_GROUPS = 4
DRAWN_RANKS = 64
LINE_RANKS = 32


def groups(degrees: Mapping[str, int], *axes: str) -> list[range]:
    """The ranks that differ along neighbouring `axes` alone; the last axis of a mesh varies fastest."""
    step, size = _step(degrees, axes[-1]), prod(degrees.values())
    span = step * prod(degrees[axis] for axis in axes)
    return [range(base + i, base + i + span, step) for base in range(0, size, span) for i in range(step)]


def channels(degrees: Mapping[str, int], ulysses: int | None = None) -> dict[str, list[range]]:
    """What is talked about, and by which groups of ranks, in the order in which a mesh makes the groups.

    Activations go along `pp` and `tp`, weights and gradients along `fsdp` and `dp_replicate`. Attention has groups of
    its own: what it sends must not queue behind what FSDP sends. They are `cp`, or for `hybrid` `exchange` (of heads,
    among `ulysses` neighbours) and `rotate`. Sums over `tokens` are sums over a stage's part of the global batch,
    those over `numbers` also over stages.
    """
    return {name: groups(within, *axes) for name, (within, axes) in _spread(degrees, ulysses).items()}


def first_groups(degrees: Mapping[str, int], ulysses: int | None = None) -> dict[str, range]:
    """Of each channel the group of rank 0, without listing the others, of which there may be thousands."""
    found = {}
    for name, (within, axes) in _spread(degrees, ulysses).items():
        step = _step(within, axes[-1])
        found[name] = range(0, step * prod(within[axis] for axis in axes), step)
    return found


def _spread(degrees: Mapping[str, int], ulysses: int | None) -> dict[str, tuple[Mapping[str, int], tuple[str, ...]]]:
    """Along which neighbouring axes of which mesh each channel's ranks differ."""
    spread: dict[str, tuple[str, ...]] = {
        "pp": ("pp",),
        "dp_replicate": ("dp_replicate",),
        "fsdp": ("dp_shard", "cp"),  # Ranks that share rows hold the same weights, so they share them.
        "tp": ("tp",),
        "tokens": ("dp_replicate", "dp_shard", "cp"),
    }
    if degrees["pp"] > 1:
        spread["numbers"] = ("pp", *spread["tokens"])
    if degrees["cp"] > 1 and ulysses is None:
        spread["cp"] = ("cp",)
    found: dict[str, tuple[Mapping[str, int], tuple[str, ...]]] = {
        name: (degrees, axes) for name, axes in spread.items()
    }
    if degrees["cp"] > 1 and ulysses is not None:
        outer = {axis: degrees[axis] for axis in AXES[:3]}
        halved = outer | {"rotate": degrees["cp"] // ulysses, "exchange": ulysses, "tp": degrees["tp"]}
        found |= {name: (halved, (name,)) for name in ("rotate", "exchange")}
    return found


def place(degrees: Mapping[str, int], rank: int) -> dict[str, int]:
    """Where a rank stands on each axis."""
    return {axis: rank // _step(degrees, axis) % size for axis, size in degrees.items()}


def spell(ranks: range) -> str:
    """`0-7`, `0,4,8` or `0,2,..,30`."""
    if len(ranks) == 1:
        return str(ranks[0])
    if ranks.step == 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= SHOWN_GROUPS:
        return ",".join(map(str, ranks))
    return f"{ranks[0]},{ranks[1]},..,{ranks[-1]}"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A mesh on a cluster. Fast links join every `node` neighbouring ranks, which is for the configuration to say.

    `hosts` are the machines that really take part; with the links they are only compared.
    """

    degrees: Mapping[str, int]
    plan: ContextPlan
    node: int
    hosts: int = 1

    def drawing(self) -> list[str]:
        """Every axis with its ranks and links, and where each rank stands if they are few."""
        made = self._channels()
        halves = {f"  {name}": made[name] for name in ("rotate", "exchange") if name in made}
        rows: dict[str, list[range]] = {}
        for axis in AXES:
            rows |= {axis: groups(self.degrees, axis)} | (halves if axis == "cp" else {})
        rows["fsdp (dp_shard x cp)"] = made["fsdp"]
        heading = f"{'axis':<20}{'size':>6}  {'links':<16}  ranks that talk"
        return [heading, *(self._row(name, found) for name, found in rows.items()), *self._places()]

    def remarks(self) -> list[str]:
        """What is allowed, and slow or seldom meant."""
        tp, made = self.degrees["tp"], self._channels()
        exchanging = made.get("exchange", made.get("cp", []) if self.plan.chosen == "ulysses" else [])
        slow = f"crosses nodes of {self.node} ranks (parallelism.node_ranks): every layer waits for the slow links"
        each = prod(self.degrees.values()) // self.hosts
        found = []
        if self._nodes(made["tp"]) > 1:
            found.append(f"parallelism.tp = {tp} {slow}")
        if self._nodes(exchanging) > 1:
            among = f"{len(exchanging[0])} ranks x tp {tp}"
            found.append(f'parallelism.cp_method "{self.plan.chosen}" exchanges heads among {among}, which {slow}')
        if self.hosts > 1 and each % self.node:
            found.append(
                f"parallelism.node_ranks = {self.node}, but each of {self.hosts} nodes runs {each} processes: links are "
                f"told, and cp_method is chosen, as if {self.node} ranks shared a node"
            )
        return found

    def _channels(self) -> dict[str, list[range]]:
        return channels(self.degrees, self.plan.ulysses if self.plan.chosen == "hybrid" else None)

    def _nodes(self, found: Sequence[range]) -> int:
        """The most nodes that one of the groups touches."""
        return max((len({rank // self.node for rank in ranks}) for ranks in found), default=0)

    def _row(self, name: str, found: Sequence[range]) -> str:
        size = len(found[0])
        if size == 1:
            return f"{name:<20}{size:>6}  -"
        nodes = self._nodes(found)
        links = "inside a node" if nodes == 1 else f"across {nodes:,} nodes"
        more = f" ... ({len(found):,} groups)" if len(found) > SHOWN_GROUPS else ""
        return f"{name:<20}{size:>6}  {links:<16}  {'  '.join(map(spell, found[:SHOWN_GROUPS]))}{more}"

    def _places(self) -> list[str]:
        """The place of each rank on every axis that has several, with a bar between nodes."""
        axes = [axis for axis, size in self.degrees.items() if size > 1]
        size = prod(self.degrees.values())
        if len(axes) < 2 or size > DRAWN_RANKS:
            return []
        lines = []
        for first in range(0, size, LINE_RANKS):
            ranks = range(first, min(first + LINE_RANKS, size))
            bars = ["|" if rank % self.node == 0 and rank != first else " " for rank in ranks]
            table = {"rank": list(ranks)} | {axis: [place(self.degrees, rank)[axis] for rank in ranks] for axis in axes}
            lines += [
                f"{name:<14}" + "".join(f"{bar}{number:>2}" for bar, number in zip(bars, row, strict=True))
                for name, row in table.items()
            ]
        return lines


def _step(degrees: Mapping[str, int], axis: str) -> int:
    """From a rank to its neighbour along an axis."""
    return prod(list(degrees.values())[list(degrees).index(axis) + 1 :])
