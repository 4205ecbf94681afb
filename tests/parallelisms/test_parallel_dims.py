"""Rules of context parallelism and the choices of `auto`."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from parallelisms.mesh.context_plan import (
    LAYOUTS_BY_ROTATE_METHOD,
    ROTATE_METHODS,
    ContextPlan,
    CPMethod,
    RotateMethod,
    ShardLayout,
    kv_head_repeats,
)

LAYOUTS: tuple[ShardLayout, ...] = get_args(ShardLayout)
K = 1024
PACKED = ContextPlan(cp=8, heads=32, kv_heads=8, seq_len=128 * K)
LONG = replace(PACKED, packs_documents=False)


# ---- auto


@pytest.mark.parametrize(
    ("plan", "method", "reason"),
    [
        (PACKED, "ulysses", "32 heads are divisible by 8 ranks; packed documents"),
        (replace(PACKED, cp=2), "ulysses", "32 heads are divisible by 2 ranks; packed documents"),
        (
            replace(PACKED, heads=12, kv_heads=4),
            "allgather",
            "12 heads are not divisible by 8 ranks; packed documents balance best with all-gather",
        ),
        (
            LONG,
            "ulysses",
            "32 heads are divisible by 8 ranks; one document per sequence, fewer bytes than KV",
        ),
        (
            replace(LONG, cp=2),
            "allgather",
            "one document per sequence; all-gather needs 3.0 GiB per layer",
        ),
        (
            replace(LONG, cp=5),
            "allgather",
            "32 heads are not divisible by 5 ranks; one document per sequence; all-gather needs 3.0 GiB per layer",
        ),
        (
            replace(PACKED, cp=6),
            "hybrid",
            "cp 6 spans nodes of 8 ranks; 2 of them divide the heads",
        ),
        # A configured layout restricts the choice.
        (
            replace(PACKED, layout="balanced"),
            "allgather",
            "packed documents balance best with all-gather",
        ),
        (
            replace(LONG, cp=2, seq_len=K * K, layout="balanced"),
            "allgather",
            "one document per sequence; all-gather needs 24.0 GiB per layer",
        ),
        (
            replace(LONG, cp=2, seq_len=K * K),
            "ring",
            "one document per sequence; all-gather needs 24.0 GiB per layer, more than 4 GiB",
        ),
        (
            replace(LONG, cp=5, seq_len=K * K),
            "ring",
            "32 heads are not divisible by 5 ranks; one document per sequence; all-gather needs 24.0 GiB per layer, "
            "more than 4 GiB",
        ),
        (
            replace(PACKED, cp=16),
            "hybrid",
            "cp 16 spans nodes of 8 ranks; 8 of them divide the heads",
        ),
        (
            replace(LONG, cp=16),
            "hybrid",
            "cp 16 spans nodes of 8 ranks; 8 of them divide the heads",
        ),
        (
            replace(PACKED, cp=8, ranks_per_node=4),
            "hybrid",
            "cp 8 spans nodes of 4 ranks; 4 of them divide the heads",
        ),
        # No two ranks of a node can exchange heads, which never cross nodes.
        (
            replace(PACKED, cp=11, heads=11, kv_heads=11),
            "allgather",
            "packed documents balance best with all-gather",
        ),
        (
            replace(LONG, cp=16, ranks_per_node=1, heads=4, kv_heads=1, seq_len=K * K),
            "allgather",
            "4 heads are not divisible by 16 ranks; one document per sequence; all-gather needs 3.0 GiB per layer",
        ),
    ],
)
def test_auto_chooses_by_documents_heads_nodes_and_memory(
    plan: ContextPlan, method: CPMethod, reason: str
) -> None:
    assert (plan.resolved_method, plan.reason) == (method, f"auto: {reason}")
    assert plan.problems() == []


@pytest.mark.parametrize(
    ("heads", "kv_heads", "cp", "method"),
    [
        # Exchanging heads sends fewer bytes above (H + K) / 2K ranks: 2.5, 4.5, 1 and 2 (equal).
        (32, 8, 2, "allgather"),
        (32, 8, 4, "ulysses"),
        (64, 8, 4, "allgather"),
        (64, 8, 8, "ulysses"),
        (8, 8, 2, "ulysses"),
        (24, 8, 2, "allgather"),
    ],
)
def test_auto_exchanges_heads_if_that_sends_fewer_bytes(
    heads: int, kv_heads: int, cp: int, method: CPMethod
) -> None:
    assert (
        replace(LONG, heads=heads, kv_heads=kv_heads, cp=cp, seq_len=32 * K).resolved_method
        == method
    )
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
def test_auto_gathers_kv_within_the_budget(
    row_tokens: int, head_dim: int, kv_heads: int, method: CPMethod
) -> None:
    assert (
        replace(
            LONG, cp=2, seq_len=row_tokens, head_dim=head_dim, kv_heads=kv_heads
        ).resolved_method
        == method
    )


# ---- derived settings


@pytest.mark.parametrize(
    ("method", "ring", "ulysses", "rotation", "layout", "multiple"),
    [
        ("allgather", 8, 1, "allgather", "balanced", 16),
        ("ring", 8, 1, "ring", "doc_headtail", 16),
        ("alltoall", 8, 1, "alltoall", "doc_headtail", 16),
        ("ulysses", 1, 8, None, "contiguous", 8),
    ],
)
def test_method_determines_degrees_layout_and_divisor(
    method: CPMethod,
    ring: int,
    ulysses: int,
    rotation: RotateMethod | None,
    layout: ShardLayout,
    multiple: int,
) -> None:
    for plan in (replace(PACKED, method=method), replace(LONG, method=method)):
        assert (plan.resolved_method, plan.reason) == (method, "as configured")
        assert (plan.ring_degree, plan.ulysses_degree, plan.rotate_method) == (
            ring,
            ulysses,
            rotation,
        )
        assert (plan.resolved_layout, plan.seq_len_divisor) == (layout, multiple)
        assert plan.problems() == []


def test_hybrid_exchanges_heads_inside_a_node_and_rotates_across() -> None:
    hybrid = replace(PACKED, cp=16, method="hybrid")
    assert (hybrid.ulysses_degree, hybrid.ring_degree, hybrid.seq_len_divisor) == (8, 2, 32)
    assert (hybrid.rotate_method, hybrid.resolved_layout) == ("allgather", "balanced")
    long = replace(hybrid, packs_documents=False)
    assert (long.rotate_method, long.resolved_layout) == ("ring", "doc_headtail")
    assert (
        replace(hybrid, cp_ulysses=2).ulysses_degree,
        replace(hybrid, cp_ulysses=2).ring_degree,
    ) == (2, 8)
    outer = replace(hybrid, outer_method="alltoall")
    assert (outer.rotate_method, outer.resolved_layout) == ("alltoall", "doc_headtail")
    assert replace(hybrid, layout="contiguous").seq_len_divisor == 16


def test_cp_settings_are_ignored_without_context_parallelism() -> None:
    for plan in (
        replace(PACKED, cp=1, method="ring", layout="balanced"),
        replace(PACKED, cp=1, cp_ulysses=4),
    ):
        assert plan.problems() == []
        assert plan.seq_len_divisor == 1


@pytest.mark.parametrize(
    ("cp", "heads", "node", "ulysses_degree"),
    [
        (16, 32, 8, 8),
        (16, 32, 4, 4),
        (12, 32, 8, 4),
        (16, 12, 8, 4),
        (16, 9, 8, 1),
        (4, 32, 8, 4),
        (16, 32, 6, 2),
    ],
)
def test_ulysses_degree_divides_cp_heads_and_node(
    cp: int, heads: int, node: int, ulysses_degree: int
) -> None:
    plan = replace(PACKED, method="hybrid", cp=cp, heads=heads, kv_heads=1, ranks_per_node=node)
    assert plan.ulysses_degree == ulysses_degree
    assert plan.ring_degree == cp // ulysses_degree
    assert plan.problems() == []


def test_summary_has_choice_and_reason() -> None:
    assert PACKED.summary() == (
        "ulysses (8 ranks), layout contiguous (auto: 32 heads are divisible by 8 ranks; packed documents)"
    )
    assert replace(PACKED, cp=16, method="hybrid").summary() == (
        "hybrid (8 x 2, allgather across), layout balanced (as configured)"
    )
    assert (
        replace(PACKED, method="ring").summary()
        == "ring (8 ranks), layout doc_headtail (as configured)"
    )


@pytest.mark.parametrize(
    ("ulysses", "kv_heads", "repeats"),
    [(8, 8, 1), (2, 8, 1), (8, 2, 4), (8, 1, 8), (4, 6, 2), (6, 4, 3), (1, 1, 1)],
)
def test_kv_heads_are_repeated_as_little_as_possible(
    ulysses: int, kv_heads: int, repeats: int
) -> None:
    assert kv_head_repeats(ulysses, kv_heads) == repeats
    assert [kv_heads * count % ulysses == 0 for count in range(1, repeats + 1)] == [
        *[False] * (repeats - 1),
        True,
    ]


# ---- layouts


@pytest.mark.parametrize(
    ("rotation", "allowed"),
    [
        ("allgather", ("balanced", "headtail", "doc_headtail", "contiguous")),
        ("ring", ("doc_headtail", "headtail", "contiguous")),
        ("alltoall", ("doc_headtail", "headtail", "contiguous")),
    ],
)
def test_layouts_of_a_rotate_method_hold_for_hybrid_too(
    rotation: RotateMethod, allowed: tuple[ShardLayout, ...]
) -> None:
    names = ", ".join(f'"{name}"' for name in allowed)
    for layout in LAYOUTS:
        plan = replace(PACKED, method=rotation, layout=layout)
        hybrid = replace(PACKED, cp=16, method="hybrid", outer_method=rotation, layout=layout)
        assert plan.resolved_layout == hybrid.resolved_layout == layout
        for method, found in ((rotation, plan.problems()), ("hybrid", hybrid.problems())):
            message = (
                f'cp_layout = "{layout}" is not supported by cp_method = "{method}"; use {names}'
            )
            assert found == ([] if layout in allowed else [message])


def test_every_rotate_method_has_layouts() -> None:
    assert tuple(LAYOUTS_BY_ROTATE_METHOD) == ROTATE_METHODS


# ---- problems


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            replace(PACKED, method="ring", kv_heads=5),
            "32 query heads must be a multiple of 5 KV heads",
        ),
        (
            replace(PACKED, method="ring", kv_heads=0),
            "32 query heads must be a multiple of 0 KV heads",
        ),
        (
            replace(PACKED, cp_ulysses=4),
            'cp_ulysses = 4 is only used with cp_method = "hybrid", not "ulysses"',
        ),
        (
            replace(PACKED, method="ring", cp_ulysses=1),
            'cp_ulysses = 1 is only used with cp_method = "hybrid", not "ring"',
        ),
        (
            replace(PACKED, method="allgather", outer_method="ring"),
            'cp_outer_method = "ring" is only used with cp_method = "hybrid", not "allgather"',
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
            'cp_method = "ulysses" splits heads over 8 ranks, which must divide the 12 query heads of a rank',
        ),
        (
            replace(PACKED, method="hybrid", cp=12, cp_ulysses=6),
            'cp_method = "hybrid" splits heads over 6 ranks, which must divide the 32 query heads of a rank',
        ),
        (
            replace(PACKED, method="ulysses", layout="headtail"),
            'cp_layout = "headtail" is not supported by cp_method = "ulysses"; use "contiguous"',
        ),
        (
            replace(PACKED, method="ulysses", layout="balanced"),
            'cp_layout = "balanced" is not supported by cp_method = "ulysses"; use "contiguous"',
        ),
    ],
)
def test_problem_names_value_and_rule(plan: ContextPlan, message: str) -> None:
    assert plan.problems() == [message]


def test_all_problems_are_reported_at_once() -> None:
    plan = replace(
        PACKED,
        method="ulysses",
        cp=8,
        heads=12,
        kv_heads=5,
        cp_ulysses=2,
        outer_method="ring",
        layout="doc_headtail",
    )
    assert plan.problems() == [
        "12 query heads must be a multiple of 5 KV heads",
        'cp_ulysses = 2 is only used with cp_method = "hybrid", not "ulysses"',
        'cp_outer_method = "ring" is only used with cp_method = "hybrid", not "ulysses"',
        'cp_method = "ulysses" splits heads over 8 ranks, which must divide the 12 query heads of a rank',
        'cp_layout = "doc_headtail" is not supported by cp_method = "ulysses"; use "contiguous"',
    ]


def test_every_method_is_valid_for_one_rank() -> None:
    methods: tuple[CPMethod, ...] = get_args(CPMethod)
    for method in methods:
        plan = replace(LONG, cp=1, method=method)
        assert plan.problems() == []
        assert (plan.ring_degree, plan.ulysses_degree) == (1, 1)
    assert replace(LONG, cp=1).problems() == []
