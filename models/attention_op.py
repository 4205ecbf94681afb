"""Causal attention inside documents, when one rank holds whole rows: one operator.

It is a `torch.library` operator so that compiled blocks see one opaque node whatever the documents are, and so that a
recomputation policy can name it. Documents are given as integers on the host: work is handed to the kernels document
by document, without masks, and what need not be computed is not.

Shape suffixes: B rows, S tokens, X tokens of all rows laid end to end, N query heads, K key/value heads, H head width,
D document starts and the row's end.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from models import kernels
from models.kernels import Rectangle, Work

Boundaries = tuple[tuple[int, ...], ...]


def attention(
    q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor, *, kernel: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Each query attends to the keys of its own document up to itself, scaled by H ** -0.5.

    Returns the output [B, S, N, H] and the log-sum-exp of the scores [B, N, S] (float64 for float64, else float32),
    through which no gradient flows. `boundaries_BD` is int32 on the host and covers exactly S tokens in every row.
    """
    result: tuple[Tensor, Tensor] = _attention(q_BSNH, k_BSKH, v_BSKH, boundaries_BD, kernel)
    return result


@torch.library.custom_op("longhaul::attention", mutates_args=())
def _attention(
    q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor, kernel: str
) -> tuple[Tensor, Tensor]:
    rows, tokens = q_BSNH.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q_BSNH, k_BSKH, v_BSKH))
    out_XNH, lse_NX = forward(q, k, v, squares(boundaries_BD, rows, tokens), kernel=kernel)
    return out_XNH.unflatten(0, (rows, tokens)), by_row(lse_NX, rows)


@torch.library.custom_op("longhaul::attention_backward", mutates_args=())
def attention_backward(
    grad_BSNH: Tensor,
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    out_BSNH: Tensor,
    lse_BNS: Tensor,
    boundaries_BD: Tensor,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out = (x.flatten(0, 1) for x in (grad_BSNH, q_BSNH, k_BSKH, v_BSKH, out_BSNH))
    documents = squares(boundaries_BD, *q_BSNH.shape[:2])
    dq, dk, dv = backward(grad, q, k, v, out, laid_out(lse_BNS), documents, kernel=kernel)
    return dq.view_as(q_BSNH), dk.view_as(k_BSKH), dv.view_as(v_BSKH)


def forward(
    q_XNH: Tensor, k_XKH: Tensor, v_XKH: Tensor, squares: Work, *, kernel: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp [N, X] of squares that cover all tokens; below autograd."""
    parts = kernels.attend(q_XNH, k_XKH, v_XKH, squares, kernel=kernel)
    if len(squares.rectangles) == 1:
        _, out, lse = next(parts)
        return out.contiguous(), lse.contiguous()
    out_XNH = torch.empty_like(q_XNH, memory_format=torch.contiguous_format)
    lse_NX = q_XNH.new_empty(q_XNH.shape[1], q_XNH.shape[0], dtype=kernels.widest(q_XNH.dtype))
    for at, out, lse in parts:
        out_XNH[at] = out
        lse_NX[:, at] = lse
    return out_XNH, lse_NX


def backward(
    grad_XNH: Tensor,
    q_XNH: Tensor,
    k_XKH: Tensor,
    v_XKH: Tensor,
    out_XNH: Tensor,
    lse_NX: Tensor,
    squares: Work,
    *,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from squares that cover all tokens, in their types; below autograd."""
    inputs = (grad_XNH, q_XNH, k_XKH, v_XKH, out_XNH, lse_NX)
    parts = kernels.attend_backward(*inputs, squares, kernel=kernel)
    if len(squares.rectangles) == 1:
        _, _, *grads = next(parts)
        dq, dk, dv = (x.contiguous() for x in grads)
        return dq, dk, dv
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_XNH, k_XKH, v_XKH))
    for at, _, *grads in parts:
        for whole, part in zip((dq, dk, dv), grads, strict=True):
            whole[at] = part
    return dq, dk, dv


def squares(boundaries_BD: Tensor, rows: int, tokens: int) -> Work:
    """The documents of all rows, laid end to end. Raises ValueError as `integers` and `checked` do."""
    return _squares(integers(boundaries_BD, rows), tokens)


@lru_cache(maxsize=64)
def _squares(rows: Boundaries, tokens: int) -> Work:
    # Every layer asks for the same, and a batch ahead may have been asked for.
    return Work(
        (
            Rectangle(*(row * tokens + at for at in (start, end, start, end)))
            for row, boundaries in enumerate(checked(rows, tokens))
            for start, end in pairwise(boundaries)
            if end > start
        ),
        causal=True,
    )


def integers(boundaries_BD: Tensor, rows: int) -> Boundaries:
    """Boundaries row by row. Raises ValueError unless they are int32 on the host, and of so many rows."""
    if boundaries_BD.device.type != "cpu" or boundaries_BD.dtype != torch.int32:
        where, what = boundaries_BD.device, boundaries_BD.dtype
        raise ValueError(f"boundaries must be int32 on the host, not {what} on {where}")
    if boundaries_BD.ndim != 2:
        raise ValueError(f"boundaries must be [rows, starts and end], not of shape {tuple(boundaries_BD.shape)}")
    if (given := boundaries_BD.shape[0]) != rows:
        raise ValueError(f"boundaries of {given} row{'s' * (given != 1)} do not fit a batch of {rows}")
    return tuple(map(tuple, boundaries_BD.tolist()))


def checked(rows: Boundaries, tokens: int) -> Boundaries:
    """The same; raises ValueError unless every row's run from 0 to `tokens`, ascending."""
    for row in rows:
        if row[0] != 0 or row[-1] != tokens or any(end < start for start, end in pairwise(row)):
            raise ValueError(f"boundaries {list(row)} must ascend from 0 to the {tokens} tokens of the row")
    return rows


def by_row(lse_NX: Tensor, rows: int) -> Tensor:
    """[N, X] as [B, N, S]."""
    lse_NBS: Tensor = lse_NX.unflatten(1, (rows, -1))
    return lse_NBS.transpose(0, 1).contiguous()


def laid_out(lse_BNS: Tensor) -> Tensor:
    """[B, N, S] as [N, X]."""
    lse_NX: Tensor = lse_BNS.transpose(0, 1).flatten(1)
    return lse_NX


def like_output(q_BSNH: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised tensors in the shape of what attention returns."""
    rows, tokens, heads, _ = q_BSNH.shape
    lse_BNS = q_BSNH.new_empty(rows, heads, tokens, dtype=kernels.widest(q_BSNH.dtype))
    return torch.empty_like(q_BSNH, memory_format=torch.contiguous_format), lse_BNS


def like_grads(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Uninitialised tensors in the shape of the gradients of these."""
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)


@_attention.register_fake
def _(q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
    del k_BSKH, v_BSKH, boundaries_BD, kernel
    return like_output(q_BSNH)


@attention_backward.register_fake
def _(
    grad_BSNH: Tensor,
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    del grad_BSNH, rest
    return like_grads(q_BSNH, k_BSKH, v_BSKH)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """For backward: the tensors, and beside them the arguments that are none."""
    q, k, v, boundaries_BD, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, boundaries_BD)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, grad_BSNH: Tensor, grad_lse: None) -> tuple[Tensor | None, ...]:
    del grad_lse
    # Kernels may plan for the strides of what they saw first.
    return *attention_backward(grad_BSNH.contiguous(), *ctx.saved_tensors, *ctx.options), None, None


_attention.register_autograd(_grad, setup_context=save)
