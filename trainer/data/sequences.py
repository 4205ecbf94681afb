"""Sequences as a pure function of their index: source, segments, labels, boundaries.

A rank reads only the spans of a sequence that it holds, which may start and end inside a segment.

    segments of a sequence    aaaaaaaabbbbcccccc____        ____ is padding, the last segment
    spans of a rank           ------          ------
    slices that it reads      aaaaaa          cc____

Shape suffixes: B sequences, S tokens of a sequence on this rank, D document starts and the sequence's end.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise, repeat
from math import gcd, lcm
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from models.batch import IGNORE_INDEX, Batch
from models.config import FULL_ATTENTION, Windows, causal_pairs, mean_pairs

MAX_PERIOD = 100_000  # sequences after which the order of sources repeats


class SequenceSource(Protocol):
    """An unlimited series of sequences, each made of segments of documents."""

    num_sequences: int
    """Sequences of an epoch."""
    max_segments: int
    num_padding_tokens: int
    """Padding tokens of an epoch."""
    pad_token_id: int
    fingerprint: str

    def segment_lengths(self, index: int) -> list[int]:
        """Lengths of the segments of a sequence; together at most seq_len."""

    def fill(self, index: int, segment: int, start: int, tokens: Tensor, labels: Tensor) -> None:
        """Fills `tokens` with a segment's tokens from `start`, and `labels` where a token has a target."""


class SequenceShard(Protocol):
    """Which tokens of a sequence a rank holds."""

    @property
    def seq_len_divisor(self) -> int:
        """Sequences are padded to a multiple of it."""

    def spans(self, boundaries: tuple[int, ...]) -> Sequence[tuple[int, int]]:
        """(start, length) of each part that the rank holds; `boundaries`: document starts, then the length."""

    def attention_pairs(self, boundaries_per_sequence: Sequence[tuple[int, ...]], window: int | None) -> int:
        """(query, key) pairs that the rank computes in a layer for sequences with these boundaries."""


@dataclass(frozen=True)
class FullSequence:
    """Whole sequences."""

    seq_len_divisor: int = 1

    def spans(self, boundaries: tuple[int, ...]) -> Sequence[tuple[int, int]]:
        return [(0, boundaries[-1])]

    def attention_pairs(self, boundaries_per_sequence: Sequence[tuple[int, ...]], window: int | None) -> int:
        return sum(
            causal_pairs(end - start, window)
            for boundaries in boundaries_per_sequence
            for start, end in pairwise(boundaries)
        )


FULL_SEQUENCE = FullSequence()


class SegmentSlice(NamedTuple):
    """The part of a segment that a rank holds."""

    segment_id: int
    start: int
    """Offset in the segment."""
    length: int


class BlendedDataset:
    """An unlimited series of sequences, drawn from sources in proportion to `weights`.

    Each source yields each of its sequences once per epoch. `mask` = "document" confines attention to a segment.
    `windows`: those of the model's layers, over which (query, key) pairs are averaged.
    """

    def __init__(
        self,
        sources: Sequence[SequenceSource],
        *,
        seq_len: int,
        mask: Literal["document", "none"] = "document",
        weights: Sequence[float | Fraction] = (1,),
        names: Sequence[str] = ("corpus",),
        windows: Windows = FULL_ATTENTION,
    ) -> None:
        self.sources, self.names = [*sources], [*names]
        self.seq_len, self._windows = seq_len, windows
        self.round_robin = WeightedRoundRobin(weights)
        self._document_mask = mask == "document"
        self._single_document = not self._document_mask or all(
            source.max_segments == 1 and not source.num_padding_tokens for source in sources
        )
        self._max_segments = max(source.max_segments for source in sources)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Token fingerprint of each source, by name."""
        return {name: source.fingerprint for name, source in zip(self.names, self.sources, strict=True)}

    def summary(self, num_sequences: int) -> list[str]:
        """One line per source: its share of the first `num_sequences` sequences."""
        counts = self.round_robin.counts(num_sequences)
        return [
            f"{name}: {source.num_sequences:,} sequences of {self.seq_len:,} tokens; {count:,} of {num_sequences:,} drawn "
            f"({count / source.num_sequences:.2f} epochs), "
            f"{source.num_padding_tokens / source.num_sequences / self.seq_len:.2%} padding"
            for name, source, count in zip(self.names, self.sources, counts, strict=True)
        ]

    def epochs(self, num_sequences: int) -> list[float]:
        """Epochs of each source in the first `num_sequences` sequences."""
        counts = zip(self.round_robin.counts(num_sequences), self.sources, strict=True)
        return [count / source.num_sequences for count, source in counts]

    def read(self, indices: Sequence[int | None], shard: SequenceShard = FULL_SEQUENCE) -> Batch:
        """The rank's part of the sequences with these global indices, on the host. None: a sequence of padding."""
        padded_len = self.seq_len + -self.seq_len % shard.seq_len_divisor
        sequences = [self._read_sequence(index, shard, padded_len) for index in indices]
        boundaries = [each.boundaries for each in sequences]
        tokens_BS, labels_BS, positions_BS, documents_BS, boundaries_BD = (
            torch.stack(parts) for parts in zip(*(each.tensors for each in sequences), strict=True)
        )
        return Batch(
            tokens=tokens_BS,
            labels=labels_BS,
            positions=positions_BS,
            document_ids=documents_BS,
            boundaries=boundaries_BD,
            num_tokens=sum(each.num_tokens for each in sequences),
            num_pairs=sum(each.num_pairs for each in sequences),
            num_computed_pairs=mean_pairs(self._windows, partial(shard.attention_pairs, boundaries)),
            sequence_sources=tuple((each.source_index, each.num_tokens) for each in sequences),
        )

    def computed_pairs(self, index: int | None) -> float:
        """(query, key) pairs of a whole sequence, padding included: the mean over layers. Reads no tokens."""
        lengths = self._padding if index is None else self._segment_lengths(index)
        boundaries = tuple(self._boundaries([*accumulate((*lengths, self.seq_len - sum(lengths), 0), initial=0)]))
        return mean_pairs(self._windows, partial(FULL_SEQUENCE.attention_pairs, [boundaries]))

    def _segment_lengths(self, index: int) -> list[int]:
        source_index, index_in_source = self.round_robin.locate(index)
        return self.sources[source_index].segment_lengths(index_in_source)

    @property
    def _padding(self) -> list[int]:
        """The segments of a sequence of padding: as many as a sequence may have, because that is the least work."""
        num_segments = min(self._max_segments, self.seq_len) if self._document_mask else 1
        length, longer = divmod(self.seq_len, num_segments)
        return [length + 1] * longer + [length] * (num_segments - longer)

    def _read_sequence(self, index: int | None, shard: SequenceShard, padded_len: int) -> LocalSequence:
        source_index, index_in_source = (0, 0) if index is None else self.round_robin.locate(index)
        source = self.sources[source_index]
        lengths = self._padding if index is None else source.segment_lengths(index_in_source)
        # Two more segments, which may be empty: padding up to seq_len, padding up to padded_len.
        sizes = [*lengths, self.seq_len - sum(lengths), padded_len - self.seq_len]
        starts = [*accumulate(sizes, initial=0)]
        boundaries = self._boundaries(starts)
        documents = [] if index is None else lengths if self._document_mask else [sum(lengths)]
        slices = slice_segments(starts, shard.spans(tuple(boundaries)))
        tokens_S = torch.full((sum(segment.length for segment in slices),), source.pad_token_id)
        labels_S = torch.full_like(tokens_S, IGNORE_INDEX)
        offset = 0
        for segment in slices:
            region = slice(offset, offset + segment.length)
            if index is not None and segment.segment_id < len(lengths):
                source.fill(index_in_source, segment.segment_id, segment.start, tokens_S[region], labels_S[region])
            offset += segment.length
        documents_S, positions_S = self._documents_and_positions(slices, starts, len(lengths))
        tensors = (tokens_S, labels_S, positions_S, documents_S, torch.tensor(boundaries, dtype=torch.int32))
        return LocalSequence(
            tensors,
            source_index,
            sum(documents),
            mean_pairs(self._windows, lambda window: sum(causal_pairs(each, window) for each in documents)),
            tuple(boundaries),
        )

    def _boundaries(self, starts: list[int]) -> list[int]:
        """The same number for every sequence: kernels and compiled graphs need a fixed shape."""
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
        """Segment of each token, and its position in the segment, or in the sequence without a document mask."""
        lengths = torch.tensor([segment.length for segment in slices])
        documents_S = torch.tensor([segment.segment_id for segment in slices]).repeat_interleave(lengths)
        origins = [segment.start for segment in slices]
        if not self._document_mask:
            # The padding up to padded_len restarts at position 0.
            origins = [
                segment.start + (starts[segment.segment_id] if segment.segment_id <= num_segments else 0)
                for segment in slices
            ]
        offsets = torch.tensor(origins) - (lengths.cumsum(0) - lengths)
        return documents_S, torch.arange(documents_S.numel()) + offsets.repeat_interleave(lengths)


class LocalSequence(NamedTuple):
    """A rank's part of a sequence."""

    tensors: tuple[Tensor, ...]
    source_index: int
    num_tokens: int
    num_pairs: float
    boundaries: tuple[int, ...]


def slice_segments(starts: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[SegmentSlice]:
    """The parts of segments, which begin at `starts`, inside the (start, length) spans."""
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


class WeightedRoundRobin:
    """Smooth weighted round-robin: which source a sequence comes from, as a function of its index.

    Each source gains its weight in credit per sequence; the richest is drawn and pays the sum. With two sources, counts
    stay within one of the exact share. The order repeats after `period`, the sum of the smallest integer weights:

        weights 3, 1    index     0 1 2 3   4 5 6 7
                        source    a a b a   a a b a
    """

    def __init__(self, weights: Sequence[float | Fraction]) -> None:
        """Raises ValueError for a weight that is not positive or rounds to 0 of MAX_PERIOD."""
        self.weights = integer_weights(weights)
        self.period = sum(self.weights)
        self._source_at, self._count_before = array("H"), array("l")
        credit, counts = [0] * len(self.weights), [0] * len(self.weights)
        for _ in repeat(None, self.period):
            for source, weight in enumerate(self.weights):
                credit[source] += weight
            selected = credit.index(max(credit))
            credit[selected] -= self.period
            self._source_at.append(selected)
            self._count_before.append(counts[selected])
            counts[selected] += 1

    def locate(self, index: int) -> tuple[int, int]:
        """(source, index within the source) of a sequence."""
        cycles, position = divmod(index, self.period)
        source = self._source_at[position]
        return source, cycles * self.weights[source] + self._count_before[position]

    def counts(self, num_sequences: int) -> list[int]:
        """Sequences of each source among the first `num_sequences`."""
        cycles, remainder = divmod(num_sequences, self.period)
        counts = [cycles * weight for weight in self.weights]
        for source in self._source_at[:remainder]:
            counts[source] += 1
        return counts


def integer_weights(weights: Sequence[float | Fraction]) -> list[int]:
    """The smallest integers in proportion to the weights, rounded if they would sum to more than MAX_PERIOD."""
    if not weights or min(weights) <= 0:
        raise ValueError(f"weights {list(weights)} must be positive")
    fractions = [Fraction(str(weight)) for weight in weights]
    denominator = lcm(*(weight.denominator for weight in fractions))
    scaled = [int(weight * denominator) for weight in fractions]
    if sum(scaled) // gcd(*scaled) > MAX_PERIOD:
        scaled = [round(weight / sum(fractions) * MAX_PERIOD) for weight in fractions]
    if min(scaled) == 0:
        raise ValueError(f"weights {list(weights)} differ too much")
    return [weight // gcd(*scaled) for weight in scaled]
