"""Token dispatch: tokens to the rows of their experts, and back.

Every way is a linear map, and its gradient the way back.

Shape suffixes: N tokens of a tile on this rank, E model dim, K experts of a token, R rows, P
places of rows by expert, some of which may be padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from models.expert_config import most_places
from models.row_groups import RowGroups, RowPlaces, padded_ends, padded_shifts
from models.tiling import CompilePiece, eager


class Rows(NamedTuple):
    """Placement of a tile's tokens: row `n * top_k + k` is token n at its k-th expert."""

    top_k: int
    tokens: Tensor
    """[P], the token at each place: by expert, then by token."""
    place: Tensor
    """[R], the place of each row."""
    groups: RowGroups
    """Groups of this rank's experts, which may get rows from other ranks."""
    route: Any = None
    """State of the tile in a dispatcher that spans ranks; None on one rank."""

    @property
    def num_tokens(self) -> int:
        return len(self.place) // self.top_k


class TokenDispatcher(Protocol):
    """Brings tokens to their experts and back. `parallelisms.expert_parallel` sets one that spans
    ranks.

    `dispatch`, `wait`, `combine` and `shared` are differentiable.
    """

    tp_rank: int
    """Index of this rank's part of the tokens, among the tp ranks that share them."""
    tp_degree: int
    """Ranks that each hold a part of every expert, and each add the same share of its bias."""

    def agree(self, num_tiles: int) -> int:
        """The largest number of tiles of any rank. Collective; the host waits."""

    def rows(
        self,
        experts_NK: Sequence[Tensor],
        num_experts: int,
        *,
        padded: bool,
        compiled: CompilePiece = eager,
    ) -> list[Rows]:
        """Rows of each tile; every rank has the same number of tiles. Collective.

        `padded`: as a kernel for groups takes them. The host waits for the device, unless rows are
        padded and stay on the rank.
        """

    def dispatch(self, x_NE: Tensor, weight_NK: Tensor, rows: Rows) -> Any:
        """Starts to send tokens, and the weights of their experts."""

    def wait(self, pending: Any, rows: Rows) -> tuple[Tensor, Tensor]:
        """Tokens [P, E] and weights [P], sorted by expert; padding weighs nothing."""

    def combine(self, out_PE: Tensor, rows: Rows, *, is_needed: bool) -> Tensor:
        """[N, E]: the sum over each token's experts.

        If not `is_needed`, only its gradient is right.
        """

    def shared(self, x_NE: Tensor, run: Callable[[Tensor], Tensor], *, is_needed: bool) -> Tensor:
        """`run(x_NE)`, of which each tp rank computes a part.

        If not `is_needed`, only its gradient is right.
        """

    def sum_over_sequence(self, counts: Tensor) -> Tensor:
        """Sums counts in place, over the ranks that share the tokens of a sequence."""


class LocalDispatcher:
    """The dispatcher of a rank that has all experts, and all of each."""

    tp_rank = 0
    tp_degree = 1

    def agree(self, num_tiles: int) -> int:
        return num_tiles

    def rows(
        self,
        experts_NK: Sequence[Tensor],
        num_experts: int,
        *,
        padded: bool,
        compiled: CompilePiece = eager,
    ) -> list[Rows]:
        return own_rows(experts_NK, num_experts, padded=padded, compiled=compiled)

    def dispatch(self, x_NE: Tensor, weight_NK: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        return to_rows(x_NE, weight_NK, rows)

    def wait(self, pending: tuple[Tensor, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        del rows
        return pending

    def combine(self, out_PE: Tensor, rows: Rows, *, is_needed: bool) -> Tensor:
        return to_tokens(out_PE, rows, is_needed=is_needed)

    def shared(self, x_NE: Tensor, run: Callable[[Tensor], Tensor], *, is_needed: bool) -> Tensor:
        del is_needed
        return run(x_NE)

    def sum_over_sequence(self, counts: Tensor) -> Tensor:
        return counts


def own_rows(
    experts_NK: Sequence[Tensor],
    num_experts: int,
    *,
    padded: bool,
    compiled: CompilePiece = eager,
) -> list[Rows]:
    """Rows of each tile on a rank that has all experts. The host waits for the device, unless rows
    are padded.
    """
    if padded:
        return [padded_rows(experts, num_experts, compiled) for experts in experts_NK]
    ordered = [sort_by_expert(experts, num_experts) for experts in experts_NK]
    # One copy to the host for all tiles: each copy waits for the device.
    counts = torch.stack([counts_X for *_, counts_X in ordered]).tolist()
    return [
        rows._replace(groups=RowGroups(each))
        for (rows, _), each in zip(ordered, counts, strict=True)
    ]


def sort_by_expert(
    experts_NK: Tensor, num_experts: int, compiled: CompilePiece = eager
) -> tuple[Rows, Tensor]:
    """Rows without padding and without their groups, and how many each expert has, [X] on the
    device.
    """
    # Stable, so that the rows of an expert are in the order of their tokens on every run.
    top_k = experts_NK.shape[1]
    ordered_R, order_R = experts_NK.flatten().sort(stable=True)
    tokens_R, place_R, counts_X = compiled(places)(ordered_R, order_R, num_experts, top_k)
    return Rows(top_k, tokens_R, place_R, RowGroups(())), counts_X


def places(
    ordered_R: Tensor, order_R: Tensor, num_experts: int, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Token at each place and place of each row, [R], and rows of each expert [X], from the
    experts of rows in ascending order and the rows in that order.
    """
    return order_R // top_k, inverse_of(order_R), _counts(ordered_R, num_experts)


def padded_rows(experts_NK: Tensor, num_experts: int, compiled: CompilePiece = eager) -> Rows:
    """Rows padded for a kernel. The host knows only the number of places: the most that padding
    may need.
    """
    top_k = experts_NK.shape[1]
    ordered_R, order_R = experts_NK.flatten().sort(stable=True)
    tokens_P, place_R, ends_X = compiled(padded_places)(ordered_R, order_R, num_experts, top_k)
    return Rows(top_k, tokens_P, place_R, RowGroups((), ends_X))


def padded_places(
    ordered_R: Tensor, order_R: Tensor, num_experts: int, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`places` with padding, [P], and the ends of the groups, [X]."""
    counts_X = _counts(ordered_R, num_experts)
    ends_X = padded_ends(counts_X)
    place_R = (
        torch.arange(len(order_R), device=order_R.device)
        + padded_shifts(counts_X, ends_X)[ordered_R]
    )
    padded = RowPlaces.sorted(order_R, place_R, most_places(len(order_R), num_experts))
    return padded.source // top_k, padded.place, ends_X.int()


def _counts(ordered_R: Tensor, num_experts: int) -> Tensor:
    """Number of rows of each expert, [X], from the experts of rows in ascending order."""
    # `bincount` would make the host wait: its length depends on the largest value.
    experts_X = torch.arange(num_experts + 1, device=ordered_R.device)
    return torch.searchsorted(ordered_R, experts_X).diff()


def inverse_of(permutation: Tensor) -> Tensor:
    # A scatter inverts a permutation; `argsort` would sort.
    positions = torch.arange(len(permutation), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, positions)


def to_rows(x_NE: Tensor, weight_NK: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Copies tokens, and the weights of their experts, to places; padding gets some token, and no
    weight.
    """
    x_PE = linear_map(
        x_NE, lambda x: x.index_select(0, rows.tokens), lambda grad_PE: _sum(grad_PE, rows)
    )
    return x_PE, to_places(weight_NK.flatten(), rows.place, len(rows.tokens))


def to_tokens(out_PE: Tensor, rows: Rows, *, is_needed: bool = True) -> Tensor:
    """The sum of each token's rows."""
    skipped = None if is_needed else rows.num_tokens
    return linear_map(
        out_PE,
        lambda x: _sum(x, rows),
        lambda grad_NE: grad_NE.index_select(0, rows.tokens),
        skipped=skipped,
    )


def to_places(x_R: Tensor, place_R: Tensor, num_places: int) -> Tensor:
    """Rows at their places, [P], with zeros in between."""
    return linear_map(
        x_R,
        lambda x: x.new_zeros(num_places).scatter_(0, place_R, x),
        lambda grad_P: grad_P.index_select(0, place_R),
    )


def select(x: Tensor, index: Tensor, back: Tensor, *, is_needed: bool = True) -> Tensor:
    """`x[index]`; `back` is where each of x is among them.

    What is selected once more weighs nothing, and has no gradient.
    """
    skipped = None if is_needed else len(index)
    return linear_map(
        x,
        lambda each: each.index_select(0, index),
        lambda grad: grad.index_select(0, back),
        skipped=skipped,
    )


def _sum(row_PE: Tensor, rows: Rows) -> Tensor:
    """Sums the rows of each token in one kernel, which adds in float32, or float64 in float64, and
    rounds once.
    """
    return F.embedding_bag(rows.place.view(-1, rows.top_k), row_PE, mode="sum")


Map = Callable[[Tensor], Tensor]


def linear_map(x: Tensor, forward: Map, transpose: Map, *, skipped: int | None = None) -> Tensor:
    """`forward(x)`, whose gradient is `transpose(grad)`.

    `skipped`: the length of a result of which only the gradient is needed; `forward` does not run.
    """
    result: Tensor = LinearMap.apply(x, forward, transpose, skipped)
    return result


class LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, transpose: Map, skipped: int | None) -> Tensor:
        ctx.transpose = transpose
        # An expanded number takes no memory, and carries the graph all the same.
        return forward(x) if skipped is None else x.new_empty(()).expand(skipped, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.transpose(grads[0]), None, None, None
