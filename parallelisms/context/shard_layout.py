"""Shard layouts: which rank of the ring holds which tokens of a sequence. Integers only, no process group, no device.

A rank holds its tokens in sequence order. The tokens of a document are therefore contiguous on the rank, and attention
among them is plain causal attention. Every rank holds the same number of tokens, for documents of any length.

    headtail, 2 ranks        0 0 1 1 1 1 0 0
    contiguous               0 0 0 0 1 1 1 1
    doc_headtail, [0, 2, 8]  0 1 0 0 1 1 1 0      head-tail inside each document, remainders assigned round-robin
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from models.kernels import concatenated_ranges
from parallelisms.parallel_dims import ShardLayout

# `balanced` takes the fewest chunks per rank whose imbalance (busiest rank over mean) is at most this...
TARGET_IMBALANCE = 1.01
# ...unless the chunks would be shorter than a kernel's tile.
MIN_CHUNK_TOKENS = 128


class TokenSpan(NamedTuple):
    """Contiguous tokens of one document on one rank."""

    local_start: int
    """First token's index among the rank's tokens of the sequence."""
    start: int
    """First token's index in the sequence."""
    length: int
    document_start: int
    """Index of the document's first token in the sequence."""

    @property
    def num_pairs(self) -> int:
        """(query, key) pairs that these tokens, as queries, attend to."""
        first_num_keys = self.start - self.document_start + 1
        return self.length * (2 * first_num_keys + self.length - 1) // 2


@dataclass(frozen=True)
class SeqLayout:
    """The layout of one sequence; `boundaries` are its document starts and its length, ascending."""

    kind: ShardLayout
    ring_degree: int
    boundaries: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.boundaries[-1]

    @property
    def documents(self) -> list[tuple[int, int]]:
        """[start, end) of each document that is not empty."""
        return [(start, end) for start, end in pairwise(self.boundaries) if end > start]

    def spans(self, rank: int) -> tuple[TokenSpan, ...]:
        """A rank's tokens, in the order in which it holds them."""
        return _token_spans(self)[rank]

    def pairs_per_rank(self) -> tuple[int, ...]:
        """(query, key) pairs that each rank's queries attend to."""
        return tuple(sum(span.num_pairs for span in spans) for spans in _token_spans(self))

    def permutation(self) -> Tensor:
        """int64 [T]: the sequence's tokens, rank by rank; `x[permutation].chunk(ring_degree)[rank]` is a rank's shard."""
        spans = [span for rank_spans in _token_spans(self) for span in rank_spans]
        return concatenated_ranges([span.start for span in spans], [span.length for span in spans])


@lru_cache(maxsize=64)
def _token_spans(layout: SeqLayout) -> tuple[tuple[TokenSpan, ...], ...]:
    if layout.ring_degree < 1 or layout.num_tokens % layout.ring_degree:
        raise ValueError(
            f"sequence length {layout.num_tokens} must be a multiple of the {layout.ring_degree} ring ranks"
        )
    kind = layout.kind if layout.ring_degree > 1 else "contiguous"
    if kind != "contiguous" and layout.num_tokens % (2 * layout.ring_degree):
        raise ValueError(
            f"sequence length {layout.num_tokens} must be a multiple of {2 * layout.ring_degree} for layout "
            f'"{kind}" over {layout.ring_degree} ranks'
        )
    assign = {"contiguous": _contiguous, "headtail": _headtail, "doc_headtail": _doc_headtail, "balanced": _balanced}
    by_rank: list[list[TokenSpan]] = [[] for _ in range(layout.ring_degree)]
    for rank, document_start, start, end in assign[kind](layout):
        last = by_rank[rank][-1] if by_rank[rank] else TokenSpan(0, 0, 0, -1)
        if (last.start + last.length, last.document_start) == (start, document_start):
            by_rank[rank][-1] = last._replace(length=last.length + end - start)
        elif end > start:
            by_rank[rank].append(TokenSpan(last.local_start + last.length, start, end - start, document_start))
    return tuple(map(tuple, by_rank))


RankSpans = Iterator[tuple[int, int, int, int]]
"""(rank, document start, start, end), in sequence order."""


def _contiguous(layout: SeqLayout) -> RankSpans:
    yield from _assign_chunks(layout, list(range(layout.ring_degree)))


def _headtail(layout: SeqLayout) -> RankSpans:
    """Rank r of n holds chunks r and 2n-1-r of 2n, which balances the load under a causal mask."""
    ranks = list(range(layout.ring_degree))
    yield from _assign_chunks(layout, ranks + ranks[::-1])


def _doc_headtail(layout: SeqLayout) -> RankSpans:
    """Head-tail inside every document. Remainders go round-robin over the ranks, continuing across documents."""
    ring_degree, next_slot = layout.ring_degree, 0
    for document_start, document_end in layout.documents:
        chunk_tokens, remainder = divmod(document_end - document_start, 2 * ring_degree)
        extras = [0] * ring_degree
        for slot in range(next_slot, next_slot + remainder):
            extras[slot % ring_degree] += 1
        next_slot += remainder
        start = document_start
        heads = [(rank, chunk_tokens + (extras[rank] > 0)) for rank in range(ring_degree)]
        tails = [(rank, chunk_tokens + (extras[rank] > 1)) for rank in reversed(range(ring_degree))]
        for rank, length in heads + tails:
            yield rank, document_start, start, start + length
            start += length


def _balanced(layout: SeqLayout) -> RankSpans:
    """Equal chunks; the heaviest goes first, to the least loaded rank (longest processing time, Graham 1969)."""
    best_owners: list[int] = []
    lowest_imbalance = float("inf")
    for per_rank in (2, 4, 8, 16, 32):
        chunk_tokens, remainder = divmod(layout.num_tokens, layout.ring_degree * per_rank)
        if remainder or (best_owners and chunk_tokens < MIN_CHUNK_TOKENS):
            continue
        owners, imbalance = _longest_processing_time(_pairs_per_chunk(layout, chunk_tokens), layout.ring_degree)
        if imbalance < lowest_imbalance:
            best_owners, lowest_imbalance = owners, imbalance
        if lowest_imbalance <= TARGET_IMBALANCE:
            break
    yield from _assign_chunks(layout, best_owners)


def _longest_processing_time(chunk_pairs: list[int], ring_degree: int) -> tuple[list[int], float]:
    """The owner of each chunk, with equally many chunks per rank, and the imbalance: busiest rank over mean."""
    free_slots = [len(chunk_pairs) // ring_degree] * ring_degree
    totals = [(0, rank) for rank in range(ring_degree)]
    owners = [0] * len(chunk_pairs)
    rank_totals: list[int] = []
    for chunk in sorted(range(len(chunk_pairs)), key=lambda chunk: (-chunk_pairs[chunk], chunk)):
        total, rank = heappop(totals)
        owners[chunk] = rank
        free_slots[rank] -= 1
        if free_slots[rank]:
            heappush(totals, (total + chunk_pairs[chunk], rank))
        else:
            rank_totals.append(total + chunk_pairs[chunk])
    return owners, max(rank_totals) * ring_degree / sum(chunk_pairs)


def _pairs_per_chunk(layout: SeqLayout, chunk_tokens: int) -> list[int]:
    chunk_pairs = [0] * (layout.num_tokens // chunk_tokens)
    for _, document_start, start, end in _assign_chunks(layout, list(range(len(chunk_pairs)))):
        chunk_pairs[start // chunk_tokens] += TokenSpan(0, start, end - start, document_start).num_pairs
    return chunk_pairs


def _assign_chunks(layout: SeqLayout, owners: list[int]) -> RankSpans:
    """Splits the sequence into equal chunks, given their owners, and at document starts."""
    chunk_tokens = layout.num_tokens // len(owners)
    for document_start, document_end in layout.documents:
        start = document_start
        while start < document_end:
            end = min(document_end, (start // chunk_tokens + 1) * chunk_tokens)
            yield owners[start // chunk_tokens], document_start, start, end
            start = end
