"""Ulysses (Jacobs et al., 2023): a rank trades its part of all heads for all of the sequence of its part of the heads.

Shape suffixes: B rows, S tokens of this rank, T tokens of the group, N heads, M heads per rank of the group, H head
width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallelisms import collectives
from parallelisms.parallel_dims import repeats


def to_heads(x_BSNH: Tensor, group_name: str, ranks: int) -> Tensor:
    """[B, S, N, H] of this rank's tokens -> [B, T, N / ranks, H] of this rank's heads; differentiable.

    Heads that do not divide among the ranks are repeated first; each rank gets what its query heads need.
    """
    times = repeats(ranks, x_BSNH.shape[2])
    if times > 1:
        x_BSNH = x_BSNH.repeat_interleave(times, dim=2)
    out: Tensor = _to_heads(x_BSNH, group_name, ranks)
    return out


def to_tokens(x_BTMH: Tensor, group_name: str, ranks: int) -> Tensor:
    """[B, T, M, H] of this rank's heads -> [B, T / ranks, M * ranks, H] of this rank's tokens; differentiable."""
    out: Tensor = _to_tokens(x_BTMH, group_name, ranks)
    return out


class ToHeads:
    """`to_heads` in two steps, below autograd."""

    def __init__(self, x_BSNH: Tensor, group_name: str, ranks: int) -> None:
        self._times = repeats(ranks, x_BSNH.shape[2])
        self._group = (group_name, ranks)
        by_rank = x_BSNH.repeat_interleave(self._times, dim=2).unflatten(2, (ranks, -1)).movedim(2, 0)
        self._pending = collectives.exchange(by_rank, collectives.named(group_name))

    def wait(self) -> Tensor:
        """[B, T, M, H]."""
        return self._pending.wait().movedim(0, 1).flatten(1, 2).contiguous()

    def backward(self, grad_BTMH: Tensor) -> Tensor:
        """[B, S, N, H]: heads that were repeated get the sum of the gradients of all."""
        grad_BSNH = to_tokens(grad_BTMH, *self._group)
        if self._times == 1:
            return grad_BSNH
        summed: Tensor = grad_BSNH.unflatten(2, (-1, self._times)).sum(3)
        return summed


@torch.library.custom_op("longhaul::to_heads", mutates_args=())
def _to_heads(x_BSNH: Tensor, group_name: str, ranks: int) -> Tensor:
    return ToHeads(x_BSNH, group_name, ranks).wait()


@torch.library.custom_op("longhaul::to_tokens", mutates_args=())
def _to_tokens(x_BTMH: Tensor, group_name: str, ranks: int) -> Tensor:
    by_rank = x_BTMH.unflatten(1, (ranks, -1)).movedim(1, 0)
    received = collectives.exchange(by_rank, collectives.named(group_name)).wait()
    return received.movedim(0, 2).flatten(2, 3).contiguous()


@_to_heads.register_fake
def _(x_BSNH: Tensor, group_name: str, ranks: int) -> Tensor:
    del group_name
    rows, tokens, heads, width = x_BSNH.shape
    return x_BSNH.new_empty(rows, tokens * ranks, heads // ranks, width)


@_to_tokens.register_fake
def _(x_BTMH: Tensor, group_name: str, ranks: int) -> Tensor:
    del group_name
    rows, tokens, heads, width = x_BTMH.shape
    return x_BTMH.new_empty(rows, tokens // ranks, heads * ranks, width)


def _save(ctx: Any, inputs: tuple[Tensor, str, int], output: Tensor) -> None:
    del output
    _, *ctx.group = inputs


_to_heads.register_autograd(
    lambda ctx, grad: (_to_tokens(grad.contiguous(), *ctx.group), None, None), setup_context=_save
)
_to_tokens.register_autograd(
    lambda ctx, grad: (_to_heads(grad.contiguous(), *ctx.group), None, None), setup_context=_save
)
