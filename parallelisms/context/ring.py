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
from parallelisms.context.attention_plan import Share
from parallelisms.context.online_softmax import Running, apart, summed


class Arriving(Protocol):
    def wait(self) -> Tensor: ...


Send = Callable[[Tensor], Arriving]
"""Starts to send a tensor, and gives what is received in its place."""
Grads = tuple[Tensor, Tensor, Tensor]


def forward(
    q_XNH: Tensor,
    k_XKH: Tensor,
    v_XKH: Tensor,
    arriving: Arriving,
    share: Share,
    *,
    rotate: Send,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Output, in the type of q, and log-sum-exp [N, X]. Of keys and values, stacked, the first hop is `arriving`."""
    running = Running(*attention_op.forward(q_XNH, k_XKH, v_XKH, share.own, kernel=kernel))
    for step, work in enumerate(share.steps, start=1):
        kv_2XKH = arriving.wait()
        if step < share.ring - 1:
            arriving = rotate(kv_2XKH)
        for part in kernels.attend(q_XNH, kv_2XKH[0], kv_2XKH[1], work, kernel=kernel):
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
    rotate: Send,
    wire: torch.dtype,
    kernel: str = "auto",
) -> Grads:
    """Gradients of q, k and v, in their types; those of keys and values travel as `wire`."""
    own = (grad_XNH, q_XNH, k_XKH, v_XKH, out_XNH, lse_NX)
    dq_XNH, home_2XKH = summed(*attention_op.backward(*own, share.own, kernel=kernel))
    travelling: Arriving | None = None
    for step, work in enumerate(share.steps, start=1):
        kv_2XKH = arriving.wait()
        if step < share.ring - 1:
            arriving = rotate(kv_2XKH)
        passing_2XKH = torch.zeros_like(home_2XKH)
        inputs = (grad_XNH, q_XNH, kv_2XKH[0], kv_2XKH[1], out_XNH, lse_NX)
        for queries, keys, dq, dk, dv in kernels.attend_backward(*inputs, work, kernel=kernel):
            dq_XNH[queries] += dq
            passing_2XKH[0][keys] += dk
            passing_2XKH[1][keys] += dv
            del dq, dk, dv  # Or they would be held beside those of the next hop.
        if travelling is not None:
            passing_2XKH += travelling.wait()
        travelling = rotate(passing_2XKH.to(wire))
    if travelling is not None:
        home_2XKH += travelling.wait()
    return dq_XNH.to(q_XNH.dtype), *apart(home_2XKH, k_XKH.dtype)
