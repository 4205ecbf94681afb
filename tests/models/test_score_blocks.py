"""Blocks of a window: every pair that a query sees is covered once, with the masks that kernels have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement

import pytest
import torch
from torch import Tensor

from models.score_blocks import ScoreBlock, ScoreBlocks, VarlenBatch, window_blocks

TOKENS = 9
RANGES = [range(start, end) for start, end in combinations_with_replacement(range(TOKENS + 1), 2) if start < end]
WINDOWS = [None, *range(1, TOKENS + 2)]


def pairs(blocks: Sequence[ScoreBlock], tokens: int = TOKENS) -> Tensor:
    """[queries, keys]: how often each pair is covered."""
    covered = torch.zeros(tokens, tokens, dtype=torch.int64)
    for q0, q1, k0, k1, mask in blocks:
        ones = torch.ones(q1 - q0, k1 - k0, dtype=torch.int64)
        covered[q0:q1, k0:k1] += {"full": ones, "causal": ones.tril(), "flipped": ones.triu()}[mask]
    return covered


def seen(window: int | None, tokens: int = TOKENS) -> Tensor:
    """The pairs of a causal document in which a query sees at most `window` keys."""
    place = torch.arange(tokens)
    distance = place[:, None] - place[None, :]
    return ((distance >= 0) & (distance < (window or tokens))).long()


@pytest.mark.parametrize("window", WINDOWS)
def test_every_visible_pair_of_any_queries_and_keys_is_covered_once(window: int | None) -> None:
    for queries in RANGES:
        for keys in RANGES:
            blocks = ScoreBlocks(window_blocks(queries, keys, window)).blocks  # None is empty, or not square.
            expected = torch.zeros(TOKENS, TOKENS, dtype=torch.int64)
            region = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
            expected[region] = seen(window)[region]
            assert torch.equal(pairs(blocks), expected), (queries, keys)


@pytest.mark.parametrize("window", WINDOWS)
def test_blocks_without_a_window_cover_the_pairs_of_those_with_it(window: int | None) -> None:
    blocks = ScoreBlocks([(0, TOKENS, 0, TOKENS)], causal=True, window=window)
    assert blocks.is_diagonal
    assert blocks.window == (window if window is not None and window < TOKENS else None)
    assert blocks.without_window.window is None
    assert torch.equal(pairs(blocks.without_window.blocks), seen(window))


def test_work_of_a_long_document_grows_with_the_window() -> None:
    for window in (2, 7, 64):
        blocks = [*window_blocks(range(1000), range(1000), window)]
        assert sum((block.q1 - block.q0) * (block.k1 - block.k0) for block in blocks) < 2000 * window
        assert len(blocks) <= 2000 / window + 1


def test_queries_of_any_block_ascend() -> None:
    for window in (1, 3, 5, None):
        starts = [block.q0 for block in window_blocks(range(2, 30), range(30), window)]
        assert starts == sorted(starts)


def indices(tokens: slice | Tensor) -> list[int]:
    return [*range(tokens.start, tokens.stop)] if isinstance(tokens, slice) else tokens.tolist()


def test_varlen_calls_reverse_the_tokens_of_each_flipped_block() -> None:
    blocks = [ScoreBlock(2, 4, 0, 2, "flipped"), ScoreBlock(4, 7, 2, 5, "flipped"), ScoreBlock(7, 9, 7, 9, "causal")]
    flipped, causal = ScoreBlocks(blocks).varlen_batches(torch.device("cpu"))
    assert (flipped.mask, causal.mask) == ("flipped", "causal")
    assert indices(flipped.queries) == [3, 2, 6, 5, 4]
    assert indices(flipped.keys) == [1, 0, 4, 3, 2]
    assert flipped.cu_seqlens_q.tolist() == flipped.cu_seqlens_k.tolist() == [0, 2, 5]
    assert indices(causal.queries) == indices(causal.keys) == [7, 8]


def test_varlen_batches_hold_every_block_once() -> None:
    blocks = ScoreBlocks(block for block in window_blocks(range(23), range(23), 4))
    batches: list[VarlenBatch] = blocks.varlen_batches(torch.device("cpu"))
    assert sum(len(batch.cu_seqlens_q) - 1 for batch in batches) == len(blocks.blocks)
    for batch in batches:
        assert len(set(indices(batch.keys))) == len(indices(batch.keys)), "gradients are added by index"
