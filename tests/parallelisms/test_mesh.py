"""Who is where on the mesh, and with whom."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
from torch import distributed
from torch.distributed import ProcessGroup

from parallelisms.collectives import all_reduce
from parallelisms.mesh import Mesh
from parallelisms.parallel_dims import AXES
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


def degrees(**sizes: int) -> dict[str, int]:
    return {axis: sizes.get(axis, 1) for axis in AXES}


@dataclass
class Place:
    axes: dict[str, int]
    size: int
    data: tuple[int, int]
    fsdp: list[list[int]]
    tokens: list[int]


def place(sizes: dict[str, int]) -> Place:
    mesh = Mesh("cpu", sizes, rank=distributed.get_rank())
    groups = [distributed.get_process_group_ranks(group) for group in mesh.fsdp_mesh.get_all_groups()]
    tokens = distributed.get_process_group_ranks(mesh.dp_cp_group)
    return Place(mesh.coordinate, mesh.size, (mesh.dp_rank, mesh.dp_degree), groups, tokens)


def test_eight_ranks_stand_as_the_picture_shows() -> None:
    places = run_ranks(place, 8, degrees(dp_replicate=2, dp_shard=2, cp=2))
    assert [p.axes["dp_replicate"] for p in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [p.axes["dp_shard"] for p in places] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [p.axes["cp"] for p in places] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert {(p.size, p.axes["pp"], p.axes["tp"]) for p in places} == {(8, 0, 0)}
    # Ranks that differ in cp alone read the same rows.
    assert [p.data for p in places] == [(index, 4) for index in (0, 0, 1, 1, 2, 2, 3, 3)]
    # Weights are sharded over dp_shard x cp, with replicas across.
    first, second = [0, 1, 2, 3], [4, 5, 6, 7]
    assert [p.fsdp for p in places] == [
        [[rank, rank + 4], first] if rank < 4 else [[rank - 4, rank], second] for rank in range(8)
    ]
    assert all(p.tokens == first + second for p in places)


def test_stages_and_tensor_ranks_share_rows_and_sum_apart() -> None:
    places = run_ranks(place, 8, degrees(pp=2, dp_shard=2, tp=2))
    assert [(p.axes["pp"], p.axes["dp_shard"], p.axes["tp"]) for p in places] == [
        (stage, shard, part) for stage in (0, 1) for shard in (0, 1) for part in (0, 1)
    ]
    assert [p.data for p in places] == [(shard, 2) for shard in (0, 0, 1, 1, 0, 0, 1, 1)]
    apart = [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    assert [p.tokens for p in places] == apart
    assert [p.fsdp for p in places] == [[group] for group in apart]


def test_one_rank_has_a_place_on_every_axis() -> None:
    (alone,) = run_ranks(place, 1, degrees())
    assert alone == Place(dict.fromkeys(AXES, 0), 1, (0, 1), [[0]], [0])


# ---- process groups


TOKENS = "dp_replicate dp_shard cp"


def groups_of(mesh: Mesh) -> dict[str, ProcessGroup]:
    """Every group that has a use, by the axes along which its ranks lie."""
    replicas = {"dp_replicate": mesh.fsdp_mesh.get_group("dp_replicate")} if mesh.degrees["dp_replicate"] > 1 else {}
    sharing = {"cp": mesh.cp_mesh.get_group("cp")} if mesh.degrees["cp"] > 1 else {}
    return {
        "pp": mesh.pp_group,
        **replicas,
        "dp_shard cp": mesh.fsdp_mesh.get_group("fsdp"),
        "tp": mesh.tp_mesh.get_group(),
        TOKENS: mesh.dp_cp_group,
        f"pp {TOKENS}": mesh.loss_group,
        **sharing,
    }


Told = dict[str, tuple[str, str, list[int]]]


def told(cases: list[dict[str, int]]) -> list[Told]:
    """The name, description and ranks of each group, by mesh."""
    meshes = [Mesh("cpu", sizes, rank=distributed.get_rank()) for sizes in cases]
    return [
        {
            axes: (group.group_name, group.group_desc, distributed.get_process_group_ranks(group))
            for axes, group in groups_of(mesh).items()
        }
        for mesh in meshes
    ]


def along(sizes: dict[str, int], axes: str, rank: int) -> list[int]:
    """The ranks that differ from `rank` along these axes alone."""
    grid = torch.arange(8).view(list(sizes.values()))
    place = [int(index) for index in (grid == rank).nonzero()[0]]
    fixed = tuple(slice(None) if axis in axes.split() else place[index] for index, axis in enumerate(AXES))
    found: list[int] = grid[fixed].flatten().tolist()
    return found


FIVE_AXES = [
    degrees(pp=2, dp_shard=2, tp=2),
    degrees(pp=2, dp_replicate=2, cp=2),
    degrees(dp_replicate=2, dp_shard=2, tp=2),
    degrees(pp=2, cp=2, tp=2),
    degrees(pp=8),
    degrees(tp=8),
    degrees(cp=8),
    degrees(dp_shard=8),
]


def test_every_group_holds_the_ranks_along_its_axes_and_is_called_the_same_on_all_of_them() -> None:
    by_rank = run_ranks(told, 8, FIVE_AXES)
    everyone: dict[str, tuple[str, list[int]]] = {}
    for case, sizes in enumerate(FIVE_AXES):
        for rank, cases in enumerate(by_rank):
            for axes, (name, description, ranks) in cases[case].items():
                assert ranks == along(sizes, axes, rank), (sizes, axes)
                # Names are counted as groups are made: were the order another on one rank, its names would be too.
                assert everyone.setdefault(name, (description, ranks)) == (description, ranks)
            numbers, tokens = (cases[case][axes][0] for axes in (f"pp {TOKENS}", TOKENS))
            assert (numbers == tokens) == (sizes["pp"] == 1), "one stage needs no second group"
    assert "0" not in everyone, "the default group has another purpose"
    descriptions = {cases[0][axes][1] for cases in by_rank for axes in cases[0]}
    assert descriptions >= {"pp 0,4", "fsdp 0,2", "tp 6-7", "tokens 5,7", "numbers 0,2,4,6"}


def alone(group: ProcessGroup | None) -> str:
    """What happens to this rank in a collective that nobody else joins."""
    with pytest.raises(RuntimeError) as raised:
        distributed.all_reduce(torch.ones(1), group=group)
    return str(raised.value).partition("] ")[2]


def patience(late: float) -> list[str]:
    """What rank 0 is told by one group as it was made, and by all of them once there is less time than at the start."""
    rank = distributed.get_rank()
    mesh = Mesh("cpu", degrees(pp=2, cp=2), rank=rank, timeout=timedelta(seconds=late))
    first = [alone(mesh.cp_mesh.get_group())] if rank == 0 else []
    mesh = Mesh("cpu", degrees(pp=2, cp=2), rank=rank, timeout=timedelta(seconds=60))
    time.sleep(late * (rank == 1))
    mesh.set_timeout(timedelta(seconds=late * 2 / 3))
    # Nobody has lost patience with the one that was late.
    assert int(all_reduce(mesh.loss_group, torch.tensor(1))) == 4
    mesh.set_timeout(timedelta(seconds=0.5))
    groups = [group for group in groups_of(mesh).values() if group.size() > 1]
    return [*first, *(alone(group) for group in (*groups, None))] if rank == 0 else []


@pytest.mark.slow
def test_every_group_waits_as_long_as_it_is_told_to() -> None:
    told = "Timed out waiting {}ms for recv operation to complete"
    assert run_ranks(patience, 4, 3.0)[0] == [told.format(3000), *[told.format(500)] * 6]


# ---- ranks that share rows


@dataclass
class Sharing:
    """The ranks with which a rank shares rows."""

    groups: list[list[int]]
    """By axis: one, or for `hybrid` those that rotate and those that exchange."""
    place: list[int]
    apart: bool
    """Whether what they send has communicators of its own."""


def sharing(cases: list[tuple[dict[str, int], int | None]]) -> list[Sharing]:
    found = []
    for sizes, ulysses in cases:
        mesh = Mesh("cpu", sizes, rank=distributed.get_rank(), ulysses_degree=ulysses, timeout=timedelta(seconds=30))
        ours = mesh.cp_mesh.get_all_groups()
        others = {group.group_name for group in [*mesh.fsdp_mesh.get_all_groups(), mesh.dp_cp_group]}
        found.append(
            Sharing(
                [distributed.get_process_group_ranks(group) for group in ours],
                [mesh.cp_mesh.get_local_rank(axis) for axis in range(mesh.cp_mesh.ndim)],
                not others & {group.group_name for group in ours},
            )
        )
    return found


@pytest.mark.slow
def test_neighbours_exchange_heads_and_keys_rotate_among_ranks_further_apart() -> None:
    grid = (degrees(dp_shard=2, cp=4), 2)
    line = (degrees(dp_shard=2, cp=4), None)
    all_exchange = (degrees(dp_replicate=2, cp=4), 4)
    with_tensor_ranks = (degrees(cp=4, tp=2), 2)
    one_ring = (degrees(cp=8), 4)
    none_exchange = (degrees(dp_shard=2, cp=4), 1)
    everyone = (degrees(cp=8), None)
    by_rank = run_ranks(sharing, 8, [grid, line, all_exchange, with_tensor_ranks, one_ring, none_exchange, everyone])
    assert all(found.apart for cases in by_rank for found in cases)
    of_grid, of_line, of_all, of_tensor, of_ring, of_none = ([cases[index] for cases in by_rank] for index in range(6))
    rotate = [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    pairs = [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    assert [found.groups for found in of_grid] == [[*both] for both in zip(rotate, pairs, strict=True)]
    assert [found.place for found in of_grid] == [[0, 0], [0, 1], [1, 0], [1, 1]] * 2
    first, second = [0, 1, 2, 3], [4, 5, 6, 7]
    assert [found.groups for found in of_line] == [[first]] * 4 + [[second]] * 4
    assert [found.place for found in of_line] == [[0], [1], [2], [3]] * 2
    assert [found.groups for found in of_all] == [[[rank], first if rank < 4 else second] for rank in range(8)]
    assert [found.groups for found in of_none] == [[first if rank < 4 else second, [rank]] for rank in range(8)]
    # Tensor-parallel ranks are the nearest, and share what their neighbours of the same part share.
    rotate = [[0, 4], [1, 5], [2, 6], [3, 7], [0, 4], [1, 5], [2, 6], [3, 7]]
    pairs = [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    assert [found.groups for found in of_tensor] == [[*both] for both in zip(rotate, pairs, strict=True)]
    assert [found.groups for found in of_ring] == [
        [[rank % 4, rank % 4 + 4], first if rank < 4 else second] for rank in range(8)
    ]


def nobody_shares() -> str:
    mesh = Mesh("cpu", degrees(dp_shard=2), rank=distributed.get_rank())
    with pytest.raises(ValueError, match="no ranks share rows") as raised:
        _ = mesh.cp_mesh
    return str(raised.value)


def test_where_no_ranks_share_rows_there_is_no_mesh_of_those_that_do() -> None:
    assert run_ranks(nobody_shares, 2) == ["parallelism.cp = 1: no ranks share rows"] * 2
