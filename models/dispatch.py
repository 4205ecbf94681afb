"""Token dispatch: tokens to the rows of their experts, and back.

Every way is a linear map, and its gradient the way back.

Shape suffixes: N tokens of a tile on this rank, E model dim, K experts of a token, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Rows(NamedTuple):
    """Where the tokens of a tile go: slot `n * top_k + k` is token n at its k-th expert."""

    top_k: int
    slots: Tensor
    """[R], the slot of each row: by expert, then by token."""
    row_of_slot: Tensor
    """[R]."""
    counts: Sequence[int]
    """Rows of each expert of this rank, which may come from other ranks."""
    route: Any = None
    """What a dispatcher between ranks needs besides."""

    @property
    def num_tokens(self) -> int:
        return len(self.slots) // self.top_k


class TokenDispatcher(Protocol):
    """Brings tokens to their experts and back. `parallelisms.expert_parallel` sets one that spans ranks.

    `dispatch`, `wait`, `combine` and `shared` are differentiable.
    """

    tp_rank: int
    """Which part of the tokens this rank has, of those that tp ranks share."""
    tp_degree: int
    """Ranks that each have a part of every expert, and add its bias."""

    def agree(self, num_tiles: int) -> int:
        """The most tiles of any rank. Collective; the host waits."""

    def rows(self, experts_NK: Sequence[Tensor], num_experts: int) -> list[Rows]:
        """Of each tile, of which every rank has the same number. Collective; the host waits for the device."""

    def dispatch(self, x_NE: Tensor, weight_NK: Tensor, rows: Rows) -> Any:
        """Starts to send tokens, and the weights of their experts."""

    def wait(self, pending: Any, rows: Rows) -> tuple[Tensor, Tensor]:
        """Tokens [R, E] and weights [R], sorted by expert."""

    def combine(self, out_RE: Tensor, rows: Rows, *, is_needed: bool) -> Tensor:
        """[N, E]: the sum over the experts of each token. If not `is_needed`, only its gradient is right."""

    def shared(self, x_NE: Tensor, run: Callable[[Tensor], Tensor], *, is_needed: bool) -> Tensor:
        """`run(x_NE)`, of which each tp rank computes a part. If not `is_needed`, only its gradient is right."""

    def sum_over_sequence(self, counts: Tensor) -> Tensor:
        """In place, over the ranks that share the tokens of a sequence."""


class LocalDispatcher:
    """Of a rank that has all experts, and all of each."""

    tp_rank, tp_degree = 0, 1

    def agree(self, num_tiles: int) -> int:
        return num_tiles

    def rows(self, experts_NK: Sequence[Tensor], num_experts: int) -> list[Rows]:
        ordered = [sort_by_expert(experts, num_experts) for experts in experts_NK]
        counts = torch.stack([counts_X for *_, counts_X in ordered]).tolist()
        return [rows._replace(counts=each) for (rows, _), each in zip(ordered, counts, strict=True)]

    def dispatch(self, x_NE: Tensor, weight_NK: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        return to_rows(x_NE, weight_NK, rows)

    def wait(self, pending: tuple[Tensor, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        del rows
        return pending

    def combine(self, out_RE: Tensor, rows: Rows, *, is_needed: bool) -> Tensor:
        return to_tokens(out_RE, rows, is_needed=is_needed)

    def shared(self, x_NE: Tensor, run: Callable[[Tensor], Tensor], *, is_needed: bool) -> Tensor:
        del is_needed
        return run(x_NE)

    def sum_over_sequence(self, counts: Tensor) -> Tensor:
        return counts


def sort_by_expert(experts_NK: Tensor, num_experts: int) -> tuple[Rows, Tensor]:
    """The rows, without counts, and the counts [X] on the device."""
    ordered_R, slots = experts_NK.flatten().sort(stable=True)
    experts_X = torch.arange(num_experts + 1, device=slots.device)
    rows = Rows(experts_NK.shape[1], slots, inverse_of(slots), ())
    return rows, torch.searchsorted(ordered_R, experts_X).diff()


def inverse_of(permutation: Tensor) -> Tensor:
    positions = torch.arange(len(permutation), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, positions)


def to_rows(x_NE: Tensor, weight_NK: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Copies tokens, and reorders the weights of their experts, to rows."""
    x_RE = linear_map(x_NE, lambda x: _take(x, rows), lambda grad_RE: _sum(grad_RE, rows))
    return x_RE, reorder(weight_NK.flatten(), rows.slots, rows.row_of_slot)


def to_tokens(row_RE: Tensor, rows: Rows, *, is_needed: bool = True) -> Tensor:
    """The sum of each token's rows."""
    skipped = None if is_needed else rows.num_tokens
    return linear_map(row_RE, lambda x: _sum(x, rows), lambda grad_NE: _take(grad_NE, rows), skipped=skipped)


def reorder(x: Tensor, index: Tensor, inverse: Tensor, *, is_needed: bool = True) -> Tensor:
    """`x[index]`, of a permutation and its inverse."""
    skipped = None if is_needed else len(index)
    return linear_map(
        x, lambda each: each.index_select(0, index), lambda grad: grad.index_select(0, inverse), skipped=skipped
    )


def _take(x_NE: Tensor, rows: Rows) -> Tensor:
    return x_NE.index_select(0, rows.slots // rows.top_k)


def _sum(row_RE: Tensor, rows: Rows) -> Tensor:
    """In one kernel, which adds in float32 or, of float64, in float64, and rounds once."""
    return F.embedding_bag(rows.row_of_slot.view(-1, rows.top_k), row_RE, mode="sum")


Map = Callable[[Tensor], Tensor]


def linear_map(x: Tensor, forward: Map, transpose: Map, *, skipped: int | None = None) -> Tensor:
    """`forward(x)`, whose gradient is `transpose(grad)`. `skipped`: the length of a result of which only that is needed."""
    result: Tensor = LinearMap.apply(x, forward, transpose, skipped)
    return result


class LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, transpose: Map, skipped: int | None) -> Tensor:
        ctx.transpose = transpose
        return forward(x) if skipped is None else x.new_zeros(()).expand(skipped, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.transpose(grads[0]), None, None, None
