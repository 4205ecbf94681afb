"""Blocks of a window: every pair that a query sees is covered once, with the masks that kernels
have.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations_with_replacement, product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.score_blocks import MASKS, ScoreBlock, ScoreBlocks, VarlenBatch, rows_before
from models.score_pairs import Scores

TOKENS = 9
RANGES = [
    range(start, end)
    for start, end in combinations_with_replacement(range(TOKENS + 1), 2)
    if start < end
]
WINDOWS = [None, *range(1, TOKENS + 2)]


def pairs(blocks: Sequence[ScoreBlock], tokens: int = TOKENS) -> Tensor:
    """[queries, keys]: how often each pair is covered."""
    covered = torch.zeros(tokens, tokens, dtype=torch.int64)
    for q0, q1, k0, k1, mask in blocks:
        ones = torch.ones(q1 - q0, k1 - k0, dtype=torch.int64)
        covered[q0:q1, k0:k1] += {"full": ones, "causal": ones.tril(), "flipped": ones.triu()}[
            mask
        ]
    return covered


def seen(window: int | None, tokens: int = TOKENS) -> Tensor:
    """The pairs of a causal document in which a query sees at most `window` keys."""
    place = torch.arange(tokens)
    distance = place[:, None] - place[None, :]
    return ((distance >= 0) & (distance < (window or tokens))).long()


def blocks_before(
    queries: Sequence[range], keys: Sequence[range], window: int | None
) -> ScoreBlocks:
    """Of pairs of ranges, by place in the document."""
    queries_P2, keys_P2 = (
        torch.tensor([(each.start, each.stop) for each in side]) for side in (queries, keys)
    )
    return ScoreBlocks(
        rows_before(queries_P2, keys_P2, window, shift_P2=torch.zeros_like(queries_P2))
    )


@pytest.mark.parametrize("window", WINDOWS)
def test_every_visible_pair_of_queries_and_earlier_keys_is_covered_once(
    window: int | None,
) -> None:
    for queries, keys in product(RANGES, RANGES):
        region = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        if keys.stop <= queries.start and seen(window)[region].any():
            expected = torch.zeros(TOKENS, TOKENS, dtype=torch.int64)
            expected[region] = seen(window)[region]
            # None is empty, or not square.
            blocks = blocks_before([queries], [keys], window).blocks
            assert torch.equal(pairs(blocks), expected), (queries, keys)
            assert len(blocks) <= 3


def test_pairs_of_ranges_are_moved_to_their_indices() -> None:
    queries_22 = torch.tensor([[4, 7], [4, 7]])
    keys_22 = torch.tensor([[0, 4], [0, 4]])
    one, other = torch.tensor([[10, 20], [0, 3]])
    both = rows_before(queries_22, keys_22, 3, shift_P2=torch.stack((one, other)))
    alone = rows_before(
        queries_22[:1], keys_22[:1], 3, shift_P2=torch.zeros(1, 2, dtype=torch.int64)
    )
    moved = [alone + F.pad(shift.repeat_interleave(2), (0, 1)) for shift in (one, other)]
    assert torch.equal(both, torch.cat(moved))


@pytest.mark.parametrize("window", WINDOWS)
def test_blocks_without_a_window_cover_the_pairs_of_those_with_it(window: int | None) -> None:
    blocks = ScoreBlocks([(0, TOKENS, 0, TOKENS)], causal=True, scores=Scores(window))
    assert blocks.disjoint_tokens == (TOKENS, TOKENS)
    assert blocks.window == (window if window is not None and window < TOKENS else None)
    assert blocks.without_window.window is None
    assert torch.equal(pairs(blocks.without_window.blocks), seen(window))


def test_work_of_a_long_document_grows_with_the_window() -> None:
    for window in (2, 7, 64):
        blocks = ScoreBlocks(
            [(0, 1000, 0, 1000)], causal=True, scores=Scores(window)
        ).without_window.blocks
        assert (
            sum((block.q1 - block.q0) * (block.k1 - block.k0) for block in blocks) < 2000 * window
        )
        assert len(blocks) <= 2000 / window + 1


def indices(tokens: slice | Tensor) -> list[int]:
    return [*range(tokens.start, tokens.stop)] if isinstance(tokens, slice) else tokens.tolist()


def test_varlen_calls_reverse_the_tokens_of_each_flipped_block() -> None:
    blocks = [
        ScoreBlock(2, 4, 0, 2, "flipped"),
        ScoreBlock(4, 7, 2, 5, "flipped"),
        ScoreBlock(7, 9, 7, 9, "causal"),
    ]
    causal, flipped = ScoreBlocks(blocks).varlen_batches(torch.device("cpu"))
    assert (flipped.mask, causal.mask) == ("flipped", "causal")
    assert indices(flipped.queries) == [3, 2, 6, 5, 4]
    assert indices(flipped.keys) == [1, 0, 4, 3, 2]
    assert flipped.cu_seqlens_q.tolist() == flipped.cu_seqlens_k.tolist() == [0, 2, 5]
    assert indices(causal.queries) == indices(causal.keys) == [7, 8]


def drawn_blocks(seed: int) -> list[ScoreBlock]:
    """Ascending queries; keys that sometimes go back."""
    rng = random.Random(seed)
    blocks = list[ScoreBlock]()
    query = 0
    key = 0
    for _ in range(rng.randint(1, 30)):
        length = rng.randint(1, 5)
        query = max(0, query + rng.choice((0, 0, 1, -2)))
        key = max(0, key + rng.choice((0, 3, -4)))
        blocks.append(ScoreBlock(query, query + length, key, key + length, rng.choice(MASKS)))
        query = query + length
        key = key + length
    return blocks


def test_varlen_calls_hold_every_block_once_and_no_query_or_key_twice() -> None:
    for seed in range(300):
        blocks = drawn_blocks(seed)
        batches: list[VarlenBatch] = ScoreBlocks(blocks).varlen_batches(torch.device("cpu"))
        found = list[ScoreBlock]()
        for batch in batches:
            assert len(set(indices(batch.queries))) == len(indices(batch.queries)), (
                "results are merged by index"
            )
            assert len(set(indices(batch.keys))) == len(indices(batch.keys)), (
                "gradients are added by index"
            )
            spans = [
                [
                    (min(part), max(part) + 1)
                    for part in torch.tensor(indices(tokens)).split(lengths.diff().tolist())
                ]
                for tokens, lengths in (
                    (batch.queries, batch.cu_seqlens_q),
                    (batch.keys, batch.cu_seqlens_k),
                )
            ]
            found += [
                ScoreBlock(q0, q1, k0, k1, batch.mask)
                for (q0, q1), (k0, k1) in zip(*spans, strict=True)
            ]
        assert sorted(found) == sorted(blocks)


def test_disjoint_blocks_take_one_varlen_call() -> None:
    documents = [
        ScoreBlock(start, start + 3, start, start + 3, "causal") for start in range(0, 300, 3)
    ]
    assert len(ScoreBlocks(documents).host_varlen_batches) == 1
    # Head and tail of each document see its first keys.
    halves = [
        block
        for start in range(0, 300, 4)
        for block in (
            ScoreBlock(start, start + 2, start, start + 1),
            ScoreBlock(start + 2, start + 4, start, start + 2),
        )
    ]
    assert len(ScoreBlocks(halves).host_varlen_batches) == 2
