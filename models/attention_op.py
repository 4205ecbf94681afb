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
from models.kernels import ScoreBlock, ScoreBlocks

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
    batch_size, seq_len = q_BSNH.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q_BSNH, k_BSKH, v_BSKH))
    out_XNH, lse_NX = forward(q, k, v, document_blocks(boundaries_BD, batch_size, seq_len), kernel=kernel)
    return out_XNH.unflatten(0, (batch_size, seq_len)), unflatten_lse(lse_NX, batch_size)


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
    blocks = document_blocks(boundaries_BD, *q_BSNH.shape[:2])
    dq, dk, dv = backward(grad, q, k, v, out, flatten_lse(lse_BNS), blocks, kernel=kernel)
    return dq.view_as(q_BSNH), dk.view_as(k_BSKH), dv.view_as(v_BSKH)


def forward(
    q_XNH: Tensor, k_XKH: Tensor, v_XKH: Tensor, blocks: ScoreBlocks, *, kernel: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp [N, X] of squares that cover all tokens; below autograd."""
    outputs = kernels.attend_blocks(q_XNH, k_XKH, v_XKH, blocks, kernel=kernel)
    if len(blocks.blocks) == 1:
        _, out, lse = next(outputs)
        return out.contiguous(), lse.contiguous()
    out_XNH = torch.empty_like(q_XNH, memory_format=torch.contiguous_format)
    lse_NX = q_XNH.new_empty(q_XNH.shape[1], q_XNH.shape[0], dtype=kernels.accumulation_dtype(q_XNH.dtype))
    for queries, out, lse in outputs:
        out_XNH[queries] = out
        lse_NX[:, queries] = lse
    return out_XNH, lse_NX


def backward(
    grad_XNH: Tensor,
    q_XNH: Tensor,
    k_XKH: Tensor,
    v_XKH: Tensor,
    out_XNH: Tensor,
    lse_NX: Tensor,
    blocks: ScoreBlocks,
    *,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from squares that cover all tokens, in their types; below autograd."""
    inputs = (grad_XNH, q_XNH, k_XKH, v_XKH, out_XNH, lse_NX)
    block_grads = kernels.attend_blocks_backward(*inputs, blocks, kernel=kernel)
    if len(blocks.blocks) == 1:
        _, _, *grads = next(block_grads)
        dq, dk, dv = (x.contiguous() for x in grads)
        return dq, dk, dv
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_XNH, k_XKH, v_XKH))
    for queries, _, *grads in block_grads:
        for full_grad, block_grad in zip((dq, dk, dv), grads, strict=True):
            full_grad[queries] = block_grad
    return dq, dk, dv


def document_blocks(boundaries_BD: Tensor, batch_size: int, seq_len: int) -> ScoreBlocks:
    """The documents of all rows, laid end to end. Raises ValueError as `integers` and `checked` do."""
    return _document_blocks(boundary_tuples(boundaries_BD, batch_size), seq_len)


@lru_cache(maxsize=64)
def _document_blocks(batch_boundaries: Boundaries, seq_len: int) -> ScoreBlocks:
    # Every layer asks for the same, and a batch ahead may have been asked for.
    return ScoreBlocks(
        (
            ScoreBlock(*(index * seq_len + position for position in (start, end, start, end)))
            for index, boundaries in enumerate(validate_boundaries(batch_boundaries, seq_len))
            for start, end in pairwise(boundaries)
            if end > start
        ),
        causal=True,
    )


def boundary_tuples(boundaries_BD: Tensor, batch_size: int) -> Boundaries:
    """Boundaries row by row. Raises ValueError unless they are int32 on the host, and of so many rows."""
    if boundaries_BD.device.type != "cpu" or boundaries_BD.dtype != torch.int32:
        device, dtype = boundaries_BD.device, boundaries_BD.dtype
        raise ValueError(f"boundaries must be int32 on the host, not {dtype} on {device}")
    if boundaries_BD.ndim != 2:
        raise ValueError(f"boundaries must be [rows, starts and end], not of shape {tuple(boundaries_BD.shape)}")
    if (num_sequences := boundaries_BD.shape[0]) != batch_size:
        raise ValueError(
            f"boundaries of {num_sequences} row{'s' * (num_sequences != 1)} do not fit a batch of {batch_size}"
        )
    return tuple(map(tuple, boundaries_BD.tolist()))


def validate_boundaries(batch_boundaries: Boundaries, seq_len: int) -> Boundaries:
    """The same; raises ValueError unless every row's run from 0 to `tokens`, ascending."""
    for boundaries in batch_boundaries:
        if boundaries[0] != 0 or boundaries[-1] != seq_len or any(end < start for start, end in pairwise(boundaries)):
            raise ValueError(f"boundaries {list(boundaries)} must ascend from 0 to the {seq_len} tokens of the row")
    return batch_boundaries


def unflatten_lse(lse_NX: Tensor, batch_size: int) -> Tensor:
    """[N, X] as [B, N, S]."""
    lse_NBS: Tensor = lse_NX.unflatten(1, (batch_size, -1))
    return lse_NBS.transpose(0, 1).contiguous()


def flatten_lse(lse_BNS: Tensor) -> Tensor:
    """[B, N, S] as [N, X]."""
    lse_NX: Tensor = lse_BNS.transpose(0, 1).flatten(1)
    return lse_NX


def empty_output(q_BSNH: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised tensors in the shape of what attention returns."""
    batch_size, seq_len, heads, _ = q_BSNH.shape
    lse_BNS = q_BSNH.new_empty(batch_size, heads, seq_len, dtype=kernels.accumulation_dtype(q_BSNH.dtype))
    return torch.empty_like(q_BSNH, memory_format=torch.contiguous_format), lse_BNS


def empty_grads(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Uninitialised tensors in the shape of the gradients of these."""
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)


@_attention.register_fake
def _(q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
    del k_BSKH, v_BSKH, boundaries_BD, kernel
    return empty_output(q_BSNH)


@attention_backward.register_fake
def _(
    grad_BSNH: Tensor,
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    del grad_BSNH, rest
    return empty_grads(q_BSNH, k_BSKH, v_BSKH)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """For backward: the tensors, and beside them the arguments that are none."""
    q, k, v, boundaries_BD, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, boundaries_BD)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx: Any, grad_BSNH: Tensor, grad_lse: None) -> tuple[Tensor | None, ...]:
    del grad_lse
    # Kernels may plan for the strides of what they saw first.
    return *attention_backward(grad_BSNH.contiguous(), *ctx.saved_tensors, *ctx.options), None, None


_attention.register_autograd(_autograd_backward, setup_context=setup_context)
