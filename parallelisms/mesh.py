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

from parallelisms.collectives import max_over_ranks
from parallelisms.parallel_dims import AXES
from parallelisms.process_groups import coordinate, format_ranks, process_group_ranks, rank_groups

WEIGHT_DIMS = ("pp", "dp_replicate", "fsdp", "tp")


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
        ulysses_degree: int | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.degrees = degrees = {axis: degrees[axis] for axis in AXES}
        self.rank = rank
        self.coordinate = coordinate(degrees, rank)
        self._groups = {
            name: _new_group(name, grouped_ranks, rank=rank, timeout=timeout)
            for name, grouped_ranks in process_group_ranks(degrees, ulysses_degree).items()
        }
        # One root for all four: FSDP2 and tensor parallelism cut the same parameters.
        self._weight_mesh = self._device_mesh(device_type, WEIGHT_DIMS, range(self.size))
        cp_ranks = next(ranks for ranks in rank_groups(degrees, "cp") if rank in ranks)
        cp_names = [name for name in ("cp", "rotate", "exchange") if name in self._groups]
        self._cp_mesh = self._device_mesh(device_type, cp_names, cp_ranks) if cp_names else None

    def _device_mesh(self, device_type: str, names: Sequence[str], ranks: range) -> DeviceMesh:
        process_groups = [self._groups[name] for name in names]
        grid = torch.arange(ranks.start, ranks.stop, ranks.step).view([group.size() for group in process_groups])
        return DeviceMesh.from_group(process_groups, device_type, grid, mesh_dim_names=tuple(names))

    @property
    def size(self) -> int:
        return prod(self.degrees.values())

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """Where parameters are sharded: 1-D, or 2-D (replicas, shards) for HSDP."""
        if self.degrees["dp_replicate"] > 1:
            return self._weight_mesh["dp_replicate", "fsdp"]
        return self._weight_mesh["fsdp"]

    @property
    def tp_mesh(self) -> DeviceMesh:
        """The ranks that share each matrix."""
        return self._weight_mesh["tp"]

    @property
    def pp_group(self) -> ProcessGroup:
        """The ranks that share the layers."""
        return self._groups["pp"]

    @property
    def cp_mesh(self) -> DeviceMesh:
        """The ranks that share rows: 1-D, or 2-D (those that rotate, those that exchange heads) for `hybrid`.

        Raises ValueError if none do.
        """
        if self._cp_mesh is None:
            raise ValueError("parallelism.cp = 1: no ranks share rows")
        return self._cp_mesh

    @property
    def dp_cp_group(self) -> ProcessGroup:
        """The ranks of this stage that hold different tokens: sums over them are sums over the global batch."""
        return self._groups["tokens"]

    @property
    def loss_group(self) -> ProcessGroup:
        """The ranks that hold different tokens or different layers: those of all stages."""
        return self._groups.get("numbers", self.dp_cp_group)

    @property
    def dp_degree(self) -> int:
        """How many ranks read different rows."""
        return self.degrees["dp_replicate"] * self.degrees["dp_shard"]

    @property
    def dp_rank(self) -> int:
        """Which of them this rank is; the same for all ranks that share rows (cp, tp, pp)."""
        return self.coordinate["dp_replicate"] * self.degrees["dp_shard"] + self.coordinate["dp_shard"]

    def set_timeout(self, timeout: timedelta) -> None:
        """From now on every collective of the run may take this long. Collective."""
        # All ranks have come this far: one that is ahead would not wait for the compilation of another.
        max_over_ranks(None, [0.0])
        for group in filter(None, (distributed.group.WORLD, *self._groups.values())):
            group.set_timeout(timeout)


def _new_group(name: str, grouped_ranks: Sequence[range], *, rank: int, timeout: timedelta | None) -> ProcessGroup:
    """The group that this rank belongs to. Every rank takes part in making all of them, in this order."""
    process_groups: list[ProcessGroup] = [
        distributed.new_group(list(ranks), timeout=timeout, group_desc=f"{name} {format_ranks(ranks)}")
        for ranks in grouped_ranks
    ]
    return next(group for group, ranks in zip(process_groups, grouped_ranks, strict=True) if rank in ranks)
