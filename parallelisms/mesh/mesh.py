"""The device mesh of a run: dimensions pp, dp_replicate, dp_shard, cp and tp, tp innermost.

Coordinates of 8 ranks, dp_replicate 2 x dp_shard 2 x cp 2:

    dp_replicate       0       0       0       0       1       1       1       1
    dp_shard           0       0       1       1       0       0       1       1
    cp                 0       1       0       1       0       1       0       1
    rank               0       1       2       3       4       5       6       7

Dimensions of size 1 exist too. `process_groups.process_group_ranks` lists the process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from math import prod

import torch
from torch import distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from parallelisms.mesh.collectives import max_over_ranks
from parallelisms.mesh.parallel_dims import AXES
from parallelisms.mesh.process_groups import (
    coordinate,
    format_ranks,
    process_group_ranks,
    rank_groups,
)

WEIGHT_DIMS = ("pp", "dp_replicate", "fsdp", "tp")
EXPERT_DIMS = ("pp", "dp_replicate", "efsdp", "ep", "tp")


class Mesh:
    """The process groups and device meshes of this rank. Collective.

    The product of `degrees`, the size of each dimension, must be the world size. `ulysses_degree`
    splits cp for `hybrid`: that many neighbouring ranks exchange heads, and KV rotates among such
    groups. `ep` neighbours of dp_shard x cp hold different experts.
    """

    def __init__(
        self,
        device_type: str,
        degrees: dict[str, int],
        *,
        rank: int,
        ulysses_degree: int | None = None,
        ep: int = 1,
        timeout: timedelta | None = None,
    ) -> None:
        self.degrees = degrees = {axis: degrees[axis] for axis in AXES}
        self.size = prod(degrees.values())
        self.rank = rank
        self.coordinate = coordinate(degrees, rank)
        self.dp_degree = degrees["dp_replicate"] * degrees["dp_shard"]
        self.dp_rank = (
            self.coordinate["dp_replicate"] * degrees["dp_shard"] + self.coordinate["dp_shard"]
        )
        """Index among the dp ranks; the same on all pp, cp and tp ranks, which read the same
        sequences.
        """
        self._groups = {
            name: _new_group(name, grouped_ranks, rank=rank, timeout=timeout)
            for name, grouped_ranks in process_group_ranks(degrees, ulysses_degree, ep).items()
        }
        self.pp_group = self._groups["pp"]
        self.dp_cp_group = self._groups["dp_cp"]
        """The ranks of a pipeline stage with different tokens: a sum over them covers the global
        batch.
        """
        self.metrics_group = self._groups.get("metrics", self.dp_cp_group)
        """Loss and metric reductions: every dp, cp and pp rank, one per tp group."""
        # One root mesh: FSDP2 and tensor parallelism shard the same parameters.
        weight_mesh = self._device_mesh(device_type, WEIGHT_DIMS, range(self.size))
        self.fsdp_mesh = self._with_replicas(weight_mesh, "fsdp")
        """1-D, or 2-D (replicas, shards) for HSDP."""
        self.tp_mesh = weight_mesh["tp"]
        self.ep_group, self.tp_group = (
            self._groups[name] if size > 1 else None
            for name, size in (("ep", ep), ("tp", degrees["tp"]))
        )
        self.expert_mesh = self.tp_mesh
        self.expert_fsdp_mesh = self.fsdp_mesh
        """Expert sub-meshes: (ep, tp) split an expert; (dp_replicate, efsdp) shard the rest."""
        if ep > 1:
            # A root mesh of its own: it divides the ranks of fsdp into efsdp x ep.
            expert_mesh = self._device_mesh(device_type, EXPERT_DIMS, range(self.size))
            self.expert_mesh = expert_mesh["ep", "tp"] if degrees["tp"] > 1 else expert_mesh["ep"]
            self.expert_fsdp_mesh = self._with_replicas(expert_mesh, "efsdp")
        cp_ranks = next(ranks for ranks in rank_groups(degrees, "cp") if rank in ranks)
        cp_names = [name for name in ("cp", "rotate", "exchange") if name in self._groups]
        self.cp_groups = [self._groups[name] for name in cp_names]
        """Process groups of the ranks that share a sequence; with several, a sum over one after
        the other is over all.
        """
        self._cp_mesh = self._device_mesh(device_type, cp_names, cp_ranks) if cp_names else None

    def _device_mesh(self, device_type: str, names: Sequence[str], ranks: range) -> DeviceMesh:
        process_groups = [self._groups[name] for name in names]
        grid = torch.arange(ranks.start, ranks.stop, ranks.step).view(
            [group.size() for group in process_groups]
        )
        return DeviceMesh.from_group(
            process_groups, device_type, grid, mesh_dim_names=tuple(names)
        )

    def _with_replicas(self, mesh: DeviceMesh, shard_dim: str) -> DeviceMesh:
        """The dimension FSDP shards over, after that of the replicas if there are several."""
        return (
            mesh["dp_replicate", shard_dim]
            if self.degrees["dp_replicate"] > 1
            else mesh[shard_dim]
        )

    @property
    def cp_mesh(self) -> DeviceMesh:
        """1-D, or 2-D (rotate KV, exchange heads) for `hybrid`. Raises ValueError for cp = 1."""
        if self._cp_mesh is None:
            raise ValueError("parallelism.cp = 1 has no context-parallel mesh")
        return self._cp_mesh

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of every process group. Collective."""
        # Wait for all ranks first: a rank that is ahead must not time out while another still
        # compiles.
        max_over_ranks(None, [0.0])
        for group in filter(None, (distributed.group.WORLD, *self._groups.values())):
            group.set_timeout(timeout)


def _new_group(
    name: str, grouped_ranks: Sequence[range], *, rank: int, timeout: timedelta | None
) -> ProcessGroup:
    """The group of this rank. Every rank must create all of them, in this order."""
    process_groups: list[ProcessGroup] = [
        distributed.new_group(
            list(ranks), timeout=timeout, group_desc=f"{name} {format_ranks(ranks)}"
        )
        for ranks in grouped_ranks
    ]
    return next(
        group for group, ranks in zip(process_groups, grouped_ranks, strict=True) if rank in ranks
    )
