r"""The score blocks that each rank computes: pure functions of the shard layouts of a batch's sequences.

Of two disjoint spans of a sequence, either all pairs attend or none: a document that reaches from one span into the
other covers everything between them. Blocks with remote keys are therefore unmasked rectangles. A rank holds its own
keys in sequence order, so they need plain causal attention inside documents. There are no masks, no empty query rows
and no wasted FLOPs, for documents of any length. A window cuts the blocks further (`models/score_blocks.py`).

    headtail, 2 ranks: rank 0 holds chunks 0 and 3, rank 1 holds chunks 1 and 2

                     keys   0 3   1 2
    queries of rank 0:  0   \     . .       own keys: causal; rank 1's keys: all of them, for the second half of the queries
                        3   x \   x x

Token indices count over all sequences of the batch, concatenated as each rank holds them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, groupby

import torch
from torch import Tensor

from models.score_blocks import ScoreBlock, ScoreBlocks, concatenated_ranges, to_device, window_blocks
from parallelisms.context.shard_layout import SeqLayout, TokenSpan


class RankAttentionPlan:
    """The score blocks of one rank for one batch, computed once for all layers that see as many keys.

    `window`: the keys that a query sees at most, its own included.
    """

    def __init__(self, layouts: Sequence[SeqLayout], rank: int, *, window: int | None = None) -> None:
        self.ring_degree, self.rank, self.window = layouts[0].ring_degree, rank, window
        lengths = [layout.num_tokens // layout.ring_degree for layout in layouts]
        self.tokens_per_rank = sum(lengths)
        self._sequences = [*zip(accumulate(lengths, initial=0), layouts, strict=False)]
        """Each sequence's offset among the tokens of a rank, and its layout."""
        self._remote_kv_index: dict[torch.device, Tensor] = {}
        self._halo_index: dict[torch.device, tuple[Tensor, ...]] = {}

    @cached_property
    def local_blocks(self) -> ScoreBlocks:
        """Blocks of the rank's own tokens, which together cover them.

        One causal block per document, whose tokens are contiguous on the rank. In a document longer than the window, one
        per span, and those between spans.
        """
        blocks = []
        for offset, layout in self._sequences:
            for _, document_spans in groupby(layout.spans(self.rank), key=lambda span: span.document_start):
                spans = list(document_spans)
                if self.window is None or spans[-1].end - spans[0].start <= self.window:
                    spans = [spans[0]._replace(length=spans[-1].local_end - spans[0].local_start)]
                for span in spans:
                    start, end = offset + span.local_start, offset + span.local_end
                    blocks.append(ScoreBlock(start, end, start, end, "causal"))
                if len(spans) > 1:
                    blocks += _shifted(_score_blocks(spans, spans, self.window), offset, offset)
        return ScoreBlocks(blocks, window=self.window)

    @cached_property
    def ring_step_blocks(self) -> list[ScoreBlocks]:
        """Blocks with the keys that the rank receives in ring steps 1, 2, ... (step 0 is its own keys)."""
        return [self.source_blocks((self.rank - step) % self.ring_degree) for step in range(1, self.ring_degree)]

    def source_blocks(self, source: int) -> ScoreBlocks:
        """Blocks with the keys of another rank, `source`."""
        return ScoreBlocks(
            block
            for offset, layout in self._sequences
            for block in _shifted(
                _score_blocks(layout.spans(self.rank), layout.spans(source), self.window), offset, offset
            )
        )

    @cached_property
    def remote_blocks(self) -> ScoreBlocks:
        """Blocks with the keys that `remote_kv_index` selects."""
        blocks = list[ScoreBlock]()
        num_keys = 0
        for offset, layout in self._sequences:
            keys = _laid_out(span for _, span in _remote_spans(layout, self.rank, self.window))
            blocks += _shifted(_score_blocks(layout.spans(self.rank), keys, self.window), offset, num_keys)
            num_keys += sum(span.length for span in keys)
        return ScoreBlocks(blocks)

    def remote_kv_index(self, device: torch.device) -> Tensor:
        """int64 [2, Y]: the remote keys that the rank's queries attend to, in the order of each sequence; their values.

        Indices into the gathered KV [ranks, 2, tokens], flattened.
        """
        if device not in self._remote_kv_index:
            key_ranges = [
                (2 * source * self.tokens_per_rank + offset + span.local_start, span.length)
                for offset, layout in self._sequences
                for source, span in _remote_spans(layout, self.rank, self.window)
            ]
            keys = concatenated_ranges([start for start, _ in key_ranges], [length for _, length in key_ranges])
            self._remote_kv_index[device] = to_device(torch.stack((keys, keys + self.tokens_per_rank)), device)
        return self._remote_kv_index[device]

    # ---- a halo: ranks send each other the keys that are needed, and no others

    @cached_property
    def max_halo_tokens(self) -> int:
        """The most keys that a rank needs from the others. Much cheaper than `halo_tokens`."""
        layouts = [layout for _, layout in self._sequences]
        return max(
            sum(_num_remote_keys(layout, rank, self.window) for layout in layouts) for rank in range(self.ring_degree)
        )

    @cached_property
    def _halos(self) -> list[list[list[tuple[int, int]]]]:
        """[receiver][sender]: (first token on the sender, length) of the keys that the receiver needs."""
        halos: list[list[list[tuple[int, int]]]] = [
            [[] for _ in range(self.ring_degree)] for _ in range(self.ring_degree)
        ]
        for receiver, of_receiver in enumerate(halos):
            for offset, layout in self._sequences:
                for source, span in _remote_spans(layout, receiver, self.window):
                    of_receiver[source].append((offset + span.local_start, span.length))
        return halos

    @cached_property
    def halo_tokens(self) -> list[list[int]]:
        """[receiver][sender]: the number of keys sent."""
        return [[sum(length for _, length in spans) for spans in of_receiver] for of_receiver in self._halos]

    def halo_index(self, device: torch.device) -> tuple[Tensor, ...]:
        """int64: for each receiver, the tokens of this rank that it needs."""
        if device not in self._halo_index:
            sent = [of_receiver[self.rank] for of_receiver in self._halos]
            self._halo_index[device] = tuple(
                to_device(concatenated_ranges([start for start, _ in spans], [length for _, length in spans]), device)
                for spans in sent
            )
        return self._halo_index[device]

    @cached_property
    def halo_blocks(self) -> ScoreBlocks:
        """Blocks with the keys as they are received: by sender, and by sequence."""
        starts = [*accumulate(self.halo_tokens[self.rank], initial=0)]
        blocks = list[ScoreBlock]()
        for offset, layout in self._sequences:
            keys = list[TokenSpan]()
            for source, span in _remote_spans(layout, self.rank, self.window):
                keys.append(span._replace(local_start=starts[source]))
                starts[source] += span.length
            blocks += _shifted(_score_blocks(layout.spans(self.rank), keys, self.window), offset, 0)
        return ScoreBlocks(blocks)


def permutation(layout: SeqLayout) -> Tensor:
    """int64 [T]: the sequence's tokens, rank by rank; `x[permutation].chunk(ring_degree)[rank]` is a rank's shard."""
    spans = [span for rank in range(layout.ring_degree) for span in layout.spans(rank)]
    return concatenated_ranges([span.start for span in spans], [span.length for span in spans])


def _needed_keys(layout: SeqLayout, rank: int, window: int | None) -> list[range]:
    """The keys before each span of the rank that its queries attend to: ascending, disjoint, each in one document."""
    needed, document_start = list[range](), -1
    for span in layout.spans(rank):
        start = span.document_start if window is None else max(span.document_start, span.start - window + 1)
        if span.document_start == document_start and needed[-1].stop >= start:
            start = needed.pop().start
        needed.append(range(start, span.start))
        document_start = span.document_start
    return needed


def _num_remote_keys(layout: SeqLayout, rank: int, window: int | None) -> int:
    """Those of `_needed_keys` that other ranks hold; looks at the rank's own spans only."""
    own = layout.spans(rank)
    starts, num_keys = [span.start for span in own], 0
    for keys in _needed_keys(layout, rank, window):
        num_keys += len(keys)
        for span in own[bisect_right(starts, keys.start - 1) : bisect_left(starts, keys.stop)]:
            num_keys -= min(span.end, keys.stop) - span.start
        before = bisect_right(starts, keys.start - 1) - 1
        if before >= 0:  # A span that reaches into the range.
            num_keys -= max(0, min(own[before].end, keys.stop) - keys.start)
    return num_keys


@lru_cache(maxsize=8)
def _all_spans(layout: SeqLayout) -> tuple[list[int], list[tuple[int, TokenSpan]]]:
    """The starts of all ranks' spans, and (rank, span), in sequence order."""
    spans = [(rank, span) for rank in range(layout.ring_degree) for span in layout.spans(rank)]
    spans.sort(key=lambda rank_span: rank_span[1].start)
    return [span.start for _, span in spans], spans


def _remote_spans(layout: SeqLayout, rank: int, window: int | None) -> Iterator[tuple[int, TokenSpan]]:
    """(source rank, span) of the remote keys that the rank's queries attend to, in sequence order."""
    starts, spans = _all_spans(layout)
    for keys in _needed_keys(layout, rank, window):
        first = bisect_right(starts, keys.start) - 1
        for source, span in spans[first : bisect_left(starts, keys.stop)]:
            start, end = max(span.start, keys.start), min(span.end, keys.stop)
            if source != rank and start < end:
                local_start = span.local_start + start - span.start
                yield source, TokenSpan(local_start, start, end - start, span.document_start)


def _laid_out(spans: Iterable[TokenSpan]) -> list[TokenSpan]:
    """The spans, one after the other."""
    laid_out, start = list[TokenSpan](), 0
    for span in spans:
        laid_out.append(span._replace(local_start=start))
        start += span.length
    return laid_out


def _shifted(blocks: Iterable[ScoreBlock], queries: int, keys: int) -> Iterator[ScoreBlock]:
    for q0, q1, k0, k1, mask in blocks:
        yield ScoreBlock(queries + q0, queries + q1, keys + k0, keys + k1, mask)


def _score_blocks(queries: Sequence[TokenSpan], keys: Sequence[TokenSpan], window: int | None) -> Iterator[ScoreBlock]:
    """Blocks of each query span with the earlier keys of its document."""
    if window is None:
        yield from _rectangles(queries, keys)
        return
    by_document = {start: list(spans) for start, spans in groupby(keys, key=lambda span: span.document_start)}
    for query in queries:
        pending_block: ScoreBlock | None = None
        """Of all queries, which neighbouring keys may extend."""
        for key in by_document.get(query.document_start, ()):
            if key.start < query.start:
                pairs = window_blocks(range(query.start, query.end), range(key.start, key.end), window)
                for block in _shifted(pairs, query.local_start - query.start, key.local_start - key.start):
                    if pending_block and _are_one(pending_block, block):
                        pending_block = pending_block._replace(k1=block.k1)
                        continue
                    if pending_block:
                        yield pending_block
                    pending_block = block
        if pending_block:
            yield pending_block


def _are_one(block: ScoreBlock, following: ScoreBlock) -> bool:
    """Whether two blocks are a rectangle."""
    return (block.q0, block.q1, block.k1, block.mask) == (*following[:3], "full") and following.mask == "full"


def _rectangles(queries: Sequence[TokenSpan], keys: Sequence[TokenSpan]) -> Iterator[ScoreBlock]:
    """Without a window. Adjacent blocks are joined.

    Query spans with the same last key are adjacent and in the same document, namely that of the key.
    """
    starts = [span.start for span in keys]
    ends = [span.local_start for span in keys] + [keys[-1].local_end if keys else 0]
    pending_block: ScoreBlock | None = None
    for span in queries:
        k0 = ends[bisect_left(starts, span.document_start)]
        k1 = ends[bisect_left(starts, span.start)]
        if k1 == k0:
            continue
        if pending_block and pending_block.k1 == k1:
            pending_block = pending_block._replace(q1=span.local_end)
            continue
        if pending_block:
            yield pending_block
        pending_block = ScoreBlock(span.local_start, span.local_end, k0, k1)
    if pending_block:
        yield pending_block
