r"""What a rank's queries attend to, as rectangles: pure functions of the layouts of a batch's rows.

Two disjoint pieces of a row attend to each other wholly or not at all, since a document that reaches from one into
the other covers what lies between. So with the keys of other ranks there are only rectangles without a mask, and with
a rank's own keys, which it holds in the order of the row, plain causal attention inside documents. No mask, no empty
row, no wasted work, for documents of any length.

    headtail, 2 ranks: rank 0 holds chunks 0 and 3, rank 1 holds 1 and 2

                     keys   0 3   1 2
    queries of rank 0:  0   \     . .       own: causal; rank 1's: the second half of the queries, all of the keys
                        3   x \   x x

Places count through the rows of the batch, laid end to end as each rank holds them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from models.kernels import Rectangle, Work, ranges, to_device
from parallelisms.context.shard_layout import Piece, SeqLayout

Rows = tuple[SeqLayout, ...]


def own(rows: Rows, rank: int) -> tuple[Rectangle, ...]:
    """The causal squares among the rank's own tokens: a document's tokens are one run."""
    found = []
    for base, layout in _based(rows):
        for _, run in groupby(layout.pieces(rank), key=lambda piece: piece.document):
            pieces = list(run)
            start, end = base + pieces[0].local, base + pieces[-1].local + pieces[-1].length
            found.append(Rectangle(start, end, start, end))
    return tuple(found)


def with_source(rows: Rows, rank: int, source: int) -> tuple[Rectangle, ...]:
    """What the queries of `rank` attend to among the keys that another rank, `source`, holds."""
    return tuple(
        Rectangle(base + q0, base + q1, base + k0, base + k1)
        for base, layout in _based(rows)
        for q0, q1, k0, k1 in _rectangles(layout.pieces(rank), layout.pieces(source))
    )


def with_foreign(rows: Rows, rank: int) -> tuple[Rectangle, ...]:
    """What the queries of `rank` attend to among the foreign keys: see `foreign`, which says where they are."""
    found = []
    count = 0
    for base, layout in _based(rows):
        keys = [piece for _, piece in _foreign(layout, rank)]
        local = 0
        for index, piece in enumerate(keys):
            keys[index] = piece._replace(local=local)
            local += piece.length
        for q0, q1, k0, k1 in _rectangles(layout.pieces(rank), keys):
            found.append(Rectangle(base + q0, base + q1, count + k0, count + k1))
        count += local
    return tuple(found)


def foreign(rows: Rows, rank: int) -> Tensor:
    """int64, on the host: the keys of other ranks that queries of `rank` attend to, row after row in the order of the row.

    They count through all ranks' tokens: source * tokens of a rank + place there.
    """
    held = sum(layout.tokens // layout.ring for layout in rows)
    pieces = [
        (source * held + base + piece.local, piece.length)
        for base, layout in _based(rows)
        for source, piece in _foreign(layout, rank)
    ]
    return ranges([start for start, _ in pieces], [length for _, length in pieces])


def _based(rows: Rows) -> Iterator[tuple[int, SeqLayout]]:
    """Each row, and where it begins on a rank."""
    base = 0
    for layout in rows:
        yield base, layout
        base += layout.tokens // layout.ring


def _foreign(layout: SeqLayout, rank: int) -> list[tuple[int, Piece]]:
    """(the rank that holds it, the piece), in the order of the row; no more than the rank's queries attend to."""
    last = {piece.document: piece.start for piece in layout.pieces(rank)}
    return sorted(
        (
            (source, piece)
            for source in range(layout.ring)
            if source != rank
            for piece in layout.pieces(source)
            if piece.start < last.get(piece.document, -1)
        ),
        key=lambda held: held[1].start,
    )


def _rectangles(queries: Sequence[Piece], keys: Sequence[Piece]) -> Iterator[Rectangle]:
    """Each piece of queries with those of the keys that lie before it in its document; neighbours are joined.

    Where two see keys up to the same one, they are neighbours of one document: it is that of the keys.
    """
    starts = [piece.start for piece in keys]
    ends = [piece.local for piece in keys] + [keys[-1].local + keys[-1].length if keys else 0]
    last: Rectangle | None = None
    for piece in queries:
        k0 = ends[bisect_left(starts, piece.document)]
        k1 = ends[bisect_left(starts, piece.start)]
        if k1 == k0:
            continue
        if last and last.k1 == k1:
            last = last._replace(q1=piece.local + piece.length)
            continue
        if last:
            yield last
        last = Rectangle(piece.local, piece.local + piece.length, k0, k1)
    if last:
        yield last


class Share:
    """What one rank of a ring computes of a batch, worked out once for all layers."""

    def __init__(self, rows: Rows, rank: int) -> None:
        self.rows = rows
        self.rank = rank
        self.ring = rows[0].ring
        self._places: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @cached_property
    def own(self) -> Work:
        """Attention to the rank's own keys."""
        return Work(own(self.rows, self.rank), causal=True)

    @cached_property
    def steps(self) -> list[Work]:
        """Attention to the keys that arrive in each step of the ring, but the first, which are its own."""
        sources = ((self.rank - step) % self.ring for step in range(1, self.ring))
        return [Work(with_source(self.rows, self.rank, source), causal=False) for source in sources]

    @cached_property
    def foreign(self) -> Work:
        """Attention to the foreign keys, in the order of the row."""
        return Work(with_foreign(self.rows, self.rank), causal=False)

    def places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the foreign keys, and where their values, stand in everyone's [ranks, 2, tokens], laid end to end."""
        if device not in self._places:
            held = sum(layout.tokens // layout.ring for layout in self.rows)
            places = foreign(self.rows, self.rank)
            keys = places + places // held * held
            self._places[device] = to_device(keys, device), to_device(keys + held, device)
        return self._places[device]
