"""What may be asked of a mesh, and what `auto` makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from parallelisms.parallel_dims import (
    LAYOUTS_BY_ROTATE_METHOD,
    ROTATE_METHODS,
    ContextPlan,
    CPMethod,
    RotateMethod,
    ShardLayout,
    kv_head_repeats,
)

KINDS: tuple[ShardLayout, ...] = get_args(ShardLayout)
K = 1024
PACKED = ContextPlan(cp=8, heads=32, kv_heads=8, seq_len=128 * K)
LONG = replace(PACKED, packs_documents=False)


# ---- auto


@pytest.mark.parametrize(
    ("plan", "method", "reason"),
    [
        (PACKED, "ulysses", "32 heads divide among 8 ranks; packed documents"),
        (replace(PACKED, cp=2), "ulysses", "32 heads divide among 2 ranks; packed documents"),
        (
            replace(PACKED, heads=12, kv_heads=4),
            "allgather",
            "12 heads do not divide among 8 ranks; packed documents balance best when gathered",
        ),
        (LONG, "ulysses", "32 heads divide among 8 ranks; one document per row, fewer bytes than keys and values"),
        (replace(LONG, cp=2), "allgather", "one document per row; gathering would hold 3.0 GiB per layer"),
        (
            replace(LONG, cp=5),
            "allgather",
            "32 heads do not divide among 5 ranks; one document per row; gathering would hold 3.0 GiB per layer",
        ),
        (replace(PACKED, cp=6), "hybrid", "cp 6 spans nodes of 8 ranks, 2 of which divide the heads"),
        # What is said of the layout narrows the choice.
        (replace(PACKED, layout="balanced"), "allgather", "packed documents balance best when gathered"),
        (
            replace(LONG, cp=2, seq_len=K * K, layout="balanced"),
            "allgather",
            "one document per row; gathering would hold 24.0 GiB per layer",
        ),
        (
            replace(LONG, cp=2, seq_len=K * K),
            "ring",
            "one document per row; gathering would hold 24.0 GiB per layer, more than 4",
        ),
        (
            replace(LONG, cp=5, seq_len=K * K),
            "ring",
            "32 heads do not divide among 5 ranks; one document per row; gathering would hold 24.0 GiB per layer, "
            "more than 4",
        ),
        (replace(PACKED, cp=16), "hybrid", "cp 16 spans nodes of 8 ranks, 8 of which divide the heads"),
        (replace(LONG, cp=16), "hybrid", "cp 16 spans nodes of 8 ranks, 8 of which divide the heads"),
        (replace(PACKED, cp=8, ranks_per_node=4), "hybrid", "cp 8 spans nodes of 4 ranks, 4 of which divide the heads"),
        # No two ranks of a node can exchange heads, and heads never cross nodes.
        (replace(PACKED, cp=11, heads=11, kv_heads=11), "allgather", "packed documents balance best when gathered"),
        (
            replace(LONG, cp=16, ranks_per_node=1, heads=4, kv_heads=1, seq_len=K * K),
            "allgather",
            "4 heads do not divide among 16 ranks; one document per row; gathering would hold 3.0 GiB per layer",
        ),
    ],
)
def test_auto_chooses_by_documents_heads_nodes_and_memory(plan: ContextPlan, method: CPMethod, reason: str) -> None:
    assert (plan.resolved_method, plan.reason) == (method, f"auto: {reason}")
    assert plan.problems() == []


@pytest.mark.parametrize(
    ("heads", "kv_heads", "cp", "method"),
    [
        # Heads are fewer bytes from (H + K) / 2K ranks on: 2.5, 4.5, 1, and 2, where they are the same.
        (32, 8, 2, "allgather"),
        (32, 8, 4, "ulysses"),
        (64, 8, 4, "allgather"),
        (64, 8, 8, "ulysses"),
        (8, 8, 2, "ulysses"),
        (24, 8, 2, "allgather"),
    ],
)
def test_a_long_document_exchanges_heads_where_that_is_fewer_bytes(
    heads: int, kv_heads: int, cp: int, method: CPMethod
) -> None:
    assert replace(LONG, heads=heads, kv_heads=kv_heads, cp=cp, seq_len=32 * K).resolved_method == method
    assert replace(PACKED, heads=heads, kv_heads=kv_heads, cp=cp).resolved_method == "ulysses"


@pytest.mark.parametrize(
    ("row_tokens", "head_dim", "kv_heads", "method"),
    [
        (128 * K, 128, 8, "allgather"),
        (256 * K, 128, 8, "ring"),
        (256 * K, 64, 8, "allgather"),
        (256 * K, 128, 4, "allgather"),
        (512 * K, 128, 4, "ring"),
    ],
)
def test_keys_and_values_are_gathered_while_they_fit(
    row_tokens: int, head_dim: int, kv_heads: int, method: CPMethod
) -> None:
    assert replace(LONG, cp=2, seq_len=row_tokens, head_dim=head_dim, kv_heads=kv_heads).resolved_method == method


# ---- what follows from a method


@pytest.mark.parametrize(
    ("method", "ring", "ulysses", "rotation", "kind", "multiple"),
    [
        ("allgather", 8, 1, "allgather", "balanced", 16),
        ("ring", 8, 1, "ring", "doc_headtail", 16),
        ("alltoall", 8, 1, "alltoall", "doc_headtail", 16),
        ("ulysses", 1, 8, None, "contiguous", 8),
    ],
)
def test_a_method_decides_who_rotates_and_who_exchanges(
    method: CPMethod, ring: int, ulysses: int, rotation: RotateMethod | None, kind: ShardLayout, multiple: int
) -> None:
    for plan in (replace(PACKED, method=method), replace(LONG, method=method)):
        assert (plan.resolved_method, plan.reason) == (method, "as configured")
        assert (plan.ring_degree, plan.ulysses_degree, plan.rotate_method) == (ring, ulysses, rotation)
        assert (plan.resolved_layout, plan.seq_len_divisor) == (kind, multiple)
        assert plan.problems() == []


def test_a_hybrid_exchanges_heads_inside_a_node_and_rotates_across() -> None:
    hybrid = replace(PACKED, cp=16, method="hybrid")
    assert (hybrid.ulysses_degree, hybrid.ring_degree, hybrid.seq_len_divisor) == (8, 2, 32)
    assert (hybrid.rotate_method, hybrid.resolved_layout) == ("allgather", "balanced")
    long = replace(hybrid, packs_documents=False)
    assert (long.rotate_method, long.resolved_layout) == ("ring", "doc_headtail")
    assert (replace(hybrid, cp_ulysses=2).ulysses_degree, replace(hybrid, cp_ulysses=2).ring_degree) == (2, 8)
    outer = replace(hybrid, outer_method="alltoall")
    assert (outer.rotate_method, outer.resolved_layout) == ("alltoall", "doc_headtail")
    assert replace(hybrid, layout="contiguous").seq_len_divisor == 16


def test_one_rank_shares_nothing_so_any_plan_will_do() -> None:
    for plan in (replace(PACKED, cp=1, method="ring", layout="balanced"), replace(PACKED, cp=1, cp_ulysses=4)):
        assert plan.problems() == []
        assert plan.seq_len_divisor == 1


@pytest.mark.parametrize(
    ("cp", "heads", "node", "inside"),
    [(16, 32, 8, 8), (16, 32, 4, 4), (12, 32, 8, 4), (16, 12, 8, 4), (16, 9, 8, 1), (4, 32, 8, 4), (16, 32, 6, 2)],
)
def test_as_many_ranks_exchange_heads_as_divide_the_ranks_and_the_heads_of_a_node(
    cp: int, heads: int, node: int, inside: int
) -> None:
    plan = replace(PACKED, method="hybrid", cp=cp, heads=heads, kv_heads=1, ranks_per_node=node)
    assert plan.ulysses_degree == inside
    assert plan.ring_degree == cp // inside
    assert plan.problems() == []


def test_the_log_says_what_was_chosen_and_why() -> None:
    assert PACKED.summary() == (
        "ulysses (8 ranks), layout contiguous (auto: 32 heads divide among 8 ranks; packed documents)"
    )
    assert replace(PACKED, cp=16, method="hybrid").summary() == (
        "hybrid (8 x 2, allgather across), layout balanced (as configured)"
    )
    assert replace(PACKED, method="ring").summary() == "ring (8 ranks), layout doc_headtail (as configured)"


@pytest.mark.parametrize(
    ("ulysses", "kv_heads", "times"), [(8, 8, 1), (2, 8, 1), (8, 2, 4), (8, 1, 8), (4, 6, 2), (6, 4, 3), (1, 1, 1)]
)
def test_key_value_heads_are_repeated_as_seldom_as_they_can_be(ulysses: int, kv_heads: int, times: int) -> None:
    assert kv_head_repeats(ulysses, kv_heads) == times
    assert [kv_heads * count % ulysses == 0 for count in range(1, times + 1)] == [*[False] * (times - 1), True]


# ---- layouts


@pytest.mark.parametrize(
    ("rotation", "allowed"),
    [
        ("allgather", ("balanced", "headtail", "doc_headtail", "contiguous")),
        ("ring", ("doc_headtail", "headtail", "contiguous")),
        ("alltoall", ("doc_headtail", "headtail", "contiguous")),
    ],
)
def test_a_rotation_takes_its_layouts_alone_and_across_nodes(
    rotation: RotateMethod, allowed: tuple[ShardLayout, ...]
) -> None:
    names = ", ".join(f'"{name}"' for name in allowed)
    for kind in KINDS:
        plan = replace(PACKED, method=rotation, layout=kind)
        hybrid = replace(PACKED, cp=16, method="hybrid", outer_method=rotation, layout=kind)
        assert plan.resolved_layout == hybrid.resolved_layout == kind
        for method, found in ((rotation, plan.problems()), ("hybrid", hybrid.problems())):
            message = f'cp_layout "{kind}" does not fit cp_method "{method}"; it takes {names}'
            assert found == ([] if kind in allowed else [message])


def test_every_rotation_has_layouts() -> None:
    assert tuple(LAYOUTS_BY_ROTATE_METHOD) == ROTATE_METHODS


# ---- problems


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            replace(PACKED, method="ring", kv_heads=5),
            "32 query heads must be a multiple of 5 key/value heads",
        ),
        (
            replace(PACKED, method="ring", kv_heads=0),
            "32 query heads must be a multiple of 0 key/value heads",
        ),
        (
            replace(PACKED, cp_ulysses=4),
            'cp_ulysses = 4 has no use with cp_method "ulysses"; use "hybrid"',
        ),
        (
            replace(PACKED, method="ring", cp_ulysses=1),
            'cp_ulysses = 1 has no use with cp_method "ring"; use "hybrid"',
        ),
        (
            replace(PACKED, method="allgather", outer_method="ring"),
            'cp_outer_method = "ring" has no use with cp_method "allgather"; use "hybrid"',
        ),
        (
            replace(PACKED, method="hybrid", cp=12, cp_ulysses=8),
            "cp_ulysses = 8 must divide cp = 12",
        ),
        (
            replace(PACKED, method="hybrid", cp=8, cp_ulysses=16),
            "cp_ulysses = 16 must divide cp = 8",
        ),
        (
            replace(PACKED, method="ulysses", heads=12, kv_heads=4),
            'cp_method "ulysses" gives heads to 8 ranks, which must divide the 12 query heads of a rank',
        ),
        (
            replace(PACKED, method="hybrid", cp=12, cp_ulysses=6),
            'cp_method "hybrid" gives heads to 6 ranks, which must divide the 32 query heads of a rank',
        ),
        (
            replace(PACKED, method="ulysses", layout="headtail"),
            'cp_layout "headtail" does not fit cp_method "ulysses"; it takes "contiguous"',
        ),
        (
            replace(PACKED, method="ulysses", layout="balanced"),
            'cp_layout "balanced" does not fit cp_method "ulysses"; it takes "contiguous"',
        ),
    ],
)
def test_a_broken_rule_is_said_with_its_numbers(plan: ContextPlan, message: str) -> None:
    assert plan.problems() == [message]


def test_all_broken_rules_are_said_at_once() -> None:
    plan = replace(
        PACKED, method="ulysses", cp=8, heads=12, kv_heads=5, cp_ulysses=2, outer_method="ring", layout="doc_headtail"
    )
    assert plan.problems() == [
        "12 query heads must be a multiple of 5 key/value heads",
        'cp_ulysses = 2 has no use with cp_method "ulysses"; use "hybrid"',
        'cp_outer_method = "ring" has no use with cp_method "ulysses"; use "hybrid"',
        'cp_method "ulysses" gives heads to 8 ranks, which must divide the 12 query heads of a rank',
        'cp_layout "doc_headtail" does not fit cp_method "ulysses"; it takes "contiguous"',
    ]


def test_one_rank_is_a_plan_without_problems() -> None:
    methods: tuple[CPMethod, ...] = get_args(CPMethod)
    for method in methods:
        plan = replace(LONG, cp=1, method=method)
        assert plan.problems() == []
        assert (plan.ring_degree, plan.ulysses_degree) == (1, 1)
    assert replace(LONG, cp=1).problems() == []
