"""Unsupported plans and inputs raise on every rank, before anything is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

from models.batch import IGNORE_INDEX, Batch
from parallelisms.context.context_parallel import ContextParallel
from tests.models.small_models import packed, starts
from tests.parallelisms.context.cores import build_core
from tests.ranks import run_ranks

HEADS: dict[str, Any] = {"heads": 8, "kv_heads": 4}
SHIFTED = (
    "labels must be the next tokens of their documents, shifted before the sequence is sharded"
)
WRONG_LENGTH = (
    "boundaries [0, 5, 6, 24, 24, 24, 24, 24] must ascend from 0 to the sequence length {}"
)


def error_message(function: Any, *arguments: Any, **options: Any) -> str:
    """The message of the ValueError."""
    with pytest.raises(ValueError, match=r".") as raised:
        function(*arguments, **options)
    return str(raised.value)


# ---- plans


def plan_errors(shape: tuple[int, ...], asked: list[dict[str, Any]]) -> list[str]:
    mesh = init_device_mesh("cpu", shape)
    return [error_message(build_core, mesh, **(HEADS | options)) for options in asked]


def unsupported(method: str, what: str) -> str:
    return f'{what} is not supported by cp_method "{method}"'


ONE_DIM_PLANS: list[tuple[dict[str, Any], str]] = [
    ({"method": "allgather", "window": 0}, "sliding window 0 must be at least 1"),
    ({"method": "ring", "softcap": 0.0}, "soft cap 0.0 must be above 0"),
    ({"method": "alltoall", "dropout": 0.1}, unsupported("alltoall", "attention dropout 0.1")),
    (
        {"method": "allgather", "causal": False},
        unsupported("allgather", "attention without a causal mask"),
    ),
    (
        {"method": "rings", "dropout": 0.2},
        'cp_method = "rings" must be one of auto, allgather, ring, alltoall, ulysses, hybrid; '
        'attention dropout 0.2 is not supported by cp_method "rings"',
    ),
    ({"method": "ring", "kv_heads": 3}, "8 query heads must be a multiple of 3 KV heads"),
    (
        {"method": "ulysses", "heads": 9, "kv_heads": 3},
        'cp_method = "ulysses" splits heads over 2 ranks, which must divide the 9 query heads of a rank',
    ),
    (
        {"method": "hybrid"},
        'cp_method "hybrid" over 2 ranks needs a mesh of shape (1, 2), not (2,)',
    ),
    (
        {"method": "ring", "outer_method": "ring"},
        'cp_outer_method = "ring" is only used with cp_method = "hybrid", not "ring"',
    ),
    (
        {"method": "ring", "layout": "balanced"},
        'cp_layout = "balanced" is not supported by cp_method = "ring"; use "doc_headtail", "headtail", "contiguous"',
    ),
    (
        {
            "method": "ulysses",
            "heads": 9,
            "kv_heads": 2,
            "layout": "headtail",
            "window": -5,
            "dropout": 0.5,
            "causal": False,
        },
        "; ".join(
            [
                "9 query heads must be a multiple of 2 KV heads",
                'cp_method = "ulysses" splits heads over 2 ranks, which must divide the 9 query heads of a rank',
                'cp_layout = "headtail" is not supported by cp_method = "ulysses"; use "contiguous"',
                unsupported("ulysses", "attention without a causal mask"),
                unsupported("ulysses", "attention dropout 0.5"),
                "sliding window -5 must be at least 1",
            ]
        ),
    ),
]
TWO_DIM_PLANS: list[tuple[dict[str, Any], str]] = [
    (
        {"heads": 9, "kv_heads": 3},
        'cp_method = "hybrid" splits heads over 2 ranks, which must divide the 9 query heads of a rank',
    ),
    ({"method": "ring"}, 'cp_ulysses = 2 is only used with cp_method = "hybrid", not "ring"'),
    ({"outer_method": "ring", "dropout": 0.3}, unsupported("hybrid", "attention dropout 0.3")),
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shape", "refused"), [((2,), ONE_DIM_PLANS), ((2, 2), TWO_DIM_PLANS)], ids=["line", "grid"]
)
def test_every_rank_reports_all_problems_of_a_plan(
    shape: tuple[int, ...], refused: list[tuple[dict[str, Any], str]]
) -> None:
    asked = [options for options, _ in refused]
    expected = [message for _, message in refused]
    for messages in run_ranks(plan_errors, torch.Size(shape).numel(), shape, asked, timeout=30):
        assert messages == expected


def mismatch_errors(shape: tuple[int, ...], asked: list[tuple[int, dict[str, Any]]]) -> list[str]:
    """The errors if one rank gets different arguments; afterwards the ranks can still
    communicate.
    """
    mesh = init_device_mesh("cpu", shape)
    method = "ring" if len(shape) == 1 else "hybrid"
    messages = []
    for odd, options in asked:
        mine = {"method": method} | HEADS | (options if distributed.get_rank() == odd else {})
        messages.append(error_message(build_core, mesh, **mine))
    build_core(mesh, method=method, **HEADS)
    return messages


@pytest.mark.ranks
@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=["line", "grid"])
def test_all_ranks_report_different_plans_without_a_hang(shape: tuple[int, ...]) -> None:
    ranks = torch.Size(shape).numel()
    asked: list[tuple[int, dict[str, Any]]] = [
        (rank, options)
        for rank in range(ranks)
        for options in (
            {"kv_heads": 2},
            {"layout": "contiguous"},
            {"reduce_dtype": torch.bfloat16},
            {"window": 3},
            {"softcap": 2.5},
            # Invalid on one rank only.
            {"softcap": 0.0},
        )
    ]
    by_rank = run_ranks(mismatch_errors, ranks, shape, asked, timeout=30)
    assert by_rank == [by_rank[0]] * ranks
    for (rank, options), message in zip(asked, by_rank[0], strict=True):
        assert message.startswith("context-parallel ranks have different plans: ")
        assert f"on rank {rank or 1}" in message
        assert str(*options.values()) in message


# ---- calls

MISMATCHED = "queries, keys and values must have equal batch, tokens, head_dim and dtype, not"
F32 = "torch.float32"


def call_errors() -> dict[str, str]:
    """The error of each invalid call."""
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for method in ("ring", "allgather", "ulysses"):
        core = build_core(mesh, method=method, **HEADS)

        def call(
            *rows: list[int],
            q: tuple[int, ...] = (1, 8, 8, 4),
            k: tuple[int, ...] = (1, 8, 4, 4),
            v: tuple[int, ...] = (1, 8, 4, 4),
            boundaries: Tensor | None = None,
            dtype: torch.dtype = torch.float32,
            core: ContextParallel = core,
        ) -> str:
            given = starts(*rows) if rows else boundaries
            return error_message(
                core, torch.ones(q, dtype=dtype), torch.ones(k), torch.ones(v), given
            )

        found[f"{method}, query heads"] = call(q=(1, 8, 4, 4))
        found[f"{method}, key heads"] = call(k=(1, 8, 8, 4), v=(1, 8, 8, 4))
        found[f"{method}, values of another width"] = call(v=(1, 8, 4, 6))
        found[f"{method}, keys of fewer tokens"] = call(k=(1, 6, 4, 4), v=(1, 6, 4, 4))
        found[f"{method}, queries of another width"] = call(q=(1, 8, 8, 6))
        found[f"{method}, queries of another type"] = call(dtype=torch.float64)
        found[f"{method}, no rows"] = call(q=(8, 8, 4), k=(8, 4, 4), v=(8, 4, 4))
        found[f"{method}, shorter row"] = call([3, 9])
        found[f"{method}, longer row"] = call([3, 29])
        found[f"{method}, int64"] = call(boundaries=starts([16]).long())
        found[f"{method}, descending"] = call(
            boundaries=torch.tensor([[0, 9, 5, 16]], dtype=torch.int32)
        )
        found[f"{method}, no start"] = call(boundaries=torch.tensor([[3, 16]], dtype=torch.int32))
        # The rejected calls left no message in flight.
        assert torch.equal(
            core(*(torch.ones(1, 8, heads, 4) for heads in (8, 4, 4))), torch.ones(1, 8, 8, 4)
        )
    return found


@pytest.mark.ranks
def test_every_method_rejects_mismatched_inputs() -> None:
    expected = {
        "query heads": "4 query heads and 4 KV heads do not match the plan's heads = 8 and kv_heads = 4",
        "key heads": "8 query heads and 8 KV heads do not match the plan's heads = 8 and kv_heads = 4",
        "values of another width": f"{MISMATCHED} (1, 8, 8, 4) {F32}, (1, 8, 4, 4) {F32}, (1, 8, 4, 6) {F32}",
        "keys of fewer tokens": f"{MISMATCHED} (1, 8, 8, 4) {F32}, (1, 6, 4, 4) {F32}, (1, 6, 4, 4) {F32}",
        "queries of another width": f"{MISMATCHED} (1, 8, 8, 6) {F32}, (1, 8, 4, 4) {F32}, (1, 8, 4, 4) {F32}",
        "queries of another type": f"{MISMATCHED} (1, 8, 8, 4) torch.float64, (1, 8, 4, 4) {F32}, (1, 8, 4, 4) {F32}",
        "no rows": "queries, keys and values must be [batch, tokens, heads, head_dim], not "
        f"(8, 8, 4) {F32}, (8, 4, 4) {F32}, (8, 4, 4) {F32}",
        "shorter row": "boundaries [0, 3, 12] must ascend from 0 to the sequence length 16",
        "longer row": "boundaries [0, 3, 32] must ascend from 0 to the sequence length 16",
        "int64": "boundaries must be int32 on the CPU, not torch.int64 on cpu",
        "descending": "boundaries [0, 9, 5, 16] must ascend from 0 to the sequence length 16",
        "no start": "boundaries [3, 16] must ascend from 0 to the sequence length 16",
    }
    for found in run_ranks(call_errors, 2):
        assert found == {
            f"{method}, {what}": message
            for method in ("ring", "allgather", "ulysses")
            for what, message in expected.items()
        }


def batch_size_errors() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for method in ("ring", "allgather", "ulysses"):
        core = build_core(mesh, method=method, **HEADS)
        q = torch.ones(2, 8, 8, 4)
        k = torch.ones(2, 8, 4, 4)
        found += [
            error_message(core, q, k, k, starts(*rows))
            for rows in ([[3, 13]], [[3, 13], [16], [16]])
        ]
    return found


@pytest.mark.ranks
def test_boundaries_with_another_batch_size_raise() -> None:
    """Otherwise sequences without boundaries would stay uninitialised, and surplus boundaries
    would crash.
    """
    for found in run_ranks(batch_size_errors, 2):
        for fewer, more in zip(found[::2], found[1::2], strict=True):
            assert fewer == "boundaries have batch size 1; q, k and v have 2"
            assert more == "boundaries have batch size 3; q, k and v have 2"


# ---- sharding


def full_batch() -> Batch:
    """Two sequences with distinct labels."""
    batch = packed([5, 1, 18], [24])
    tokens = torch.arange(48).view(2, 24)
    return replace(
        batch,
        tokens=tokens,
        labels=torch.where(batch.labels == IGNORE_INDEX, IGNORE_INDEX, tokens + 1),
    )


def sharding_errors() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,))
    headtail, contiguous = (
        build_core(mesh, method="ring", layout=kind, **HEADS)
        for kind in ("headtail", "contiguous")
    )
    batch = full_batch()
    return {
        "18 tokens": error_message(headtail.shard, torch.ones(2, 18)),
        "17 tokens": error_message(contiguous.shard, torch.ones(2, 17)),
        "other boundaries": error_message(headtail.shard, torch.ones(2, 20), batch.boundaries),
        "int64": error_message(headtail.shard, torch.ones(2, 24), batch.boundaries.long()),
        "device": error_message(headtail.shard, torch.ones(2, 24), batch.boundaries.to("meta")),
        "gather": error_message(headtail.gather, torch.ones(2, 9)),
    }


@pytest.mark.ranks
def test_sharding_rejects_indivisible_lengths() -> None:
    for found in run_ranks(sharding_errors, 2):
        assert found == {
            "18 tokens": 'sequence length 18 must be a multiple of 4 for layout "headtail" over 2 ranks',
            "17 tokens": 'sequence length 17 must be a multiple of 2 for layout "contiguous" over 2 ranks',
            "other boundaries": WRONG_LENGTH.format(20),
            "int64": "boundaries must be int32 on the CPU, not torch.int64 on cpu",
            "device": "boundaries must be int32 on the CPU, not torch.int32 on meta",
            "gather": 'sequence length 18 must be a multiple of 4 for layout "headtail" over 2 ranks',
        }
