"""Sequences as a pure function of their index: source, segments, labels, boundaries.

A rank reads only the spans of a sequence that it holds, which may start and end inside a segment.

    segments of a sequence    aaaaaaaabbbbcccccc____        ____ is padding, the last segment
    spans of a rank           ------          ------
    slices that it reads      aaaaaa          cc____

Shape suffixes: B sequences, S tokens of a sequence on this rank, D document starts and the
sequence's end.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import repeat
from math import gcd, lcm
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from models.batch import IGNORE_INDEX, Batch
from models.ranges import concatenated_ranges, cut_ranges
from models.score_pairs import FULL_ATTENTION, Windows, causal_pairs, mean_pairs

# sequences after which the order of sources repeats
MAX_PERIOD = 100_000


class SequenceSource(Protocol):
    """An unlimited series of sequences, each made of segments of documents."""

    num_sequences: int
    """Sequences of an epoch."""
    max_segments: int
    num_padding_tokens: int
    """Padding tokens of an epoch."""
    pad_token_id: int
    seed: int
    """Seed of the order."""
    fingerprint: str
    """Fingerprint of the tokens."""
    plan_fingerprint: str
    """Fingerprint of the packing plan; empty if no plan is stored."""

    def segment_lengths(self, index: int) -> Tensor:
        """int64: lengths of the segments of a sequence; together at most seq_len."""

    def read(self, index: int, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and labels of parts of a sequence, each inside a segment; IGNORE_INDEX where a
        token has no target.
        """


class SequenceShard(Protocol):
    """Which tokens of a sequence a rank holds."""

    @property
    def seq_len_divisor(self) -> int:
        """Sequences are padded to a multiple of it."""

    def spans(self, boundaries_D: Tensor) -> tuple[Tensor, Tensor]:
        """int64: starts, ascending, and lengths of the parts that the rank holds.

        `boundaries_D`: document starts, then the length.
        """

    def attention_pairs(self, boundaries_BD: Tensor, window: int | None) -> int:
        """(query, key) pairs that the rank computes in a layer for sequences with these
        boundaries.
        """


@dataclass(frozen=True)
class FullSequence:
    """The shard of a rank that holds whole sequences."""

    seq_len_divisor: int = 1

    def spans(self, boundaries_D: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, dtype=torch.int64), boundaries_D[-1:].long()

    def attention_pairs(self, boundaries_BD: Tensor, window: int | None) -> int:
        return int(causal_pairs(boundaries_BD.long().diff(), window).sum())


FULL_SEQUENCE = FullSequence()


class BlendedDataset:
    """An unlimited series of sequences, drawn from sources in proportion to `weights`.

    Each source yields each of its sequences once per epoch. `mask` = "document" confines attention
    to a segment. `windows`: those of the model's layers, over which (query, key) pairs are
    averaged.
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
        self.sources = [*sources]
        self.names = [*names]
        self.seq_len = seq_len
        self._windows = windows
        self.round_robin = WeightedRoundRobin(weights)
        self._document_mask = mask == "document"
        self._single_document = not self._document_mask or all(
            source.max_segments == 1 and not source.num_padding_tokens for source in sources
        )
        self._max_segments = max(source.max_segments for source in sources)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Token fingerprint of each source, by name."""
        return {
            name: source.fingerprint for name, source in zip(self.names, self.sources, strict=True)
        }

    @property
    def plan_fingerprints(self) -> dict[str, str]:
        """Fingerprint of each source's packing plan, by name."""
        return {
            name: source.plan_fingerprint
            for name, source in zip(self.names, self.sources, strict=True)
            if source.plan_fingerprint
        }

    @property
    def order(self) -> str:
        """Identifies the sequences and their order."""
        sources = [
            (source.fingerprint, source.plan_fingerprint, source.seed) for source in self.sources
        ]
        weights = self.round_robin.weights
        identity = [self.seq_len, self._document_mask, weights, sources]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]

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
        """The rank's part of the sequences with these global indices, on the host.

        None: a sequence of padding.
        """
        padded_len = self.seq_len + -self.seq_len % shard.seq_len_divisor
        sequences = [self._read_sequence(index, shard, padded_len) for index in indices]
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
            num_computed_pairs=mean_pairs(
                self._windows, partial(shard.attention_pairs, boundaries_BD)
            ),
            sequence_sources=tuple((each.source_index, each.num_tokens) for each in sequences),
        )

    def computed_pairs(self, index: int | None) -> float:
        """(query, key) pairs of a whole sequence, padding included: the mean over layers.

        Reads no tokens.
        """
        boundaries_D = self._boundaries(self._segment_ends(index, self.seq_len))
        return mean_pairs(
            self._windows, partial(FULL_SEQUENCE.attention_pairs, boundaries_D[None])
        )

    def _segment_ends(self, index: int | None, padded_len: int) -> Tensor:
        """0, the ends of a sequence's segments, and those of two more, which may be empty: padding
        up to seq_len, and up to `padded_len`.
        """
        if index is None:
            lengths = self._padding
        else:
            source_index, index_in_source = self.round_robin.locate(index)
            lengths = self.sources[source_index].segment_lengths(index_in_source)
        return torch.cat(
            (
                torch.zeros(1, dtype=torch.int64),
                lengths.cumsum(0),
                torch.tensor([self.seq_len, padded_len]),
            )
        )

    @property
    def _padding(self) -> Tensor:
        """The segments of a sequence of padding: as many as a sequence may have, because that is
        the least work.
        """
        num_segments = min(self._max_segments, self.seq_len) if self._document_mask else 1
        length, longer = divmod(self.seq_len, num_segments)
        return length + (torch.arange(num_segments) < longer)

    def _read_sequence(
        self, index: int | None, shard: SequenceShard, padded_len: int
    ) -> LocalSequence:
        source_index, index_in_source = (0, 0) if index is None else self.round_robin.locate(index)
        source = self.sources[source_index]
        ends = self._segment_ends(index, padded_len)
        # `ends` has a leading 0 and two ends of padding beside those of the content.
        num_content_segments = 0 if index is None else len(ends) - 3
        boundaries_D = self._boundaries(ends)
        segment, start, length = cut_ranges(*shard.spans(boundaries_D), ends)
        tokens_S = torch.full((int(length.sum()),), source.pad_token_id)
        labels_S = torch.full_like(tokens_S, IGNORE_INDEX)
        is_content = segment < num_content_segments
        if bool(is_content.any()):  # Padding comes last.
            content = slice(int(length[is_content].sum()))
            tokens_S[content], labels_S[content] = source.read(
                index_in_source, start[is_content], length[is_content]
            )
        # Without a document mask positions count over the sequence; the padding up to padded_len
        # restarts.
        restarts = self._document_mask | (segment == len(ends) - 2)
        positions_S = concatenated_ranges(start - ends[segment] * restarts, length)
        # Without a document mask all content is one document, from its first to its last end.
        documents = ends[: num_content_segments + 1]
        if not self._document_mask:
            documents = documents[[0, -1]]
        return LocalSequence(
            (tokens_S, labels_S, positions_S, segment.repeat_interleave(length), boundaries_D),
            source_index,
            int(documents[-1]),
            mean_pairs(
                self._windows, lambda window: int(causal_pairs(documents.diff(), window).sum())
            ),
        )

    def _boundaries(self, ends: Tensor) -> Tensor:
        """int32: as many for every sequence, because kernels and compiled graphs need a fixed
        shape.
        """
        starts = ends[:-2] if self._document_mask and not self._single_document else ends[:1]
        # Repeated ends are empty documents, which cost nothing and fill up the shape.
        num_filled = 1 if self._single_document else self._max_segments + 2 - len(starts)
        tail = ends[-1:] if ends[-1] > self.seq_len else ends[:0]
        return torch.cat((starts, ends[-2:-1].expand(num_filled), tail)).int()


class LocalSequence(NamedTuple):
    """A rank's part of a sequence."""

    tensors: tuple[Tensor, ...]
    source_index: int
    num_tokens: int
    num_pairs: float


class WeightedRoundRobin:
    """Smooth weighted round-robin: which source a sequence comes from, as a function of its index.

    Each source gains its weight in credit per sequence; the richest is drawn and pays the sum.
    With two sources, counts stay within one of the exact share. The order repeats after `period`,
    the sum of the smallest integer weights:

        weights 3, 1    index     0 1 2 3   4 5 6 7
                        source    a a b a   a a b a
    """

    def __init__(self, weights: Sequence[float | Fraction]) -> None:
        """Raises ValueError for a weight that is not positive or rounds to 0 of MAX_PERIOD."""
        self.weights = integer_weights(weights)
        self.period = sum(self.weights)
        # One period is tabulated, so that `locate` takes constant time for any index.
        self._source_at = array("H")
        self._count_before = array("l")
        credit = [0] * len(self.weights)
        counts = [0] * len(self.weights)
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
    """The smallest integers in proportion to the weights, rounded if they would sum to more than
    MAX_PERIOD.
    """
    if not weights or min(weights) <= 0:
        raise ValueError(f"weights {list(weights)} must be positive")
    # By decimal text: the binary value of 0.1 has the denominator 2^55, far beyond any period.
    fractions = [Fraction(str(weight)) for weight in weights]
    denominator = lcm(*(weight.denominator for weight in fractions))
    scaled = [int(weight * denominator) for weight in fractions]
    if sum(scaled) // gcd(*scaled) > MAX_PERIOD:
        scaled = [round(weight / sum(fractions) * MAX_PERIOD) for weight in fractions]
    if min(scaled) == 0:
        raise ValueError(f"weights {list(weights)} differ too much")
    return [weight // gcd(*scaled) for weight in scaled]
