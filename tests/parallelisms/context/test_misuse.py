"""What cannot be done exactly is refused in words: on every rank, before anything is sent."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

from models.batch import IGNORE_INDEX, Batch
from parallelisms.context.context_parallel import ContextParallel
from parallelisms.context.shard_layout import SeqLayout
from tests.models.small_models import packed, starts
from tests.ranks import run_ranks

HEADS: dict[str, Any] = {"heads": 8, "kv_heads": 4}
SHIFTED = "labels must be the next tokens of their documents, shifted on the whole row before it is cut"
WHOLE = "boundaries [0, 5, 6, 24, 24, 24, 24, 24] must ascend from 0 to the {} tokens of the row"


def said(function: Any, *arguments: Any, **options: Any) -> str:
    """The message with which it is refused."""
    with pytest.raises(ValueError, match=r".") as raised:
        function(*arguments, **options)
    return str(raised.value)


# ---- plans


def plans(shape: tuple[int, ...], asked: list[dict[str, Any]]) -> list[str]:
    mesh = init_device_mesh("cpu", shape)
    return [said(ContextParallel, mesh, **(HEADS | options)) for options in asked]


def unsupported(method: str, window: str = "sliding window 4096") -> str:
    return f'{window} is not supported by cp_method "{method}"'


ON_A_LINE: list[tuple[dict[str, Any], str]] = [
    ({"method": "ring", "window": 4096}, unsupported("ring")),
    ({"method": "allgather", "window": 0}, unsupported("allgather", "sliding window 0")),
    ({"method": "ulysses", "window": 4096}, unsupported("ulysses")),
    ({"method": "alltoall", "dropout": 0.1}, unsupported("alltoall", "attention dropout 0.1")),
    ({"method": "allgather", "causal": False}, unsupported("allgather", "attention without a causal mask")),
    (
        {"method": "rings", "window": 5},
        'cp_method = "rings" must be one of auto, allgather, ring, alltoall, ulysses, hybrid; '
        'sliding window 5 is not supported by cp_method "rings"',
    ),
    ({"method": "ring", "kv_heads": 3}, "8 query heads must be a multiple of 3 KV heads"),
    (
        {"method": "ulysses", "heads": 9, "kv_heads": 3},
        'cp_method = "ulysses" splits heads over 2 ranks, which must divide the 9 query heads of a rank',
    ),
    (
        {"method": "hybrid"},
        'cp_method "hybrid" needs a mesh of two axes: ranks that rotate, ranks that exchange heads',
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
            "window": 5,
            "dropout": 0.5,
            "causal": False,
        },
        "; ".join(
            [
                "9 query heads must be a multiple of 2 KV heads",
                'cp_method = "ulysses" splits heads over 2 ranks, which must divide the 9 query heads of a rank',
                'cp_layout = "headtail" is not supported by cp_method = "ulysses"; use "contiguous"',
                unsupported("ulysses", "attention without a causal mask"),
                unsupported("ulysses", "sliding window 5"),
                unsupported("ulysses", "attention dropout 0.5"),
            ]
        ),
    ),
]
ON_A_GRID: list[tuple[dict[str, Any], str]] = [
    (
        {"heads": 9, "kv_heads": 3},
        'cp_method = "hybrid" splits heads over 2 ranks, which must divide the 9 query heads of a rank',
    ),
    ({"method": "ring"}, 'cp_ulysses = 2 is only used with cp_method = "hybrid", not "ring"'),
    ({"outer_method": "ring", "window": 7}, unsupported("hybrid", "sliding window 7")),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("shape", "refused"), [((2,), ON_A_LINE), ((2, 2), ON_A_GRID)], ids=["line", "grid"])
def test_what_a_plan_cannot_do_is_said_on_every_rank_with_all_else_that_it_cannot(
    shape: tuple[int, ...], refused: list[tuple[dict[str, Any], str]]
) -> None:
    asked, expected = [options for options, _ in refused], [message for _, message in refused]
    for messages in run_ranks(plans, torch.Size(shape).numel(), shape, asked, timeout=30):
        assert messages == expected


def different(shape: tuple[int, ...], asked: list[tuple[int, dict[str, Any]]]) -> list[str]:
    """What is said where one rank is given something else than the others; and then the ranks still work together."""
    mesh = init_device_mesh("cpu", shape)
    method = "ring" if len(shape) == 1 else "hybrid"
    messages = []
    for odd, options in asked:
        mine = {"method": method} | HEADS | (options if distributed.get_rank() == odd else {})
        messages.append(said(ContextParallel, mesh, **mine))
    core = ContextParallel(mesh, method=method, **HEADS)
    boundaries_BD = starts([5, 11]) if distributed.get_rank() else starts([5, 10, 1])
    messages.append(said(core.require_same_boundaries, boundaries_BD))
    core.require_same_boundaries(starts([5, 11]))
    return messages


@pytest.mark.ranks
@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=["line", "grid"])
def test_ranks_with_different_plans_or_documents_all_say_so_and_none_waits(shape: tuple[int, ...]) -> None:
    ranks = torch.Size(shape).numel()
    asked: list[tuple[int, dict[str, Any]]] = [
        (rank, options)
        for rank in range(ranks)
        for options in (
            {"kv_heads": 2},
            {"layout": "contiguous"},
            {"reduce_dtype": torch.bfloat16},
            # Refused on one rank alone.
            {"window": 3},
        )
    ]
    by_rank = run_ranks(different, ranks, shape, asked, timeout=30)
    assert by_rank == [by_rank[0]] * ranks
    for (rank, options), message in zip(asked, by_rank[0], strict=False):
        assert message.startswith("context-parallel ranks were given different plans: ")
        assert f"on rank {rank or 1}" in message
        assert str(*options.values()) in message
    assert by_rank[0][-1].startswith("context-parallel ranks were given different documents: ")
    assert "[[0, 5, 15, 16]]" in by_rank[0][-1]
    assert "[[0, 5, 16]]" in by_rank[0][-1]


# ---- calls

ALIKE = "queries, keys and values must have the same rows, tokens, width and type, not"
F32 = "torch.float32"


def calls() -> dict[str, str]:
    """By what is wrong with it, what is said of a call."""
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for method in ("ring", "allgather", "ulysses"):
        core = ContextParallel(mesh, method=method, **HEADS)

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
            return said(core, torch.ones(q, dtype=dtype), torch.ones(k), torch.ones(v), given)

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
        found[f"{method}, descending"] = call(boundaries=torch.tensor([[0, 9, 5, 16]], dtype=torch.int32))
        found[f"{method}, no start"] = call(boundaries=torch.tensor([[3, 16]], dtype=torch.int32))
        # What was refused has left nothing on its way.
        assert torch.equal(core(*(torch.ones(1, 8, heads, 4) for heads in (8, 4, 4))), torch.ones(1, 8, 8, 4))
    return found


@pytest.mark.ranks
def test_a_call_that_does_not_fit_is_refused_by_every_method() -> None:
    expected = {
        "query heads": "the plan is for 8 query and 4 key/value heads, not 4 and 4",
        "key heads": "the plan is for 8 query and 4 key/value heads, not 8 and 8",
        "values of another width": f"{ALIKE} (1, 8, 8, 4) {F32}, (1, 8, 4, 4) {F32}, (1, 8, 4, 6) {F32}",
        "keys of fewer tokens": f"{ALIKE} (1, 8, 8, 4) {F32}, (1, 6, 4, 4) {F32}, (1, 6, 4, 4) {F32}",
        "queries of another width": f"{ALIKE} (1, 8, 8, 6) {F32}, (1, 8, 4, 4) {F32}, (1, 8, 4, 4) {F32}",
        "queries of another type": f"{ALIKE} (1, 8, 8, 4) torch.float64, (1, 8, 4, 4) {F32}, (1, 8, 4, 4) {F32}",
        "no rows": "queries, keys and values must be [rows, tokens, heads, width], not "
        f"(8, 8, 4) {F32}, (8, 4, 4) {F32}, (8, 4, 4) {F32}",
        "shorter row": "boundaries [0, 3, 12] must ascend from 0 to the 16 tokens of the row",
        "longer row": "boundaries [0, 3, 32] must ascend from 0 to the 16 tokens of the row",
        "int64": "boundaries must be int32 on the host, not torch.int64 on cpu",
        "descending": "boundaries [0, 9, 5, 16] must ascend from 0 to the 16 tokens of the row",
        "no start": "boundaries [3, 16] must ascend from 0 to the 16 tokens of the row",
    }
    for found in run_ranks(calls, 2):
        assert found == {
            f"{method}, {what}": message
            for method in ("ring", "allgather", "ulysses")
            for what, message in expected.items()
        }


def rows_of_boundaries() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for method in ("ring", "allgather", "ulysses"):
        core = ContextParallel(mesh, method=method, **HEADS)
        q, k = torch.ones(2, 8, 8, 4), torch.ones(2, 8, 4, 4)
        found += [said(core, q, k, k, starts(*rows)) for rows in ([[3, 13]], [[3, 13], [16], [16]])]
    return found


@pytest.mark.ranks
def test_boundaries_of_fewer_or_more_rows_than_the_batch_are_refused() -> None:
    """Rows without boundaries would hold what memory held, and boundaries without rows end the process."""
    for found in run_ranks(rows_of_boundaries, 2):
        for fewer, more in zip(found[::2], found[1::2], strict=True):
            assert re.search(r"boundaries .*\b1 row.*\b2\b", fewer)
            assert re.search(r"boundaries .*\b3 rows.*\b2\b", more)


# ---- the way in


def whole() -> Batch:
    """Two rows, in which no label is another's."""
    batch = packed([5, 1, 18], [24])
    tokens = torch.arange(48).view(2, 24)
    return replace(batch, tokens=tokens, labels=torch.where(batch.labels == IGNORE_INDEX, IGNORE_INDEX, tokens + 1))


def entrances() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,))
    headtail, contiguous = (
        ContextParallel(mesh, method="ring", layout=kind, **HEADS) for kind in ("headtail", "contiguous")
    )
    batch, shape = whole(), (2, 24)
    shifted_in_the_whole_row = replace(batch, labels=batch.tokens.roll(-1, 1))
    before = batch.labels.roll(1, 1)
    # Each rank shifts what it holds: right within a piece, wrong where two meet.
    order = SeqLayout("headtail", 2, (0, 24)).permutation()
    late = batch.tokens[1:, order].unflatten(1, (2, -1)).roll(-1, 2).flatten(1)[:, order.argsort()]
    assert headtail.shard_batch(batch).labels.shape == headtail.shard_batch(shifted_in_the_whole_row).labels.shape
    return {
        "18 tokens": said(headtail.shard, torch.ones(2, 18)),
        "17 tokens": said(contiguous.shard, torch.ones(2, 17)),
        "other boundaries": said(headtail.shard, torch.ones(2, 20), batch.boundaries),
        "int64": said(headtail.shard, torch.ones(2, 24), batch.boundaries.long()),
        "device": said(headtail.shard, torch.ones(2, 24), batch.boundaries.to("meta")),
        "unshard": said(headtail.unshard, torch.ones(2, 9)),
        "not shifted": said(headtail.shard_batch, replace(batch, labels=batch.tokens)),
        "shifted twice": said(headtail.shard_batch, replace(batch, labels=batch.tokens.roll(-2, 1))),
        "shifted back": said(headtail.shard_batch, replace(batch, labels=before)),
        "one wrong": said(
            headtail.shard_batch,
            replace(batch, labels=batch.labels.masked_fill(torch.arange(48).view(shape) == 40, 7)),
        ),
        "after the cut": said(headtail.shard_batch, replace(batch, labels=torch.cat([batch.labels[:1], late]))),
        "cut before": said(headtail.shard_batch, headtail.shard_batch(batch)),
    }


@pytest.mark.ranks
def test_rows_and_labels_that_do_not_fit_are_refused_at_the_door() -> None:
    for rank, found in enumerate(run_ranks(entrances, 2)):
        assert found == {
            "18 tokens": 'a row of 18 tokens must be a multiple of 4 for layout "headtail" over 2 ranks',
            "17 tokens": 'a row of 17 tokens must be a multiple of 2 for layout "contiguous" over 2 ranks',
            "other boundaries": WHOLE.format(20),
            "int64": "boundaries must be int32 on the host, not torch.int64 on cpu",
            "device": "boundaries must be int32 on the host, not torch.int32 on meta",
            "unshard": 'a row of 18 tokens must be a multiple of 4 for layout "headtail" over 2 ranks',
            "not shifted": SHIFTED,
            "shifted twice": SHIFTED,
            "shifted back": SHIFTED,
            "one wrong": SHIFTED,
            "after the cut": SHIFTED,
            # Where a rank holds one piece, its length tells.
            "cut before": SHIFTED if rank == 0 else WHOLE.format(12),
        }
