"""Causal attention inside documents, with its log-sum-exp: one operator, and the only file that picks a kernel.

Shape suffixes: B rows, S tokens, N query heads, K key/value heads (N is a multiple of K), H head width, D document
starts and the row's end.

It is a `torch.library` operator so that compiled blocks see one opaque node whatever the documents are, and so that a
recomputation policy can name it. Documents are given as integers on the host: kernels are launched per document (CPU)
or once with the lengths (CUDA flash), without masks, and skipped work is really skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Grads = tuple[Tensor, Tensor, Tensor]

# The last arguments of every kernel: no dropout, causal.
CAUSAL = (0.0, True)


def documents_of(boundaries: list[int]) -> list[tuple[int, int]]:
    """The non-empty [start, end) of one row, from its padded boundaries."""
    return [(start, end) for start, end in pairwise(boundaries) if end > start]


@torch.library.custom_op("longhaul::attention", mutates_args=())
def attention(q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor) -> tuple[Tensor, Tensor]:
    """Each query attends to the keys of its own document up to itself, scaled by H ** -0.5.

    Returns the output [B, S, N, H] and the log-sum-exp of the scores [B, N, S] (float64 for float64, else float32).
    `boundaries_BD` is int32 on the host and covers exactly S tokens in every row.
    """
    check_boundaries(boundaries_BD, q_BSNH.shape[1])
    if uses_flash(q_BSNH):
        return _flash_forward(q_BSNH, k_BSKH, v_BSKH, boundaries_BD)
    forward = _cpu_forward if q_BSNH.device.type == "cpu" else _plain_forward
    spans = _spans(boundaries_BD)
    if spans is None:
        out, lse = forward(*(x.transpose(1, 2) for x in (q_BSNH, k_BSKH, v_BSKH)))
        return out.transpose(1, 2).contiguous(), lse.contiguous()
    out_BSNH = torch.empty_like(q_BSNH, memory_format=torch.contiguous_format)
    lse_BNS = _empty_lse(q_BSNH)
    for row, span in spans:
        out, lse = forward(*(x[row, span].transpose(1, 2) for x in (q_BSNH, k_BSKH, v_BSKH)))
        out_BSNH[row, span] = out.transpose(1, 2)
        lse_BNS[row, :, span] = lse
    return out_BSNH, lse_BNS


@torch.library.custom_op("longhaul::attention_backward", mutates_args=())
def attention_backward(
    grad_BSNH: Tensor,
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    out_BSNH: Tensor,
    lse_BNS: Tensor,
    boundaries_BD: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from the output and log-sum-exp that `attention` returned."""
    if uses_flash(q_BSNH):
        return _flash_backward(grad_BSNH, q_BSNH, k_BSKH, v_BSKH, out_BSNH, lse_BNS, boundaries_BD)
    backward: Callable[..., Grads] = _cpu_backward if q_BSNH.device.type == "cpu" else _plain_backward
    inputs = (grad_BSNH, q_BSNH, k_BSKH, v_BSKH, out_BSNH)
    spans = _spans(boundaries_BD)
    if spans is None:
        parts = backward(*(x.transpose(1, 2) for x in inputs), lse_BNS)
        dq, dk, dv = (part.transpose(1, 2).contiguous() for part in parts)
        return dq, dk, dv
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BSNH, k_BSKH, v_BSKH))
    for row, span in spans:
        parts = backward(*(x[row, span].transpose(1, 2) for x in inputs), lse_BNS[row, :, span])
        for grad, part in zip((dq, dk, dv), parts, strict=True):
            grad[row, span] = part.transpose(1, 2)
    return dq, dk, dv


def check_boundaries(boundaries_BD: Tensor, tokens: int) -> None:
    """Raises ValueError unless boundaries are int32 on the host and every row's run from 0 to `tokens`, ascending."""
    if boundaries_BD.device.type != "cpu" or boundaries_BD.dtype != torch.int32:
        where, what = boundaries_BD.device, boundaries_BD.dtype
        raise ValueError(f"boundaries must be int32 on the host, not {what} on {where}")
    for row in boundaries_BD.tolist():
        if row[0] != 0 or row[-1] != tokens or any(end < start for start, end in pairwise(row)):
            raise ValueError(f"boundaries {row} must ascend from 0 to the {tokens} tokens of the row")


def _spans(boundaries_BD: Tensor) -> list[tuple[slice, slice]] | None:
    """(row, tokens) of every document; None when each row is one, and one call serves all rows."""
    rows = [documents_of(row) for row in boundaries_BD.tolist()]
    if all(len(row) == 1 for row in rows):
        return None
    return [(slice(index, index + 1), slice(*document)) for index, row in enumerate(rows) for document in row]


def _empty_lse(q_BSNH: Tensor) -> Tensor:
    rows, tokens, heads, _ = q_BSNH.shape
    dtype = torch.float64 if q_BSNH.dtype == torch.float64 else torch.float32
    return torch.empty(rows, heads, tokens, dtype=dtype, device=q_BSNH.device)


# CPU flash: any strides, grouped heads and float64 natively.


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, *CAUSAL)
    return out, lse


def _cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Grads:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, *CAUSAL)
    return dq, dk, dv


# CUDA flash, half precision: all documents of all rows in one call.


def uses_flash(q: Tensor) -> bool:
    return q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16)


def _flash_lengths(boundaries_BD: Tensor, device: torch.device) -> tuple[Tensor, int]:
    """Document starts of the flattened rows, int32 on the device, and the longest document."""
    tokens = int(boundaries_BD[0, -1])
    starts, longest = [0], 0
    for index, row in enumerate(boundaries_BD.tolist()):
        for start, end in documents_of(row):
            starts.append(index * tokens + end)
            longest = max(longest, end - start)
    return torch.tensor(starts, dtype=torch.int32).to(device, non_blocking=True), longest


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, boundaries_BD: Tensor) -> tuple[Tensor, Tensor]:
    starts, longest = _flash_lengths(boundaries_BD, q.device)
    lengths = (starts, starts, longest, longest)
    without_mask = (False,)
    out, lse, *_ = aten._flash_attention_forward(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *lengths, *CAUSAL, *without_mask
    )
    return out.view_as(q), lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, boundaries_BD: Tensor
) -> Grads:
    starts, longest = _flash_lengths(boundaries_BD, q.device)
    lengths = (starts, starts, longest, longest)
    flat = [x.contiguous().flatten(0, 1) for x in (grad, q, k, v, out)]
    flat_lse = lse.transpose(0, 1).flatten(1, 2).contiguous()
    no_dropout_state = (torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device))
    grads = aten._flash_attention_backward(*flat, flat_lse, *lengths, *CAUSAL, *no_dropout_state)
    dq, dk, dv = (x.view_as(like) for x, like in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


# Anything else (single and double precision on CUDA): matrix products, for debugging and as the tests' reference.


def _plain_scores(q: Tensor, k: Tensor) -> Tensor:
    scores: Tensor = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-2, -1) * q.shape[-1] ** -0.5
    future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -torch.inf)


def _plain_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = _plain_scores(q, k)
    out = scores.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return out, scores.logsumexp(-1)


def _plain_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Grads:
    # By hand: the body of an operator runs below autograd. FlashAttention (Dao et al., 2022), appendix B.
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    weights = (_plain_scores(q, k) - lse.unsqueeze(-1)).exp()
    k_all, v_all = (x.repeat_interleave(groups[1], dim=1) for x in (k, v))
    grad_weights = grad @ v_all.transpose(-2, -1) - (grad * out).sum(-1, keepdim=True)
    grad_scores = weights * grad_weights * q.shape[-1] ** -0.5
    dk = (grad_scores.transpose(-2, -1) @ q).unflatten(1, groups).sum(2)
    dv = (weights.transpose(-2, -1) @ grad).unflatten(1, groups).sum(2)
    return grad_scores @ k_all, dk, dv


@attention.register_fake
def _(q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor) -> tuple[Tensor, Tensor]:
    del k_BSKH, v_BSKH, boundaries_BD
    return torch.empty_like(q_BSNH, memory_format=torch.contiguous_format), _empty_lse(q_BSNH)


@attention_backward.register_fake
def _(
    grad_BSNH: Tensor,
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    out_BSNH: Tensor,
    lse_BNS: Tensor,
    boundaries_BD: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    del grad_BSNH, out_BSNH, lse_BNS, boundaries_BD
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BSNH, k_BSKH, v_BSKH))
    return dq, dk, dv


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, grad_BSNH: Tensor, grad_lse: None) -> tuple[Tensor | None, ...]:
    del grad_lse
    q, k, v, boundaries_BD, out, lse = ctx.saved_tensors
    return *attention_backward(grad_BSNH, q, k, v, out, lse, boundaries_BD), None


attention.register_autograd(_grad, setup_context=_save)
