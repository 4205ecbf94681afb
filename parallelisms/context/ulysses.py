"""Ulysses (Jacobs et al., 2023): all-to-all between a shard of the tokens with all heads, and all
tokens of a head shard.

Shape suffixes: B batch, S tokens of this rank, T tokens of the group, N heads, M heads of this
rank, H head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallelisms.mesh import collectives
from parallelisms.mesh.context_plan import kv_head_repeats


class UlyssesGroup(NamedTuple):
    """The ranks that exchange heads; one rank keeps its tensors unchanged."""

    name: str
    size: int

    def seq_to_heads(self, x_BSNH: Tensor) -> Tensor:
        """[B, S, N, H] -> [B, T, M, H]; differentiable.

        KV heads that the group size does not divide are repeated first, so each rank has the KV of
        its query heads.
        """
        num_repeats = kv_head_repeats(self.size, x_BSNH.shape[2])
        if num_repeats > 1:
            x_BSNH = x_BSNH.repeat_interleave(num_repeats, dim=2)
        out: Tensor = _seq_to_heads(x_BSNH, *self)
        return out

    def heads_to_seq(self, x_BTMH: Tensor) -> Tensor:
        """[B, T, M, H] -> [B, S, N, H]; differentiable."""
        out: Tensor = _heads_to_seq(x_BTMH, *self)
        return out


class SeqToHeads:
    """`UlyssesGroup.seq_to_heads` as an asynchronous all-to-all, below autograd."""

    def __init__(self, x_BSNH: Tensor, group: UlyssesGroup) -> None:
        self._num_repeats = kv_head_repeats(group.size, x_BSNH.shape[2])
        self._group = group
        if self._num_repeats > 1:  # Once would be a copy, too.
            x_BSNH = x_BSNH.repeat_interleave(self._num_repeats, dim=2)
        # [ranks, B, S, heads of the receiver, H]: the all-to-all exchanges dimension 0.
        x_by_rank = x_BSNH.unflatten(2, (group.size, -1)).movedim(2, 0)
        self._handle = collectives.all_to_all_async(
            x_by_rank, collectives.resolve_process_group(group.name)
        )

    def wait(self) -> Tensor:
        """[B, T, M, H]."""
        # Ranks hold neighbouring tokens: [ranks, B, S, M, H] becomes [B, T, M, H]. It is
        # contiguous, as the fake implementation promises.
        return self._handle.wait().movedim(0, 1).flatten(1, 2).contiguous()

    def backward(self, grad_BTMH: Tensor) -> Tensor:
        """[B, S, N, H]: the gradients of repeated heads are summed."""
        grad_BSNH = self._group.heads_to_seq(grad_BTMH)
        if self._num_repeats == 1:
            return grad_BSNH
        grad_sum: Tensor = grad_BSNH.unflatten(2, (-1, self._num_repeats)).sum(3)
        return grad_sum


# Operators, because a graph cannot hold a process group, and are each other's gradient.
@torch.library.custom_op("longhaul::to_heads", mutates_args=())
def _seq_to_heads(x_BSNH: Tensor, group_name: str, group_size: int) -> Tensor:
    return SeqToHeads(x_BSNH, UlyssesGroup(group_name, group_size)).wait()


@torch.library.custom_op("longhaul::to_tokens", mutates_args=())
def _heads_to_seq(x_BTMH: Tensor, group_name: str, group_size: int) -> Tensor:
    by_rank = x_BTMH.unflatten(1, (group_size, -1)).movedim(1, 0)
    received = collectives.all_to_all_async(
        by_rank, collectives.resolve_process_group(group_name)
    ).wait()
    return received.movedim(0, 2).flatten(2, 3).contiguous()


def _setup_context(ctx: Any, inputs: tuple[Tensor, str, int], output: Tensor) -> None:
    del output
    _, *ctx.group = inputs


_seq_to_heads.register_fake(
    lambda x, _, size: x.new_empty(len(x), x.shape[1] * size, x.shape[2] // size, x.shape[3])
)
_heads_to_seq.register_fake(
    lambda x, _, size: x.new_empty(len(x), x.shape[1] // size, x.shape[2] * size, x.shape[3])
)
# Autograd may bring an expanded or transposed gradient: the operators get it as in the forward
# pass.
_seq_to_heads.register_autograd(
    lambda ctx, grad: (_heads_to_seq(grad.contiguous(), *ctx.group), None, None),
    setup_context=_setup_context,
)
_heads_to_seq.register_autograd(
    lambda ctx, grad: (_seq_to_heads(grad.contiguous(), *ctx.group), None, None),
    setup_context=_setup_context,
)
