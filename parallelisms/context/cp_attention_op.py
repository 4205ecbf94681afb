"""Attention over rows that the ranks of a ring share: the operator behind `ring`, `alltoall` and `allgather`.

All of a method's control flow lies inside: every rank traces the same graph, whatever it holds, and documents may
change from batch to batch without a new compilation.

Shape suffixes: B rows, S tokens of this rank, N query heads, K key/value heads, H head width, D document starts and the
row's end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from models import attention_op
from parallelisms import collectives
from parallelisms.context import all_gather, ring
from parallelisms.context.attention_plan import Share
from parallelisms.context.ring import Arriving
from parallelisms.context.shard_layout import SeqLayout
from parallelisms.parallel_dims import Layout


def attention(
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    boundaries_BD: Tensor,
    *,
    rotation: str,
    layout: str,
    group_name: str,
    wire: torch.dtype,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """What `models.attention_op.attention` returns, for this rank's tokens of rows that the group shares.

    `boundaries_BD` are those of whole rows. Gradients of keys and values travel as `wire` in half
    precision, else as what they are.
    """
    result: tuple[Tensor, Tensor] = _attention(
        q_BSNH, k_BSKH, v_BSKH, boundaries_BD, rotation, layout, group_name, wire, kernel
    )
    return result


@torch.library.custom_op("longhaul::context_attention", mutates_args=())
def _attention(
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    boundaries_BD: Tensor,
    rotation: str,
    layout: str,
    group_name: str,
    wire: torch.dtype,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    del wire  # Only gradients travel so.
    # Refused before anything is sent: what nobody waits for would be taken for the next.
    share_of(boundaries_BD, layout, collectives.named(group_name), *q_BSNH.shape[:2])
    arriving = start(k_BSKH, v_BSKH, rotation, group_name)
    return forward(q_BSNH, k_BSKH, v_BSKH, arriving, boundaries_BD, rotation, layout, group_name, kernel)


@torch.library.custom_op("longhaul::context_attention_backward", mutates_args=())
def _attention_backward(
    grad_BSNH: Tensor,
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    out_BSNH: Tensor,
    lse_BNS: Tensor,
    boundaries_BD: Tensor,
    rotation: str,
    layout: str,
    group_name: str,
    wire: torch.dtype,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    arriving = start(k_BSKH, v_BSKH, rotation, group_name)
    given = (grad_BSNH, q_BSNH, k_BSKH, v_BSKH, arriving, out_BSNH, lse_BNS, boundaries_BD)
    return backward(*given, rotation, layout, group_name, wire, kernel)


# ---- the same in steps, below autograd


def start(k_BSKH: Tensor, v_BSKH: Tensor, rotation: str, group_name: str) -> Arriving:
    """Lets keys and values begin their way to the other ranks."""
    return _SEND[rotation](torch.stack((k_BSKH.flatten(0, 1), v_BSKH.flatten(0, 1))), collectives.named(group_name))


def forward(
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    arriving: Arriving,
    boundaries_BD: Tensor,
    rotation: str,
    layout: str,
    group_name: str,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    group = collectives.named(group_name)
    share = share_of(boundaries_BD, layout, group, *q_BSNH.shape[:2])
    q, k, v = (x.flatten(0, 1) for x in (q_BSNH, k_BSKH, v_BSKH))
    if rotation == "allgather":
        out, lse = all_gather.forward(q, k, v, arriving, share, kernel=kernel)
    else:
        rotate = partial(_SEND[rotation], group=group)
        out, lse = ring.forward(q, k, v, arriving, share, rotate=rotate, kernel=kernel)
    return out.view_as(q_BSNH), attention_op.by_row(lse, q_BSNH.shape[0])


def backward(
    grad_BSNH: Tensor,
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    arriving: Arriving,
    out_BSNH: Tensor,
    lse_BNS: Tensor,
    boundaries_BD: Tensor,
    rotation: str,
    layout: str,
    group_name: str,
    wire: torch.dtype,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    group = collectives.named(group_name)
    share = share_of(boundaries_BD, layout, group, *q_BSNH.shape[:2])
    grad, q, k, v, out = (x.flatten(0, 1) for x in (grad_BSNH, q_BSNH, k_BSKH, v_BSKH, out_BSNH))
    inputs = (grad, q, k, v, arriving, out, attention_op.laid_out(lse_BNS), share)
    wire = wire if q.dtype.itemsize < 4 else q.dtype
    if rotation == "allgather":
        reduce = partial(collectives.reduce_scatter, group=group)
        grads = all_gather.backward(*inputs, reduce_scatter=reduce, kernel=kernel, wire=wire)
    else:
        rotate = partial(_SEND[rotation], group=group)
        grads = ring.backward(*inputs, rotate=rotate, kernel=kernel, wire=wire)
    dq, dk, dv = (grad.view(x.shape) for grad, x in zip(grads, (q_BSNH, k_BSKH, v_BSKH), strict=True))
    return dq, dk, dv


def share_of(boundaries_BD: Tensor, kind: str, group: ProcessGroup, rows: int, held: int) -> Share:
    """What this rank computes of rows of which each rank holds `held` tokens. Raises ValueError."""
    return _share_of(attention_op.integers(boundaries_BD, rows), cast(Layout, kind), group.size(), group.rank(), held)


@lru_cache(maxsize=8)
def _share_of(rows: attention_op.Boundaries, kind: Layout, ring: int, rank: int, held: int) -> Share:
    # Every layer asks for the same. Few are kept: each may hold 15 MiB on the device, at a million tokens.
    return Share(tuple(SeqLayout(kind, ring, row) for row in attention_op.checked(rows, held * ring)), rank)


_SEND: dict[str, Callable[..., Arriving]] = {
    "ring": collectives.rotate,
    "alltoall": collectives.rotate_all_to_all,
    "allgather": collectives.gather,
}


@_attention.register_fake
def _(q_BSNH: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    del rest
    return attention_op.like_output(q_BSNH)


@_attention_backward.register_fake
def _(grad_BSNH: Tensor, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    del grad_BSNH, rest
    return attention_op.like_grads(q_BSNH, k_BSKH, v_BSKH)


def _grad(ctx: Any, grad_BSNH: Tensor, grad_lse: None) -> tuple[Tensor | None, ...]:
    del grad_lse
    return *_attention_backward(grad_BSNH.contiguous(), *ctx.saved_tensors, *ctx.options), *[None] * (
        1 + len(ctx.options)
    )


_attention.register_autograd(_grad, setup_context=attention_op.save)
