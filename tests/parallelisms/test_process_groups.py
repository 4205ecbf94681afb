"""Process groups, the nodes they span, and their table."""

from __future__ import annotations

import pytest

from parallelisms.mesh.context_plan import ContextPlan, CPMethod
from parallelisms.mesh.parallel_dims import AXES
from parallelisms.mesh.process_groups import (
    Topology,
    coordinate,
    format_ranks,
    process_group_ranks,
    rank_groups,
)


def degrees(**sizes: int) -> dict[str, int]:
    return {axis: sizes.get(axis, 1) for axis in AXES}


def topology(
    *,
    method: CPMethod = "ring",
    ulysses: int | None = None,
    node: int = 8,
    num_nodes: int = 1,
    **sizes: int,
) -> Topology:
    plan = ContextPlan(
        cp=sizes.get("cp", 1),
        method=method,
        cp_ulysses=ulysses,
        heads=32,
        kv_heads=8,
        ranks_per_node=node,
    )
    return Topology(
        degrees=degrees(**sizes), context_plan=plan, ranks_per_node=node, num_nodes=num_nodes
    )


# ---- groups


def test_rank_groups_of_every_dimension() -> None:
    sizes = degrees(dp_replicate=2, dp_shard=2, tp=2)
    groups_by_axis = {axis: [list(ranks) for ranks in rank_groups(sizes, axis)] for axis in sizes}
    assert groups_by_axis["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups_by_axis["dp_shard"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups_by_axis["dp_replicate"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups_by_axis["pp"] == [[rank] for rank in range(8)]


@pytest.mark.parametrize(
    "sizes", [degrees(pp=2, dp_shard=2, cp=2), degrees(dp_replicate=3, cp=4, tp=2), degrees()]
)
def test_groups_partition_the_ranks_and_differ_only_in_their_dimensions(
    sizes: dict[str, int],
) -> None:
    for first in range(len(AXES)):
        for last in range(first, len(AXES)):
            axes = AXES[first : last + 1]
            found = [*rank_groups(sizes, *axes)]
            fixed_coordinates = {
                tuple(coordinate(sizes, rank)[axis] for axis in AXES if axis not in axes): None
                for rank in found[0]
            }
            assert len(fixed_coordinates) == 1
            assert sorted(rank for ranks in found for rank in ranks) == list(
                next(rank_groups(sizes, *AXES))
            )
            assert len(found[0]) * len(found) == len(next(rank_groups(sizes, *AXES)))


def test_process_groups_have_the_expected_ranks() -> None:
    made = process_group_ranks(degrees(pp=2, dp_shard=2, cp=2))
    assert list(made) == ["pp", "dp_replicate", "fsdp", "tp", "dp_cp", "metrics", "cp"]
    assert {
        name: [format_ranks(ranks) for ranks in found]
        for name, found in made.items()
        if len(found) < 8
    } == {
        "pp": ["0,4", "1,5", "2,6", "3,7"],
        "fsdp": ["0-3", "4-7"],
        "dp_cp": ["0-3", "4-7"],
        "metrics": ["0-7"],
        "cp": ["0-1", "2-3", "4-5", "6-7"],
    }
    halves = process_group_ranks(degrees(dp_shard=2, cp=4, tp=2), ulysses_degree=2)
    assert list(halves) == ["pp", "dp_replicate", "fsdp", "tp", "dp_cp", "rotate", "exchange"]
    assert [list(ranks) for ranks in halves["exchange"][:4]] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert [list(ranks) for ranks in halves["rotate"][:4]] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_unused_groups_are_not_created() -> None:
    assert list(process_group_ranks(degrees(dp_shard=8))) == [
        "pp",
        "dp_replicate",
        "fsdp",
        "tp",
        "dp_cp",
    ]


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
def test_ranks_are_abbreviated(ranks: range, text: str) -> None:
    assert format_ranks(ranks) == text


# ---- the table


def table_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def test_table_of_sixteen_ranks_on_four_dimensions() -> None:
    assert topology(pp=2, dp_shard=2, cp=2, tp=2).diagram() == table_lines("""
dimension             size  links             groups of ranks
pp                       2  across 2 nodes    0,8  1,9  2,10  3,11 ... (8 groups)
dp_shard                 2  inside a node     0,4  1,5  2,6  3,7 ... (8 groups)
cp                       2  inside a node     0,2  1,3  4,6  5,7 ... (8 groups)
tp                       2  inside a node     0-1  2-3  4-5  6-7 ... (8 groups)
fsdp (dp_shard x cp)     4  inside a node     0,2,4,6  1,3,5,7  8,10,12,14  9,11,13,15
""")


def test_table_of_hybrid_has_its_rotate_and_exchange_groups() -> None:
    assert topology(
        method="hybrid", ulysses=4, dp_replicate=4, cp=8, tp=2, node=16
    ).diagram() == table_lines("""
dimension             size  links             groups of ranks
dp_replicate             4  across 4 nodes    0,16,32,48  1,17,33,49  2,18,34,50  3,19,35,51 ... (16 groups)
cp                       8  inside a node     0,2,..,14  1,3,..,15  16,18,..,30  17,19,..,31 ... (8 groups)
  rotate                 2  inside a node     0,8  1,9  2,10  3,11 ... (32 groups)
  exchange               4  inside a node     0,2,4,6  1,3,5,7  8,10,12,14  9,11,13,15 ... (16 groups)
tp                       2  inside a node     0-1  2-3  4-5  6-7 ... (32 groups)
fsdp (dp_shard x cp)     8  inside a node     0,2,..,14  1,3,..,15  16,18,..,30  17,19,..,31 ... (8 groups)
""")


def test_table_abbreviates_many_groups_and_is_empty_for_one_rank() -> None:
    many = topology(pp=8, dp_shard=16, cp=16, tp=8).diagram()
    assert many[1] == (
        "pp                       8  across 8 nodes    0,2048,..,14336  1,2049,..,14337  2,2050,..,14338  "
        "3,2051,..,14339 ... (2,048 groups)"
    )
    assert [line.split()[0] for line in many] == [
        "dimension",
        "pp",
        "dp_shard",
        "cp",
        "tp",
        "fsdp",
    ]
    assert topology().diagram() == []


# ---- links


@pytest.mark.parametrize(
    ("node", "tp", "dp_shard"),
    [
        (8, "inside a node", "across 4 nodes"),
        (4, "across 2 nodes", "across 4 nodes"),
        (32, *["inside a node"] * 2),
    ],
)
def test_table_shows_how_many_nodes_a_group_spans(node: int, tp: str, dp_shard: str) -> None:
    lines = {line.split()[0]: line for line in topology(dp_shard=4, tp=8, node=node).diagram()}
    assert tp in lines["tp"]
    assert dp_shard in lines["dp_shard"]


def test_table_shows_the_widest_group_of_a_dimension() -> None:
    lines = topology(dp_shard=4, tp=6, node=8).diagram()
    assert lines[2] == "tp                       6  across 2 nodes    0-5  6-11  12-17  18-23"


@pytest.mark.parametrize(
    ("case", "expected_warnings"),
    [
        (topology(tp=8, dp_shard=4, num_nodes=4), []),
        (
            topology(tp=6, dp_shard=4),
            [
                "parallelism.tp = 6 crosses nodes of 8 ranks (parallelism.ranks_per_node): every lay"
            ],
        ),
        (topology(cp=8, method="ulysses", dp_shard=2), []),
        (topology(cp=16, method="ring"), []),
        (
            topology(cp=4, method="ulysses", tp=4),
            [
                'parallelism.cp_method "ulysses" exchanges heads among 4 ranks x tp 4 and crosses nodes of 8 ranks'
            ],
        ),
        (topology(cp=16, method="hybrid", ulysses=8), []),
        (
            topology(cp=16, method="hybrid", ulysses=8, tp=2),
            [
                'parallelism.cp_method "hybrid" exchanges heads among 8 ranks x tp 2 and crosses nodes of 8 ranks'
            ],
        ),
        (
            topology(dp_shard=8, num_nodes=2),
            [
                "parallelism.ranks_per_node = 8 does not match 2 nodes of 4 processes: cp_method and this table assume 8"
            ],
        ),
        (topology(dp_shard=16, num_nodes=2, node=4), []),
        (topology(dp_shard=12), []),
    ],
)
def test_tensor_and_head_groups_across_nodes_are_warned_about(
    case: Topology, expected_warnings: list[str]
) -> None:
    warnings = case.warnings()
    assert [
        line[: len(start)] for line, start in zip(warnings, expected_warnings, strict=True)
    ] == expected_warnings
