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

from models import causal, kernels
from parallelisms.context import tasks
from parallelisms.context.merge import Running
from parallelisms.context.ring import Grads, Send, summed
from parallelisms.context.tasks import Share


def forward(q_XNH: Tensor, k_XKH: Tensor, v_XKH: Tensor, share: Share, *, gather: Send) -> tuple[Tensor, Tensor]:
    """Output, in the type of q, and log-sum-exp [N, X]."""
    arriving = gather(torch.stack((k_XKH, v_XKH)))
    running = Running(*causal.forward(q_XNH, k_XKH, v_XKH, tasks.own(share.rows, share.rank), kernel=share.kernel))
    k_YKH, v_YKH = _in_row_order(arriving.wait(), tasks.foreign(share.rows, share.rank, q_XNH.device))
    rectangles = tasks.with_foreign(share.rows, share.rank)
    for part in kernels.attend(q_XNH, k_YKH, v_YKH, rectangles, causal=False, kernel=share.kernel):
        running.add(*part)
    return running.out_XNH.to(q_XNH.dtype), running.lse_NX


def backward(
    grad_XNH: Tensor,
    q_XNH: Tensor,
    k_XKH: Tensor,
    v_XKH: Tensor,
    out_XNH: Tensor,
    lse_NX: Tensor,
    share: Share,
    *,
    gather: Send,
    reduce_scatter: Callable[[Tensor], Tensor],
) -> Grads:
    """Gradients of q, k and v, in their types; those of keys and values travel as `share.wire`."""
    tokens = k_XKH.shape[0]
    arriving = gather(torch.stack((k_XKH, v_XKH)))
    squares = tasks.own(share.rows, share.rank)
    dq, *home = causal.backward(grad_XNH, q_XNH, k_XKH, v_XKH, out_XNH, lse_NX, squares, kernel=share.kernel)
    dq_XNH, home_2XKH = summed(dq), summed(torch.stack(home))
    places_Y = tasks.foreign(share.rows, share.rank, q_XNH.device)
    k_YKH, v_YKH = _in_row_order(arriving.wait(), places_Y)
    dk_YKH, dv_YKH = (torch.zeros_like(x, dtype=dq_XNH.dtype) for x in (k_YKH, v_YKH))
    rectangles = tasks.with_foreign(share.rows, share.rank)
    inputs = (grad_XNH, q_XNH, k_YKH, v_YKH, out_XNH, lse_NX)
    parts = kernels.attend_backward(*inputs, rectangles, causal=False, kernel=share.kernel)
    for queries, keys, dq, dk, dv in parts:
        dq_XNH[queries] += dq
        dk_YKH[keys] += dk
        dv_YKH[keys] += dv
    everyone_R2XKH = torch.zeros(share.ring, *home_2XKH.shape, dtype=share.wire, device=q_XNH.device)
    flat = everyone_R2XKH.view(-1, *k_XKH.shape[1:])
    for index, of_keys in enumerate((dk_YKH, dv_YKH)):
        flat.index_copy_(0, _flat(places_Y, tokens, index), of_keys.to(share.wire))
    home_2XKH += reduce_scatter(everyone_R2XKH)
    dk_XKH, dv_XKH = (home_XKH.to(k_XKH.dtype, copy=True) for home_XKH in home_2XKH)
    return dq_XNH.to(q_XNH.dtype), dk_XKH, dv_XKH


def _in_row_order(everyone_R2XKH: Tensor, places_Y: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and the values that stand at these places."""
    tokens = everyone_R2XKH.shape[2]
    flat = everyone_R2XKH.flatten(0, 2)
    k_YKH, v_YKH = (flat.index_select(0, _flat(places_Y, tokens, index)) for index in (0, 1))
    return k_YKH, v_YKH


def _flat(places_Y: Tensor, tokens: int, index: int) -> Tensor:
    """Places among all ranks' tokens as places in [R, 2, X], of keys (0) or values (1)."""
    return places_Y + (places_Y // tokens + index) * tokens
