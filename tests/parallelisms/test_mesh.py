"""Who is where on the mesh, and with whom."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch import distributed

from parallelisms.mesh import Mesh
from parallelisms.rules import AXES
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
    groups = [distributed.get_process_group_ranks(group) for group in mesh.fsdp.get_all_groups()]
    tokens = distributed.get_process_group_ranks(mesh.tokens)
    return Place(mesh.place, mesh.size, (mesh.data_rank, mesh.data_ranks), groups, tokens)


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
