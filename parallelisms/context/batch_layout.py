"""The shard layouts of a batch's sequences, as int64 tensors: those of `shard_layout` for any
number of documents.

Shape suffixes: B sequences, D document boundaries, C chunks, P spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from models.batch import concatenated_boundaries, document_ranges, remembered
from models.ranges import concatenated_ranges, is_first_of_run
from models.score_pairs import causal_pairs
from parallelisms.mesh.context_plan import ShardLayout
from parallelisms.mesh.shard_layout import (
    chunks_of,
    doc_headtail_tokens,
    mirrored,
    require_divisible,
)


@dataclass(frozen=True)
class Spans:
    """Contiguous tokens of one document on one rank each, ascending; int64 [P], on the host."""

    rank: Tensor
    local_start: Tensor
    """First token's index among all tokens of the rank."""
    start: Tensor
    """First token's index in the sequences, concatenated."""
    length: Tensor
    document_start: Tensor
    """Index of the document's first token in the sequences."""

    @property
    def end(self) -> Tensor:
        return self.start + self.length

    @property
    def local_end(self) -> Tensor:
        return self.local_start + self.length

    def __len__(self) -> int:
        return len(self.rank)

    def __getitem__(self, selected: Tensor | slice) -> Spans:
        """Spans that a mask, indices or a slice select."""
        return Spans(*(getattr(self, each.name)[selected] for each in fields(self)))


class BatchLayout:
    """Layouts of sequences of equal length; `boundaries_BD` are their document starts and their
    length, ascending.

    Raises ValueError for a length that the layout cannot split.
    """

    def __init__(self, kind: ShardLayout, ring_degree: int, boundaries_BD: Tensor) -> None:
        self.ring_degree = ring_degree
        self.seq_len = int(boundaries_BD[0, -1])
        self.kind = require_divisible(kind, ring_degree, self.seq_len)
        self.tokens_per_rank = len(boundaries_BD) * self.seq_len // ring_degree
        """Tokens of all sequences that each rank holds."""
        self._boundaries_BD = boundaries_BD.long()

    @cached_property
    def spans(self) -> Spans:
        """Spans of all ranks, in sequence order."""
        chunks = [
            self._chunks(boundaries_D.unique_consecutive()) for boundaries_D in self._boundaries_BD
        ]
        ends = torch.cat(
            [ends_C + number * self.seq_len for number, (ends_C, _) in enumerate(chunks)]
        )
        boundaries = concatenated_boundaries(self._boundaries_BD, self.seq_len)
        cuts, order = torch.cat((boundaries, ends)).sort()
        num_ends = (order >= len(boundaries)).cumsum(0)
        # A span begins at the last of equal cuts; up to there, `num_ends` chunks end, and the
        # other cuts start documents.
        begins = (cuts.diff() > 0).nonzero().flatten()
        start = cuts[begins]
        num_ends = num_ends[begins]
        rank = torch.cat([owners_C for _, owners_C in chunks])[num_ends]
        document_start = boundaries[begins - num_ends]
        # Neighbours of the same rank and document are one span.
        first = is_first_of_run(rank) | is_first_of_run(document_start)
        start, rank, document_start = (x[first] for x in (start, rank, document_start))
        length = torch.cat((start, boundaries[-1:])).diff()
        # Ranks hold equally many tokens: a running sum over the spans by rank, less those of the
        # ranks before, counts within the rank.
        by_rank = rank.argsort(stable=True)
        local_start = torch.empty_like(start)
        local_start[by_rank] = length[by_rank].cumsum(0) - length[by_rank]
        return Spans(
            rank, local_start - rank * self.tokens_per_rank, start, length, document_start
        )

    @cached_property
    def spans_by_rank(self) -> Spans:
        return self.spans[self.spans.rank.argsort(stable=True)]

    def of_rank(self, rank: int) -> Spans:
        first, end = torch.searchsorted(
            self.spans_by_rank.rank, torch.tensor([rank, rank + 1], device="cpu")
        )
        return self.spans_by_rank[first:end]

    def documents(self, spans: Spans) -> Tensor:
        """int64 [P]: the number of each span's document, as `models.batch.document_ranges` counts
        them.
        """
        # Of documents with the same start, all but the last are empty.
        return torch.searchsorted(self._document_starts, spans.document_start, right=True) - 1

    def local_ranges(self, spans: Spans) -> Tensor:
        """int64 [R, 2]: [start, end) of every document among the tokens of the rank that holds
        these spans.
        """
        document = self.documents(spans)
        is_first = is_first_of_run(document)
        ranges_R2 = torch.zeros(len(self._document_starts), 2, dtype=torch.int64, device="cpu")
        ranges_R2[document[is_first], 0] = spans.local_start[is_first]
        # The last of each run.
        ranges_R2[document[is_first], 1] = spans.local_end[is_first.roll(-1)]
        return ranges_R2

    @cached_property
    def _document_starts(self) -> Tensor:
        return document_ranges(self._boundaries_BD, self.seq_len)[:, 0].contiguous()

    def pairs_per_rank(self, window: int | None = None) -> list[int]:
        """(query, key) pairs that each rank's queries attend to."""
        spans = self.spans
        first = spans.start - spans.document_start
        last = spans.end - spans.document_start
        pairs = causal_pairs(last, window) - causal_pairs(first, window)
        total: list[int] = (
            pairs.new_zeros(self.ring_degree).index_add_(0, spans.rank, pairs).tolist()
        )
        return total

    def permutation(self) -> Tensor:
        """int64 [B, T]: each sequence's tokens, rank by rank."""
        # The spans are in order within a rank, and so in each sequence: a stable sort keeps that
        # order.
        tokens = concatenated_ranges(self.spans_by_rank.start, self.spans_by_rank.length)
        by_sequence = (tokens // self.seq_len).argsort(stable=True)
        return tokens[by_sequence].view(-1, self.seq_len) % self.seq_len

    def _chunks(self, boundaries_D: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [C]: ends and ranks of the parts of one sequence; some are empty."""
        starts = boundaries_D[:-1]
        lengths = boundaries_D.diff()

        def pairs_before(ends: Sequence[int]) -> list[int]:
            pairs = causal_pairs(lengths)
            ends_C = torch.tensor(ends, device="cpu")
            document = torch.searchsorted(starts, ends_C) - 1
            before: list[int] = (
                (pairs.cumsum(0) - pairs)[document] + causal_pairs(ends_C - starts[document])
            ).tolist()
            return before

        def pairs_by_document() -> list[int]:
            pairs = causal_pairs(self._slot_tokens(lengths).cumsum(1)).diff(
                dim=1, prepend=torch.zeros_like(lengths)[:, None]
            )
            heads, tails = pairs.sum(0).view(2, -1)
            total: list[int] = (heads + tails.flip(0)).tolist()
            return total

        chunks = chunks_of(
            self.kind, self.ring_degree, self.seq_len, pairs_before, pairs_by_document
        )
        if chunks is not None:
            ends_C, owners_C = (torch.tensor(part, device="cpu") for part in chunks)
            return ends_C, owners_C
        owners = torch.tensor(mirrored(self.ring_degree), device="cpu")
        return self._slot_tokens(lengths).flatten().cumsum(0), owners.repeat(len(lengths))

    def _slot_tokens(self, lengths_D: Tensor) -> Tensor:
        """[D, 2 ranks]: tokens of each part of each document in `doc_headtail`."""
        owners = torch.tensor(mirrored(self.ring_degree), device="cpu")
        # `shard_layout.doc_headtail_tokens` for all documents at once.
        left_over = lengths_D % len(owners)
        next_rank = left_over.cumsum(0) - left_over
        is_tail = torch.arange(len(owners), device="cpu") >= self.ring_degree
        tokens: Tensor = doc_headtail_tokens(
            lengths_D[:, None], next_rank[:, None], owners, is_tail, self.ring_degree
        )
        return tokens


@remembered
def batch_layout(
    boundaries_BD: Tensor, batch_size: int, seq_len: int, kind: ShardLayout, ring_degree: int
) -> BatchLayout:
    """The layout of sequences with these boundaries."""
    del batch_size, seq_len
    return BatchLayout(kind, ring_degree, boundaries_BD)
