"""Ulysses (Jacobs et al., 2023): a rank trades its part of all heads for all of the sequence of its part of the heads.

Shape suffixes: B rows, S tokens of this rank, T tokens of the group, N heads, M heads per rank of the group, H head
width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallelisms import collectives
from parallelisms.parallel_dims import kv_head_repeats


def seq_to_heads(x_BSNH: Tensor, group_name: str, group_size: int) -> Tensor:
    """[B, S, N, H] of this rank's tokens -> [B, T, N / ranks, H] of this rank's heads; differentiable.

    Heads that do not divide among the ranks are repeated first; each rank gets what its query heads need.
    """
    num_repeats = kv_head_repeats(group_size, x_BSNH.shape[2])
    if num_repeats > 1:
        x_BSNH = x_BSNH.repeat_interleave(num_repeats, dim=2)
    out: Tensor = _seq_to_heads(x_BSNH, group_name, group_size)
    return out


def heads_to_seq(x_BTMH: Tensor, group_name: str, group_size: int) -> Tensor:
    """[B, T, M, H] of this rank's heads -> [B, T / ranks, M * ranks, H] of this rank's tokens; differentiable."""
    out: Tensor = _heads_to_seq(x_BTMH, group_name, group_size)
    return out


class SeqToHeads:
    """`to_heads` in two steps, below autograd."""

    def __init__(self, x_BSNH: Tensor, group_name: str, group_size: int) -> None:
        self._num_repeats = kv_head_repeats(group_size, x_BSNH.shape[2])
        self._group = (group_name, group_size)
        x_by_rank = x_BSNH.repeat_interleave(self._num_repeats, dim=2).unflatten(2, (group_size, -1)).movedim(2, 0)
        self._handle = collectives.all_to_all_async(x_by_rank, collectives.resolve_process_group(group_name))

    def wait(self) -> Tensor:
        """[B, T, M, H]."""
        return self._handle.wait().movedim(0, 1).flatten(1, 2).contiguous()

    def backward(self, grad_BTMH: Tensor) -> Tensor:
        """[B, S, N, H]: heads that were repeated get the sum of the gradients of all."""
        grad_BSNH = heads_to_seq(grad_BTMH, *self._group)
        if self._num_repeats == 1:
            return grad_BSNH
        grad_sum: Tensor = grad_BSNH.unflatten(2, (-1, self._num_repeats)).sum(3)
        return grad_sum


@torch.library.custom_op("longhaul::to_heads", mutates_args=())
def _seq_to_heads(x_BSNH: Tensor, group_name: str, group_size: int) -> Tensor:
    return SeqToHeads(x_BSNH, group_name, group_size).wait()


@torch.library.custom_op("longhaul::to_tokens", mutates_args=())
def _heads_to_seq(x_BTMH: Tensor, group_name: str, group_size: int) -> Tensor:
    by_rank = x_BTMH.unflatten(1, (group_size, -1)).movedim(1, 0)
    received = collectives.all_to_all_async(by_rank, collectives.resolve_process_group(group_name)).wait()
    return received.movedim(0, 2).flatten(2, 3).contiguous()


@_seq_to_heads.register_fake
def _(x_BSNH: Tensor, group_name: str, ranks: int) -> Tensor:
    del group_name
    rows, tokens, heads, width = x_BSNH.shape
    return x_BSNH.new_empty(rows, tokens * ranks, heads // ranks, width)


@_heads_to_seq.register_fake
def _(x_BTMH: Tensor, group_name: str, ranks: int) -> Tensor:
    del group_name
    rows, tokens, heads, width = x_BTMH.shape
    return x_BTMH.new_empty(rows, tokens // ranks, heads * ranks, width)


def _setup_context(ctx: Any, inputs: tuple[Tensor, str, int], output: Tensor) -> None:
    del output
    _, *ctx.group = inputs


_seq_to_heads.register_autograd(
    lambda ctx, grad: (_heads_to_seq(grad.contiguous(), *ctx.group), None, None), setup_context=_setup_context
)
_heads_to_seq.register_autograd(
    lambda ctx, grad: (_seq_to_heads(grad.contiguous(), *ctx.group), None, None), setup_context=_setup_context
)
