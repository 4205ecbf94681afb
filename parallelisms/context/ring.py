"""Ring attention (Liu et al., 2023): `rotate_kv` passes KV around the ring; each rank attends to every shard in turn.

    4 ranks, step    0        1        2        3
    rank 0 sees     KV 0     KV 3     KV 2     KV 1
    rank 1          KV 1     KV 0     KV 3     KV 2        the next step's transfer overlaps this step's attention

The caller chooses the transport: send-recv or all-to-all. In the backward pass the gradients of a KV shard follow it
around the ring, one step behind. Each rank keeps its own contribution, so both directions take one transfer less than
there are ranks.

Shape suffixes: X tokens of this rank (all sequences concatenated), N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from models import attention_op, kernels
from models.kernels import Grads, ScoreBlocks
from parallelisms.context.attention_plan import RankAttentionPlan
from parallelisms.context.online_softmax import OnlineSoftmax, split_kv_grads, to_accumulators


class Waitable(Protocol):
    """A tensor in flight, such as `collectives.AsyncHandle`."""

    def wait(self) -> Tensor: ...


Rotate = Callable[[Tensor], Waitable]
"""Starts to send a tensor to the next rank of the ring and to receive one from the previous rank."""


def rotate_kv(pending_kv: Waitable, plan: RankAttentionPlan, rotate: Rotate) -> Iterator[tuple[Tensor, ScoreBlocks]]:
    """Yields the KV shard [2, X, K, H] of every other rank and the score blocks of this rank's queries with it.

    `pending_kv` is the first transfer. Each further transfer starts before the yield, to overlap with attention.
    """
    for step, blocks in enumerate(plan.ring_step_blocks, start=1):
        kv_2XKH = pending_kv.wait()
        if step < plan.ring_degree - 1:
            pending_kv = rotate(kv_2XKH)
        yield kv_2XKH, blocks


def forward(
    q_XNH: Tensor,
    k_XKH: Tensor,
    v_XKH: Tensor,
    pending_kv: Waitable,
    plan: RankAttentionPlan,
    *,
    rotate: Rotate,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Output, in q's dtype, and log-sum-exp [N, X]. `pending_kv` is the first rotation of k and v, stacked."""
    softmax = OnlineSoftmax(*attention_op.forward(q_XNH, k_XKH, v_XKH, plan.local_blocks, kernel=kernel))
    for kv_2XKH, blocks in rotate_kv(pending_kv, plan, rotate):
        for block_output in kernels.attend_blocks(q_XNH, kv_2XKH[0], kv_2XKH[1], blocks, kernel=kernel):
            softmax.merge(*block_output)
        del kv_2XKH  # Freed before the next rotation allocates its receive buffer.
    return softmax.out_XNH.to(q_XNH.dtype), softmax.lse_NX


def backward(
    grad_XNH: Tensor,
    q_XNH: Tensor,
    k_XKH: Tensor,
    v_XKH: Tensor,
    pending_kv: Waitable,
    out_XNH: Tensor,
    lse_NX: Tensor,
    plan: RankAttentionPlan,
    *,
    rotate: Rotate,
    reduce_dtype: torch.dtype,
    kernel: str = "auto",
) -> Grads:
    """dq, dk and dv in their inputs' dtypes. dk and dv are sent in `reduce_dtype`."""
    local_inputs = (grad_XNH, q_XNH, k_XKH, v_XKH, out_XNH, lse_NX)
    dq_XNH, dkv_2XKH = to_accumulators(*attention_op.backward(*local_inputs, plan.local_blocks, kernel=kernel))
    pending_dkv: Waitable | None = None
    for kv_2XKH, blocks in rotate_kv(pending_kv, plan, rotate):
        step_dkv_2XKH = torch.zeros_like(dkv_2XKH)
        inputs = (grad_XNH, q_XNH, kv_2XKH[0], kv_2XKH[1], out_XNH, lse_NX)
        grads = (dq_XNH, step_dkv_2XKH[0], step_dkv_2XKH[1])
        kernels.accumulate_grads(grads, kernels.attend_blocks_backward(*inputs, blocks, kernel=kernel))
        if pending_dkv is not None:
            step_dkv_2XKH += pending_dkv.wait()
        pending_dkv = rotate(step_dkv_2XKH.to(reduce_dtype))
        del kv_2XKH, inputs, step_dkv_2XKH, grads
    if pending_dkv is not None:
        dkv_2XKH += pending_dkv.wait()
    return dq_XNH.to(q_XNH.dtype), *split_kv_grads(dkv_2XKH, k_XKH.dtype)
