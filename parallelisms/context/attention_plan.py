r"""The score blocks that each rank computes: pure functions of the shard layouts of a batch's sequences.

Of two disjoint spans of a sequence, either all pairs attend or none: a document that reaches from one span into the
other covers everything between them. Blocks with remote keys are therefore unmasked rectangles. A rank holds its own
keys in sequence order, so they need plain causal attention inside documents. There are no masks, no empty query rows
and no wasted FLOPs, for documents of any length. A window cuts the blocks further (`models/score_blocks.py`).

    headtail, 2 ranks: rank 0 holds chunks 0 and 3, rank 1 holds chunks 1 and 2

                     keys   0 3   1 2
    queries of rank 0:  0   \     . .       own keys: causal; rank 1's keys: all of them, for the second half of the queries
                        3   x \   x x

Without a causal mask, a query sees all keys of its document. Its tokens on a rank are contiguous, so there is one
rectangle for each document and each rank that holds keys of it.

Token indices count over all sequences of the batch, concatenated as each rank holds them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from models.batch import remembered, require_keys, split_boundaries
from models.ranges import concatenated_ranges, is_first_of_run
from models.score_blocks import (
    CAUSAL,
    FULL,
    ScoreBlocks,
    block_rows,
    document_rows,
    rows_before,
    to_device,
)
from models.score_pairs import FULL_SCORES, Scores
from parallelisms.context.batch_layout import BatchLayout, Spans, batch_layout
from parallelisms.mesh.context_plan import ShardLayout


class RingPlace(NamedTuple):
    """One rank of a ring, and how the tokens of a sequence are dealt to all of them."""

    layout: ShardLayout
    ring_degree: int
    rank: int


class RankAttentionPlan:
    """The score blocks of one rank for one batch, computed once for all layers with these scores.

    `keys`: the layout of the keys of attention without a causal mask.
    """

    def __init__(
        self,
        layout: BatchLayout,
        rank: int,
        *,
        scores: Scores = FULL_SCORES,
        keys: BatchLayout | None = None,
    ) -> None:
        self.ring_degree = layout.ring_degree
        self.rank = rank
        self.scores = scores
        self.window = scores.window
        self._layout = layout
        self._keys = layout if keys is None else keys
        self._is_causal = keys is None
        self.tokens_per_rank = self._keys.tokens_per_rank
        """Keys that a rank holds."""
        self._remote_kv_index: dict[torch.device, Tensor] = {}
        self._halo_index: dict[torch.device, tuple[Tensor, ...]] = {}

    @cached_property
    def _own(self) -> Spans:
        return self._layout.of_rank(self.rank)

    @cached_property
    def local_blocks(self) -> ScoreBlocks:
        """Blocks of the rank's own tokens, which together cover them.

        One causal block per document, whose tokens are contiguous on the rank. In a document
        longer than the window, one per span, and those between spans.
        """
        if not self._is_causal:
            return self.source_blocks(self.rank)
        own = self._own
        first = is_first_of_run(self._own.document_start)
        between = torch.empty(0, 5, dtype=torch.int64, device="cpu")
        if self.window is not None:
            # Documents within the window stay one causal block; a longer one is cut at its spans.
            extents = own.end[_is_last(first)] - own.start[first]
            is_long = (extents > self.window)[first.cumsum(0) - 1]
            between = self._blocks(own[is_long], own[is_long])
            first = first | is_long
        tokens_R2 = torch.stack((own.local_start[first], own.local_end[_is_last(first)]), dim=1)
        return ScoreBlocks(
            torch.cat((block_rows(tokens_R2, tokens_R2, CAUSAL), between)), scores=self.scores
        )

    @cached_property
    def ring_step_blocks(self) -> list[ScoreBlocks]:
        """Blocks with the keys that the rank receives in ring steps 1, 2, ...; step 0 is its own
        keys.
        """
        return [
            self.source_blocks((self.rank - step) % self.ring_degree)
            for step in range(1, self.ring_degree)
        ]

    def source_blocks(self, source: int) -> ScoreBlocks:
        """Blocks with the keys of another rank, `source`."""
        return self._score_blocks(self._keys.of_rank(source))

    # ---- gathered keys

    @cached_property
    def _remote_keys(self) -> Spans:
        """Spans of other ranks' keys that this rank's queries see."""
        return self._needed_by(self.rank, self._keys.spans)

    @cached_property
    def remote_blocks(self) -> ScoreBlocks:
        """Blocks with the keys that `remote_kv_index` selects."""
        keys = self._remote_keys
        return self._score_blocks(replace(keys, local_start=keys.length.cumsum(0) - keys.length))

    def remote_kv_index(self, device: torch.device) -> Tensor:
        """int64 [2, Y]: the remote keys that the rank's queries attend to, in the order of each
        sequence; their values.

        Indices into the gathered KV [ranks, 2, tokens], flattened.
        """
        if device not in self._remote_kv_index:
            self._remote_kv_index[device] = to_device(self._host_remote_kv_index, device)
        return self._remote_kv_index[device]

    @cached_property
    def _host_remote_kv_index(self) -> Tensor:
        keys = self._remote_keys
        # The gathered tensor is [rank, (key, value), token]: the keys of rank r begin at 2 r times
        # the tokens of a rank, and its values follow.
        index_Y = concatenated_ranges(
            2 * self.tokens_per_rank * keys.rank + keys.local_start, keys.length
        )
        return torch.stack((index_Y, index_Y + self.tokens_per_rank))

    # ---- a halo: ranks send each other the keys that are needed, and no others

    @cached_property
    def max_halo_tokens(self) -> int:
        """The most keys that a rank needs from the others; the same on all ranks."""
        by_rank = self._layout.spans_by_rank
        # Keys between a rank's neighbouring spans of a document: those next to the second.
        is_next = ~(is_first_of_run(by_rank.rank) | is_first_of_run(by_rank.document_start))
        # `roll` brings the end of the span before. A document's first span on a rank lacks all
        # keys from the document's start.
        gap = by_rank.start - torch.where(is_next, by_rank.end.roll(1), by_rank.document_start)
        needed = gap if self.window is None else gap.clamp(max=self.window - 1)
        return int(gap.new_zeros(self.ring_degree).index_add_(0, by_rank.rank, needed).max())

    @cached_property
    def _sent(self) -> list[Spans]:
        """Spans of this rank's tokens that each other rank needs, by receiver."""
        return [self._needed_by(receiver, self._own) for receiver in range(self.ring_degree)]

    @cached_property
    def halo_sent(self) -> list[int]:
        """Keys that this rank sends to each."""
        return [int(spans.length.sum()) for spans in self._sent]

    @cached_property
    def halo_received(self) -> list[int]:
        """Keys that this rank receives from each."""
        keys = self._remote_keys
        received: list[int] = (
            keys.length.new_zeros(self.ring_degree).index_add_(0, keys.rank, keys.length).tolist()
        )
        return received

    def halo_index(self, device: torch.device) -> tuple[Tensor, ...]:
        """int64: for each receiver, the tokens of this rank that it needs."""
        if device not in self._halo_index:
            self._halo_index[device] = tuple(
                to_device(index_Y, device) for index_Y in self._host_halo_index
            )
        return self._halo_index[device]

    @cached_property
    def _host_halo_index(self) -> list[Tensor]:
        return [concatenated_ranges(spans.local_start, spans.length) for spans in self._sent]

    @cached_property
    def halo_blocks(self) -> ScoreBlocks:
        """Blocks with the keys as they are received: by sender, and by sequence."""
        keys = self._remote_keys
        # Keys come one sender after the other: each span begins after all that are received
        # before.
        by_sender = keys.rank.argsort(stable=True)
        received = torch.empty_like(keys.start)
        received[by_sender] = keys.length[by_sender].cumsum(0) - keys.length[by_sender]
        return self._score_blocks(replace(keys, local_start=received))

    # ---- which keys, and which blocks

    def _needed_by(self, rank: int, spans: Spans) -> Spans:
        """The parts of other ranks' spans that queries of `rank` attend to."""
        queries = self._layout.of_rank(rank)
        if not self._is_causal:
            is_in_document = torch.isin(
                self._keys.documents(spans), self._layout.documents(queries)
            )
            return spans[is_in_document & (spans.rank != rank)]
        # Its next span after the keys sees as much of them as any.
        following = torch.searchsorted(queries.start, spans.start).clamp(max=len(queries) - 1)
        start = queries.start[following]
        skipped = torch.zeros_like(spans.start)
        # The first query of the span is the one that sees furthest back.
        if self.window is not None:
            skipped = (start - self.window + 1 - spans.start).clamp(min=0)
        is_in_document = (queries.document_start[following] == spans.document_start) & (
            start > spans.start
        )
        is_seen = is_in_document & (skipped < spans.length) & (spans.rank != rank)
        seen = spans[is_seen]
        skipped = skipped[is_seen]
        start = seen.start + skipped
        local_start = seen.local_start + skipped
        return replace(seen, start=start, local_start=local_start, length=seen.length - skipped)

    def _score_blocks(self, keys: Spans) -> ScoreBlocks:
        return ScoreBlocks(self._blocks(self._own, keys), scores=self.scores)

    def _blocks(self, queries: Spans, keys: Spans) -> Tensor:
        """int64 [R, 5]: blocks of each query span with the keys of its document that it sees."""
        if not self._is_causal:
            return document_rows(self._layout.local_ranges(queries), self._keys.local_ranges(keys))
        return (
            _rectangles(queries, keys)
            if self.window is None
            else _window_blocks(queries, keys, self.window)
        )


@remembered
def rank_attention_plan(
    boundaries_BD: Tensor,
    batch_size: int,
    seq_len: int,
    place: RingPlace,
    scores: Scores = FULL_SCORES,
    kv_boundaries_BD: Tensor | None = None,
    kv_len: int = 0,
) -> RankAttentionPlan:
    """The plan of a rank, for sequences with these boundaries.

    Those of keys: for attention without a causal mask.
    """
    layout, ring_degree, rank = place
    queries = batch_layout(boundaries_BD, batch_size, seq_len, layout, ring_degree)
    keys = None
    if kv_boundaries_BD is not None:
        require_keys(boundaries_BD, kv_boundaries_BD)
        keys = batch_layout(kv_boundaries_BD, batch_size, kv_len, layout, ring_degree)
    return RankAttentionPlan(queries, rank, scores=scores, keys=keys)


def plan_of(
    boundaries_BD: Tensor,
    batch_size: int,
    seq_len: int,
    kv_len: int,
    place: RingPlace,
    scores: Scores,
) -> RankAttentionPlan:
    """The plan of a rank for boundaries of `models.attention_core.AttentionCore`; full sequences
    have `kv_len` keys.
    """
    queries_BD, keys_BD = split_boundaries(boundaries_BD)
    keys = () if keys_BD is None else (keys_BD, kv_len)
    return rank_attention_plan(queries_BD, batch_size, seq_len, place, scores, *keys)


def _rectangles(queries: Spans, keys: Spans) -> Tensor:
    """Blocks without a window, for keys that are held in their order. Adjacent blocks are joined.

    Query spans with the same last key are adjacent and in the same document, namely that of the
    key.
    """
    if not len(keys):
        return torch.empty(0, 5, dtype=torch.int64, device="cpu")
    # Keys are in sequence order, so those between the start of a document and a query span are one
    # range, whichever ranks sent them.
    places = torch.cat((keys.local_start, keys.local_end[-1:]))
    k0, k1 = (
        places[torch.searchsorted(keys.start, x)] for x in (queries.document_start, queries.start)
    )
    has_keys = k0 < k1
    queries = queries[has_keys]
    k0 = k0[has_keys]
    k1 = k1[has_keys]
    first = is_first_of_run(k1)
    last = _is_last(first)
    tokens_R2 = torch.stack((queries.local_start[first], queries.local_end[last]), dim=1)
    return block_rows(tokens_R2, torch.stack((k0[first], k1[first]), dim=1))


def _window_blocks(queries: Spans, keys: Spans, window: int) -> Tensor:
    # From the first key span that ends after the oldest visible key to the last that begins before
    # the queries.
    first = torch.searchsorted(
        keys.end, torch.maximum(queries.document_start, queries.start - window + 1), right=True
    )
    counts = (torch.searchsorted(keys.start, queries.start) - first).clamp(min=0)
    queries = queries[torch.repeat_interleave(counts)]
    keys = keys[concatenated_ranges(first, counts)]
    queries_P2, keys_P2 = (torch.stack((each.start, each.end), dim=1) for each in (queries, keys))
    shift_P2 = torch.stack(
        (queries.local_start - queries.start, keys.local_start - keys.start), dim=1
    )
    rows_R5 = rows_before(queries_P2, keys_P2, window, shift_P2=shift_P2)
    # Neighbouring keys extend a block of the same queries.
    q0, q1, k0, k1, mask = rows_R5.unbind(1)
    starts = (
        is_first_of_run(q0)
        | is_first_of_run(q1)
        | (mask != FULL)
        | (mask.roll(1) != FULL)
        | (k0 != k1.roll(1))
    )
    # `roll` compares the first row with the last.
    starts[:1] = True
    return torch.cat((rows_R5[starts, :3], rows_R5[_is_last(starts), 3:]), dim=1)


def _is_last(is_first: Tensor) -> Tensor:
    """Whether an element is the last of a run, given which are the first."""
    return is_first.roll(-1)
