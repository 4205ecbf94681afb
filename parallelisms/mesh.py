"""The N-D mesh: every rank has a place on the axes pp, dp_replicate, dp_shard, cp and tp, tp innermost.

8 ranks, dp_replicate 2 x dp_shard 2 x cp 2:

    dp_replicate       0       0       0       0       1       1       1       1
    dp_shard           0       0       1       1       0       0       1       1
    cp                 0       1       0       1       0       1       0       1
    rank               0       1       2       3       4       5       6       7

Axes of size 1 exist like the others. `topology.channels` says along which axes, and unions of neighbouring axes, there
are process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from math import prod

import torch
from torch import distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from parallelisms.collectives import max_over
from parallelisms.parallel_dims import AXES
from parallelisms.process_groups import channels, groups, place, spell

WEIGHTS = ("pp", "dp_replicate", "fsdp", "tp")


class Mesh:
    """The process groups of a run. `degrees` gives the size of each axis; their product is the world size.

    For `hybrid`, `ulysses` neighbours of the cp axis exchange heads, and such groups rotate keys and values.
    """

    def __init__(
        self,
        device_type: str,
        degrees: dict[str, int],
        *,
        rank: int,
        ulysses: int | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.degrees = degrees = {axis: degrees[axis] for axis in AXES}
        self.rank = rank
        self.place = place(degrees, rank)
        self._groups = {
            name: _make(name, found, rank=rank, timeout=timeout) for name, found in channels(degrees, ulysses).items()
        }
        # One root for all four: FSDP2 and tensor parallelism cut the same parameters.
        self._weights = self._grid(device_type, WEIGHTS, range(self.size))
        sharing = next(ranks for ranks in groups(degrees, "cp") if rank in ranks)
        halves = [name for name in ("cp", "rotate", "exchange") if name in self._groups]
        self._context = self._grid(device_type, halves, sharing) if halves else None

    def _grid(self, device_type: str, names: Sequence[str], ranks: range) -> DeviceMesh:
        made = [self._groups[name] for name in names]
        grid = torch.arange(ranks.start, ranks.stop, ranks.step).view([group.size() for group in made])
        return DeviceMesh.from_group(made, device_type, grid, mesh_dim_names=tuple(names))

    @property
    def size(self) -> int:
        return prod(self.degrees.values())

    @property
    def fsdp(self) -> DeviceMesh:
        """Where parameters are sharded: 1-D, or 2-D (replicas, shards) for HSDP."""
        if self.degrees["dp_replicate"] > 1:
            return self._weights["dp_replicate", "fsdp"]
        return self._weights["fsdp"]

    @property
    def tp(self) -> DeviceMesh:
        """The ranks that share each matrix."""
        return self._weights["tp"]

    @property
    def pp(self) -> ProcessGroup:
        """The ranks that share the layers."""
        return self._groups["pp"]

    @property
    def context(self) -> DeviceMesh:
        """The ranks that share rows: 1-D, or 2-D (those that rotate, those that exchange heads) for `hybrid`.

        Raises ValueError if none do.
        """
        if self._context is None:
            raise ValueError("parallelism.cp = 1: no ranks share rows")
        return self._context

    @property
    def tokens(self) -> ProcessGroup:
        """The ranks of this stage that hold different tokens: sums over them are sums over the global batch."""
        return self._groups["tokens"]

    @property
    def numbers(self) -> ProcessGroup:
        """The ranks that hold different tokens or different layers: those of all stages."""
        return self._groups.get("numbers", self.tokens)

    @property
    def data_ranks(self) -> int:
        """How many ranks read different rows."""
        return self.degrees["dp_replicate"] * self.degrees["dp_shard"]

    @property
    def data_rank(self) -> int:
        """Which of them this rank is; the same for all ranks that share rows (cp, tp, pp)."""
        return self.place["dp_replicate"] * self.degrees["dp_shard"] + self.place["dp_shard"]

    def set_timeout(self, timeout: timedelta) -> None:
        """From now on every collective of the run may take this long. Collective."""
        # All ranks have come this far: one that is ahead would not wait for the compilation of another.
        max_over(None, [0.0])
        for group in filter(None, (distributed.group.WORLD, *self._groups.values())):
            group.set_timeout(timeout)


def _make(name: str, found: Sequence[range], *, rank: int, timeout: timedelta | None) -> ProcessGroup:
    """The group that this rank belongs to. Every rank takes part in making all of them, in this order."""
    made: list[ProcessGroup] = [
        distributed.new_group(list(ranks), timeout=timeout, group_desc=f"{name} {spell(ranks)}") for ranks in found
    ]
    return next(group for group, ranks in zip(made, found, strict=True) if rank in ranks)
