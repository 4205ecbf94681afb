"""Shard layouts, compared with manually written tables and an independent count of pairs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise, product
from typing import get_args

import pytest
import torch

from models.batch import IGNORE_INDEX
from models.score_pairs import Scores
from parallelisms.context.attention_plan import RankAttentionPlan
from parallelisms.context.batch_layout import BatchLayout
from parallelisms.mesh.context_plan import ShardLayout
from parallelisms.mesh.shard_layout import SeqLayout
from tests.parallelisms.context.documents import (
    DISTRIBUTIONS,
    Distribution,
    document_of,
    few,
    keys_seen,
    of_lengths,
    packed,
    scattered,
    small,
)

KINDS: tuple[ShardLayout, ...] = get_args(ShardLayout)
RINGS = (1, 2, 3, 4, 8)
# A multiple of twice every ring.
TOKENS = 48


def permutation(layout: SeqLayout) -> torch.Tensor:
    """A sequence's tokens, rank by rank."""
    return of_batch(layout).permutation()[0]


def of_batch(*layouts: SeqLayout) -> BatchLayout:
    boundaries_BD = torch.tensor([layout.boundaries for layout in layouts], dtype=torch.int32)
    return BatchLayout(layouts[0].kind, layouts[0].ring_degree, boundaries_BD)


def local_tokens(layout: SeqLayout) -> list[list[int]]:
    """Token indices of every rank."""
    parts: list[list[int]] = [
        part.tolist() for part in permutation(layout).chunk(layout.ring_degree)
    ]
    return parts


def owners(layout: SeqLayout) -> list[int]:
    """The rank of every token."""
    of_token = {
        token: rank for rank, tokens in enumerate(local_tokens(layout)) for token in tokens
    }
    return [of_token[token] for token in range(layout.num_tokens)]


def assign_heaviest_first(sums: list[int], ring: int) -> list[int]:
    """The rank of each chunk: heaviest first, to the least loaded rank with a free slot; ties by
    index.
    """
    rank_of = [0] * len(sums)
    load = [0] * ring
    count = [0] * ring
    for chunk in sorted(range(len(sums)), key=lambda chunk: sums[chunk], reverse=True):
        rank = min((r for r in range(ring) if count[r] < len(sums) // ring), key=lambda r: load[r])
        rank_of[chunk] = rank
        load[rank] += sums[chunk]
        count[rank] += 1
    return rank_of


def assign_chunks(
    boundaries: tuple[int, ...], ring: int, per_rank: int
) -> tuple[list[int], float]:
    """The rank of each chunk for `per_rank` chunks per rank, and the imbalance."""
    sums = keys_seen(boundaries).view(ring * per_rank, -1).sum(1)
    rank_of = assign_heaviest_first(sums.tolist(), ring)
    totals = torch.zeros(ring, dtype=torch.int64).index_add_(0, torch.tensor(rank_of), sums)
    return rank_of, (totals.max() * ring / sums.sum()).item()


def imbalance(layout: SeqLayout) -> float:
    work = layout.pairs_per_rank()
    return max(work) * layout.ring_degree / sum(work)


# ---- tables


def test_headtail_gives_each_rank_a_chunk_and_its_mirror() -> None:
    first, second = local_tokens(SeqLayout("headtail", 2, (0, 32)))
    assert first == [*range(8), *range(24, 32)]
    assert second == [*range(8, 24)]
    ids = torch.arange(1, 9)
    order = permutation(SeqLayout("headtail", 2, (0, 8)))
    assert [part.tolist() for part in ids[order].chunk(2)] == [[1, 2, 7, 8], [3, 4, 5, 6]]
    assert torch.equal(ids[permutation(SeqLayout("headtail", 1, (0, 8)))], ids)
    assert owners(SeqLayout("headtail", 4, (0, 3, 8))) == [0, 1, 2, 3, 3, 2, 1, 0]


def test_contiguous_gives_each_rank_one_range() -> None:
    assert owners(SeqLayout("contiguous", 2, (0, 8))) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert owners(SeqLayout("contiguous", 3, (0, 1, 5, 9))) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_doc_headtail_splits_every_document_over_all_ranks() -> None:
    assert local_tokens(SeqLayout("doc_headtail", 2, (0, 8, 12))) == [
        [0, 1, 6, 7, 8, 11],
        [2, 3, 4, 5, 9, 10],
    ]


@pytest.mark.parametrize(
    ("ring", "lengths", "expected"),
    [
        (2, (2, 6), ["01", "001110"]),
        # Three left over, 0 1 0; then one, for rank 1.
        (2, (3, 1, 4), ["010", "1", "0110"]),
        # Four left over, 0 1 2 0; then one, for rank 1's head; then one, for rank 2.
        (3, (4, 7, 1), ["0120", "0112210", "2"]),
        # Five left over, 0 1 2 0 1; then five, 2 0 1 2 0; then two, 1 2.
        (3, (5, 5, 2), ["01210", "01220", "12"]),
        (4, (1, 1, 1, 1, 1, 1, 1, 1), [*"01230123"]),
    ],
)
def test_remainders_go_round_robin_to_heads_then_tails(
    ring: int, lengths: tuple[int, ...], expected: list[str]
) -> None:
    picture = "".join(map(str, owners(SeqLayout("doc_headtail", ring, of_lengths(*lengths)))))
    ends = of_lengths(*lengths)
    assert [picture[start:end] for start, end in pairwise(ends)] == expected


def test_documents_of_four_and_twelve_tokens_are_balanced() -> None:
    assert SeqLayout("doc_headtail", 2, of_lengths(4, 12)).pairs_per_rank() == (44, 44)
    assert SeqLayout("doc_headtail", 2, of_lengths(12, 4)).pairs_per_rank() == (44, 44)


def test_pairs_per_rank_count_the_keys_of_every_query() -> None:
    assert SeqLayout("contiguous", 2, (0, 8)).pairs_per_rank() == (1 + 2 + 3 + 4, 5 + 6 + 7 + 8)
    assert SeqLayout("contiguous", 2, (0, 3, 8)).pairs_per_rank() == (1 + 2 + 3 + 1, 2 + 3 + 4 + 5)


def test_labels_shifted_before_sharding_are_right_on_every_rank() -> None:
    labels = torch.tensor([2, 3, 4, 5, 6, 7, 8, IGNORE_INDEX])
    expected: dict[ShardLayout, list[list[int]]] = {
        "contiguous": [[2, 3, 4, 5], [6, 7, 8, IGNORE_INDEX]],
        "headtail": [[2, 3, 8, IGNORE_INDEX], [4, 5, 6, 7]],
    }
    for kind, parts in expected.items():
        order = permutation(SeqLayout(kind, 2, (0, 8)))
        assert [part.tolist() for part in labels[order].chunk(2)] == parts


# ---- any number of documents


def drawn_batches(seed: int, count: int) -> Iterator[list[SeqLayout]]:
    """So many of each kind on each ring."""
    rng = random.Random(seed)
    for kind, ring, _ in product(KINDS, (1, 2, 3, 5, 8), range(count)):
        tokens = 2 * ring * rng.choice((1, 2, 5, 16, 300))
        documents = rng.choice((1, 2, 4, 10, 50))
        rows = [
            sorted(rng.choice((tokens, rng.randint(0, tokens))) for _ in range(documents - 1))
            for _ in range(rng.choice((1, 1, 2, 3)))
        ]
        yield [SeqLayout(kind, ring, (0, *row, tokens)) for row in rows]


def halo_tokens(layout: SeqLayout, window: int) -> list[list[int]]:
    """[receiver][sender]: keys of other ranks that the receiver's queries see, up to `window`
    - 1 before each span.
    """
    tokens = [[0] * layout.ring_degree for _ in range(layout.ring_degree)]
    spans = sorted(
        (span.start, rank, span)
        for rank in range(layout.ring_degree)
        for span in layout.spans(rank)
    )
    for index, (_, receiver, span) in enumerate(spans):
        needed = min(window - 1, span.start - span.document_start)
        before = index - 1
        # What lies beyond a span of its own, the receiver needs for that one.
        while needed > 0 and (sender := spans[before][1]) != receiver:
            tokens[receiver][sender] += min(needed, spans[before][2].length)
            needed -= spans[before][2].length
            before -= 1
    return tokens


@pytest.mark.parametrize("count", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_a_batch_has_the_spans_pairs_and_halos_of_its_sequences(count: int) -> None:
    for layouts in drawn_batches(0, count):
        batch = of_batch(*layouts)
        ring = layouts[0].ring_degree
        for rank in range(ring):
            spans = batch.of_rank(rank)
            columns = (spans.local_start, spans.start, spans.length, spans.document_start)
            assert [*zip(*(column.tolist() for column in columns), strict=True)] == [
                (
                    span.local_start + number * layout.num_tokens // ring,
                    span.start + number * layout.num_tokens,
                    span.length,
                    span.document_start + number * layout.num_tokens,
                )
                for number, layout in enumerate(layouts)
                for span in layout.spans(rank)
            ]
        for window in (None, 1, 3, 17):
            pairs = [layout.pairs_per_rank(window) for layout in layouts]
            assert batch.pairs_per_rank(window) == [*map(sum, zip(*pairs, strict=True))]
        for window in (1, 3, 17):
            halos = torch.tensor([halo_tokens(layout, window) for layout in layouts]).sum(0)
            for rank in range(ring):
                plan = RankAttentionPlan(batch, rank, scores=Scores(window))
                assert (plan.halo_received, plan.halo_sent) == (
                    halos[rank].tolist(),
                    halos[:, rank].tolist(),
                )
                assert plan.max_halo_tokens == int(halos.sum(1).max())


# ---- properties for any documents


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_permutation_is_even_and_invertible(kind: ShardLayout, ring: int) -> None:
    for boundaries in small(TOKENS):
        layout = SeqLayout(kind, ring, boundaries)
        parts = local_tokens(layout)
        assert permutation(layout).dtype == torch.int64
        assert sorted(token for part in parts for token in part) == list(range(TOKENS))
        assert [len(part) for part in parts] == [TOKENS // ring] * ring
        assert all(part == sorted(part) for part in parts), (
            "a rank holds its tokens in the order of the row"
        )
        row = torch.arange(TOKENS) * 7
        assert torch.equal(row[permutation(layout)][permutation(layout).argsort()], row)


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_spans_are_maximal_ranges_of_a_document_on_a_rank(kind: ShardLayout, ring: int) -> None:
    for boundaries in small(TOKENS):
        layout = SeqLayout(kind, ring, boundaries)
        documents = document_of(boundaries).tolist()
        for rank, tokens in enumerate(local_tokens(layout)):
            begins = [
                local
                for local, token in enumerate(tokens)
                if not local
                or tokens[local - 1] != token - 1
                or documents[token - 1] != documents[token]
            ]
            ends = [*begins[1:], len(tokens)]
            assert [tuple(piece) for piece in layout.spans(rank)] == [
                (begin, tokens[begin], end - begin, boundaries[documents[tokens[begin]]])
                for begin, end in zip(begins, ends, strict=True)
            ]


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_pairs_per_rank_sum_to_all_visible_pairs(kind: ShardLayout, ring: int) -> None:
    for boundaries in small(TOKENS):
        layout = SeqLayout(kind, ring, boundaries)
        seen = keys_seen(boundaries)
        assert layout.pairs_per_rank() == tuple(
            int(seen[tokens].sum()) for tokens in local_tokens(layout)
        )
        lengths = [end - start for start, end in pairwise(boundaries)]
        assert sum(layout.pairs_per_rank()) == sum(
            length * (length + 1) // 2 for length in lengths
        )


@pytest.mark.parametrize("ring", RINGS)
def test_doc_headtail_orders_ranks_up_then_down_in_every_document(ring: int) -> None:
    for boundaries in small(TOKENS):
        ranks = owners(SeqLayout("doc_headtail", ring, boundaries))
        for start, end in pairwise(boundaries):
            size, left_over = divmod(end - start, 2 * ring)
            document = ranks[start:end]
            turn = next(
                place
                for place in range(len(document) + 1)
                if document[place:] == sorted(document[place:])[::-1]
            )
            assert document[:turn] == sorted(document[:turn])
            counts = [document.count(rank) - 2 * size for rank in range(ring)]
            assert set(counts) <= {left_over // ring, -(-left_over // ring)}


@pytest.mark.parametrize("ring", RINGS)
def test_single_document_is_headtail_in_every_balancing_layout(ring: int) -> None:
    row = (0, 48 * 1024)
    expected = local_tokens(SeqLayout("headtail", ring, row))
    assert local_tokens(SeqLayout("doc_headtail", ring, row)) == expected
    # With the ranks renamed.
    assert sorted(local_tokens(SeqLayout("balanced", ring, row))) == expected
    assert imbalance(SeqLayout("headtail", ring, row)) < 1 + 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_padded_boundaries_give_the_same_layout(kind: ShardLayout) -> None:
    layout = SeqLayout(kind, 2, (0, 3, 16))
    filled = SeqLayout(kind, 2, (0, 3, 16, 16, 16))
    assert filled.num_tokens == 16
    assert filled.documents == layout.documents == [(0, 3), (3, 16)]
    assert [filled.spans(rank) for rank in range(2)] == [layout.spans(rank) for rank in range(2)]
    assert filled.pairs_per_rank() == layout.pairs_per_rank()


@pytest.mark.parametrize("ring", [2, 4])
def test_balanced_uses_the_fewest_chunks_that_balance_else_splits_documents(ring: int) -> None:
    chosen = set()
    # Shorter chunks would have fewer than 128 tokens.
    for tokens, counts in ((1024, (2, 4, 8)), (512, (2, 4)), (256, (2,))):
        for boundaries in (few(tokens * ring, seed) for seed in range(20)):
            tried = {per_rank: assign_chunks(boundaries, ring, per_rank) for per_rank in counts}
            even = [per_rank for per_rank, (_, ratio) in tried.items() if ratio <= 1.01]
            per_rank = even[0] if even else min(tried, key=lambda per_rank: tried[per_rank][1])
            rank_of, ratio = tried[per_rank]
            expected = [rank for rank in rank_of for _ in range(tokens // per_rank)]
            by_document = SeqLayout("doc_headtail", ring, boundaries)
            if splits_documents := ratio > 1.02 and imbalance(by_document) < ratio:
                expected = owners(by_document)
            assert owners(SeqLayout("balanced", ring, boundaries)) == expected
            chosen.add("documents" if splits_documents else per_rank)
    assert chosen == {2, 4, 8, "documents"}


def test_balanced_uses_up_to_32_chunks_per_rank_with_one_long_document() -> None:
    boundaries = (0, 6553, *range(6553 + 64, 8192 * 4, 64), 8192 * 4)
    rank_of, ratio = assign_chunks(boundaries, 4, 32)
    assert (
        ratio
        <= 1.01
        < min(assign_chunks(boundaries, 4, per_rank)[1] for per_rank in (2, 4, 8, 16))
    )
    # 64 chunks of 128 tokens would fit.
    assert owners(SeqLayout("balanced", 4, boundaries)) == [
        rank for rank in rank_of for _ in range(256)
    ]


def test_tokens_that_equal_chunks_leave_over_are_one_short_chunk_per_rank_at_the_end() -> None:
    # Per rank 32 chunks of 256 tokens, and 22 tokens.
    tokens = 4 * (8192 + 22)
    layout = SeqLayout("balanced", 4, (0, 6553, *range(6553 + 64, tokens, 64), tokens))
    rank_of = owners(layout)
    assert all(len({*rank_of[first : first + 256]}) == 1 for first in range(0, 4 * 8192, 256))
    assert sorted(rank_of[4 * 8192 :: 22]) == [0, 1, 2, 3]
    assert all(rank_of.count(rank) == tokens // 4 for rank in range(4))
    assert imbalance(layout) <= 1.01


# ---- errors


def test_indivisible_sequence_length_raises() -> None:
    with pytest.raises(
        ValueError, match=r"^sequence length 7 must be a multiple of the 2 ring ranks$"
    ):
        permutation(SeqLayout("contiguous", 2, (0, 7)))
    with pytest.raises(
        ValueError, match=r"^sequence length 8 must be a multiple of the 0 ring ranks$"
    ):
        SeqLayout("contiguous", 0, (0, 8)).pairs_per_rank()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "contiguous"])
def test_sequence_without_two_equal_chunks_per_rank_raises(kind: ShardLayout) -> None:
    message = rf'^sequence length 12 must be a multiple of 8 for layout "{kind}" over 4 ranks$'
    with pytest.raises(ValueError, match=message):
        SeqLayout(kind, 4, (0, 5, 12)).spans(0)
    assert owners(SeqLayout("contiguous", 4, (0, 5, 12))) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


# ---- balance


def worst_imbalance(kind: ShardLayout, rows: list[tuple[int, ...]], ring: int) -> float:
    return max(imbalance(SeqLayout(kind, ring, boundaries)) for boundaries in rows)


@pytest.mark.parametrize("ring", [4, 8, 16])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_packed_documents_are_balanced(distribution: Distribution, ring: int) -> None:
    rows = [packed(distribution, 128 * 1024, seed) for seed in range(20)]
    assert worst_imbalance("doc_headtail", rows, ring) <= 1.01
    assert worst_imbalance("balanced", rows, ring) <= 1.02


@pytest.mark.parametrize("ring", [2, 3, 5, 7, 8, 12, 16, 32])
def test_balanced_is_balanced_at_any_legal_length(ring: int) -> None:
    """Lengths with few factors of two, from a thousand tokens per rank to a million in all."""
    draw = random.Random(ring)
    lengths = [2 * ring * (2 * draw.randrange(250, 5_000) + 1) for _ in range(4)]
    lengths += [
        tokens for tokens, ranks in ((4_240, 8), (100_000, 16), (1_000_000, 32)) if ranks == ring
    ]
    for tokens in lengths:
        rows = [
            packed(distribution, tokens, seed)
            for distribution in DISTRIBUTIONS
            for seed in range(3)
        ]
        assert worst_imbalance("balanced", rows, ring) <= 1.02, tokens


@pytest.mark.parametrize("ring", [2, 3, 8, 32])
def test_balanced_is_never_less_even_than_the_other_layouts_beyond_two_percent(ring: int) -> None:
    """Down to one token per chunk, where nothing may be even."""
    for tokens in (2 * ring, 6 * ring, 22 * ring, 106 * ring, 254 * ring):
        for boundaries in [
            scattered(tokens, seed) if tokens > 12 else (0, 1, tokens) for seed in range(6)
        ]:
            best = min(
                imbalance(SeqLayout(kind, ring, boundaries))
                for kind in ("headtail", "doc_headtail")
            )
            assert imbalance(SeqLayout("balanced", ring, boundaries)) <= max(1.02, best)


@pytest.mark.slow
@pytest.mark.parametrize("ring", [4, 8, 16, 32])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_packed_sequences_of_a_million_tokens_are_balanced(
    distribution: Distribution, ring: int
) -> None:
    rows = [packed(distribution, 1024 * 1024, seed) for seed in range(20)]
    assert worst_imbalance("doc_headtail", rows, ring) <= 1.01
    assert worst_imbalance("balanced", rows, ring) <= 1.02


def test_headtail_is_unbalanced_for_packed_documents() -> None:
    """The baseline of the balanced layouts."""
    for distribution in DISTRIBUTIONS:
        rows = [packed(distribution, 128 * 1024, seed) for seed in range(20)]
        mean = sum(imbalance(SeqLayout("headtail", 16, boundaries)) for boundaries in rows) / len(
            rows
        )
        assert mean == 1 if distribution == "one document" else mean > 1.4
