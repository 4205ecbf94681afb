"""`longhaul::attention`: attention inside documents, as one operator, for a rank that holds full
sequences.

As a `torch.library` operator it is one opaque node in a compiled block, whatever the documents,
and a recomputation policy can name it. Document boundaries are integers on the CPU: the kernels
get one document at a time, without a mask and without wasted FLOPs.

Shape suffixes: B batch, S tokens, X tokens of all sequences concatenated, N query heads, K KV
heads, H head dim, D document boundaries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from models import kernels
from models.batch import (
    concatenated_boundaries,
    document_ranges,
    remembered,
    require_ascending,
    require_keys,
    split_boundaries,
)
from models.dtypes import accumulation_dtype
from models.kernels import Grads
from models.online_softmax import OnlineSoftmax, add_sink, sink_grad
from models.score_blocks import CAUSAL, ScoreBlocks, block_rows, document_rows
from models.score_pairs import FULL_SCORES, Scores


def _attention(
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    boundaries_BD: Tensor,
    sink_N: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    kernel_name: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Each query attends to the keys of its document up to its own position, with scale H ** -0.5.

    `boundaries_BD` is int32 on the CPU and covers exactly S tokens in every sequence. `sink_N`: a
    logit per head without a key. `window` and `softcap`: those of `Scores`, since operators take
    no objects. With boundaries [2, B, D], of queries and of keys, it attends to all keys of its
    document. Returns the output [B, S, N, H] and the log-sum-exp of the scores [B, N, S] (in
    `accumulation_dtype`), which has no gradient.
    """
    # Not `kernel`: Inductor passes optional arguments by keyword, and has one of that name itself.
    q, k, v = (x.flatten(0, 1) for x in (q_BSNH, k_BSKH, v_BSKH))
    blocks = score_blocks(q_BSNH, k_BSKH, boundaries_BD, Scores(window, softcap))
    out_XNH, lse_NX = forward(q, k, v, blocks, kernel=kernel_name)
    if sink_N is not None:
        out_XNH, lse_NX = add_sink(out_XNH, lse_NX, sink_N)
    return out_XNH.view_as(q_BSNH), unflatten_lse(lse_NX, q_BSNH.shape[0])


def _attention_backward(
    grad_BSNH: Tensor,
    saved: list[Tensor],
    boundaries_BD: Tensor,
    sink_N: Tensor | None,
    window: int | None,
    softcap: float | None,
    kernel_name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and the gradient of the sink, which is empty if there is none.

    `saved`: queries, keys, values, output and log-sum-exp.
    """
    q_BSNH, k_BSKH, v_BSKH, out_BSNH, lse_BNS = saved
    grad, q, k, v, out = (x.flatten(0, 1) for x in (grad_BSNH, q_BSNH, k_BSKH, v_BSKH, out_BSNH))
    blocks = score_blocks(q_BSNH, k_BSKH, boundaries_BD, Scores(window, softcap))
    lse_NX = flatten_lse(lse_BNS)
    dq, dk, dv = backward(grad, q, k, v, out, lse_NX, blocks, kernel=kernel_name)
    return (
        dq.view_as(q_BSNH),
        dk.view_as(k_BSKH),
        dv.view_as(v_BSKH),
        optional_sink_grad(grad, out, lse_NX, sink_N),
    )


def optional_sink_grad(
    grad_XNH: Tensor, out_XNH: Tensor, lse_NX: Tensor, sink_N: Tensor | None
) -> Tensor:
    """Gradient of the sink in its dtype; empty without one, because an operator cannot return
    None.
    """
    if sink_N is None:
        return out_XNH.new_empty(0)
    return sink_grad(grad_XNH, out_XNH, lse_NX, sink_N).to(sink_N.dtype)


def forward(
    q_XNH: Tensor, k_XKH: Tensor, v_XKH: Tensor, blocks: ScoreBlocks, *, kernel: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp [N, X] for blocks that cover all tokens; below autograd."""
    blocks = kernels.supported_blocks(
        blocks, kernels.select_kernel(q_XNH, kernel, scores=blocks.scores)
    )
    block_outputs = kernels.attend_blocks(q_XNH, k_XKH, v_XKH, blocks, kernel=kernel)
    # Blocks that share queries or keys give partial results: these are merged by their
    # log-sum-exp, in `accumulation_dtype`.
    if blocks.disjoint_tokens != (len(q_XNH), len(k_XKH)):
        softmax = OnlineSoftmax.of_no_keys(q_XNH)
        softmax.merge_all(block_outputs)
        return softmax.out_XNH.to(q_XNH.dtype), softmax.lse_NX
    results: tuple[Tensor, ...] = ()
    for queries, out, lse in block_outputs:
        # One call for all tokens: its results are not copied.
        if len(out) == len(q_XNH):
            return out.contiguous(), lse.contiguous()
        # Uninitialized: the blocks are disjoint and cover all tokens.
        results = results or tuple(x[0] for x in empty_output(q_XNH[None]))
        results[0][queries] = out
        results[1][:, queries] = lse
        del out, lse
    out_XNH, lse_NX = results
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
) -> Grads:
    """dq, dk and dv, in their inputs' dtypes, for blocks that cover all tokens; below autograd."""
    inputs = (grad_XNH, q_XNH, k_XKH, v_XKH, out_XNH, lse_NX)
    blocks = kernels.supported_blocks(
        blocks, kernels.select_kernel(q_XNH, kernel, scores=blocks.scores)
    )
    block_grads = kernels.attend_blocks_backward(*inputs, blocks, kernel=kernel)
    results: tuple[Tensor, ...] = ()
    if blocks.disjoint_tokens != (len(q_XNH), len(k_XKH)):
        # Several blocks may add to a token's gradient, so the sums are rounded once, at the end.
        dtype = accumulation_dtype(q_XNH.dtype)
        dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q_XNH, k_XKH, v_XKH))
        kernels.accumulate_grads((dq, dk, dv), block_grads)
        return dq.to(q_XNH.dtype), dk.to(q_XNH.dtype), dv.to(q_XNH.dtype)
    for queries, keys, *grads in block_grads:
        if len(grads[0]) == len(q_XNH):
            results = tuple(x.contiguous() for x in grads)
            break
        results = results or empty_grads(q_XNH, k_XKH, v_XKH)
        for result, tokens, grad in zip(results, (queries, keys, keys), grads, strict=True):
            result[tokens] = grad
        del grads, grad
    dq, dk, dv = results
    return dq, dk, dv


def score_blocks(
    q_BSNH: Tensor, k_BSKH: Tensor, boundaries_BD: Tensor, scores: Scores
) -> ScoreBlocks:
    batch_size, seq_len, kv_len = *q_BSNH.shape[:2], k_BSKH.shape[1]
    queries_BD, keys_BD = split_boundaries(boundaries_BD)
    if keys_BD is None:
        return document_blocks(queries_BD, batch_size, seq_len, scores)
    return full_blocks(queries_BD, batch_size, seq_len, keys_BD, kv_len, scores)


@remembered
def full_blocks(
    boundaries_BD: Tensor,
    batch_size: int,
    seq_len: int,
    kv_boundaries_BD: Tensor,
    kv_len: int,
    scores: Scores = FULL_SCORES,
) -> ScoreBlocks:
    """One rectangle per document: its queries see all its keys.

    Raises ValueError for invalid boundaries.
    """
    # `remembered` passes the batch size to every builder; the boundaries have it, too.
    del batch_size
    require_ascending(kv_boundaries_BD, kv_len)
    require_keys(boundaries_BD, kv_boundaries_BD)
    rows_R5 = document_rows(
        document_ranges(boundaries_BD, seq_len), document_ranges(kv_boundaries_BD, kv_len)
    )
    return ScoreBlocks(rows_R5, scores=scores)


@remembered
def document_blocks(
    boundaries_BD: Tensor, batch_size: int, seq_len: int, scores: Scores = FULL_SCORES
) -> ScoreBlocks:
    """One causal block per document, over all sequences concatenated.

    Raises ValueError for invalid boundaries.
    """
    del batch_size
    boundaries = concatenated_boundaries(boundaries_BD, seq_len)
    documents_R2 = torch.stack((boundaries[:-1], boundaries[1:]), dim=1)
    return ScoreBlocks(block_rows(documents_R2, documents_R2, CAUSAL), scores=scores)


def unflatten_lse(lse_NX: Tensor, batch_size: int) -> Tensor:
    """[N, X] -> [B, N, S]."""
    lse_NBS: Tensor = lse_NX.unflatten(1, (batch_size, -1))
    # Contiguous, because the operator must return the strides that `empty_output` promises.
    return lse_NBS.transpose(0, 1).contiguous()


def flatten_lse(lse_BNS: Tensor) -> Tensor:
    """[B, N, S] -> [N, X]."""
    lse_NX: Tensor = lse_BNS.transpose(0, 1).flatten(1)
    return lse_NX


def empty_output(q_BSNH: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised output and log-sum-exp."""
    batch_size, seq_len, heads, _ = q_BSNH.shape
    lse_BNS = q_BSNH.new_empty(batch_size, heads, seq_len, dtype=accumulation_dtype(q_BSNH.dtype))
    return torch.empty_like(q_BSNH, memory_format=torch.contiguous_format), lse_BNS


def empty_grads(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)


def fake_backward(
    grad: Tensor, saved: list[Tensor], boundaries: Tensor, sink: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    del grad, boundaries
    q, k, v, out, _lse = saved
    return *empty_grads(q, k, v), out.new_empty(0) if sink is None else torch.empty_like(sink)


# Inductor's cache finds a compiled graph by the arguments of the forward operator alone. Where
# those of the backward one change, they must change too, or a graph of before calls it.
attention = torch.library.custom_op("longhaul::attention", _attention, mutates_args=())
attention_backward = torch.library.custom_op(
    "longhaul::attention_backward", _attention_backward, mutates_args=()
)
attention.register_fake(lambda q_BSNH, *_: empty_output(q_BSNH))
attention_backward.register_fake(fake_backward)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, boundaries_BD, sink_N, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, boundaries_BD, sink_N)
    # The log-sum-exp is an output for recomputation's sake. Without `set_materialize_grads(False)`
    # autograd would allocate a gradient of zeros for it.
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def backward_of(
    operator: Callable[..., tuple[Tensor, ...]],
) -> Callable[..., tuple[Tensor | None, ...]]:
    """The autograd formula of an attention operator, from its backward operator."""

    def autograd_backward(
        ctx: Any, grad_BSNH: Tensor, grad_lse: None
    ) -> tuple[Tensor | None, ...]:
        del grad_lse
        # Once: activation checkpointing recomputes them for the first access only.
        *saved, boundaries_BD, sink_N = ctx.saved_tensors
        # A kernel may cache a plan for the strides of its first call.
        *grads, grad_sink_N = operator(
            grad_BSNH.contiguous(), saved, boundaries_BD, sink_N, *ctx.options
        )
        return *grads, None, None if sink_N is None else grad_sink_N, *[None] * len(ctx.options)

    return autograd_backward


attention.register_autograd(backward_of(attention_backward), setup_context=setup_context)


# ---- without the dispatch of an operator, which costs the host 0.1 ms a call


class _Attention(torch.autograd.Function):
    """Runs the bodies of an operator and of its backward operator under autograd."""

    @staticmethod
    def forward(
        ctx: Any, bodies: tuple[Callable[..., Any], Callable[..., Any]], *inputs: Any
    ) -> Any:
        output = bodies[0](*inputs)
        ctx.backward_body = bodies[1]
        setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *backward_of(ctx.backward_body)(ctx, *grads)


def undispatched(operator: Callable[..., Any], *bodies: Callable[..., Any]) -> Callable[..., Any]:
    """The operator without its dispatch: calls run its body, unless a compiler or a tensor
    subclass looks for the operator.

    With the body of its backward operator, the result is differentiable.
    """

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or type(inputs[0]) is not Tensor:
            return operator(*inputs)
        if len(bodies) == 1 or not torch.is_grad_enabled():
            return bodies[0](*inputs)
        return _Attention.apply(bodies, *inputs)

    return call


attend = undispatched(attention, _attention, _attention_backward)
attend_backward = undispatched(attention_backward, _attention_backward)
