r"""The score blocks that each rank computes: pure functions of the shard layouts of a batch's sequences.

Of two disjoint spans of a sequence, either all pairs attend or none: a document that reaches from one span into the
other covers everything between them. Blocks with remote keys are therefore unmasked rectangles. A rank holds its own
keys in sequence order, so they need plain causal attention inside documents. There are no masks, no empty query rows
and no wasted FLOPs, for documents of any length.

    headtail, 2 ranks: rank 0 holds chunks 0 and 3, rank 1 holds chunks 1 and 2

                     keys   0 3   1 2
    queries of rank 0:  0   \     . .       own keys: causal; rank 1's keys: all of them, for the second half of the queries
                        3   x \   x x

Token indices count over all sequences of the batch, concatenated as each rank holds them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, groupby

import torch
from torch import Tensor

from models.kernels import ScoreBlock, ScoreBlocks, concatenated_ranges, to_device
from parallelisms.context.shard_layout import SeqLayout, TokenSpan


class RankAttentionPlan:
    """The score blocks of one rank for one batch, computed once for all layers."""

    def __init__(self, layouts: Sequence[SeqLayout], rank: int) -> None:
        self.ring_degree, self.rank = layouts[0].ring_degree, rank
        lengths = [layout.num_tokens // layout.ring_degree for layout in layouts]
        self.tokens_per_rank = sum(lengths)
        self._sequences = [*zip(accumulate(lengths, initial=0), layouts, strict=False)]
        """Each sequence's offset among the tokens of a rank, and its layout."""
        self._remote_kv_index: dict[torch.device, Tensor] = {}

    @cached_property
    def local_blocks(self) -> ScoreBlocks:
        """Causal blocks of the rank's own tokens: one per document, whose tokens are contiguous on the rank."""
        blocks = []
        for offset, layout in self._sequences:
            for _, document_spans in groupby(layout.spans(self.rank), key=lambda span: span.document_start):
                spans = list(document_spans)
                start, end = offset + spans[0].local_start, offset + spans[-1].local_start + spans[-1].length
                blocks.append(ScoreBlock(start, end, start, end))
        return ScoreBlocks(blocks, causal=True)

    @cached_property
    def ring_step_blocks(self) -> list[ScoreBlocks]:
        """Blocks with the keys that the rank receives in ring steps 1, 2, ... (step 0 is its own keys)."""
        return [self.source_blocks((self.rank - step) % self.ring_degree) for step in range(1, self.ring_degree)]

    def source_blocks(self, source: int) -> ScoreBlocks:
        """Blocks with the keys of another rank, `source`."""
        blocks = (
            ScoreBlock(offset + q0, offset + q1, offset + k0, offset + k1)
            for offset, layout in self._sequences
            for q0, q1, k0, k1 in _score_blocks(layout.spans(self.rank), layout.spans(source))
        )
        return ScoreBlocks(blocks, causal=False)

    @cached_property
    def remote_blocks(self) -> ScoreBlocks:
        """Blocks with the keys that `remote_kv_index` selects."""
        blocks = []
        num_keys = 0
        for offset, layout in self._sequences:
            spans = [span for _, span in _remote_spans(layout, self.rank)]
            starts = [*accumulate((span.length for span in spans), initial=0)]
            keys = [span._replace(local_start=start) for start, span in zip(starts, spans, strict=False)]
            for q0, q1, k0, k1 in _score_blocks(layout.spans(self.rank), keys):
                blocks.append(ScoreBlock(offset + q0, offset + q1, num_keys + k0, num_keys + k1))
            num_keys += starts[-1]
        return ScoreBlocks(blocks, causal=False)

    def remote_kv_index(self, device: torch.device) -> Tensor:
        """int64 [2, Y]: the remote keys that the rank's queries attend to, in the order of each sequence; their values.

        Indices into the gathered KV [ranks, 2, tokens], flattened.
        """
        if device not in self._remote_kv_index:
            key_ranges = [
                (2 * source * self.tokens_per_rank + offset + span.local_start, span.length)
                for offset, layout in self._sequences
                for source, span in _remote_spans(layout, self.rank)
            ]
            keys = concatenated_ranges([start for start, _ in key_ranges], [length for _, length in key_ranges])
            self._remote_kv_index[device] = to_device(torch.stack((keys, keys + self.tokens_per_rank)), device)
        return self._remote_kv_index[device]


def permutation(layout: SeqLayout) -> Tensor:
    """int64 [T]: the sequence's tokens, rank by rank; `x[permutation].chunk(ring_degree)[rank]` is a rank's shard."""
    spans = [span for rank in range(layout.ring_degree) for span in layout.spans(rank)]
    return concatenated_ranges([span.start for span in spans], [span.length for span in spans])


def _remote_spans(layout: SeqLayout, rank: int) -> list[tuple[int, TokenSpan]]:
    """(source rank, span) of the remote keys that the rank's queries attend to, in sequence order."""
    last_start_by_document = {span.document_start: span.start for span in layout.spans(rank)}
    return sorted(
        (
            (source, span)
            for source in range(layout.ring_degree)
            if source != rank
            for span in layout.spans(source)
            if span.start < last_start_by_document.get(span.document_start, -1)
        ),
        key=lambda source_span: source_span[1].start,
    )


def _score_blocks(queries: Sequence[TokenSpan], keys: Sequence[TokenSpan]) -> Iterator[ScoreBlock]:
    """Blocks of each query span with the earlier keys of its document; adjacent blocks are joined.

    Query spans with the same last key are adjacent and in the same document, namely that of the key.
    """
    starts = [span.start for span in keys]
    ends = [span.local_start for span in keys] + [keys[-1].local_start + keys[-1].length if keys else 0]
    pending_block: ScoreBlock | None = None
    for span in queries:
        k0 = ends[bisect_left(starts, span.document_start)]
        k1 = ends[bisect_left(starts, span.start)]
        if k1 == k0:
            continue
        if pending_block and pending_block.k1 == k1:
            pending_block = pending_block._replace(q1=span.local_start + span.length)
            continue
        if pending_block:
            yield pending_block
        pending_block = ScoreBlock(span.local_start, span.local_start + span.length, k0, k1)
    if pending_block:
        yield pending_block
