"""Rows as a pure function of their number: which source and documents, which labels, which boundaries.

Of a row a rank reads what it holds, wherever that lies: a row is pieces of documents, and a rank's spans cut it again.

    pieces of the row          aaaaaaaabbbbcccccc____        ____ is padding, the last piece
    spans of a rank            ------          ------
    what is read, and filled   aaaaaa          cc____

Shape suffixes: B rows, S tokens of a row on this rank, T tokens of the whole row, D document starts and the row's end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from models.batch import IGNORE, Batch
from trainer.data.mix import Mix


class RowSource(Protocol):
    """Numbered rows without end, each of pieces that together have at most so many tokens as a row."""

    num_rows: int
    """After how many of them an epoch ends."""
    max_pieces: int
    num_padding: int
    """Tokens of an epoch that are padding."""
    padding: int
    """The token that fills a row's end."""
    fingerprint: str

    def pieces(self, number: int) -> list[int]:
        """Lengths of the pieces of a row."""

    def fill(self, number: int, piece: int, start: int, tokens: Tensor, labels: Tensor) -> None:
        """Writes a piece's tokens from `start` on, and the labels of those that have one, as many as there is room."""


class Share(Protocol):
    """Which tokens of rows a rank holds."""

    def padded(self, tokens: int) -> int:
        """The length of a row of so many tokens, made to divide among all ranks."""

    def spans(self, boundaries: tuple[int, ...]) -> Sequence[tuple[int, int]]:
        """(start, length) of what the rank holds of a row with these document starts and length."""

    def work(self, rows: Sequence[tuple[int, ...]]) -> int:
        """(query, key) pairs that the rank attends to in rows with these document starts and lengths."""


@dataclass(frozen=True)
class Whole:
    """Whole rows, padded to a multiple."""

    multiple: int = 1

    def padded(self, tokens: int) -> int:
        return tokens + -tokens % self.multiple

    def spans(self, boundaries: tuple[int, ...]) -> Sequence[tuple[int, int]]:
        return [(0, boundaries[-1])]

    def work(self, rows: Sequence[tuple[int, ...]]) -> int:
        return pairs(end - start for boundaries in rows for start, end in pairwise(boundaries))


WHOLE = Whole()


class Segment(NamedTuple):
    """A part of a piece that a rank holds."""

    piece: int
    start: int
    """In the piece."""
    length: int


class Rows:
    """An endless sequence of rows of several sources, every epoch of which holds each of its rows once.

    `mask` says whether attention stays inside pieces; `names` are those of the sources, one for each weight.
    """

    def __init__(
        self,
        sources: Sequence[RowSource],
        *,
        seq_len: int,
        mask: Literal["document", "none"] = "document",
        weights: Sequence[float | Fraction] = (1,),
        names: Sequence[str] = ("corpus",),
    ) -> None:
        self.sources, self.names = [*sources], [*names]
        self.seq_len = seq_len
        self.mix = Mix(weights)
        self._masked = mask == "document"
        self._is_one = not self._masked or all(source.max_pieces == 1 and not source.num_padding for source in sources)
        self._most = max(source.max_pieces for source in sources)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of the tokens of every source, by name."""
        return {name: source.fingerprint for name, source in zip(self.names, self.sources, strict=True)}

    def summary(self, rows: int) -> list[str]:
        """What so many first rows take of every source, a line each."""
        taken = zip(self.names, self.sources, self.mix.counts(rows), self.epochs(rows), strict=True)
        return [
            f"{name}: {source.num_rows:,} rows of {self.seq_len:,} tokens; of the {rows:,} rows that are drawn it gives "
            f"{count:,} ({epochs:.2f} epochs); {source.num_padding / source.num_rows / self.seq_len:.2%} is padding"
            for name, source, count, epochs in taken
        ]

    def epochs(self, rows: int) -> list[float]:
        """How often each source was gone through in so many first rows."""
        drawn = zip(self.mix.counts(rows), self.sources, strict=True)
        return [count / source.num_rows for count, source in drawn]

    def read(self, numbers: Sequence[int | None], share: Share = WHOLE) -> Batch:
        """What a rank holds of the rows with these global numbers, on the host; None is a row of padding."""
        length = share.padded(self.seq_len)
        rows = [self._read(number, share, length) for number in numbers]
        tokens_BS, labels_BS, positions_BS, documents_BS, boundaries_BD = (
            torch.stack(parts) for parts in zip(*(row.tensors for row in rows), strict=True)
        )
        return Batch(
            tokens=tokens_BS,
            labels=labels_BS,
            positions=positions_BS,
            documents=documents_BS,
            boundaries=boundaries_BD,
            num_tokens=sum(row.tokens for row in rows),
            num_pairs=sum(row.pairs for row in rows),
            attended=share.work([row.boundaries for row in rows]),
            sources=tuple((row.source, row.tokens) for row in rows),
        )

    def _read(self, number: int | None, share: Share, length: int) -> Row:
        index, at = (0, 0) if number is None else self.mix.locate(number)
        source = self.sources[index]
        pieces = [] if number is None else source.pieces(at)
        filled = sum(pieces)
        # Padding is one more piece, which may be empty; what makes the row divide is another.
        sizes = [*pieces, self.seq_len - filled, length - self.seq_len]
        starts = [*accumulate(sizes, initial=0)]
        boundaries = self._boundaries(starts)
        found = segments(starts, share.spans(tuple(boundaries)))
        tokens_S = torch.full((sum(segment.length for segment in found),), source.padding)
        labels_S = torch.full_like(tokens_S, IGNORE)
        done = 0
        for segment in found:
            here = slice(done, done + segment.length)
            if segment.piece < len(pieces):
                source.fill(at, segment.piece, segment.start, tokens_S[here], labels_S[here])
            done += segment.length
        documents_S, positions_S = self._placed(found, starts, len(pieces))
        tensors = (tokens_S, labels_S, positions_S, documents_S, torch.tensor(boundaries, dtype=torch.int32))
        return Row(tensors, index, filled, pairs(pieces if self._masked else [filled]), tuple(boundaries))

    def _boundaries(self, starts: list[int]) -> list[int]:
        """As many for every row: kernels and compiled graphs want one shape."""
        *_, seq_len, length = starts
        extra = [length] * (length > seq_len)
        if self._is_one:
            return [0, seq_len, *extra]
        inner = starts[1:-2] if self._masked else []
        inner = inner + [seq_len] * (self._most + 1 - len(inner))
        return [0, *inner, *extra]

    def _placed(self, found: list[Segment], starts: list[int], pieces: int) -> tuple[Tensor, Tensor]:
        """Each token's number of piece, and its position in it, or in the row where pieces are not told apart."""
        lengths = torch.tensor([segment.length for segment in found])
        documents_S = torch.tensor([segment.piece for segment in found]).repeat_interleave(lengths)
        origins = [segment.start for segment in found]
        if not self._masked:
            # What makes the row divide begins anew.
            origins = [segment.start + (starts[segment.piece] if segment.piece <= pieces else 0) for segment in found]
        offsets = torch.tensor(origins) - (lengths.cumsum(0) - lengths)
        return documents_S, torch.arange(documents_S.numel()) + offsets.repeat_interleave(lengths)


class Row(NamedTuple):
    """One row, or a rank's part of it."""

    tensors: tuple[Tensor, ...]
    source: int
    tokens: int
    pairs: int
    boundaries: tuple[int, ...]


def segments(starts: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[Segment]:
    """The parts of pieces, which begin at `starts`, that lie in these spans."""
    found = []
    for start, length in spans:
        end = start + length
        piece = bisect_right(starts, start) - 1
        while start < end:
            stop = min(end, starts[piece + 1])
            if stop > start:
                found.append(Segment(piece, start - starts[piece], stop - start))
            start, piece = stop, piece + 1
    return found


def pairs(lengths: Iterable[int]) -> int:
    """(query, key) pairs inside documents of these lengths."""
    return sum(length * (length + 1) // 2 for length in lengths)
