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

from models import causal, kernels
from parallelisms.context import tasks
from parallelisms.context.merge import Running
from parallelisms.context.tasks import Share


class Arriving(Protocol):
    def wait(self) -> Tensor: ...


Send = Callable[[Tensor], Arriving]
"""Starts to send a tensor, and gives what is received in its place."""
Grads = tuple[Tensor, Tensor, Tensor]


def forward(q_XNH: Tensor, k_XKH: Tensor, v_XKH: Tensor, share: Share, *, rotate: Send) -> tuple[Tensor, Tensor]:
    """Output, in the type of q, and log-sum-exp [N, X]."""
    arriving = rotate(torch.stack((k_XKH, v_XKH)))
    running = Running(*causal.forward(q_XNH, k_XKH, v_XKH, tasks.own(share.rows, share.rank), kernel=share.kernel))
    for step in range(1, share.ring):
        kv_2XKH = arriving.wait()
        if step < share.ring - 1:
            arriving = rotate(kv_2XKH)
        rectangles = tasks.with_source(share.rows, share.rank, (share.rank - step) % share.ring)
        for part in kernels.attend(q_XNH, kv_2XKH[0], kv_2XKH[1], rectangles, causal=False, kernel=share.kernel):
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
    rotate: Send,
) -> Grads:
    """Gradients of q, k and v, in their types; those of keys and values travel as `share.wire`."""
    arriving = rotate(torch.stack((k_XKH, v_XKH)))
    squares = tasks.own(share.rows, share.rank)
    dq, *home = causal.backward(grad_XNH, q_XNH, k_XKH, v_XKH, out_XNH, lse_NX, squares, kernel=share.kernel)
    dq_XNH, home_2XKH = summed(dq), summed(torch.stack(home))
    travelling: Arriving | None = None
    for step in range(1, share.ring):
        kv_2XKH = arriving.wait()
        if step < share.ring - 1:
            arriving = rotate(kv_2XKH)
        passing_2XKH = torch.zeros_like(home_2XKH)
        rectangles = tasks.with_source(share.rows, share.rank, (share.rank - step) % share.ring)
        inputs = (grad_XNH, q_XNH, kv_2XKH[0], kv_2XKH[1], out_XNH, lse_NX)
        parts = kernels.attend_backward(*inputs, rectangles, causal=False, kernel=share.kernel)
        for queries, keys, dq, dk, dv in parts:
            dq_XNH[queries] += dq
            passing_2XKH[0][keys] += dk
            passing_2XKH[1][keys] += dv
        if travelling is not None:
            passing_2XKH += travelling.wait()
        travelling = rotate(passing_2XKH.to(share.wire))
    if travelling is not None:
        home_2XKH += travelling.wait()
    dk_XKH, dv_XKH = (home_XKH.to(k_XKH.dtype, copy=True) for home_XKH in home_2XKH)
    return dq_XNH.to(q_XNH.dtype), dk_XKH, dv_XKH


def summed(x: Tensor) -> Tensor:
    """As an accumulator: in the type in which parts are summed."""
    return x.to(kernels.widest(x.dtype))
