"""The score matrix as rectangular blocks, and a sliding window as blocks that need no mask of their own.

A block covers all pairs of its queries and keys or, if it is square, those of a triangle: `causal` the keys up to each
query's place, `flipped` those from it on, which is causal attention of both in reversed order. A window of w tokens is
made of these three:

    w = 4     keys  0 1 2 3 4 5 6 7
    queries 0       c                   c  causal squares of w tokens
            1       c c                 f  flipped squares of w - 1 tokens, with the keys before
            2       c c c
            3       c c c c
            4         f f f c
            5           f f c c
            6             f c c c
            7               c c c c

Shape suffixes: X query tokens and Y key tokens (all sequences of a batch concatenated).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Mask = Literal["full", "causal", "flipped"]
TokenIndex = slice | Tensor
"""A range of tokens, or distinct int64 indices."""


class ScoreBlock(NamedTuple):
    """Queries [q0, q1) and keys [k0, k1)."""

    q0: int
    q1: int
    k0: int
    k1: int
    mask: Mask = "full"

    @property
    def is_single(self) -> bool:
        """Whether it has a single query or key."""
        return min(self.q1 - self.q0, self.k1 - self.k0) == 1


class ScoreBlocks:
    """Blocks of the score matrix, ascending in their queries; validated once for all layers.

    `window`: how many keys a query of a causal block sees at most, its own included; only kernels with windows take
    such blocks, and `without_window` are the same pairs for the others. Raises ValueError for an empty block, and for one
    that is causal or flipped and not square.
    """

    def __init__(
        self,
        blocks: Iterable[tuple[int, int, int, int] | ScoreBlock],
        *,
        causal: bool = False,
        window: int | None = None,
    ) -> None:
        """`causal`: all blocks are."""
        self.blocks = tuple(ScoreBlock(*block[:4], "causal") if causal else ScoreBlock(*block) for block in blocks)
        self._varlen_batches: dict[torch.device, list[VarlenBatch]] = {}
        longest = 0
        # The CPU kernel crashes on length zero; kernels disagree on the diagonal of a block that is not square.
        for block in self.blocks:
            queries, keys = block.q1 - block.q0, block.k1 - block.k0
            if queries <= 0 or keys <= 0:
                raise ValueError(f"{block} is empty: attention needs at least one query and one key")
            if block.mask != "full" and queries != keys:
                raise ValueError(f"{block} is {block.mask}, and must have as many queries as keys")
            longest = max(longest, queries if block.mask == "causal" else 0)
        self.window = window if window is not None and window < longest else None

    @cached_property
    def is_diagonal(self) -> bool:
        """Whether all blocks are causal, of tokens that see no others: results of a block are final."""
        return all(block.mask == "causal" and block.q0 == block.k0 for block in self.blocks)

    @cached_property
    def by_length(self) -> tuple[ScoreBlocks, ScoreBlocks]:
        """(the blocks of a single query or key, all others)."""
        single = [block for block in self.blocks if block.is_single]
        return ScoreBlocks(single), ScoreBlocks([block for block in self.blocks if not block.is_single])

    @cached_property
    def without_window(self) -> ScoreBlocks:
        """The same pairs, in blocks that need no window."""
        if self.window is None:
            return self
        return ScoreBlocks(part for block in self.blocks for part in self._without_window(block))

    def _without_window(self, block: ScoreBlock) -> Iterator[ScoreBlock]:
        if block.mask != "causal":
            yield block
            return
        tokens = range(block.q1 - block.q0)
        for q0, q1, k0, k1, mask in window_blocks(tokens, tokens, self.window):
            yield ScoreBlock(block.q0 + q0, block.q0 + q1, block.k0 + k0, block.k0 + k1, mask)

    def varlen_batches(self, device: torch.device) -> list[VarlenBatch]:
        """The blocks grouped into varlen calls, within each of which queries and keys are disjoint; cached by device."""
        if device not in self._varlen_batches:
            batches: list[list[ScoreBlock]] = []
            for block in self.blocks:
                batch = next((batch for batch in batches if _goes_into(batch[-1], block)), None)
                if batch is None:
                    batches.append(batch := [])
                batch.append(block)
            self._varlen_batches[device] = [_varlen_batch(batch, device) for batch in batches]
        return self._varlen_batches[device]


def window_blocks(queries: range, keys: range, window: int | None) -> Iterator[ScoreBlock]:
    """The pairs of these tokens of one document, by place in it, in which the key is at most the query's own place and
    less than `window` tokens before it (None: however far).
    """
    # Rows from `sliding` on do not see the first key any more; rows before `keys.stop` see keys up to their own.
    sliding = keys.stop + queries.stop if window is None else keys.start + window
    start = max(queries.start, keys.start)
    end = queries.stop if window is None else min(queries.stop, keys.stop + window - 1)
    while start < end:
        stop = min([end, *(bound for bound in (sliding, keys.stop) if bound > start)])
        if window is not None and sliding <= start < keys.stop:
            stop = min(stop, start + window)
        # The first key of the first row, and that of the last row.
        first, last = (keys.start if window is None else max(keys.start, row - window + 1) for row in (start, stop - 1))
        is_triangle = start < keys.stop and stop - start > 1
        end_of_all = min(start + (not is_triangle), keys.stop)
        if last < end_of_all:
            yield ScoreBlock(start, stop, last, end_of_all)
        if is_triangle:
            yield ScoreBlock(start, stop, start, stop, "causal")
        if first < last:
            yield ScoreBlock(start, stop - 1, first, last, "flipped")
        start = stop


# ---- varlen calls of several blocks


class VarlenBatch(NamedTuple):
    """Arguments of one varlen flash attention call; flipped blocks have their tokens in reversed order."""

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


def _goes_into(last: ScoreBlock, block: ScoreBlock) -> bool:
    return last.mask == block.mask and last.q1 <= block.q0 and last.k1 <= block.k0


def _varlen_batch(blocks: list[ScoreBlock], device: torch.device) -> VarlenBatch:
    mask = blocks[0].mask
    flip = mask == "flipped"
    queries, cu_seqlens_q, max_seqlen_q = _varlen_spans([block[:2] for block in blocks], device, flip=flip)
    keys, cu_seqlens_k, max_seqlen_k = _varlen_spans([block[2:4] for block in blocks], device, flip=flip)
    return VarlenBatch(queries, keys, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask)


def _varlen_spans(spans: list[tuple[int, int]], device: torch.device, *, flip: bool) -> tuple[TokenIndex, Tensor, int]:
    """The tokens of the spans, cu_seqlens and the longest length."""
    starts, lengths = [start for start, _ in spans], [end - start for start, end in spans]
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cpu")
    tokens: TokenIndex = slice(starts[0], spans[-1][1])
    if flip:
        # Minus the reversed tokens of each span ascend.
        index = concatenated_ranges([-end + 1 for _, end in spans], lengths).neg()
        tokens = to_device(index, device)
    elif any(end != start for (_, end), (start, _) in pairwise(spans)):
        tokens = to_device(concatenated_ranges(starts, lengths), device)
    return tokens, to_device(cu_seqlens, device), max(lengths)


def concatenated_ranges(starts: list[int], lengths: list[int]) -> Tensor:
    """int64 on the CPU: `arange(start, start + length)` of every pair, concatenated."""
    start_tensor, length_tensor = torch.tensor([starts, lengths], dtype=torch.int64, device="cpu")
    offsets: Tensor = (start_tensor - (length_tensor.cumsum(0) - length_tensor)).repeat_interleave(length_tensor)
    return offsets + torch.arange(len(offsets), device="cpu")


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copies without blocking the host; a copy from pageable memory would wait for the device's queue."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
