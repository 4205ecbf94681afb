"""Who talks to whom, over which links, and how it is drawn."""

from __future__ import annotations

import pytest

from parallelisms.parallel_dims import AXES, ContextPlan, CPMethod
from parallelisms.process_groups import Topology, coordinate, format_ranks, process_group_ranks, rank_groups


def degrees(**sizes: int) -> dict[str, int]:
    return {axis: sizes.get(axis, 1) for axis in AXES}


def topology(
    *, method: CPMethod = "ring", ulysses: int | None = None, node: int = 8, hosts: int = 1, **sizes: int
) -> Topology:
    plan = ContextPlan(
        cp=sizes.get("cp", 1), method=method, cp_ulysses=ulysses, heads=32, kv_heads=8, ranks_per_node=node
    )
    return Topology(degrees=degrees(**sizes), context_plan=plan, ranks_per_node=node, num_nodes=hosts)


# ---- groups


def test_groups_of_a_mesh() -> None:
    sizes = degrees(dp_replicate=2, dp_shard=2, tp=2)
    spelled = {axis: [list(ranks) for ranks in rank_groups(sizes, axis)] for axis in sizes}
    assert spelled["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert spelled["dp_shard"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert spelled["dp_replicate"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert spelled["pp"] == [[rank] for rank in range(8)]


@pytest.mark.parametrize("sizes", [degrees(pp=2, dp_shard=2, cp=2), degrees(dp_replicate=3, cp=4, tp=2), degrees()])
def test_ranks_of_a_group_differ_along_its_axes_alone_and_every_rank_is_in_one(sizes: dict[str, int]) -> None:
    for first in range(len(AXES)):
        for last in range(first, len(AXES)):
            axes = AXES[first : last + 1]
            found = rank_groups(sizes, *axes)
            apart = {
                tuple(coordinate(sizes, rank)[axis] for axis in AXES if axis not in axes): None for rank in found[0]
            }
            assert len(apart) == 1
            assert sorted(rank for ranks in found for rank in ranks) == list(rank_groups(sizes, *AXES)[0])
            assert len(found[0]) * len(found) == len(rank_groups(sizes, *AXES)[0])


def test_what_is_talked_about_by_whom() -> None:
    made = process_group_ranks(degrees(pp=2, dp_shard=2, cp=2))
    assert list(made) == ["pp", "dp_replicate", "fsdp", "tp", "tokens", "numbers", "cp"]
    assert {name: [format_ranks(ranks) for ranks in found] for name, found in made.items() if len(found) < 8} == {
        "pp": ["0,4", "1,5", "2,6", "3,7"],
        "fsdp": ["0-3", "4-7"],
        "tokens": ["0-3", "4-7"],
        "numbers": ["0-7"],
        "cp": ["0-1", "2-3", "4-5", "6-7"],
    }
    halves = process_group_ranks(degrees(dp_shard=2, cp=4, tp=2), ulysses_degree=2)
    assert list(halves) == ["pp", "dp_replicate", "fsdp", "tp", "tokens", "rotate", "exchange"]
    assert [list(ranks) for ranks in halves["exchange"][:4]] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert [list(ranks) for ranks in halves["rotate"][:4]] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_no_group_is_made_that_nobody_uses() -> None:
    assert list(process_group_ranks(degrees(dp_shard=8))) == ["pp", "dp_replicate", "fsdp", "tp", "tokens"]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (range(5, 6), "5"),
        (range(8), "0-7"),
        (range(2), "0-1"),
        (range(0, 12, 4), "0,4,8"),
        (range(1, 80, 8), "1,9,..,73"),
    ],
)
def test_ranks_are_spelled_shortly(ranks: range, text: str) -> None:
    assert format_ranks(ranks) == text


# ---- the drawing


def drawn(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def test_sixteen_ranks_on_four_axes() -> None:
    assert topology(pp=2, dp_shard=2, cp=2, tp=2).diagram() == drawn("""
axis                  size  links             ranks that talk
pp                       2  across 2 nodes    0,8  1,9  2,10  3,11 ... (8 groups)
dp_replicate             1  -
dp_shard                 2  inside a node     0,4  1,5  2,6  3,7 ... (8 groups)
cp                       2  inside a node     0,2  1,3  4,6  5,7 ... (8 groups)
tp                       2  inside a node     0-1  2-3  4-5  6-7 ... (8 groups)
fsdp (dp_shard x cp)     4  inside a node     0,2,4,6  1,3,5,7  8,10,12,14  9,11,13,15
rank            0  1  2  3  4  5  6  7| 8  9 10 11 12 13 14 15
pp              0  0  0  0  0  0  0  0| 1  1  1  1  1  1  1  1
dp_shard        0  0  0  0  1  1  1  1| 0  0  0  0  1  1  1  1
cp              0  0  1  1  0  0  1  1| 0  0  1  1  0  0  1  1
tp              0  1  0  1  0  1  0  1| 0  1  0  1  0  1  0  1
""")


def test_hybrid_shows_who_exchanges_heads_and_what_rotates() -> None:
    assert topology(method="hybrid", ulysses=4, dp_replicate=4, cp=8, tp=2, node=16).diagram() == drawn("""
axis                  size  links             ranks that talk
pp                       1  -
dp_replicate             4  across 4 nodes    0,16,32,48  1,17,33,49  2,18,34,50  3,19,35,51 ... (16 groups)
dp_shard                 1  -
cp                       8  inside a node     0,2,..,14  1,3,..,15  16,18,..,30  17,19,..,31 ... (8 groups)
  rotate                 2  inside a node     0,8  1,9  2,10  3,11 ... (32 groups)
  exchange               4  inside a node     0,2,4,6  1,3,5,7  8,10,12,14  9,11,13,15 ... (16 groups)
tp                       2  inside a node     0-1  2-3  4-5  6-7 ... (32 groups)
fsdp (dp_shard x cp)     8  inside a node     0,2,..,14  1,3,..,15  16,18,..,30  17,19,..,31 ... (8 groups)
rank            0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15|16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
dp_replicate    0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0| 1  1  1  1  1  1  1  1  1  1  1  1  1  1  1  1
cp              0  0  1  1  2  2  3  3  4  4  5  5  6  6  7  7| 0  0  1  1  2  2  3  3  4  4  5  5  6  6  7  7
tp              0  1  0  1  0  1  0  1  0  1  0  1  0  1  0  1| 0  1  0  1  0  1  0  1  0  1  0  1  0  1  0  1
rank           32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47|48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
dp_replicate    2  2  2  2  2  2  2  2  2  2  2  2  2  2  2  2| 3  3  3  3  3  3  3  3  3  3  3  3  3  3  3  3
cp              0  0  1  1  2  2  3  3  4  4  5  5  6  6  7  7| 0  0  1  1  2  2  3  3  4  4  5  5  6  6  7  7
tp              0  1  0  1  0  1  0  1  0  1  0  1  0  1  0  1| 0  1  0  1  0  1  0  1  0  1  0  1  0  1  0  1
""")


def test_groups_suffice_for_many_ranks_or_a_single_axis() -> None:
    many = topology(pp=8, dp_shard=16, cp=16, tp=8).diagram()
    assert many[1] == (
        "pp                       8  across 8 nodes    0,2048,..,14336  1,2049,..,14337  2,2050,..,14338  "
        "3,2051,..,14339 ... (2,048 groups)"
    )
    assert len(many) == 7
    assert not any(line.startswith("rank") for line in topology(dp_shard=8).diagram())
    assert topology().diagram()[1:] == [f"{name:<20}     1  -" for name in (*AXES, "fsdp (dp_shard x cp)")]


# ---- links


@pytest.mark.parametrize(
    ("node", "tp", "dp_shard"),
    [(8, "inside a node", "across 4 nodes"), (4, "across 2 nodes", "across 4 nodes"), (32, *["inside a node"] * 2)],
)
def test_a_group_is_as_fast_as_the_nodes_it_touches_allow(node: int, tp: str, dp_shard: str) -> None:
    lines = {line.split()[0]: line for line in topology(dp_shard=4, tp=8, node=node).diagram()[:7]}
    assert tp in lines["tp"]
    assert dp_shard in lines["dp_shard"]


def test_the_group_that_touches_most_nodes_speaks_for_its_axis() -> None:
    lines = topology(dp_shard=4, tp=6, node=8).diagram()
    assert lines[5] == "tp                       6  across 2 nodes    0-5  6-11  12-17  18-23"


@pytest.mark.parametrize(
    ("case", "remarks"),
    [
        (topology(tp=8, dp_shard=4, hosts=4), []),
        (
            topology(tp=6, dp_shard=4),
            ["parallelism.tp = 6 crosses nodes of 8 ranks (parallelism.ranks_per_node): every lay"],
        ),
        (topology(cp=8, method="ulysses", dp_shard=2), []),
        (topology(cp=16, method="ring"), []),
        (
            topology(cp=4, method="ulysses", tp=4),
            ['parallelism.cp_method "ulysses" exchanges heads among 4 ranks x tp 4, which crosses nodes of 8 ranks'],
        ),
        (topology(cp=16, method="hybrid", ulysses=8), []),
        (
            topology(cp=16, method="hybrid", ulysses=8, tp=2),
            ['parallelism.cp_method "hybrid" exchanges heads among 8 ranks x tp 2, which crosses nodes of 8 ranks'],
        ),
        (
            topology(dp_shard=8, hosts=2),
            [
                "parallelism.ranks_per_node = 8, but each of 2 nodes runs 4 processes: links are told, and cp_method is chosen"
            ],
        ),
        (topology(dp_shard=16, hosts=2, node=4), []),
        (topology(dp_shard=12), []),
    ],
)
def test_slow_links_where_fast_ones_are_needed_are_remarked(case: Topology, remarks: list[str]) -> None:
    told = case.warnings()
    assert [line[: len(start)] for line, start in zip(told, remarks, strict=True)] == remarks
