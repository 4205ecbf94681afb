"""Ring attention (Liu et al., 2023): keys and values go round, and every rank attends to what is passing.

    4 ranks, step    0        1        2        3
    rank 0 sees     KV 0     KV 3     KV 2     KV 1
    rank 1          KV 1     KV 0     KV 3     KV 2        the next step's flies while this step's is computed

Whether a hop is a pair of sends or an all-to-all is the caller's. In the backward pass the gradients of keys and values
travel one step behind their keys; a rank's own share stays at home, so both make one hop less than there are ranks.

Shape suffixes: X tokens of this rank (all rows laid end to end), N query heads, K key/value heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from models import attention_op, kernels
from parallelisms.context.attention_plan import RankAttentionPlan
from parallelisms.context.online_softmax import OnlineSoftmax, split_kv_grads, to_accumulators


class Waitable(Protocol):
    def wait(self) -> Tensor: ...


StartExchange = Callable[[Tensor], Waitable]
"""Starts to send a tensor, and gives what is received in its place."""
Grads = tuple[Tensor, Tensor, Tensor]


def forward(
    q_XNH: Tensor,
    k_XKH: Tensor,
    v_XKH: Tensor,
    pending_kv: Waitable,
    plan: RankAttentionPlan,
    *,
    rotate: StartExchange,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Output, in the type of q, and log-sum-exp [N, X]. Of keys and values, stacked, the first hop is `arriving`."""
    softmax = OnlineSoftmax(*attention_op.forward(q_XNH, k_XKH, v_XKH, plan.local_blocks, kernel=kernel))
    for step, blocks in enumerate(plan.ring_step_blocks, start=1):
        kv_2XKH = pending_kv.wait()
        if step < plan.ring_degree - 1:
            pending_kv = rotate(kv_2XKH)
        for block_output in kernels.attend_blocks(q_XNH, kv_2XKH[0], kv_2XKH[1], blocks, kernel=kernel):
            softmax.merge(*block_output)
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
    rotate: StartExchange,
    reduce_dtype: torch.dtype,
    kernel: str = "auto",
) -> Grads:
    """Gradients of q, k and v, in their types; those of keys and values travel as `wire`."""
    local_inputs = (grad_XNH, q_XNH, k_XKH, v_XKH, out_XNH, lse_NX)
    dq_XNH, dkv_2XKH = to_accumulators(*attention_op.backward(*local_inputs, plan.local_blocks, kernel=kernel))
    pending_dkv: Waitable | None = None
    for step, blocks in enumerate(plan.ring_step_blocks, start=1):
        kv_2XKH = pending_kv.wait()
        if step < plan.ring_degree - 1:
            pending_kv = rotate(kv_2XKH)
        step_dkv_2XKH = torch.zeros_like(dkv_2XKH)
        inputs = (grad_XNH, q_XNH, kv_2XKH[0], kv_2XKH[1], out_XNH, lse_NX)
        for queries, keys, dq, dk, dv in kernels.attend_blocks_backward(*inputs, blocks, kernel=kernel):
            dq_XNH[queries] += dq
            step_dkv_2XKH[0][keys] += dk
            step_dkv_2XKH[1][keys] += dv
            del dq, dk, dv  # Or they would be held beside those of the next hop.
        if pending_dkv is not None:
            step_dkv_2XKH += pending_dkv.wait()
        pending_dkv = rotate(step_dkv_2XKH.to(reduce_dtype))
    if pending_dkv is not None:
        dkv_2XKH += pending_dkv.wait()
    return dq_XNH.to(q_XNH.dtype), *split_kv_grads(dkv_2XKH, k_XKH.dtype)
