"""Score blocks of each rank: every pair that the mask allows is covered exactly once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import get_args

import pytest
import torch
from torch import Tensor

from models.batch import NUM_RECENT
from models.score_blocks import ScoreBlock
from models.score_pairs import Scores
from parallelisms.context.attention_plan import RankAttentionPlan, RingPlace, rank_attention_plan
from parallelisms.context.batch_layout import BatchLayout
from parallelisms.mesh.context_plan import ShardLayout
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


@dataclass(frozen=True)
class Rows:
    """Sequences with these document boundaries."""

    kind: ShardLayout
    ring: int
    boundaries: tuple[tuple[int, ...], ...]

    def plan(self, rank: int, window: int | None = None) -> RankAttentionPlan:
        return RankAttentionPlan(self.layout, rank, scores=Scores(window))

    @cached_property
    def layout(self) -> BatchLayout:
        longest = max(map(len, self.boundaries))
        filled = [each + each[-1:] * (longest - len(each)) for each in self.boundaries]
        return BatchLayout(self.kind, self.ring, torch.tensor(filled, dtype=torch.int32))

    @property
    def tokens(self) -> int:
        return sum(each[-1] for each in self.boundaries)


def local_score_blocks(rows: Rows, rank: int) -> tuple[ScoreBlock, ...]:
    return rows.plan(rank).local_blocks.blocks


def source_score_blocks(rows: Rows, rank: int, source: int) -> tuple[ScoreBlock, ...]:
    return rows.plan(rank).source_blocks(source).blocks


def remote_score_blocks(rows: Rows, rank: int) -> tuple[ScoreBlock, ...]:
    return rows.plan(rank).remote_blocks.blocks


def joined(rows: Rows) -> tuple[int, ...]:
    """The documents of all sequences, concatenated."""
    return of_lengths(
        *(end - start for boundaries in rows.boundaries for start, end in pairwise(boundaries))
    )


@lru_cache
def local_tokens(rows: Rows, rank: int) -> Tensor:
    """A rank's tokens, as indices into the concatenated sequences."""
    tokens_BT = rows.layout.permutation()
    tokens_BT = tokens_BT + torch.arange(len(tokens_BT))[:, None] * tokens_BT.shape[1]
    return tokens_BT.chunk(rows.ring, dim=1)[rank].flatten()


def remote_keys(rows: Rows, rank: int) -> Tensor:
    """The keys of `remote_kv_index`, as indices into the concatenated sequences."""
    places_2Y = rows.plan(rank).remote_kv_index(torch.device("cpu"))
    assert places_2Y.dtype == torch.int64
    by_source = [local_tokens(rows, source) for source in range(rows.ring)]
    # Gathered KV are keys and values of rank 0, then of rank 1, ...
    gathered = torch.cat([part for tokens in by_source for part in (tokens, -1 - tokens)])
    keys: Tensor = gathered[places_2Y[0]]
    assert torch.equal(gathered[places_2Y[1]], -1 - keys)
    assert not torch.isin(keys, local_tokens(rows, rank)).any()
    return keys


def no_pairs(rows: Rows) -> Tensor:
    return torch.zeros(rows.tokens, rows.tokens, dtype=torch.int64)


def local_pairs(rows: Rows, rank: int) -> Tensor:
    """int64 [tokens, tokens]: 1 for the pairs of causal attention inside documents on the rank's
    own tokens.
    """
    tokens = local_tokens(rows, rank)
    pairs = no_pairs(rows)
    documents = document_of(joined(rows))[tokens]
    pairs[tokens[:, None], tokens[None, :]] = (
        (documents[:, None] == documents[None, :]).long().tril()
    )
    return pairs


def cover(pairs: Tensor, rectangles: Sequence[ScoreBlock], queries: Tensor, keys: Tensor) -> None:
    """Adds the pairs of these blocks; queries and keys are indices into the concatenated
    sequences.
    """
    for q0, q1, k0, k1, _ in rectangles:
        assert 0 <= q0 < q1 <= len(queries)
        assert 0 <= k0 < k1 <= len(keys)
        pairs[queries[q0:q1][:, None], keys[k0:k1][None, :]] += 1
    for above, below in pairwise(rectangles):
        assert above.q1 <= below.q0, "queries ascend, each in one rectangle"
        touching = above.q1 == below.q0
        assert not (touching and above[2:4] == below[2:4]), (
            "neighbours with the same keys are one rectangle"
        )


def pairs_by_ring(rows: Rows) -> Tensor:
    pairs = no_pairs(rows)
    ring = rows.ring
    for rank in range(ring):
        pairs += local_pairs(rows, rank)
        for source in set(range(ring)) - {rank}:
            cover(
                pairs,
                source_score_blocks(rows, rank, source),
                local_tokens(rows, rank),
                local_tokens(rows, source),
            )
    return pairs


def pairs_by_allgather(rows: Rows) -> Tensor:
    pairs = no_pairs(rows)
    for rank in range(rows.ring):
        pairs += local_pairs(rows, rank)
        cover(
            pairs,
            remote_score_blocks(rows, rank),
            local_tokens(rows, rank),
            remote_keys(rows, rank),
        )
    return pairs


def single(kind: ShardLayout, ring: int, boundaries: tuple[int, ...]) -> Rows:
    return Rows(kind, ring, (boundaries,))


def batches(kind: ShardLayout, ring: int) -> list[Rows]:
    """Every small sequence alone, and some in one batch."""
    rows = small(TOKENS)
    return [
        *(single(kind, ring, boundaries) for boundaries in rows),
        Rows(kind, ring, (rows[1], rows[3], rows[-1])),
    ]


# ---- coverage


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_ring_blocks_cover_every_visible_pair_exactly_once(kind: ShardLayout, ring: int) -> None:
    for rows in batches(kind, ring):
        assert torch.equal(pairs_by_ring(rows), visible(joined(rows)).long())


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_allgather_blocks_cover_every_visible_pair_exactly_once(
    kind: ShardLayout, ring: int
) -> None:
    for rows in batches(kind, ring):
        assert torch.equal(pairs_by_allgather(rows), visible(joined(rows)).long())


def windowed_pairs(rows: Rows, window: int, *, halo: bool) -> Tensor:
    """The pairs of all ranks' blocks, with the keys that a halo or each other rank sends."""
    pairs = no_pairs(rows)
    ring = rows.ring
    plans = [rows.plan(rank, window) for rank in range(ring)]
    tokens = [local_tokens(rows, rank) for rank in range(ring)]
    device = torch.device("cpu")
    for rank, plan in enumerate(plans):
        received = torch.cat(
            [tokens[sender][plans[sender].halo_index(device)[rank]] for sender in range(ring)]
        )
        assert len(received) == sum(plan.halo_received) == len(received.unique())
        local = plan.local_blocks.without_window.blocks
        remote = [
            (plan.source_blocks(source).blocks, tokens[source])
            for source in set(range(ring)) - {rank}
        ]
        for blocks, keys in [
            (local, tokens[rank]),
            *([(plan.halo_blocks.blocks, received)] if halo else remote),
        ]:
            for q0, q1, k0, k1, mask in blocks:
                ones = torch.ones(q1 - q0, k1 - k0, dtype=torch.int64)
                masked = {"full": ones, "causal": ones.tril(), "flipped": ones.triu()}[mask]
                pairs[tokens[rank][q0:q1][:, None], keys[k0:k1][None, :]] += masked
        seen = visible(joined(rows)).triu(1 - window)[tokens[rank]].any(0)
        seen[tokens[rank]] = False
        assert torch.equal(received.sort().values, seen.nonzero().flatten()), (
            "no key that no query sees"
        )
        assert plan.max_halo_tokens == max(sum(each.halo_received) for each in plans)
        assert [each.halo_sent[rank] for each in plans] == plan.halo_received
    return pairs


@pytest.mark.parametrize("halo", [True, False])
@pytest.mark.parametrize("ring", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_window_cover_every_visible_pair_exactly_once(
    kind: ShardLayout, ring: int, *, halo: bool
) -> None:
    for number, rows in enumerate(batches(kind, ring)):
        window = (1, 2, 5, 7, 12, 13, TOKENS - 1)[number % 7]
        expected = visible(joined(rows)).triu(1 - window).long()
        assert torch.equal(windowed_pairs(rows, window, halo=halo), expected)


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_local_blocks_are_one_causal_square_per_document(kind: ShardLayout, ring: int) -> None:
    for rows in batches(kind, ring):
        for rank in range(ring):
            counts = torch.bincount(document_of(joined(rows))[local_tokens(rows, rank)])
            ends = counts[counts > 0].cumsum(0).tolist()
            squares = [
                ScoreBlock(start, end, start, end, "causal") for start, end in pairwise([0, *ends])
            ]
            assert local_score_blocks(rows, rank) == tuple(squares)


@pytest.mark.parametrize(("ring", "tokens"), [(2, 1024), (3, 1536)])
def test_pairs_are_covered_with_many_chunks_per_rank(ring: int, tokens: int) -> None:
    most = 0
    for seed in range(1, 5):
        rows = single("balanced", ring, few(tokens, seed))
        most = max(most, *(len(rows.layout.of_rank(rank)) for rank in range(ring)))
        expected = visible(joined(rows)).long()
        assert torch.equal(pairs_by_ring(rows), expected)
        assert torch.equal(pairs_by_allgather(rows), expected)
    assert most > 4


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_remote_keys_are_in_sequence_order_and_all_attended(kind: ShardLayout, ring: int) -> None:
    for rows in batches(kind, ring):
        pairs = visible(joined(rows))
        for rank in range(ring):
            seen = pairs[local_tokens(rows, rank)].any(dim=0)
            seen[local_tokens(rows, rank)] = False
            assert remote_keys(rows, rank).tolist() == seen.nonzero()[:, 0].tolist()


def test_boundaries_that_repeat_the_sequence_length_change_nothing() -> None:
    for kind in KINDS:
        rows = Rows(kind, 2, ((0, 3, 16), (0, 16)))
        filled = Rows(kind, 2, ((0, 3, 16, 16), (0, 16, 16, 16)))
        assert local_score_blocks(filled, 1) == local_score_blocks(rows, 1)
        assert source_score_blocks(filled, 1, 0) == source_score_blocks(rows, 1, 0)
        assert remote_score_blocks(filled, 1) == remote_score_blocks(rows, 1)
        assert remote_keys(filled, 1).tolist() == remote_keys(rows, 1).tolist()


# ---- schedule


@pytest.mark.parametrize("ring", range(2, 9))
@pytest.mark.parametrize("kind", ["headtail", "doc_headtail"])
def test_headtail_meets_another_rank_in_one_of_two_patterns(kind: ShardLayout, ring: int) -> None:
    chunk = 5
    rows = single(kind, ring, (0, 2 * ring * chunk))
    for rank in range(ring):
        for source in set(range(ring)) - {rank}:
            all_on_head = ScoreBlock(0, 2 * chunk, 0, chunk)
            tail_on_all = ScoreBlock(chunk, 2 * chunk, 0, 2 * chunk)
            assert source_score_blocks(rows, rank, source) == (
                all_on_head if source < rank else tail_on_all,
            )


@pytest.mark.parametrize("ring", range(2, 9))
def test_contiguous_shard_attends_to_all_earlier_shards_and_no_later(ring: int) -> None:
    chunk = 7
    rows = single("contiguous", ring, (0, ring * chunk))
    for rank in range(ring):
        for source in set(range(ring)) - {rank}:
            expected = (ScoreBlock(0, chunk, 0, chunk),) if source < rank else ()
            assert source_score_blocks(rows, rank, source) == expected
        assert remote_score_blocks(rows, rank) == (
            (ScoreBlock(0, chunk, 0, rank * chunk),) if rank else ()
        )


def test_doc_headtail_blocks_of_each_document() -> None:
    # Rank 0 holds 0 1 6 7 | 8 11, rank 1 holds 2 3 4 5 | 9 10.
    rows = single("doc_headtail", 2, of_lengths(8, 4))
    assert source_score_blocks(rows, 1, 0) == (ScoreBlock(0, 4, 0, 2), ScoreBlock(4, 6, 4, 5))
    assert source_score_blocks(rows, 0, 1) == (ScoreBlock(2, 4, 0, 4), ScoreBlock(5, 6, 4, 6))
    assert remote_keys(rows, 1).tolist() == [0, 1, 8]
    assert remote_score_blocks(rows, 1) == (ScoreBlock(0, 4, 0, 2), ScoreBlock(4, 6, 2, 3))


def test_two_chunks_need_at_most_two_blocks() -> None:
    limits: dict[ShardLayout, int] = {"headtail": 2, "contiguous": 1}
    for kind, most in limits.items():
        for boundaries in small(TOKENS):
            rows = single(kind, 4, boundaries)
            for rank in range(4):
                counts = [
                    len(source_score_blocks(rows, rank, source))
                    for source in range(4)
                    if source != rank
                ]
                assert max(counts) <= most


def test_documents_on_one_rank_need_no_remote_keys() -> None:
    rows = single("contiguous", 4, of_lengths(5, 7, 12, 1, 11, 12))
    assert [remote_score_blocks(rows, rank) for rank in range(4)] == [()] * 4
    assert [remote_keys(rows, rank).tolist() for rank in range(4)] == [[]] * 4
    assert [
        source_score_blocks(rows, rank, source)
        for rank in range(4)
        for source in range(4)
        if rank != source
    ] == [()] * 12


# ---- load balance per ring step


def ring_step_imbalance(rows: Rows) -> float:
    """Pairs of the busiest rank, summed over ring steps, over the mean of the ranks."""
    ring = rows.ring
    slowest = max(int(num_local_pairs(rows, rank)) for rank in range(ring))
    for step in range(1, ring):
        at_once = [source_score_blocks(rows, rank, (rank - step) % ring) for rank in range(ring)]
        slowest += max(
            sum((q1 - q0) * (k1 - k0) for q0, q1, k0, k1, _ in rectangles)
            for rectangles in at_once
        )
    return slowest * ring / sum(rows.layout.pairs_per_rank())


def num_local_pairs(rows: Rows, rank: int) -> Tensor:
    """Pairs among the rank's own tokens."""
    counts = torch.bincount(document_of(joined(rows))[local_tokens(rows, rank)])
    return (counts * (counts + 1) // 2).sum()


def worst_imbalance(
    kind: ShardLayout, distribution: Distribution, tokens: int, ring: int
) -> float:
    return max(
        ring_step_imbalance(single(kind, ring, packed(distribution, tokens, seed)))
        for seed in range(32 // ring)
    )


@pytest.mark.parametrize(
    "ring", [4, *(pytest.param(ring, marks=pytest.mark.slow) for ring in (8, 16))]
)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_doc_headtail_is_balanced_in_every_ring_step(
    distribution: Distribution, ring: int
) -> None:
    assert worst_imbalance("doc_headtail", distribution, 128 * 1024, ring) <= 1.01


@pytest.mark.slow
@pytest.mark.parametrize("ring", [4, 8, 16, 32])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_ring_steps_are_balanced_at_a_million_tokens(
    distribution: Distribution, ring: int
) -> None:
    assert worst_imbalance("doc_headtail", distribution, 1024 * 1024, ring) <= 1.01


def test_headtail_of_the_full_sequence_is_unbalanced() -> None:
    """The baseline of `doc_headtail`."""
    for distribution in DISTRIBUTIONS:
        waiting = worst_imbalance("headtail", distribution, 128 * 1024, 8)
        assert waiting < 1.001 if distribution == "one document" else waiting > 1.5


def test_cached_plans_stay_small_at_a_million_tokens() -> None:
    share = single("balanced", 16, (0, 1 << 20)).plan(0)
    assert NUM_RECENT * share.remote_kv_index(torch.device("cpu")).nbytes < 128 << 20


def test_plans_are_found_while_somebody_holds_them() -> None:
    def plan(length: int) -> RankAttentionPlan:
        return plan_of(0, length)

    def plan_of(*ends: int) -> RankAttentionPlan:
        boundaries_1D = torch.tensor([ends], dtype=torch.int32)
        return rank_attention_plan(boundaries_1D, 1, ends[-1], RingPlace("headtail", 2, 0))

    held = plan(8)
    forgotten = weakref.ref(plan(12))
    for length in range(16, 16 + 4 * NUM_RECENT, 4):
        plan(length)
    gc.collect()
    assert plan(8) is held
    assert [len(plan_of(0, end, 8).local_blocks) for end in (1, 4, 8)] == [2, 2, 1]
    assert forgotten() is None
    assert plan(12).tokens_per_rank == 6
    with pytest.raises(ValueError, match="must ascend from 0 to the sequence length 12"):
        rank_attention_plan(
            torch.tensor([[0, 8]], dtype=torch.int32), 1, 12, RingPlace("headtail", 2, 0)
        )
