"""Shard layouts: which rank of the ring holds which tokens of a sequence. Integers only; imports
no torch.

A rank holds its tokens in sequence order. The tokens of a document are therefore contiguous on the
rank, and attention among them is plain causal attention. Every rank holds the same number of
tokens, for documents of any length.

    headtail, 2 ranks        0 0 1 1 1 1 0 0
    contiguous               0 0 0 0 1 1 1 1
    doc_headtail, [0, 2, 8]  0 1 0 0 1 1 1 0      head-tail inside each document, remainders assigned round-robin
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from models.score_pairs import causal_pairs
from parallelisms.mesh.context_plan import ShardLayout

# `balanced` takes the fewest chunks per rank whose imbalance (busiest rank over mean) is at most
# this...
TARGET_IMBALANCE = 1.01
# ...unless the chunks would be shorter than a kernel's tile. Above this imbalance it splits every
# document instead.
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
        first = self.start - self.document_start
        last = self.end - self.document_start
        return causal_pairs(last, window) - causal_pairs(first, window)


@dataclass(frozen=True)
class SeqLayout:
    """The layout of one sequence; `boundaries` are its document starts and its length,
    ascending.
    """

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

    @property
    def imbalance(self) -> float:
        """Pairs of the busiest rank over the mean."""
        return imbalance_of(self.pairs_per_rank())

    def pairs_before(self, ends: Sequence[int]) -> list[int]:
        """(query, key) pairs of the tokens before each of these."""
        starts = [start for start, _ in self.documents]
        pairs = [
            *accumulate((causal_pairs(end - start) for start, end in self.documents), initial=0)
        ]
        documents = [bisect_left(starts, end) - 1 for end in ends]
        return [
            pairs[each] + causal_pairs(end - starts[each])
            for each, end in zip(documents, ends, strict=True)
        ]

    def pairs_by_document(self) -> list[int]:
        """`pairs_per_rank` in `doc_headtail`."""
        return [*replace(self, kind="doc_headtail").pairs_per_rank()]


def halo_fits(received: int, tokens_per_rank: int, rotate_method: str) -> bool:
    """Whether ranks send each other the keys that a window needs, instead of all keys. `received`:
    at most by a rank.

    These are never more. But a ring holds one rank's keys while it receives the next; a halo has
    all of them at once.
    """
    return rotate_method == "allgather" or received <= 2 * tokens_per_rank


@lru_cache(maxsize=64)
def _token_spans(layout: SeqLayout) -> tuple[tuple[TokenSpan, ...], ...]:
    kind = require_divisible(layout.kind, layout.ring_degree, layout.num_tokens)
    chunks = chunks_of(
        kind, layout.ring_degree, layout.num_tokens, layout.pairs_before, layout.pairs_by_document
    )
    by_rank: list[list[TokenSpan]] = [[] for _ in range(layout.ring_degree)]
    for rank, document_start, start, end in (
        _doc_headtail(layout) if chunks is None else _cut(layout, *chunks)
    ):
        # Neighbouring parts of one document on one rank are one span.
        last = by_rank[rank][-1] if by_rank[rank] else TokenSpan(0, 0, 0, -1)
        if (last.start + last.length, last.document_start) == (start, document_start):
            by_rank[rank][-1] = last._replace(length=last.length + end - start)
        elif end > start:
            by_rank[rank].append(
                TokenSpan(last.local_start + last.length, start, end - start, document_start)
            )
    return tuple(map(tuple, by_rank))


RankSpans = Iterator[tuple[int, int, int, int]]
"""(rank, document start, start, end), in sequence order."""


def _doc_headtail(layout: SeqLayout) -> RankSpans:
    ring_degree = layout.ring_degree
    next_rank = 0
    for document_start, document_end in layout.documents:
        start = document_start
        length = document_end - document_start
        for slot, rank in enumerate(mirrored(ring_degree)):
            tokens = doc_headtail_tokens(length, next_rank, rank, slot >= ring_degree, ring_degree)
            yield rank, document_start, start, start + tokens
            start += tokens
        next_rank += length % (2 * ring_degree)


def _cut(layout: SeqLayout, ends: Sequence[int], owners: Sequence[int]) -> RankSpans:
    """Cuts the sequence into chunks with these ends and owners, and at document starts."""
    chunk = 0
    for document_start, document_end in layout.documents:
        start = document_start
        while start < document_end:
            end = min(document_end, ends[chunk])
            yield owners[chunk], document_start, start, end
            start = end
            chunk = chunk + (end == ends[chunk])


# ---- how a sequence is split, for ints and tensors


def require_divisible(kind: ShardLayout, ring_degree: int, num_tokens: int) -> ShardLayout:
    """The layout; that of a single rank is contiguous.

    Raises ValueError for a length that it cannot split.
    """
    if ring_degree < 1 or num_tokens % ring_degree:
        raise ValueError(
            f"sequence length {num_tokens} must be a multiple of the {ring_degree} ring ranks"
        )
    kind = kind if ring_degree > 1 else "contiguous"
    if kind != "contiguous" and num_tokens % (2 * ring_degree):
        raise ValueError(
            f"sequence length {num_tokens} must be a multiple of {2 * ring_degree} for layout "
            f'"{kind}" over {ring_degree} ranks'
        )
    return kind


def mirrored(ring_degree: int) -> list[int]:
    """The ranks of a head-tail split: rank r of n holds parts r and 2n-1-r, which balances a
    causal mask.
    """
    return [*range(ring_degree), *reversed(range(ring_degree))]


def doc_headtail_tokens(
    length: Any, next_rank: Any, rank: Any, is_tail: Any, ring_degree: int
) -> Any:
    """Tokens of the head or the tail of a document that a rank holds: equal parts, and one more of
    those left over.

    They go round-robin over the ranks, from `next_rank` (modulo the ranks) on, which continues
    across documents.
    """
    equal = length // (2 * ring_degree)
    left_over = length % (2 * ring_degree)
    # Of the left-over tokens, numbered from `next_rank` on, this rank gets those that are equal to
    # it modulo the ranks: none, one for the head, or one for the tail, too.
    first = next_rank - rank + ring_degree - 1
    extra = (first + left_over) // ring_degree - first // ring_degree
    return equal + (extra > is_tail)


def chunks_of(
    kind: ShardLayout,
    ring_degree: int,
    num_tokens: int,
    pairs_before: Callable[[Sequence[int]], list[int]],
    pairs_by_document: Callable[[], list[int]],
) -> tuple[list[int], list[int]] | None:
    """Ends and owners of the chunks that a sequence is split into; None: `doc_headtail` splits
    every document.

    `pairs_before`: (query, key) pairs of the tokens before each of these; `pairs_by_document`:
    those of each rank in `doc_headtail`. Both are for `balanced`: equal chunks, of which the
    heaviest goes first, to the least loaded rank (longest processing time, Graham 1969). The
    tokens that equal chunks leave over are the last chunks, one per rank. Documents that no chunks
    balance are split as in `doc_headtail`.
    """
    if kind == "contiguous":
        return _equal_chunk_ends(num_tokens, ring_degree, 1), [*range(ring_degree)]
    if kind == "headtail":
        return _equal_chunk_ends(num_tokens, ring_degree, 2), mirrored(ring_degree)
    if kind == "doc_headtail":
        return None
    best = (float("inf"), list[int](), list[int]())
    # More chunks balance better and cost more kernel calls: the first division that suffices is
    # taken.
    for per_rank in (2, 4, 8, 16, 32):
        if per_rank > 2 and num_tokens < ring_degree * per_rank * MIN_CHUNK_TOKENS:
            break
        ends = _equal_chunk_ends(num_tokens, ring_degree, per_rank)
        before = pairs_before(ends)
        pairs = [after - before for before, after in pairwise([0, *before])]
        owners, imbalance = _longest_processing_time(pairs, per_rank, ring_degree)
        best = min(best, (imbalance, ends, owners), key=itemgetter(0))
        if imbalance <= TARGET_IMBALANCE:
            break
    imbalance, ends, owners = best
    return (
        None
        if imbalance > MAX_IMBALANCE and imbalance > imbalance_of(pairs_by_document())
        else (ends, owners)
    )


def imbalance_of(pairs_per_rank: Sequence[int]) -> float:
    """Pairs of the busiest rank over the mean."""
    return max(pairs_per_rank) * len(pairs_per_rank) / sum(pairs_per_rank)


def _equal_chunk_ends(num_tokens: int, ring_degree: int, per_rank: int) -> list[int]:
    """The ends of `per_rank` equal chunks per rank and, if tokens are left, of one shorter chunk
    per rank.
    """
    length = num_tokens // (ring_degree * per_rank)
    ends = [length * (chunk + 1) for chunk in range(ring_degree * per_rank)]
    remainder = (num_tokens - ends[-1]) // ring_degree
    return ends + [ends[-1] + remainder * (rank + 1) for rank in range(ring_degree) if remainder]


def _longest_processing_time(
    chunk_pairs: list[int], per_rank: int, ring_degree: int
) -> tuple[list[int], float]:
    """The owner of each chunk, and the imbalance: busiest rank over mean.

    Each rank owns `per_rank` of the equal chunks, which come first, and one of the shorter ones,
    if there are any.
    """
    owners = [0] * len(chunk_pairs)
    totals = [0] * ring_degree
    num_equal = per_rank * ring_degree
    # Every rank gets as many chunks of either size, and so as many tokens.
    for chunks, slots in ((range(num_equal), per_rank), (range(num_equal, len(chunk_pairs)), 1)):
        least_loaded = [(total, rank, slots) for rank, total in enumerate(totals)]
        heapify(least_loaded)
        for chunk in sorted(chunks, key=lambda chunk: (-chunk_pairs[chunk], chunk)):
            total, rank, free_slots = heappop(least_loaded)
            owners[chunk] = rank
            totals[rank] = total + chunk_pairs[chunk]
            if free_slots > 1:
                heappush(least_loaded, (totals[rank], rank, free_slots - 1))
    return owners, imbalance_of(totals)
