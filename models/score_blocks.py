"""The score matrix as rectangular blocks, and a sliding window as blocks that need no mask of
their own.

A block covers all pairs of its queries and keys or, if it is square, those of a triangle: `causal`
the keys up to each query's place, `flipped` those from it on, which is causal attention of both in
reversed order. A window of w tokens is made of these three:

    w = 4     keys  0 1 2 3 4 5 6 7
    queries 0       c                   c  causal squares of w tokens
            1       c c                 f  flipped squares of w - 1 tokens, with the keys before
            2       c c c
            3       c c c c
            4         f f f c
            5           f f c c
            6             f c c c
            7               c c c c

Blocks are rows of an int64 tensor on the host: a sequence may have a hundred thousand, too many
for Python.

Shape suffixes: X query tokens and Y key tokens (all sequences of a batch concatenated), R blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from models.kernel_choice import LONG_TOKENS, planned_length
from models.ranges import concatenated_ranges
from models.score_pairs import FULL_SCORES, Scores

Mask = Literal["full", "causal", "flipped"]
MASKS: tuple[Mask, ...] = get_args(Mask)
FULL, CAUSAL, FLIPPED = range(len(MASKS))
TokenIndex = slice | Tensor
"""A range of tokens, or distinct int64 indices."""


class ScoreBlock(NamedTuple):
    """Queries [q0, q1) and keys [k0, k1)."""

    q0: int
    q1: int
    k0: int
    k1: int
    mask: Mask = "full"

    def shape(self) -> tuple[int, int, Mask]:
        return self.q1 - self.q0, self.k1 - self.k0, self.mask


class ScoreBlocks:
    """Blocks of the score matrix; validated once for all layers.

    `scores`: how they are formed. The window is that of causal blocks; only kernels with windows
    take such blocks, and `without_window` are the same pairs for the others. Raises ValueError for
    an empty block, and for one that is causal or flipped and not square.
    """

    def __init__(
        self,
        blocks: Tensor | Iterable[tuple[int, int, int, int] | ScoreBlock],
        *,
        causal: bool = False,
        scores: Scores = FULL_SCORES,
    ) -> None:
        """`blocks`: also int64 [R, 5] on the CPU, the last column a mask's place in `MASKS`.

        `causal`: all blocks are.
        """
        if not isinstance(blocks, Tensor):
            named = [ScoreBlock(*block) for block in blocks]
            rows = [(*block[:4], CAUSAL if causal else MASKS.index(block.mask)) for block in named]
            blocks = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 5)
        self._rows_R5 = blocks
        q0, q1, k0, k1, mask = blocks.unbind(1)
        queries = q1 - q0
        keys = k1 - k0
        # The CPU kernel crashes on length zero; kernels disagree on the diagonal of a block that
        # is not square.
        if rows := blocks[torch.minimum(queries, keys) <= 0].tolist():
            raise ValueError(
                f"{_named(rows[0])} is empty: attention needs at least one query and one key"
            )
        if rows := blocks[(mask != FULL) & (queries != keys)].tolist():
            raise ValueError(
                f"{_named(rows[0])} is {MASKS[rows[0][4]]}, and must have as many queries as keys"
            )
        self._is_long = torch.zeros_like(mask, dtype=torch.bool)
        """Whether each block is causal, and longer than the window."""
        if scores.window is not None:
            self._is_long = (mask == CAUSAL) & (queries > scores.window)
        self.scores = scores if bool(self._is_long.any()) else scores._replace(window=None)
        """Scores without the window, if no block is longer."""
        self._varlen_batches: dict[torch.device, list[VarlenBatch]] = {}

    def __len__(self) -> int:
        return len(self._rows_R5)

    @property
    def window(self) -> int | None:
        return self.scores.window

    @cached_property
    def blocks(self) -> tuple[ScoreBlock, ...]:
        *columns, masks = (column.tolist() for column in self._rows_R5.unbind(1))
        return tuple(map(ScoreBlock, *columns, map(MASKS.__getitem__, masks)))

    @cached_property
    def disjoint_tokens(self) -> tuple[int, int] | None:
        """Numbers of queries and keys in the blocks, if no token is in two of them and none is
        reversed: a block's results are then final. Else None.
        """
        queries_R2 = self._rows_R5[:, :2]
        keys_R2 = self._rows_R5[:, 2:4]
        mask_R = self._rows_R5[:, 4]
        overlaps = (
            bool(_places_in_overlaps(ranges_R2).any()) for ranges_R2 in (queries_R2, keys_R2)
        )
        if bool((mask_R == FLIPPED).any()) or any(overlaps):
            return None
        return int(queries_R2.diff().sum()), int(keys_R2.diff().sum())

    @cached_property
    def single_and_longer(self) -> tuple[ScoreBlocks, ScoreBlocks]:
        """(the blocks of a single query or key, all others)."""
        return self._divided(self._shorter_sides > 1)

    @cached_property
    def short_and_long(self) -> tuple[ScoreBlocks, ScoreBlocks]:
        """(blocks for calls of many, blocks that are worth a call each). With a window all are
        short.

        Of the long ones, a rectangle has lengths for which kernels have plans; a causal block need
        not have them, because a longer call gives the same results.
        """
        if self.window is not None:
            return self, self._of(self._rows_R5[:0])
        is_long = self._shorter_sides >= LONG_TOKENS
        takes_a_call = [_fits_a_plan(*row) for row in self._rows_R5[is_long].tolist()]
        # A copy selects, because the assignment changes what it selects by.
        is_long[is_long.clone()] = torch.tensor(takes_a_call, dtype=torch.bool, device="cpu")
        return self._divided(is_long)

    @property
    def _shorter_sides(self) -> Tensor:
        q0, q1, k0, k1, _ = self._rows_R5.unbind(1)
        return torch.minimum(q1 - q0, k1 - k0)

    def _divided(self, is_second_R: Tensor) -> tuple[ScoreBlocks, ScoreBlocks]:
        return self._of(self._rows_R5[~is_second_R]), self._of(self._rows_R5[is_second_R])

    def _of(self, rows_R5: Tensor) -> ScoreBlocks:
        """Blocks of the same scores, of which none is longer than the window."""
        return ScoreBlocks(rows_R5, scores=self.scores._replace(window=None))

    @cached_property
    def without_window(self) -> ScoreBlocks:
        """Blocks of the same pairs that need no window."""
        if self.window is None:
            return self
        q0, q1, k0, _, _ = self._rows_R5[self._is_long].unbind(1)
        # Strips of as many queries as the window has keys.
        counts = (q1 - q0 + self.window - 1) // self.window
        start = concatenated_ranges(torch.zeros_like(counts), counts) * self.window
        shift_P2 = torch.stack((q0, k0), dim=1).repeat_interleave(counts, dim=0)
        strips_P2 = torch.stack(
            (start, torch.minimum(start + self.window, (q1 - q0).repeat_interleave(counts))), dim=1
        )
        squares = block_rows(strips_P2 + shift_P2[:, :1], strips_P2 + shift_P2[:, 1:], CAUSAL)
        later = start > 0
        keys_P2 = torch.stack((start - self.window, start), dim=1)
        before = rows_before(
            strips_P2[later], keys_P2[later], self.window, shift_P2=shift_P2[later]
        )
        return self._of(torch.cat((self._rows_R5[~self._is_long], squares, before)))

    def varlen_batches(self, device: torch.device) -> list[VarlenBatch]:
        """The blocks grouped into varlen calls, within each of which queries and keys are
        disjoint; cached by device.
        """
        if device not in self._varlen_batches:
            self._varlen_batches[device] = [batch.to(device) for batch in self.host_varlen_batches]
        return self._varlen_batches[device]

    @cached_property
    def host_varlen_batches(self) -> list[VarlenBatch]:
        batches = []
        for mask in range(len(MASKS)):
            rows_R5 = self._rows_R5[self._rows_R5[:, 4] == mask]
            # Two blocks with queries in common differ in the first, with keys in common in the
            # second.
            places = (_places_in_overlaps(rows_R5[:, :2]), _places_in_overlaps(rows_R5[:, 2:4]))
            # One number per pair of places: blocks with equal numbers share no token, and make one
            # call.
            call_R = places[0] * len(rows_R5) + places[1]
            batches += [
                _varlen_batch(rows_R5[call_R == call], MASKS[mask])
                for call in call_R.unique().tolist()
            ]
        return batches


def _named(row: Sequence[int]) -> ScoreBlock:
    q0, q1, k0, k1, mask = row
    return ScoreBlock(q0, q1, k0, k1, MASKS[mask])


def _fits_a_plan(q0: int, q1: int, k0: int, k1: int, mask: int) -> bool:
    if mask != FULL:
        return mask == CAUSAL
    return all(planned_length(length) == length for length in (q1 - q0, k1 - k0))


def block_rows(queries_R2: Tensor, keys_R2: Tensor, mask: int = FULL) -> Tensor:
    """int64 [R, 5]: blocks of these queries and keys, [start, end)."""
    return torch.cat((queries_R2, keys_R2, queries_R2.new_full((len(queries_R2), 1), mask)), dim=1)


def document_rows(queries_R2: Tensor, keys_R2: Tensor) -> Tensor:
    """int64 [R, 5]: all pairs of the queries and the keys of each document, for documents that
    have both.
    """
    has_both = torch.minimum(queries_R2.diff(), keys_R2.diff()).flatten() > 0
    return block_rows(queries_R2[has_both], keys_R2[has_both])


def rows_before(
    queries_P2: Tensor, keys_P2: Tensor, window: int | None, *, shift_P2: Tensor
) -> Tensor:
    """int64 [R, 5], pair by pair: the blocks of spans [start, end) of a document with spans that
    end before them.

    Spans are given by place in the document, which `shift_P2` moves to (query, key) indices. A
    query sees keys that are less than `window` tokens before it (None: however far).
    """
    to_query = shift_P2[:, :1]
    to_key = shift_P2[:, 1:]
    if window is None:
        return block_rows(queries_P2 + to_query, keys_P2 + to_key)
    start, stop = queries_P2.unbind(1)
    first, end = keys_P2.unbind(1)
    # The last key `end - 1` is seen by queries before `end - 1 + window`; later ones see none.
    stop = torch.minimum(stop, end + window - 1)
    # Queries before `sliding` see all keys.
    sliding = torch.minimum(stop, torch.maximum(start, first + window))
    # From `sliding` on, each query loses the key that the one before saw first: a flipped square,
    # and beside it a rectangle. A single query makes a rectangle only.
    is_triangle = stop - sliding > 1
    first_of_triangle = sliding - window + 1
    end_of_triangle = stop - window + 1
    rest = torch.where(is_triangle, end_of_triangle, first_of_triangle)
    parts = [
        (start, sliding, first, end, FULL, start < sliding),
        (sliding, stop, first_of_triangle, end_of_triangle, FLIPPED, is_triangle),
        (sliding, stop, rest, end, FULL, (sliding < stop) & (rest < end)),
    ]
    rows_P35 = torch.stack(
        [
            block_rows(
                torch.stack(part[:2], dim=1) + to_query,
                torch.stack(part[2:4], dim=1) + to_key,
                part[4],
            )
            for part in parts
        ],
        dim=1,
    )
    return rows_P35[torch.stack([part[5] for part in parts], dim=1)]


# ---- varlen calls of several blocks


class VarlenBatch(NamedTuple):
    """Arguments of one varlen flash attention call; flipped blocks have their tokens in reversed
    order.
    """

    queries: TokenIndex
    keys: TokenIndex
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    mask: Mask

    @property
    def lengths(self) -> tuple[Tensor, Tensor, int, int]:
        return self[2:6]

    def to(self, device: torch.device) -> VarlenBatch:
        queries, keys = (
            to_device(x, device) if isinstance(x, Tensor) else x for x in (self.queries, self.keys)
        )
        cu_seqlens = (to_device(self.cu_seqlens_q, device), to_device(self.cu_seqlens_k, device))
        return VarlenBatch(
            queries, keys, *cu_seqlens, self.max_seqlen_q, self.max_seqlen_k, self.mask
        )


def _places_in_overlaps(ranges_R2: Tensor) -> Tensor:
    """int64 [R]: each range's place among those that it overlaps, directly or through others.

    Equal ones are disjoint.
    """
    start, order = ranges_R2[:, 0].sort(stable=True)
    # In order of their starts, a range is apart if it starts where all before it have ended.
    reached = ranges_R2[order, 1].cummax(0).values
    number = torch.arange(len(order), device="cpu")
    first = number.new_ones(1, dtype=torch.bool)
    others = start[1:] >= reached[:-1]
    is_apart = torch.cat((first, others))[: len(order)]
    # The place is the distance to the last range that was apart.
    place = torch.empty_like(number)
    place[order] = number - (number * is_apart).cummax(0).values
    return place


def _varlen_batch(rows_R5: Tensor, mask: Mask) -> VarlenBatch:
    queries, cu_seqlens_q, max_seqlen_q = _varlen_spans(rows_R5[:, :2], flip=mask == "flipped")
    keys, cu_seqlens_k, max_seqlen_k = _varlen_spans(rows_R5[:, 2:4], flip=mask == "flipped")
    return VarlenBatch(queries, keys, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask)


def _varlen_spans(spans_R2: Tensor, *, flip: bool) -> tuple[TokenIndex, Tensor, int]:
    """The tokens of the spans, cu_seqlens and the longest length."""
    starts, ends = spans_R2.unbind(1)
    lengths = ends - starts
    cu_seqlens = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int()
    tokens: TokenIndex = slice(int(starts[0]), int(ends[-1]))
    if flip:
        # Minus the reversed tokens of each span ascend.
        tokens = concatenated_ranges(1 - ends, lengths).neg()
    elif bool((ends[:-1] != starts[1:]).any()):
        tokens = concatenated_ranges(starts, lengths)
    return tokens, cu_seqlens, int(lengths.max())


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copies without blocking the host; a copy from pageable memory would wait for the device's
    queue.
    """
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
