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

from models.kernels import ScoreBlock, ScoreBlocks, concatenated_ranges, to_device
from parallelisms.context.shard_layout import SeqLayout, TokenSpan

BatchLayouts = tuple[SeqLayout, ...]


def local_score_blocks(layouts: BatchLayouts, rank: int) -> tuple[ScoreBlock, ...]:
    """The causal squares among the rank's own tokens: a document's tokens are one run."""
    blocks = []
    for offset, layout in _with_offsets(layouts):
        for _, document_spans in groupby(layout.spans(rank), key=lambda span: span.document_start):
            spans = list(document_spans)
            start, end = offset + spans[0].local_start, offset + spans[-1].local_start + spans[-1].length
            blocks.append(ScoreBlock(start, end, start, end))
    return tuple(blocks)


def source_score_blocks(layouts: BatchLayouts, rank: int, source: int) -> tuple[ScoreBlock, ...]:
    """What the queries of `rank` attend to among the keys that another rank, `source`, holds."""
    return tuple(
        ScoreBlock(offset + q0, offset + q1, offset + k0, offset + k1)
        for offset, layout in _with_offsets(layouts)
        for q0, q1, k0, k1 in _score_blocks(layout.spans(rank), layout.spans(source))
    )


def remote_score_blocks(layouts: BatchLayouts, rank: int) -> tuple[ScoreBlock, ...]:
    """What the queries of `rank` attend to among the foreign keys: see `foreign`, which says where they are."""
    blocks = []
    num_keys = 0
    for offset, layout in _with_offsets(layouts):
        keys = [span for _, span in _remote_spans(layout, rank)]
        local = 0
        for index, piece in enumerate(keys):
            keys[index] = piece._replace(local_start=local)
            local += piece.length
        for q0, q1, k0, k1 in _score_blocks(layout.spans(rank), keys):
            blocks.append(ScoreBlock(offset + q0, offset + q1, num_keys + k0, num_keys + k1))
        num_keys += local
    return tuple(blocks)


def remote_key_indices(layouts: BatchLayouts, rank: int) -> Tensor:
    """int64, on the host: the keys of other ranks that queries of `rank` attend to, row after row in the order of the row.

    They count through all ranks' tokens: source * tokens of a rank + place there.
    """
    tokens_per_rank = sum(layout.num_tokens // layout.ring_degree for layout in layouts)
    key_ranges = [
        (source * tokens_per_rank + offset + span.local_start, span.length)
        for offset, layout in _with_offsets(layouts)
        for source, span in _remote_spans(layout, rank)
    ]
    return concatenated_ranges([start for start, _ in key_ranges], [length for _, length in key_ranges])


def _with_offsets(layouts: BatchLayouts) -> Iterator[tuple[int, SeqLayout]]:
    """Each row, and where it begins on a rank."""
    offset = 0
    for layout in layouts:
        yield offset, layout
        offset += layout.num_tokens // layout.ring_degree


def _remote_spans(layout: SeqLayout, rank: int) -> list[tuple[int, TokenSpan]]:
    """(the rank that holds it, the piece), in the order of the row; no more than the rank's queries attend to."""
    last_start_by_document = {piece.document_start: piece.start for piece in layout.spans(rank)}
    return sorted(
        (
            (source, piece)
            for source in range(layout.ring_degree)
            if source != rank
            for piece in layout.spans(source)
            if piece.start < last_start_by_document.get(piece.document_start, -1)
        ),
        key=lambda source_span: source_span[1].start,
    )


def _score_blocks(queries: Sequence[TokenSpan], keys: Sequence[TokenSpan]) -> Iterator[ScoreBlock]:
    """Each piece of queries with those of the keys that lie before it in its document; neighbours are joined.

    Where two see keys up to the same one, they are neighbours of one document: it is that of the keys.
    """
    starts = [span.start for span in keys]
    ends = [piece.local_start for piece in keys] + [keys[-1].local_start + keys[-1].length if keys else 0]
    pending_block: ScoreBlock | None = None
    for piece in queries:
        k0 = ends[bisect_left(starts, piece.document_start)]
        k1 = ends[bisect_left(starts, piece.start)]
        if k1 == k0:
            continue
        if pending_block and pending_block.k1 == k1:
            pending_block = pending_block._replace(q1=piece.local_start + piece.length)
            continue
        if pending_block:
            yield pending_block
        pending_block = ScoreBlock(piece.local_start, piece.local_start + piece.length, k0, k1)
    if pending_block:
        yield pending_block


class RankAttentionPlan:
    """What one rank of a ring computes of a batch, worked out once for all layers."""

    def __init__(self, layouts: BatchLayouts, rank: int) -> None:
        self.layouts = layouts
        self.rank = rank
        self.ring_degree = layouts[0].ring_degree
        self._remote_kv_indices: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @cached_property
    def local_blocks(self) -> ScoreBlocks:
        """Attention to the rank's own keys."""
        return ScoreBlocks(local_score_blocks(self.layouts, self.rank), causal=True)

    @cached_property
    def ring_step_blocks(self) -> list[ScoreBlocks]:
        """Attention to the keys that arrive in each step of the ring, but the first, which are its own."""
        sources = ((self.rank - step) % self.ring_degree for step in range(1, self.ring_degree))
        return [ScoreBlocks(source_score_blocks(self.layouts, self.rank, source), causal=False) for source in sources]

    @cached_property
    def remote_blocks(self) -> ScoreBlocks:
        """Attention to the foreign keys, in the order of the row."""
        return ScoreBlocks(remote_score_blocks(self.layouts, self.rank), causal=False)

    def remote_kv_indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the foreign keys, and where their values, stand in everyone's [ranks, 2, tokens], laid end to end."""
        if device not in self._remote_kv_indices:
            tokens_per_rank = sum(layout.num_tokens // layout.ring_degree for layout in self.layouts)
            key_indices = remote_key_indices(self.layouts, self.rank)
            flat_keys = key_indices + key_indices // tokens_per_rank * tokens_per_rank
            self._remote_kv_indices[device] = (
                to_device(flat_keys, device),
                to_device(flat_keys + tokens_per_rank, device),
            )
        return self._remote_kv_indices[device]
