"""Which rank holds which tokens of a row: integers only, no process group and no device.

A layout is an assignment of tokens to the ring's ranks. Within a rank tokens stay in the order of the row, so the
tokens of one document are one run there, and attention among them is plain causal attention.

    headtail, 2 ranks        0 0 1 1 1 1 0 0
    contiguous               0 0 0 0 1 1 1 1
    doc_headtail, [0, 2, 8]  0 1 0 0 1 1 1 0      each document head-tail, left-overs dealt to the ranks in turn

Every rank holds the same number of tokens, whatever the lengths of the documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from models.kernels import ranges
from parallelisms.parallel_dims import Layout

# `balanced` takes the smallest number of chunks per rank that comes this close to the mean...
GOOD_ENOUGH = 1.01
# ...unless its chunks would be too short to fill a kernel's tile.
SHORTEST_CHUNK = 128


class Piece(NamedTuple):
    """Consecutive tokens of one document that a rank holds."""

    local: int
    """Where they begin on the rank."""
    start: int
    """Where they begin in the row."""
    length: int
    document: int
    """Where their document begins in the row."""

    @property
    def work(self) -> int:
        """Keys that these tokens attend to, summed."""
        first = self.start - self.document + 1
        return self.length * (2 * first + self.length - 1) // 2


@dataclass(frozen=True)
class SeqLayout:
    """The layout of a row over `ring` ranks; `boundaries` are its document starts and its length, ascending."""

    kind: Layout
    ring: int
    boundaries: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.boundaries[-1]

    @property
    def documents(self) -> list[tuple[int, int]]:
        """[start, end) of each."""
        return [(start, end) for start, end in pairwise(self.boundaries) if end > start]

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What a rank holds, in the order in which it holds it."""
        return _pieces(self)[rank]

    def work(self) -> tuple[int, ...]:
        """(query, key) pairs that each rank's queries attend to."""
        return tuple(sum(piece.work for piece in pieces) for pieces in _pieces(self))

    def order(self) -> Tensor:
        """int64 [tokens]: the row's tokens by rank; `x[order].chunk(ring)[rank]` is a rank's part."""
        pieces = [piece for pieces in _pieces(self) for piece in pieces]
        return ranges([piece.start for piece in pieces], [piece.length for piece in pieces])

    def inverse(self) -> Tensor:
        """int64 [tokens]: where each of the row's tokens stands in `order`."""
        return torch.argsort(self.order())


@lru_cache(maxsize=64)
def _pieces(layout: SeqLayout) -> tuple[tuple[Piece, ...], ...]:
    if layout.ring < 1 or layout.tokens % layout.ring:
        raise ValueError(f"a row of {layout.tokens} tokens does not divide among {layout.ring} ranks")
    spans = {"contiguous": _contiguous, "headtail": _headtail, "doc_headtail": _doc_headtail, "balanced": _balanced}
    held: list[list[Piece]] = [[] for _ in range(layout.ring)]
    for rank, document, start, end in spans[layout.kind if layout.ring > 1 else "contiguous"](layout):
        pieces = held[rank]
        if pieces and pieces[-1].start + pieces[-1].length == start and pieces[-1].document == document:
            last = pieces.pop()
            pieces.append(last._replace(length=last.length + end - start))
        elif end > start:
            local = pieces[-1].local + pieces[-1].length if pieces else 0
            pieces.append(Piece(local, start, end - start, document))
    return tuple(tuple(pieces) for pieces in held)


Spans = Iterator[tuple[int, int, int, int]]
"""(rank, document, start, end), ascending."""


def _contiguous(layout: SeqLayout) -> Spans:
    yield from _of_chunks(layout, list(range(layout.ring)))


def _headtail(layout: SeqLayout) -> Spans:
    """Rank r of n holds chunks r and 2n-1-r of 2n: under a causal mask, as much work as any other."""
    _require_chunks(layout, 2)
    ranks = list(range(layout.ring))
    yield from _of_chunks(layout, ranks + ranks[::-1])


def _doc_headtail(layout: SeqLayout) -> Spans:
    """Head-tail inside every document. The tokens left over are dealt on from where the last document's ended."""
    _require_chunks(layout, 2)
    ring, turn = layout.ring, 0
    for document, document_end in layout.documents:
        size, left_over = divmod(document_end - document, 2 * ring)
        extras = [0] * ring
        for dealt in range(turn, turn + left_over):
            extras[dealt % ring] += 1
        turn += left_over
        start = document
        heads = [(rank, size + (extras[rank] > 0)) for rank in range(ring)]
        tails = [(rank, size + (extras[rank] > 1)) for rank in reversed(range(ring))]
        for rank, length in heads + tails:
            yield rank, document, start, start + length
            start += length


def _balanced(layout: SeqLayout) -> Spans:
    """Equal chunks, the heaviest first to the rank with the least work (longest processing time, Graham 1969)."""
    _require_chunks(layout, 2)
    best: list[int] = []
    least = float("inf")
    for per_rank in (2, 4, 8, 16, 32):
        size, rest = divmod(layout.tokens, layout.ring * per_rank)
        if rest or (best and size < SHORTEST_CHUNK):
            continue
        owners, imbalance = _dealt(_chunk_work(layout, size), layout.ring)
        if imbalance < least:
            best, least = owners, imbalance
        if least <= GOOD_ENOUGH:
            break
    yield from _of_chunks(layout, best)


def _dealt(work: list[int], ring: int) -> tuple[list[int], float]:
    """The owner of each chunk, as many chunks to every rank; and the busiest rank's work over the mean."""
    room = [len(work) // ring] * ring
    totals = [(0, rank) for rank in range(ring)]
    owners = [0] * len(work)
    done: list[int] = []
    for chunk in sorted(range(len(work)), key=lambda chunk: (-work[chunk], chunk)):
        total, rank = heappop(totals)
        owners[chunk] = rank
        room[rank] -= 1
        if room[rank]:
            heappush(totals, (total + work[chunk], rank))
        else:
            done.append(total + work[chunk])
    return owners, max(done) * ring / sum(work)


def _chunk_work(layout: SeqLayout, size: int) -> list[int]:
    work = [0] * (layout.tokens // size)
    for _, document, start, end in _of_chunks(layout, list(range(len(work)))):
        work[start // size] += Piece(0, start, end - start, document).work
    return work


def _of_chunks(layout: SeqLayout, owners: list[int]) -> Spans:
    """The row in equal chunks with these owners, cut where documents begin."""
    size = layout.tokens // len(owners)
    for document, document_end in layout.documents:
        start = document
        while start < document_end:
            end = min(document_end, (start // size + 1) * size)
            yield owners[start // size], document, start, end
            start = end


def _require_chunks(layout: SeqLayout, per_rank: int) -> None:
    if layout.tokens % (layout.ring * per_rank):
        raise ValueError(
            f'layout "{layout.kind}" over {layout.ring} ranks needs a row that is a multiple of '
            f"{layout.ring * per_rank} tokens, not {layout.tokens}"
        )
