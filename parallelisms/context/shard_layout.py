"""Shard layouts: which rank of the ring holds which tokens of a sequence. Integers only; imports no torch.

A rank holds its tokens in sequence order. The tokens of a document are therefore contiguous on the rank, and attention
among them is plain causal attention. Every rank holds the same number of tokens, for documents of any length.

    headtail, 2 ranks        0 0 1 1 1 1 0 0
    contiguous               0 0 0 0 1 1 1 1
    doc_headtail, [0, 2, 8]  0 1 0 0 1 1 1 0      head-tail inside each document, remainders assigned round-robin
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from models.config import causal_pairs
from parallelisms.parallel_dims import ShardLayout

# `balanced` takes the fewest chunks per rank whose imbalance (busiest rank over mean) is at most this...
TARGET_IMBALANCE = 1.01
# ...unless the chunks would be shorter than a kernel's tile. Above this imbalance it splits every document instead.
MIN_CHUNK_TOKENS = 128
MAX_IMBALANCE = 1.02


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
    def end(self) -> int:
        return self.start + self.length

    @property
    def local_end(self) -> int:
        return self.local_start + self.length

    def num_pairs(self, window: int | None = None) -> int:
        """(query, key) pairs that these tokens, as queries, attend to."""
        first, last = self.start - self.document_start, self.end - self.document_start
        return causal_pairs(last, window) - causal_pairs(first, window)


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

    def pairs_per_rank(self, window: int | None = None) -> tuple[int, ...]:
        """(query, key) pairs that each rank's queries attend to."""
        return tuple(sum(span.num_pairs(window) for span in spans) for spans in _token_spans(self))

    def halo_tokens(self, window: int) -> list[list[int]]:
        """[receiver][sender]: keys of other ranks that the receiver's queries see, up to `window` - 1 before each span."""
        tokens = [[0] * self.ring_degree for _ in range(self.ring_degree)]
        spans = sorted((span.start, rank, span) for rank in range(self.ring_degree) for span in self.spans(rank))
        for index, (_, receiver, span) in enumerate(spans):
            needed, before = min(window - 1, span.start - span.document_start), index - 1
            # What lies beyond a span of its own, the receiver needs for that one.
            while needed > 0 and (sender := spans[before][1]) != receiver:
                tokens[receiver][sender] += min(needed, spans[before][2].length)
                needed -= spans[before][2].length
                before -= 1
        return tokens

    @property
    def imbalance(self) -> float:
        """Pairs of the busiest rank over the mean."""
        pairs = self.pairs_per_rank()
        return max(pairs) * len(pairs) / sum(pairs)


def halo_fits(received: int, tokens_per_rank: int, rotate_method: str) -> bool:
    """Whether ranks send each other the keys that a window needs, instead of all keys. `received`: at most by a rank.

    These are never more. But a ring holds one rank's keys while it receives the next; a halo has all of them at once.
    """
    return rotate_method == "allgather" or received <= 2 * tokens_per_rank


def halo_traffic(halo: tuple[int, int]) -> tuple[int, int]:
    """Orders (sent, received) tokens of ranks by traffic: keys are sent more often than their gradients are returned."""
    return sum(halo), halo[0]


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
    yield from _assign_chunks(layout, _equal_chunk_ends(layout, 1), list(range(layout.ring_degree)))


def _headtail(layout: SeqLayout) -> RankSpans:
    """Rank r of n holds chunks r and 2n-1-r of 2n, which balances the load under a causal mask."""
    ranks = list(range(layout.ring_degree))
    yield from _assign_chunks(layout, _equal_chunk_ends(layout, 2), ranks + ranks[::-1])


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
    """Equal chunks; the heaviest goes first, to the least loaded rank (longest processing time, Graham 1969).

    The tokens that equal chunks leave over are the last chunks, one per rank. Documents that no chunks balance are split
    as in `doc_headtail`.
    """
    best = (float("inf"), list[int](), list[int]())
    for per_rank in (2, 4, 8, 16, 32):
        if per_rank > 2 and layout.num_tokens < layout.ring_degree * per_rank * MIN_CHUNK_TOKENS:
            break
        ends = _equal_chunk_ends(layout, per_rank)
        owners, imbalance = _longest_processing_time(_pairs_per_chunk(layout, ends), per_rank, layout.ring_degree)
        best = min(best, (imbalance, ends, owners), key=itemgetter(0))
        if imbalance <= TARGET_IMBALANCE:
            break
    imbalance, ends, owners = best
    splits_documents = imbalance > MAX_IMBALANCE and replace(layout, kind="doc_headtail").imbalance < imbalance
    yield from _doc_headtail(layout) if splits_documents else _assign_chunks(layout, ends, owners)


def _equal_chunk_ends(layout: SeqLayout, per_rank: int) -> list[int]:
    """The ends of `per_rank` equal chunks per rank and, if tokens are left, of one shorter chunk per rank."""
    ranks, tokens = layout.ring_degree, layout.num_tokens
    length = tokens // (ranks * per_rank)
    ends = [length * (chunk + 1) for chunk in range(ranks * per_rank)]
    remainder = (tokens - ends[-1]) // ranks
    return ends + [ends[-1] + remainder * (rank + 1) for rank in range(ranks) if remainder]


def _longest_processing_time(chunk_pairs: list[int], per_rank: int, ring_degree: int) -> tuple[list[int], float]:
    """The owner of each chunk, and the imbalance: busiest rank over mean.

    Each rank owns `per_rank` of the equal chunks, which come first, and one of the shorter ones, if there are any.
    """
    owners, totals = [0] * len(chunk_pairs), [0] * ring_degree
    num_equal = per_rank * ring_degree
    for chunks, slots in ((range(num_equal), per_rank), (range(num_equal, len(chunk_pairs)), 1)):
        least_loaded = [(total, rank, slots) for rank, total in enumerate(totals)]
        heapify(least_loaded)
        for chunk in sorted(chunks, key=lambda chunk: (-chunk_pairs[chunk], chunk)):
            total, rank, free_slots = heappop(least_loaded)
            owners[chunk], totals[rank] = rank, total + chunk_pairs[chunk]
            if free_slots > 1:
                heappush(least_loaded, (totals[rank], rank, free_slots - 1))
    return owners, max(totals) * ring_degree / sum(totals)


def _pairs_per_chunk(layout: SeqLayout, ends: list[int]) -> list[int]:
    chunk_pairs = [0] * len(ends)
    for chunk, document_start, start, end in _assign_chunks(layout, ends, range(len(ends))):
        chunk_pairs[chunk] += TokenSpan(0, start, end - start, document_start).num_pairs()
    return chunk_pairs


def _assign_chunks(layout: SeqLayout, ends: list[int], owners: Sequence[int]) -> RankSpans:
    """Splits the sequence into chunks with these ends and owners, and at document starts."""
    chunk = 0
    for document_start, document_end in layout.documents:
        start = document_start
        while start < document_end:
            end = min(document_end, ends[chunk])
            yield owners[chunk], document_start, start, end
            start, chunk = end, chunk + (end == ends[chunk])
