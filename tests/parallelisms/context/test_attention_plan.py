"""What a rank's queries attend to: every pair that documents allow is counted, and must be there exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import get_args

import pytest
import torch
from torch import Tensor

from models.kernels import ScoreBlock
from parallelisms.context import cp_attention_op
from parallelisms.context.attention_plan import (
    BatchLayouts,
    RankAttentionPlan,
    local_score_blocks,
    remote_key_indices,
    remote_score_blocks,
    source_score_blocks,
)
from parallelisms.context.shard_layout import SeqLayout
from parallelisms.parallel_dims import ShardLayout
from tests.parallelisms.context.documents import (
    DISTRIBUTIONS,
    Distribution,
    document_of,
    few,
    of_lengths,
    packed,
    small,
    visible,
)

KINDS: tuple[ShardLayout, ...] = get_args(ShardLayout)
RINGS = (1, 2, 3, 4, 8)
# A multiple of twice every ring.
TOKENS = 48


def joined(rows: BatchLayouts) -> tuple[int, ...]:
    """The documents of all rows, laid end to end."""
    return of_lengths(*(end - start for layout in rows for start, end in pairwise(layout.boundaries)))


@lru_cache
def held(rows: BatchLayouts, rank: int) -> Tensor:
    """The tokens of a rank, row after row, by their place in the rows laid end to end."""
    starts = of_lengths(*(layout.num_tokens for layout in rows))
    return torch.cat(
        [
            start + layout.permutation().chunk(layout.ring_degree)[rank]
            for start, layout in zip(starts, rows, strict=False)
        ]
    )


def foreign_keys(rows: BatchLayouts, rank: int) -> Tensor:
    """The keys that `with_foreign` counts through, by their place in the rows laid end to end."""
    places = remote_key_indices(rows, rank)
    assert places.dtype == torch.int64
    gathered = torch.cat([held(rows, source) for source in range(rows[0].ring_degree)])
    assert not torch.isin(gathered[places], held(rows, rank)).any()
    return gathered[places]


def no_pairs(rows: BatchLayouts) -> Tensor:
    tokens = sum(layout.num_tokens for layout in rows)
    return torch.zeros(tokens, tokens, dtype=torch.int64)


def own_pairs(rows: BatchLayouts, rank: int) -> Tensor:
    """int64 [tokens, tokens]: 1 where plain causal attention inside documents on the rank's own tokens sees a pair."""
    tokens = held(rows, rank)
    pairs = no_pairs(rows)
    documents = document_of(joined(rows))[tokens]
    pairs[tokens[:, None], tokens[None, :]] = (documents[:, None] == documents[None, :]).long().tril()
    return pairs


def cover(pairs: Tensor, rectangles: Sequence[ScoreBlock], queries: Tensor, keys: Tensor) -> None:
    """Count the pairs of these rectangles; the queries and keys are given by their place in the rows."""
    for q0, q1, k0, k1 in rectangles:
        assert 0 <= q0 < q1 <= len(queries)
        assert 0 <= k0 < k1 <= len(keys)
        pairs[queries[q0:q1][:, None], keys[k0:k1][None, :]] += 1
    for above, below in pairwise(rectangles):
        assert above.q1 <= below.q0, "queries ascend, each in one rectangle"
        touching = above.q1 == below.q0
        assert not (touching and above[2:] == below[2:]), "neighbours with the same keys are one rectangle"


def seen_through_sources(rows: BatchLayouts) -> Tensor:
    pairs = no_pairs(rows)
    ring = rows[0].ring_degree
    for rank in range(ring):
        pairs += own_pairs(rows, rank)
        for source in set(range(ring)) - {rank}:
            cover(pairs, source_score_blocks(rows, rank, source), held(rows, rank), held(rows, source))
    return pairs


def seen_through_foreign(rows: BatchLayouts) -> Tensor:
    pairs = no_pairs(rows)
    for rank in range(rows[0].ring_degree):
        pairs += own_pairs(rows, rank)
        cover(pairs, remote_score_blocks(rows, rank), held(rows, rank), foreign_keys(rows, rank))
    return pairs


def alone(kind: ShardLayout, ring: int, boundaries: tuple[int, ...]) -> BatchLayouts:
    return (SeqLayout(kind, ring, boundaries),)


def batches(kind: ShardLayout, ring: int) -> list[BatchLayouts]:
    """Every small row alone, and some together; rows of one batch may differ in length."""
    rows = [SeqLayout(kind, ring, boundaries) for boundaries in small(TOKENS)]
    longer = SeqLayout(kind, ring, of_lengths(7, 2 * TOKENS - 7))
    return [*((layout,) for layout in rows), (rows[1], longer, rows[-1])]


# ---- coverage


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_visible_pair_is_in_one_rectangle_with_some_source_and_no_other_pair_is(
    kind: ShardLayout, ring: int
) -> None:
    for rows in batches(kind, ring):
        assert torch.equal(seen_through_sources(rows), visible(joined(rows)).long())


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_visible_pair_is_in_one_rectangle_with_gathered_keys_and_no_other_pair_is(
    kind: ShardLayout, ring: int
) -> None:
    for rows in batches(kind, ring):
        assert torch.equal(seen_through_foreign(rows), visible(joined(rows)).long())


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_own_tokens_are_one_causal_square_for_each_document(kind: ShardLayout, ring: int) -> None:
    for rows in batches(kind, ring):
        for rank in range(ring):
            counts = torch.bincount(document_of(joined(rows))[held(rows, rank)])
            ends = counts[counts > 0].cumsum(0).tolist()
            squares = [ScoreBlock(start, end, start, end) for start, end in pairwise([0, *ends])]
            assert local_score_blocks(rows, rank) == tuple(squares)


@pytest.mark.parametrize(("ring", "tokens"), [(2, 1024), (3, 1536)])
def test_pairs_are_covered_when_a_rank_holds_many_chunks(ring: int, tokens: int) -> None:
    most = 0
    for seed in range(1, 5):
        rows = alone("balanced", ring, few(tokens, seed))
        most = max(most, *(len(rows[0].spans(rank)) for rank in range(ring)))
        expected = visible(joined(rows)).long()
        assert torch.equal(seen_through_sources(rows), expected)
        assert torch.equal(seen_through_foreign(rows), expected)
    assert most > 4


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_gathered_in_the_order_of_the_row_and_only_where_someone_sees_them(
    kind: ShardLayout, ring: int
) -> None:
    for rows in batches(kind, ring):
        pairs = visible(joined(rows))
        for rank in range(ring):
            seen = pairs[held(rows, rank)].any(dim=0)
            seen[held(rows, rank)] = False
            assert foreign_keys(rows, rank).tolist() == seen.nonzero()[:, 0].tolist()


def test_boundaries_that_repeat_the_row_length_change_nothing() -> None:
    for kind in KINDS:
        rows = (SeqLayout(kind, 2, (0, 3, 16)), SeqLayout(kind, 2, (0, 16)))
        filled = (SeqLayout(kind, 2, (0, 3, 16, 16)), SeqLayout(kind, 2, (0, 16, 16, 16)))
        assert local_score_blocks(filled, 1) == local_score_blocks(rows, 1)
        assert source_score_blocks(filled, 1, 0) == source_score_blocks(rows, 1, 0)
        assert remote_score_blocks(filled, 1) == remote_score_blocks(rows, 1)
        assert foreign_keys(filled, 1).tolist() == foreign_keys(rows, 1).tolist()


# ---- schedule


@pytest.mark.parametrize("ring", range(2, 9))
@pytest.mark.parametrize("kind", ["headtail", "doc_headtail"])
def test_head_and_tail_meet_another_rank_in_one_of_two_ways(kind: ShardLayout, ring: int) -> None:
    chunk = 5
    rows = alone(kind, ring, (0, 2 * ring * chunk))
    for rank in range(ring):
        for source in set(range(ring)) - {rank}:
            all_on_head = ScoreBlock(0, 2 * chunk, 0, chunk)
            tail_on_all = ScoreBlock(chunk, 2 * chunk, 0, 2 * chunk)
            assert source_score_blocks(rows, rank, source) == (all_on_head if source < rank else tail_on_all,)


@pytest.mark.parametrize("ring", range(2, 9))
def test_a_run_sees_all_of_the_runs_before_it_and_none_after(ring: int) -> None:
    chunk = 7
    rows = alone("contiguous", ring, (0, ring * chunk))
    for rank in range(ring):
        for source in set(range(ring)) - {rank}:
            expected = (ScoreBlock(0, chunk, 0, chunk),) if source < rank else ()
            assert source_score_blocks(rows, rank, source) == expected
        assert remote_score_blocks(rows, rank) == ((ScoreBlock(0, chunk, 0, rank * chunk),) if rank else ())


def test_every_document_of_a_rank_meets_its_own_head_or_tail() -> None:
    # Rank 0 holds 0 1 6 7 | 8 11, rank 1 holds 2 3 4 5 | 9 10.
    rows = alone("doc_headtail", 2, of_lengths(8, 4))
    assert source_score_blocks(rows, 1, 0) == (ScoreBlock(0, 4, 0, 2), ScoreBlock(4, 6, 4, 5))
    assert source_score_blocks(rows, 0, 1) == (ScoreBlock(2, 4, 0, 4), ScoreBlock(5, 6, 4, 6))
    assert foreign_keys(rows, 1).tolist() == [0, 1, 8]
    assert remote_score_blocks(rows, 1) == (ScoreBlock(0, 4, 0, 2), ScoreBlock(4, 6, 2, 3))


def test_no_more_than_two_rectangles_are_needed_for_two_chunks_of_the_row() -> None:
    limits: dict[ShardLayout, int] = {"headtail": 2, "contiguous": 1}
    for kind, most in limits.items():
        for boundaries in small(TOKENS):
            rows = alone(kind, 4, boundaries)
            for rank in range(4):
                counts = [len(source_score_blocks(rows, rank, source)) for source in range(4) if source != rank]
                assert max(counts) <= most


def test_documents_that_no_two_ranks_share_need_no_keys_of_others() -> None:
    rows = alone("contiguous", 4, of_lengths(5, 7, 12, 1, 11, 12))
    assert [remote_score_blocks(rows, rank) for rank in range(4)] == [()] * 4
    assert [foreign_keys(rows, rank).tolist() for rank in range(4)] == [[]] * 4
    assert [source_score_blocks(rows, rank, source) for rank in range(4) for source in range(4) if rank != source] == [
        ()
    ] * 12


# ---- balance of a ring in lock step


def stepwise(rows: BatchLayouts) -> float:
    """Pairs of the slowest rank, summed over the steps of the ring, over the mean of the ranks."""
    ring = rows[0].ring_degree
    slowest = max(int(own_work(rows, rank)) for rank in range(ring))
    for step in range(1, ring):
        at_once = [source_score_blocks(rows, rank, (rank - step) % ring) for rank in range(ring)]
        slowest += max(sum((q1 - q0) * (k1 - k0) for q0, q1, k0, k1 in rectangles) for rectangles in at_once)
    return slowest * ring / sum(sum(layout.pairs_per_rank()) for layout in rows)


def own_work(rows: BatchLayouts, rank: int) -> Tensor:
    """Pairs among the rank's own tokens."""
    counts = torch.bincount(document_of(joined(rows))[held(rows, rank)])
    return (counts * (counts + 1) // 2).sum()


def worst(kind: ShardLayout, distribution: Distribution, tokens: int, ring: int) -> float:
    return max(stepwise(alone(kind, ring, packed(distribution, tokens, seed))) for seed in range(32 // ring))


@pytest.mark.parametrize("ring", [4, 8, 16])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_no_rank_waits_for_another_in_any_step_of_doc_headtail(distribution: Distribution, ring: int) -> None:
    assert worst("doc_headtail", distribution, 128 * 1024, ring) <= 1.01


@pytest.mark.slow
@pytest.mark.parametrize("ring", [4, 8, 16, 32])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_no_rank_waits_in_rows_of_a_million_tokens(distribution: Distribution, ring: int) -> None:
    assert worst("doc_headtail", distribution, 1024 * 1024, ring) <= 1.01


def test_ranks_wait_for_each_other_with_head_and_tail_of_the_row() -> None:
    """What the balance of `doc_headtail` is measured against."""
    for distribution in DISTRIBUTIONS:
        waiting = worst("headtail", distribution, 128 * 1024, 8)
        assert waiting < 1.001 if distribution == "one document" else waiting > 1.5


def test_what_is_remembered_of_rows_of_a_million_tokens_is_little() -> None:
    share = RankAttentionPlan((SeqLayout("balanced", 16, (0, 1 << 20)),), 0)
    on_device = sum(places.nbytes for places in share.remote_kv_indices(torch.device("cpu")))
    remembered = cp_attention_op._rank_attention_plan.cache_parameters()["maxsize"]
    assert remembered is not None
    assert remembered * on_device < 128 << 20
