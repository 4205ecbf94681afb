"""All-gather attention (Llama 3): every rank gathers the KV of all ranks and attends to the keys that it needs.

Attention to the rank's own keys overlaps the all-gather. The needed remote keys are selected in sequence order, so that
each span of queries attends to one contiguous range. A reduce-scatter sums their gradients.

Shape suffixes: X tokens of this rank (all sequences concatenated), Y remote tokens, R ranks, N query heads, K KV heads,
H head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from models import attention_op, kernels
from models.kernels import Grads
from parallelisms.context.attention_plan import RankAttentionPlan
from parallelisms.context.online_softmax import OnlineSoftmax, split_kv_grads, to_accumulators
from parallelisms.context.ring import Waitable


def forward(
    q_XNH: Tensor, k_XKH: Tensor, v_XKH: Tensor, pending_kv: Waitable, plan: RankAttentionPlan, *, kernel: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Output, in q's dtype, and log-sum-exp [N, X]. `pending_kv` is the all-gather of k and v, stacked."""
    softmax = OnlineSoftmax(*attention_op.forward(q_XNH, k_XKH, v_XKH, plan.local_blocks, kernel=kernel))
    k_YKH, v_YKH = _select_remote_kv(pending_kv.wait(), plan)
    for block_output in kernels.attend_blocks(q_XNH, k_YKH, v_YKH, plan.remote_blocks, kernel=kernel):
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
    reduce_scatter: Callable[[Tensor], Tensor],
    reduce_dtype: torch.dtype,
    kernel: str = "auto",
) -> Grads:
    """dq, dk and dv in their inputs' dtypes. dk and dv are reduce-scattered in `reduce_dtype`."""
    local_inputs = (grad_XNH, q_XNH, k_XKH, v_XKH, out_XNH, lse_NX)
    dq_XNH, dkv_2XKH = to_accumulators(*attention_op.backward(*local_inputs, plan.local_blocks, kernel=kernel))
    k_YKH, v_YKH = _select_remote_kv(pending_kv.wait(), plan)
    dk_YKH, dv_YKH = (torch.zeros_like(x, dtype=dq_XNH.dtype) for x in (k_YKH, v_YKH))
    inputs = (grad_XNH, q_XNH, k_YKH, v_YKH, out_XNH, lse_NX)
    block_grads = kernels.attend_blocks_backward(*inputs, plan.remote_blocks, kernel=kernel)
    kernels.accumulate_grads((dq_XNH, dk_YKH, dv_YKH), block_grads)
    del k_YKH, v_YKH, inputs, block_grads
    dkv_R2XKH = torch.zeros(plan.ring_degree, *dkv_2XKH.shape, dtype=reduce_dtype, device=q_XNH.device)
    flat = dkv_R2XKH.flatten(0, 2)
    for indices, remote_grads in zip(plan.remote_kv_indices(q_XNH.device), (dk_YKH, dv_YKH), strict=True):
        flat.index_copy_(0, indices, remote_grads.to(reduce_dtype))
    del dk_YKH, dv_YKH
    dkv_2XKH += reduce_scatter(dkv_R2XKH)
    return dq_XNH.to(q_XNH.dtype), *split_kv_grads(dkv_2XKH, k_XKH.dtype)


def _select_remote_kv(kv_R2XKH: Tensor, plan: RankAttentionPlan) -> tuple[Tensor, Tensor]:
    flat = kv_R2XKH.flatten(0, 2)
    keys, values = plan.remote_kv_indices(flat.device)
    return flat.index_select(0, keys), flat.index_select(0, values)
