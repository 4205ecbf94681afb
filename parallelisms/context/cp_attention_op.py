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
from parallelisms.context.attention_plan import RankAttentionPlan
from parallelisms.context.ring import Waitable
from parallelisms.context.shard_layout import SeqLayout
from parallelisms.parallel_dims import ShardLayout


def attention(
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    boundaries_BD: Tensor,
    *,
    rotate_method: str,
    layout: str,
    group_name: str,
    reduce_dtype: torch.dtype,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """What `models.attention_op.attention` returns, for this rank's tokens of rows that the group shares.

    `boundaries_BD` are those of whole rows. Gradients of keys and values travel as `wire` in half
    precision, else as what they are.
    """
    result: tuple[Tensor, Tensor] = _attention(
        q_BSNH, k_BSKH, v_BSKH, boundaries_BD, rotate_method, layout, group_name, reduce_dtype, kernel
    )
    return result


@torch.library.custom_op("longhaul::context_attention", mutates_args=())
def _attention(
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    boundaries_BD: Tensor,
    rotate_method: str,
    layout: str,
    group_name: str,
    reduce_dtype: torch.dtype,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    del reduce_dtype  # Only gradients travel so.
    # Refused before anything is sent: what nobody waits for would be taken for the next.
    rank_attention_plan(boundaries_BD, layout, collectives.resolve_process_group(group_name), *q_BSNH.shape[:2])
    pending_kv = start_kv_exchange(k_BSKH, v_BSKH, rotate_method, group_name)
    return forward(q_BSNH, k_BSKH, v_BSKH, pending_kv, boundaries_BD, rotate_method, layout, group_name, kernel)


@torch.library.custom_op("longhaul::context_attention_backward", mutates_args=())
def _attention_backward(
    grad_BSNH: Tensor,
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    out_BSNH: Tensor,
    lse_BNS: Tensor,
    boundaries_BD: Tensor,
    rotate_method: str,
    layout: str,
    group_name: str,
    reduce_dtype: torch.dtype,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    pending_kv = start_kv_exchange(k_BSKH, v_BSKH, rotate_method, group_name)
    inputs = (grad_BSNH, q_BSNH, k_BSKH, v_BSKH, pending_kv, out_BSNH, lse_BNS, boundaries_BD)
    return backward(*inputs, rotate_method, layout, group_name, reduce_dtype, kernel)


# ---- the same in steps, below autograd


def start_kv_exchange(k_BSKH: Tensor, v_BSKH: Tensor, rotate_method: str, group_name: str) -> Waitable:
    """Lets keys and values begin their way to the other ranks."""
    return _START_EXCHANGE[rotate_method](
        torch.stack((k_BSKH.flatten(0, 1), v_BSKH.flatten(0, 1))), collectives.resolve_process_group(group_name)
    )


def forward(
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    pending_kv: Waitable,
    boundaries_BD: Tensor,
    rotate_method: str,
    layout: str,
    group_name: str,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    group = collectives.resolve_process_group(group_name)
    plan = rank_attention_plan(boundaries_BD, layout, group, *q_BSNH.shape[:2])
    q, k, v = (x.flatten(0, 1) for x in (q_BSNH, k_BSKH, v_BSKH))
    if rotate_method == "allgather":
        out, lse = all_gather.forward(q, k, v, pending_kv, plan, kernel=kernel)
    else:
        rotate = partial(_START_EXCHANGE[rotate_method], group=group)
        out, lse = ring.forward(q, k, v, pending_kv, plan, rotate=rotate, kernel=kernel)
    return out.view_as(q_BSNH), attention_op.unflatten_lse(lse, q_BSNH.shape[0])


def backward(
    grad_BSNH: Tensor,
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    pending_kv: Waitable,
    out_BSNH: Tensor,
    lse_BNS: Tensor,
    boundaries_BD: Tensor,
    rotate_method: str,
    layout: str,
    group_name: str,
    reduce_dtype: torch.dtype,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    group = collectives.resolve_process_group(group_name)
    plan = rank_attention_plan(boundaries_BD, layout, group, *q_BSNH.shape[:2])
    grad, q, k, v, out = (x.flatten(0, 1) for x in (grad_BSNH, q_BSNH, k_BSKH, v_BSKH, out_BSNH))
    inputs = (grad, q, k, v, pending_kv, out, attention_op.flatten_lse(lse_BNS), plan)
    reduce_dtype = reduce_dtype if q.dtype.itemsize < 4 else q.dtype
    if rotate_method == "allgather":
        reduce = partial(collectives.reduce_scatter, group=group)
        grads = all_gather.backward(*inputs, reduce_scatter=reduce, kernel=kernel, reduce_dtype=reduce_dtype)
    else:
        rotate = partial(_START_EXCHANGE[rotate_method], group=group)
        grads = ring.backward(*inputs, rotate=rotate, kernel=kernel, reduce_dtype=reduce_dtype)
    dq, dk, dv = (grad.view(x.shape) for grad, x in zip(grads, (q_BSNH, k_BSKH, v_BSKH), strict=True))
    return dq, dk, dv


def rank_attention_plan(
    boundaries_BD: Tensor, layout: str, group: ProcessGroup, batch_size: int, tokens_per_rank: int
) -> RankAttentionPlan:
    """What this rank computes of rows of which each rank holds `held` tokens. Raises ValueError."""
    return _rank_attention_plan(
        attention_op.boundary_tuples(boundaries_BD, batch_size),
        cast(ShardLayout, layout),
        group.size(),
        group.rank(),
        tokens_per_rank,
    )


@lru_cache(maxsize=8)
def _rank_attention_plan(
    batch_boundaries: attention_op.Boundaries, layout: ShardLayout, ring_degree: int, rank: int, tokens_per_rank: int
) -> RankAttentionPlan:
    # Every layer asks for the same. Few are kept: each may hold 15 MiB on the device, at a million tokens.
    return RankAttentionPlan(
        tuple(
            SeqLayout(layout, ring_degree, boundaries)
            for boundaries in attention_op.validate_boundaries(batch_boundaries, tokens_per_rank * ring_degree)
        ),
        rank,
    )


_START_EXCHANGE: dict[str, Callable[..., Waitable]] = {
    "ring": collectives.ring_shift,
    "alltoall": collectives.ring_shift_all_to_all,
    "allgather": collectives.all_gather_async,
}


@_attention.register_fake
def _(q_BSNH: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    del rest
    return attention_op.empty_output(q_BSNH)


@_attention_backward.register_fake
def _(grad_BSNH: Tensor, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    del grad_BSNH, rest
    return attention_op.empty_grads(q_BSNH, k_BSKH, v_BSKH)


def _autograd_backward(ctx: Any, grad_BSNH: Tensor, grad_lse: None) -> tuple[Tensor | None, ...]:
    del grad_lse
    return *_attention_backward(grad_BSNH.contiguous(), *ctx.saved_tensors, *ctx.options), *[None] * (
        1 + len(ctx.options)
    )


_attention.register_autograd(_autograd_backward, setup_context=attention_op.setup_context)
