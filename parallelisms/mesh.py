"""The N-D mesh: every rank has a place on the axes pp, dp_replicate, dp_shard, cp and tp, tp innermost.

8 ranks, dp_replicate 2 x dp_shard 2 x cp 2:

    dp_replicate       0       0       0       0       1       1       1       1
    dp_shard           0       0       1       1       0       0       1       1
    cp                 0       1       0       1       0       1       0       1
    rank               0       1       2       3       4       5       6       7

Axes of size 1 exist like the others. Unions of neighbouring axes are views of the same ranks, built from public parts.
"""

from __future__ import annotations

from datetime import timedelta
from math import prod

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from parallelisms.rules import AXES


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
        self.degrees = degrees
        self.rank = rank
        size = prod(degrees.values())
        pp, replicate, shard, cp, tp = (degrees[axis] for axis in AXES)
        ranks = torch.arange(size, dtype=torch.int)
        # Parameters are sharded over dp_shard x cp: context-parallel ranks hold the same weights, so they share them.
        self._weights = DeviceMesh(
            device_type, ranks.view(pp, replicate, shard * cp, tp), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")
        )
        self._tokens = DeviceMesh(
            device_type, ranks.view(pp, replicate * shard * cp, tp), mesh_dim_names=("pp", "tokens", "tp")
        )
        meshes = [self._weights, self._tokens]
        if cp > 1:
            # Its own groups: what attention sends must not queue behind what FSDP sends.
            shared = {"cp": cp} if ulysses is None else {"rotate": cp // ulysses, "exchange": ulysses}
            shape = {"others": pp * replicate * shard, **shared, "tp": tp}
            meshes.append(DeviceMesh(device_type, ranks.view(tuple(shape.values())), mesh_dim_names=tuple(shape)))
        self._context = meshes[-1]
        if timeout is not None:
            set_timeout(timeout, *meshes)
        places = torch.unravel_index(torch.tensor(rank), (pp, replicate, shard, cp, tp))
        self.place = {axis: int(place) for axis, place in zip(AXES, places, strict=True)}

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
    def context(self) -> DeviceMesh:
        """The ranks that share rows: 1-D, or 2-D (those that rotate, those that exchange heads) for `hybrid`.

        Raises ValueError if none do.
        """
        if self.degrees["cp"] == 1:
            raise ValueError("parallelism.cp = 1: no ranks share rows")
        return self._context["cp"] if self._context.ndim == 3 else self._context["rotate", "exchange"]

    @property
    def tokens(self) -> ProcessGroup:
        """The ranks that hold different tokens: sums over them are sums over the global batch."""
        return self._tokens.get_group("tokens")

    @property
    def data_ranks(self) -> int:
        """How many ranks read different rows."""
        return self.degrees["dp_replicate"] * self.degrees["dp_shard"]

    @property
    def data_rank(self) -> int:
        """Which of them this rank is; the same for all ranks that share rows (cp, tp, pp)."""
        return self.place["dp_replicate"] * self.degrees["dp_shard"] + self.place["dp_shard"]


def set_timeout(timeout: timedelta, *meshes: DeviceMesh) -> None:
    """DeviceMesh gives its groups the library's default, whatever the run's is; there is no public way to say it."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    for mesh in meshes:
        for axis in mesh.mesh_dim_names or ():
            _set_pg_timeout(timeout, mesh.get_group(axis))
