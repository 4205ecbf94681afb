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

from models.batch import IGNORE_INDEX, Batch
from trainer.data.mix import WeightedRoundRobin


class SequenceSource(Protocol):
    """Numbered rows without end, each of pieces that together have at most so many tokens as a row."""

    num_sequences: int
    """After how many of them an epoch ends."""
    max_segments: int
    num_padding_tokens: int
    """Tokens of an epoch that are padding."""
    pad_token_id: int
    """The token that fills a row's end."""
    fingerprint: str

    def segment_lengths(self, index: int) -> list[int]:
        """Lengths of the pieces of a row."""

    def fill(self, index: int, segment: int, start: int, tokens: Tensor, labels: Tensor) -> None:
        """Writes a piece's tokens from `start` on, and the labels of those that have one, as many as there is room."""


class SequenceShard(Protocol):
    """Which tokens of rows a rank holds."""

    def padded_length(self, seq_len: int) -> int:
        """The length of a row of so many tokens, made to divide among all ranks."""

    def spans(self, boundaries: tuple[int, ...]) -> Sequence[tuple[int, int]]:
        """(start, length) of what the rank holds of a row with these document starts and length."""

    def attention_pairs(self, boundaries_per_sequence: Sequence[tuple[int, ...]]) -> int:
        """(query, key) pairs that the rank attends to in rows with these document starts and lengths."""


@dataclass(frozen=True)
class FullSequence:
    """Whole rows, padded to a multiple."""

    multiple: int = 1

    def padded_length(self, seq_len: int) -> int:
        return seq_len + -seq_len % self.multiple

    def spans(self, boundaries: tuple[int, ...]) -> Sequence[tuple[int, int]]:
        return [(0, boundaries[-1])]

    def attention_pairs(self, boundaries_per_sequence: Sequence[tuple[int, ...]]) -> int:
        return causal_pairs(
            end - start for boundaries in boundaries_per_sequence for start, end in pairwise(boundaries)
        )


FULL_SEQUENCE = FullSequence()


class SegmentSlice(NamedTuple):
    """A part of a piece that a rank holds."""

    segment_id: int
    start: int
    """In the piece."""
    length: int


class BlendedDataset:
    """An endless sequence of rows of several sources, every epoch of which holds each of its rows once.

    `mask` says whether attention stays inside pieces; `names` are those of the sources, one for each weight.
    """

    def __init__(
        self,
        sources: Sequence[SequenceSource],
        *,
        seq_len: int,
        mask: Literal["document", "none"] = "document",
        weights: Sequence[float | Fraction] = (1,),
        names: Sequence[str] = ("corpus",),
    ) -> None:
        self.sources, self.names = [*sources], [*names]
        self.seq_len = seq_len
        self.round_robin = WeightedRoundRobin(weights)
        self._document_mask = mask == "document"
        self._single_document = not self._document_mask or all(
            source.max_segments == 1 and not source.num_padding_tokens for source in sources
        )
        self._max_segments = max(source.max_segments for source in sources)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of the tokens of every source, by name."""
        return {name: source.fingerprint for name, source in zip(self.names, self.sources, strict=True)}

    def summary(self, num_sequences: int) -> list[str]:
        """What so many first rows take of every source, a line each."""
        usage = zip(
            self.names, self.sources, self.round_robin.counts(num_sequences), self.epochs(num_sequences), strict=True
        )
        return [
            f"{name}: {source.num_sequences:,} rows of {self.seq_len:,} tokens; of the {num_sequences:,} rows that are drawn it gives "
            f"{count:,} ({epochs:.2f} epochs); {source.num_padding_tokens / source.num_sequences / self.seq_len:.2%} is padding"
            for name, source, count, epochs in usage
        ]

    def epochs(self, num_sequences: int) -> list[float]:
        """How often each source was gone through in so many first rows."""
        counts = zip(self.round_robin.counts(num_sequences), self.sources, strict=True)
        return [count / source.num_sequences for count, source in counts]

    def read(self, indices: Sequence[int | None], shard: SequenceShard = FULL_SEQUENCE) -> Batch:
        """What a rank holds of the rows with these global numbers, on the host; None is a row of padding."""
        padded_len = shard.padded_length(self.seq_len)
        sequences = [self._read_sequence(number, shard, padded_len) for number in indices]
        tokens_BS, labels_BS, positions_BS, documents_BS, boundaries_BD = (
            torch.stack(parts) for parts in zip(*(row.tensors for row in sequences), strict=True)
        )
        return Batch(
            tokens=tokens_BS,
            labels=labels_BS,
            positions=positions_BS,
            document_ids=documents_BS,
            boundaries=boundaries_BD,
            num_tokens=sum(row.num_tokens for row in sequences),
            num_pairs=sum(row.num_pairs for row in sequences),
            num_computed_pairs=shard.attention_pairs([row.boundaries for row in sequences]),
            sequence_sources=tuple((row.source_index, row.num_tokens) for row in sequences),
        )

    def _read_sequence(self, source_index: int | None, shard: SequenceShard, padded_len: int) -> LocalSequence:
        source_index, index_in_source = (0, 0) if source_index is None else self.round_robin.locate(source_index)
        source = self.sources[source_index]
        lengths = [] if source_index is None else source.segment_lengths(index_in_source)
        num_tokens = sum(lengths)
        # Padding is one more piece, which may be empty; what makes the row divide is another.
        sizes = [*lengths, self.seq_len - num_tokens, padded_len - self.seq_len]
        starts = [*accumulate(sizes, initial=0)]
        boundaries = self._boundaries(starts)
        slices = slice_segments(starts, shard.spans(tuple(boundaries)))
        tokens_S = torch.full((sum(segment.length for segment in slices),), source.pad_token_id)
        labels_S = torch.full_like(tokens_S, IGNORE_INDEX)
        offset = 0
        for segment in slices:
            region = slice(offset, offset + segment.length)
            if segment.segment_id < len(lengths):
                source.fill(index_in_source, segment.segment_id, segment.start, tokens_S[region], labels_S[region])
            offset += segment.length
        documents_S, positions_S = self._documents_and_positions(slices, starts, len(lengths))
        tensors = (tokens_S, labels_S, positions_S, documents_S, torch.tensor(boundaries, dtype=torch.int32))
        return LocalSequence(
            tensors,
            source_index,
            num_tokens,
            causal_pairs(lengths if self._document_mask else [num_tokens]),
            tuple(boundaries),
        )

    def _boundaries(self, starts: list[int]) -> list[int]:
        """As many for every row: kernels and compiled graphs want one shape."""
        *_, seq_len, padded_len = starts
        tail = [padded_len] * (padded_len > seq_len)
        if self._single_document:
            return [0, seq_len, *tail]
        inner = starts[1:-2] if self._document_mask else []
        inner = inner + [seq_len] * (self._max_segments + 1 - len(inner))
        return [0, *inner, *tail]

    def _documents_and_positions(
        self, slices: list[SegmentSlice], starts: list[int], num_segments: int
    ) -> tuple[Tensor, Tensor]:
        """Each token's number of piece, and its position in it, or in the row where pieces are not told apart."""
        lengths = torch.tensor([segment.length for segment in slices])
        documents_S = torch.tensor([segment.segment_id for segment in slices]).repeat_interleave(lengths)
        origins = [segment.start for segment in slices]
        if not self._document_mask:
            # What makes the row divide begins anew.
            origins = [
                segment.start + (starts[segment.segment_id] if segment.segment_id <= num_segments else 0)
                for segment in slices
            ]
        offsets = torch.tensor(origins) - (lengths.cumsum(0) - lengths)
        return documents_S, torch.arange(documents_S.numel()) + offsets.repeat_interleave(lengths)


class LocalSequence(NamedTuple):
    """One row, or a rank's part of it."""

    tensors: tuple[Tensor, ...]
    source_index: int
    num_tokens: int
    num_pairs: int
    boundaries: tuple[int, ...]


def slice_segments(starts: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[SegmentSlice]:
    """The parts of pieces, which begin at `starts`, that lie in these spans."""
    slices = []
    for start, length in spans:
        end = start + length
        segment = bisect_right(starts, start) - 1
        while start < end:
            stop = min(end, starts[segment + 1])
            if stop > start:
                slices.append(SegmentSlice(segment, start - starts[segment], stop - start))
            start, segment = stop, segment + 1
    return slices


def causal_pairs(lengths: Iterable[int]) -> int:
    """(query, key) pairs inside documents of these lengths."""
    return sum(length * (length + 1) // 2 for length in lengths)
