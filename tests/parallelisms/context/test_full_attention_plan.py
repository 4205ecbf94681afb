"""Attention without a causal mask: every pair of a query and a key of the same document is covered
exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from random import Random

import pytest
import torch
from torch import Tensor

from models.attention_op import full_blocks
from models.score_blocks import ScoreBlocks
from models.score_pairs import FULL_SCORES
from parallelisms.context.attention_plan import RankAttentionPlan, RingPlace, plan_of
from tests.parallelisms.context.test_attention_plan import KINDS, RINGS, Rows, local_tokens

HOST = torch.device("cpu")


def drawn_sides(random: Random) -> tuple[Rows, Rows]:
    """Queries and keys of two sequences of up to five documents, of which some have no queries."""
    kind = random.choice(KINDS)
    ring = random.choice(RINGS)
    tokens = [48 * random.randint(1, 2) for _ in range(2)]
    sides: tuple[list[tuple[int, ...]], ...] = ([], [])
    for documents in (random.randint(1, 5), random.randint(1, 5)):
        least = [1, *(random.randint(0, 1) for _ in range(documents - 1))]
        for side, length, lengths in zip(sides, tokens, (least, [1] * documents), strict=True):
            chosen = [number for number, tokens_of_it in enumerate(lengths) if tokens_of_it]
            for _ in range(length - sum(lengths)):
                lengths[random.choice(chosen)] += 1
            side.append((0, *accumulate(lengths)))
    queries, keys = (Rows(kind, ring, tuple(side)) for side in sides)
    return queries, keys


def document_of(rows: Rows) -> Tensor:
    """The sequence and the document of every token, as one number."""
    by_sequence = [
        100 * number + torch.searchsorted(torch.tensor(ends), torch.arange(ends[-1]), right=True)
        for number, ends in enumerate(rows.boundaries)
    ]
    return torch.cat(by_sequence)


def ring_parts(
    plan: RankAttentionPlan, by_rank: list[Tensor]
) -> Iterator[tuple[ScoreBlocks, Tensor]]:
    """Blocks, and the keys that they count in."""
    yield plan.local_blocks, by_rank[plan.rank]
    for step, blocks in enumerate(plan.ring_step_blocks, start=1):
        yield blocks, by_rank[(plan.rank - step) % len(by_rank)]


def gathered_parts(
    plan: RankAttentionPlan, by_rank: list[Tensor]
) -> Iterator[tuple[ScoreBlocks, Tensor]]:
    yield plan.local_blocks, by_rank[plan.rank]
    keys_and_values = torch.cat([part for tokens in by_rank for part in (tokens, -1 - tokens)])
    keys, values = keys_and_values[plan.remote_kv_index(HOST)]
    assert torch.equal(values, -1 - keys)
    yield plan.remote_blocks, keys


@pytest.mark.parametrize("parts", [ring_parts, gathered_parts])
def test_every_pair_of_a_document_is_covered_once(
    parts: Callable[..., Iterator[tuple[ScoreBlocks, Tensor]]],
) -> None:
    random = Random(0)
    for _ in range(40):
        queries, keys = drawn_sides(random)
        covered = torch.zeros(queries.tokens, keys.tokens, dtype=torch.int64)
        by_rank = [local_tokens(keys, rank) for rank in range(keys.ring)]
        for rank in range(queries.ring):
            plan = RankAttentionPlan(queries.layout, rank, keys=keys.layout)
            for blocks, tokens in parts(plan, by_rank):
                for q0, q1, k0, k1, mask in blocks.blocks:
                    assert mask == "full"
                    covered[local_tokens(queries, rank)[q0:q1, None], tokens[k0:k1]] += 1
        assert torch.equal(covered, (document_of(queries)[:, None] == document_of(keys)).long()), (
            queries,
            keys,
        )


def test_a_document_is_one_rectangle_on_a_rank_whatever_its_spans() -> None:
    rows = Rows("balanced", 4, ((0, 1000, 4096),))
    plan = RankAttentionPlan(rows.layout, 1, keys=rows.layout)
    assert [
        len(blocks) for blocks in (plan.local_blocks, plan.remote_blocks, *plan.ring_step_blocks)
    ] == [2] * 5


def test_plans_depend_on_the_documents_of_both_sides() -> None:
    def plan(kv_end: int) -> RankAttentionPlan:
        boundaries = torch.tensor([[[0, 4, 8]], [[0, kv_end, 16]]], dtype=torch.int32)
        return plan_of(boundaries, 1, 8, 16, RingPlace("contiguous", 2, 0), FULL_SCORES)

    assert plan(4) is plan(4)
    assert plan(4) is not plan(12)
    assert [block[3] for block in plan(4).local_blocks.blocks + plan(12).local_blocks.blocks] == [
        4,
        8,
    ]


def test_queries_without_keys_are_refused() -> None:
    boundaries = torch.tensor([[[0, 4, 8], [0, 0, 8]], [[0, 8, 8], [0, 4, 8]]], dtype=torch.int32)
    told = "document 1 of sequence 0 has queries and no keys"
    with pytest.raises(ValueError, match=told):
        plan_of(boundaries, 2, 8, 8, RingPlace("contiguous", 2, 0), FULL_SCORES)
    with pytest.raises(ValueError, match=told):
        full_blocks(boundaries[0], 2, 8, boundaries[1], 8)
    with pytest.raises(ValueError, match="must ascend from 0 to the sequence length 12"):
        full_blocks(boundaries[0], 2, 8, boundaries[1], 12)
