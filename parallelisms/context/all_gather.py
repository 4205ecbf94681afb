"""All-gather attention (Llama 3's): every rank collects all keys and values, and attends to those it needs.

A rank attends to its own keys while the others' arrive. It puts those into the order of the row, as far as its queries
attend to them, so that a piece of queries sees one range of them; and their gradients are summed by a reduce-scatter.

Shape suffixes: X tokens of this rank (all rows laid end to end), Y foreign tokens, R ranks, N query heads, K key/value
heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from models import attention_op, kernels
from parallelisms.context.attention_plan import Share
from parallelisms.context.online_softmax import Running, apart, summed
from parallelisms.context.ring import Arriving, Grads


def forward(
    q_XNH: Tensor, k_XKH: Tensor, v_XKH: Tensor, arriving: Arriving, share: Share, *, kernel: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Output, in the type of q, and log-sum-exp [N, X]. Everyone's keys and values, stacked, are `arriving`."""
    running = Running(*attention_op.forward(q_XNH, k_XKH, v_XKH, share.own, kernel=kernel))
    k_YKH, v_YKH = _in_row_order(arriving.wait(), share)
    for part in kernels.attend(q_XNH, k_YKH, v_YKH, share.foreign, kernel=kernel):
        running.add(*part)
    return running.out_XNH.to(q_XNH.dtype), running.lse_NX


def backward(
    grad_XNH: Tensor,
    q_XNH: Tensor,
    k_XKH: Tensor,
    v_XKH: Tensor,
    arriving: Arriving,
    out_XNH: Tensor,
    lse_NX: Tensor,
    share: Share,
    *,
    reduce_scatter: Callable[[Tensor], Tensor],
    wire: torch.dtype,
    kernel: str = "auto",
) -> Grads:
    """Gradients of q, k and v, in their types; those of keys and values travel as `wire`."""
    own = (grad_XNH, q_XNH, k_XKH, v_XKH, out_XNH, lse_NX)
    dq_XNH, home_2XKH = summed(*attention_op.backward(*own, share.own, kernel=kernel))
    k_YKH, v_YKH = _in_row_order(arriving.wait(), share)
    dk_YKH, dv_YKH = (torch.zeros_like(x, dtype=dq_XNH.dtype) for x in (k_YKH, v_YKH))
    inputs = (grad_XNH, q_XNH, k_YKH, v_YKH, out_XNH, lse_NX)
    for queries, keys, dq, dk, dv in kernels.attend_backward(*inputs, share.foreign, kernel=kernel):
        dq_XNH[queries] += dq
        dk_YKH[keys] += dk
        dv_YKH[keys] += dv
    del k_YKH, v_YKH, inputs
    everyone_R2XKH = torch.zeros(share.ring, *home_2XKH.shape, dtype=wire, device=q_XNH.device)
    flat = everyone_R2XKH.flatten(0, 2)
    for places, grads in zip(share.places(q_XNH.device), (dk_YKH, dv_YKH), strict=True):
        flat.index_copy_(0, places, grads.to(wire))
    del dk_YKH, dv_YKH
    home_2XKH += reduce_scatter(everyone_R2XKH)
    return dq_XNH.to(q_XNH.dtype), *apart(home_2XKH, k_XKH.dtype)


def _in_row_order(everyone_R2XKH: Tensor, share: Share) -> tuple[Tensor, Tensor]:
    """The foreign keys and their values."""
    flat = everyone_R2XKH.flatten(0, 2)
    keys, values = share.places(flat.device)
    return flat.index_select(0, keys), flat.index_select(0, values)
