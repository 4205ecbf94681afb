"""Coordinates, process groups and device meshes of a mesh."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
from torch import distributed
from torch.distributed import ProcessGroup

from parallelisms.mesh.collectives import all_reduce
from parallelisms.mesh.mesh import Mesh
from parallelisms.mesh.parallel_dims import AXES
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


def degrees(**sizes: int) -> dict[str, int]:
    return {axis: sizes.get(axis, 1) for axis in AXES}


@dataclass
class Coordinates:
    axes: dict[str, int]
    size: int
    data: tuple[int, int]
    fsdp: list[list[int]]
    tokens: list[int]


def local_coordinate(sizes: dict[str, int]) -> Coordinates:
    mesh = Mesh("cpu", sizes, rank=distributed.get_rank())
    groups = [
        distributed.get_process_group_ranks(group) for group in mesh.fsdp_mesh.get_all_groups()
    ]
    tokens = distributed.get_process_group_ranks(mesh.dp_cp_group)
    return Coordinates(mesh.coordinate, mesh.size, (mesh.dp_rank, mesh.dp_degree), groups, tokens)


def test_coordinates_of_eight_ranks_match_the_docstring() -> None:
    coordinates = run_ranks(local_coordinate, 8, degrees(dp_replicate=2, dp_shard=2, cp=2))
    assert [p.axes["dp_replicate"] for p in coordinates] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [p.axes["dp_shard"] for p in coordinates] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [p.axes["cp"] for p in coordinates] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert {(p.size, p.axes["pp"], p.axes["tp"]) for p in coordinates} == {(8, 0, 0)}
    # Ranks that differ only in cp read the same sequences.
    assert [p.data for p in coordinates] == [(index, 4) for index in (0, 0, 1, 1, 2, 2, 3, 3)]
    # Weights are sharded over dp_shard x cp, with replicas across.
    first = [0, 1, 2, 3]
    second = [4, 5, 6, 7]
    assert [p.fsdp for p in coordinates] == [
        [[rank, rank + 4], first] if rank < 4 else [[rank - 4, rank], second] for rank in range(8)
    ]
    assert all(p.tokens == first + second for p in coordinates)


def test_pp_and_tp_ranks_read_the_same_sequences_and_reduce_separately() -> None:
    coordinates = run_ranks(local_coordinate, 8, degrees(pp=2, dp_shard=2, tp=2))
    assert [(p.axes["pp"], p.axes["dp_shard"], p.axes["tp"]) for p in coordinates] == [
        (stage, shard, part) for stage in (0, 1) for shard in (0, 1) for part in (0, 1)
    ]
    assert [p.data for p in coordinates] == [(shard, 2) for shard in (0, 0, 1, 1, 0, 0, 1, 1)]
    dedicated = [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    assert [p.tokens for p in coordinates] == dedicated
    assert [p.fsdp for p in coordinates] == [[group] for group in dedicated]


def test_one_rank_has_a_coordinate_on_every_dimension() -> None:
    (unanswered_all_reduce,) = run_ranks(local_coordinate, 1, degrees())
    assert unanswered_all_reduce == Coordinates(dict.fromkeys(AXES, 0), 1, (0, 1), [[0]], [0])


# ---- process groups


TOKENS = "dp_replicate dp_shard cp"


def groups_of(mesh: Mesh) -> dict[str, ProcessGroup]:
    """Every process group in use, by its mesh dimensions."""
    replicas = (
        {"dp_replicate": mesh.fsdp_mesh.get_group("dp_replicate")}
        if mesh.degrees["dp_replicate"] > 1
        else {}
    )
    cp_groups = {"cp": mesh.cp_mesh.get_group("cp")} if mesh.degrees["cp"] > 1 else {}
    return {
        "pp": mesh.pp_group,
        **replicas,
        "dp_shard cp": mesh.fsdp_mesh.get_group("fsdp"),
        "tp": mesh.tp_mesh.get_group(),
        TOKENS: mesh.dp_cp_group,
        f"pp {TOKENS}": mesh.metrics_group,
        **cp_groups,
    }


GroupInfo = dict[str, tuple[str, str, list[int]]]


def describe_groups(cases: list[dict[str, int]]) -> list[GroupInfo]:
    """The name, description and ranks of each group, by mesh."""
    meshes = [Mesh("cpu", sizes, rank=distributed.get_rank()) for sizes in cases]
    return [
        {
            axes: (group.group_name, group.group_desc, distributed.get_process_group_ranks(group))
            for axes, group in groups_of(mesh).items()
        }
        for mesh in meshes
    ]


def ranks_along(sizes: dict[str, int], axes: str, rank: int) -> list[int]:
    """The ranks that differ from `rank` only in these mesh dimensions."""
    grid = torch.arange(8).view(list(sizes.values()))
    local_coordinate = [int(index) for index in (grid == rank).nonzero()[0]]
    fixed = tuple(
        slice(None) if axis in axes.split() else local_coordinate[index]
        for index, axis in enumerate(AXES)
    )
    found: list[int] = grid[fixed].flatten().tolist()
    return found


MESHES = [
    degrees(pp=2, dp_shard=2, tp=2),
    degrees(pp=2, dp_replicate=2, cp=2),
    degrees(dp_replicate=2, dp_shard=2, tp=2),
    degrees(pp=2, cp=2, tp=2),
    degrees(pp=8),
    degrees(tp=8),
    degrees(cp=8),
    degrees(dp_shard=8),
]


def test_every_group_has_the_ranks_of_its_dimensions_and_one_name() -> None:
    by_rank = run_ranks(describe_groups, 8, MESHES)
    seen_groups: dict[str, tuple[str, list[int]]] = {}
    for case, sizes in enumerate(MESHES):
        for rank, cases in enumerate(by_rank):
            for axes, (name, description, ranks) in cases[case].items():
                assert ranks == ranks_along(sizes, axes, rank), (sizes, axes)
                # torch numbers groups in creation order, which must be the same on all ranks.
                assert seen_groups.setdefault(name, (description, ranks)) == (description, ranks)
            numbers, tokens = (cases[case][axes][0] for axes in (f"pp {TOKENS}", TOKENS))
            assert (numbers == tokens) == (sizes["pp"] == 1), (
                "without a pipeline both groups are the same"
            )
    assert "0" not in seen_groups, "the default group is not used"
    descriptions = {cases[0][axes][1] for cases in by_rank for axes in cases[0]}
    assert descriptions >= {"pp 0,4", "fsdp 0,2", "tp 6-7", "dp_cp 5,7", "metrics 0,2,4,6"}


def unanswered_all_reduce(group: ProcessGroup | None) -> str:
    """The error of a collective that no other rank joins."""
    with pytest.raises(RuntimeError) as raised:
        distributed.all_reduce(torch.ones(1), group=group)
    return str(raised.value).partition("] ")[2]


def timeout_errors(delay: float) -> list[str]:
    """Timeout errors of rank 0: of one group with the initial timeout, and of all groups with a
    shorter one.
    """
    rank = distributed.get_rank()
    mesh = Mesh("cpu", degrees(pp=2, cp=2), rank=rank, timeout=timedelta(seconds=delay))
    first = [unanswered_all_reduce(mesh.cp_mesh.get_group())] if rank == 0 else []
    mesh = Mesh("cpu", degrees(pp=2, cp=2), rank=rank, timeout=timedelta(seconds=60))
    time.sleep(delay * (rank == 1))
    mesh.set_timeout(timedelta(seconds=delay * 2 / 3))
    # No rank timed out waiting for the delay one.
    assert int(all_reduce(mesh.metrics_group, torch.tensor(1))) == 4
    mesh.set_timeout(timedelta(seconds=0.5))
    groups = [group for group in groups_of(mesh).values() if group.size() > 1]
    return (
        [*first, *(unanswered_all_reduce(group) for group in (*groups, None))] if rank == 0 else []
    )


@pytest.mark.slow
def test_set_timeout_applies_to_every_group() -> None:
    describe_groups = "Timed out waiting {}ms for recv operation to complete"
    assert run_ranks(timeout_errors, 4, 3.0)[0] == [
        describe_groups.format(3000),
        *[describe_groups.format(500)] * 6,
    ]


# ---- context parallelism


@dataclass
class CPGroups:
    """The cp ranks of a rank."""

    groups: list[list[int]]
    """One group, or for `hybrid` the rotate group and the exchange group."""
    local_coordinate: list[int]
    dedicated: bool
    """Whether no other mesh shares these process groups."""


def cp_groups(cases: list[tuple[dict[str, int], int | None]]) -> list[CPGroups]:
    found = []
    for sizes, ulysses in cases:
        mesh = Mesh(
            "cpu",
            sizes,
            rank=distributed.get_rank(),
            ulysses_degree=ulysses,
            timeout=timedelta(seconds=30),
        )
        ours = mesh.cp_mesh.get_all_groups()
        others = {
            group.group_name for group in [*mesh.fsdp_mesh.get_all_groups(), mesh.dp_cp_group]
        }
        found.append(
            CPGroups(
                [distributed.get_process_group_ranks(group) for group in ours],
                [mesh.cp_mesh.get_local_rank(axis) for axis in range(mesh.cp_mesh.ndim)],
                not others & {group.group_name for group in ours},
            )
        )
    return found


@pytest.mark.slow
def test_hybrid_exchanges_heads_among_neighbours_and_rotates_kv_across() -> None:
    grid = (degrees(dp_shard=2, cp=4), 2)
    line = (degrees(dp_shard=2, cp=4), None)
    all_exchange = (degrees(dp_replicate=2, cp=4), 4)
    with_tensor_ranks = (degrees(cp=4, tp=2), 2)
    one_ring = (degrees(cp=8), 4)
    none_exchange = (degrees(dp_shard=2, cp=4), 1)
    seen_groups = (degrees(cp=8), None)
    by_rank = run_ranks(
        cp_groups,
        8,
        [grid, line, all_exchange, with_tensor_ranks, one_ring, none_exchange, seen_groups],
    )
    assert all(found.dedicated for cases in by_rank for found in cases)
    of_grid, of_line, of_all, of_tensor, of_ring, of_none = (
        [cases[index] for cases in by_rank] for index in range(6)
    )
    rotate = [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    pairs = [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    assert [found.groups for found in of_grid] == [
        [*both] for both in zip(rotate, pairs, strict=True)
    ]
    assert [found.local_coordinate for found in of_grid] == [[0, 0], [0, 1], [1, 0], [1, 1]] * 2
    first = [0, 1, 2, 3]
    second = [4, 5, 6, 7]
    assert [found.groups for found in of_line] == [[first]] * 4 + [[second]] * 4
    assert [found.local_coordinate for found in of_line] == [[0], [1], [2], [3]] * 2
    assert [found.groups for found in of_all] == [
        [[rank], first if rank < 4 else second] for rank in range(8)
    ]
    assert [found.groups for found in of_none] == [
        [first if rank < 4 else second, [rank]] for rank in range(8)
    ]
    # tp ranks are adjacent, so cp groups are strided.
    rotate = [[0, 4], [1, 5], [2, 6], [3, 7], [0, 4], [1, 5], [2, 6], [3, 7]]
    pairs = [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    assert [found.groups for found in of_tensor] == [
        [*both] for both in zip(rotate, pairs, strict=True)
    ]
    assert [found.groups for found in of_ring] == [
        [[rank % 4, rank % 4 + 4], first if rank < 4 else second] for rank in range(8)
    ]


def error_without_cp() -> str:
    mesh = Mesh("cpu", degrees(dp_shard=2), rank=distributed.get_rank())
    with pytest.raises(ValueError, match=r"parallelism\.cp = 1") as raised:
        _ = mesh.cp_mesh
    return str(raised.value)


def test_cp_mesh_is_an_error_without_context_parallelism() -> None:
    assert (
        run_ranks(error_without_cp, 2) == ["parallelism.cp = 1 has no context-parallel mesh"] * 2
    )
