"""Tiles and chunks of tokens, loops over them, and sums of weight gradients.

Tiling bounds the transient memory of recomputation (ALST, Bekman et al., 2025). Tokens interact
only in attention, so every tile length gives exact results.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

from torch import Tensor

from models.dtypes import accumulation_dtype

Part = TypeVar("Part")
Result = TypeVar("Result")
Likeness = Callable[[Any], Hashable]
"""Equal for parts that take the same operations on tensors of the same shapes, wherever they are
in the loop.
"""
Loop = Callable[[Sequence[Any], Likeness], Iterator[Any]]

CompilePiece = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Compiles a function, once for all blocks."""


def eager(piece: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves a piece as it is."""
    return piece


_loops: list[Loop] = []


def split_into_tiles(num_tokens: int, max_tokens: int | None = None) -> list[slice]:
    """The fewest tiles of at most `max_tokens`, as equal as possible: a small last tile would
    waste the device.
    """
    count = 1 if max_tokens is None else -(-num_tokens // max(1, max_tokens))
    starts = [-(-num_tokens * index // count) for index in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(starts)]


def bytes_per_token(dim: int, ffn_dim: int, itemsize: int, *, rows: int = 0) -> int:
    """Peak bytes per token in the feed-forward's backward pass, at `itemsize` bytes per number.

    Gate, up and the buffers of their gradients; then these gradients and two input gradients; plus
    the normed input. With experts, for each of a token's `rows`; besides them, its input and the
    gradient of its output as rows.
    """
    numbers = 2 * ffn_dim + 2 * max(ffn_dim, dim)
    return (rows * (numbers + 2 * dim) + 2 * dim if rows else numbers + dim) * itemsize


class TokenTiles:
    """Tiles of a rank's S tokens, and their positions among all T tokens, which are ordered by tp
    rank.
    """

    def __init__(self, local_tokens: int, total_tokens: int, max_tile_tokens: int | None) -> None:
        self.num_tp_shards = total_tokens // local_tokens
        self.total_tokens = total_tokens
        self.tiles = split_into_tiles(
            local_tokens,
            None if max_tile_tokens is None else max_tile_tokens // self.num_tp_shards,
        )

    def select(self, x_BT: Tensor, tile: slice, *, dim: int = 1) -> Tensor:
        """The tokens of a tile of every tp rank: [B, T, ...] -> [B, num_tp_shards * C, ...]."""
        by_rank: Tensor = x_BT.unflatten(dim, (self.num_tp_shards, -1))
        of_tile: Tensor = by_rank.narrow(dim + 1, tile.start, tile.stop - tile.start)
        return of_tile.flatten(dim, dim + 1)

    def each(self, *beside: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """Every tile, with what `beside` has for it."""
        return each([*zip(self.tiles, *beside, strict=True)], lambda part: _size(part[0]))

    def map_tiles(
        self,
        compute: Callable[..., Sequence[Tensor]],
        *beside: Sequence[Any],
        gathered: bool = False,
    ) -> list[Tensor]:
        """Runs `compute` on every tile, with what `beside` has for it, and concatenates its
        outputs along the tokens.
        """
        outputs: list[Tensor] = []
        num_shards = self.num_tp_shards if gathered else 1
        for tile, *others in self.each(*beside):
            results = compute(tile, *others)
            # One tile is everything, so its outputs need no copy.
            if len(self.tiles) == 1:
                return [*results]
            if not outputs:
                num_tokens = self.total_tokens * num_shards // self.num_tp_shards
                outputs = [x.new_empty(x.shape[0], num_tokens, *x.shape[2:]) for x in results]
            for x, result in zip(outputs, results, strict=True):
                # Gathered tokens are ordered by tp rank: a tile is a range of the tokens of each.
                x.unflatten(1, (num_shards, -1))[:, :, tile] = result.unflatten(
                    1, (num_shards, -1)
                )
        return outputs


class GradAccumulator:
    """Sums weight gradients over tiles and head groups, in `accumulation_dtype`; a single one is
    kept as it is.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._dtypes = {name: weight.dtype for name, weight in weights.items()}
        self._sums: dict[str, Tensor] = {}

    def add(self, grads: Mapping[str, Tensor]) -> None:
        """Takes the gradients over: they may be overwritten."""
        for name, grad in grads.items():
            # Only a second gradient widens the sum: a single tile costs no float32 copy.
            if name in self._sums:
                self._sums[name] = self._sums[name].to(accumulation_dtype(grad.dtype)).add_(grad)
            else:
                self._sums[name] = grad

    def pop_grads(self) -> list[Tensor]:
        """Each gradient in its weight's dtype and order.

        Raises ValueError with the names of weights without one.
        """
        if lost := self._dtypes.keys() - self._sums.keys():
            raise ValueError(
                f"recomputation found no gradient of {', '.join(sorted(lost))}: no piece uses it"
            )
        return [self._sums.pop(name).to(dtype) for name, dtype in self._dtypes.items()]


# ---- loops over parts that cost alike, of which a trace on fake tensors runs few


def each(parts: Sequence[Part], likeness: Likeness = lambda _: None) -> Iterator[Part]:
    """The parts, one after the other.

    No part may need what the body keeps of a certain other one.
    """
    return _loops[-1](parts, likeness) if _loops else iter(parts)


def map_each(
    compute: Callable[..., Result], parts: Sequence[slice | Tensor], *beside: Sequence[Any]
) -> list[Result]:
    """`compute` of every part, with what `beside` has for it, in order. Those of one size cost
    alike, so that parts that do not run have the result of one before.
    """
    sizes = [*map(_size, parts)]
    arguments = [*zip(parts, *beside, strict=True)]
    indices = each(range(len(parts)), sizes.__getitem__)
    results = {index: compute(*arguments[index]) for index in indices}
    latest: dict[Hashable, Result] = {}
    found = []
    for index, size in enumerate(sizes):
        if index in results:
            latest[size] = results[index]
        found.append(latest[size])
    return found


def _size(part: slice | Tensor) -> Hashable:
    return part.stop - part.start if isinstance(part, slice) else part.shape


def each_chunk(length: int, size: int) -> Iterator[slice]:
    """Chunks of `size` each; the last one may be shorter."""
    return each([slice(start, start + size) for start in range(0, length, size)])


@contextmanager
def loops_run_by(loop: Loop) -> Iterator[None]:
    """Until the end of the context, `loop` chooses which parts `each` gives.

    For fake tensors only.
    """
    _loops.append(loop)
    try:
        yield
    finally:
        _loops.pop()
