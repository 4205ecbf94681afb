"""Attention kernels of torch that return the log-sum-exp, selected by device and dtype.

The score matrix is given as blocks (`models/score_blocks.py`).

Shape suffixes: X query tokens and Y key tokens (all sequences of a batch concatenated), P tokens
of a block, N query heads, K KV heads (N is a multiple of K), H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from models.device_paths import runs_as_on_gpu
from models.dtypes import accumulation_dtype
from models.kernel_choice import (
    CUDNN_AND_FLASH,
    SOFTCAP_PROBLEM,
    AttentionNeeds,
    auto_choices,
    planned_length,
)
from models.score_blocks import ScoreBlock, ScoreBlocks, TokenIndex, VarlenBatch
from models.score_pairs import FULL_SCORES, Scores
from models.tiling import each

aten = torch.ops.aten

KERNELS = ("auto", "cpu", "flash", "cudnn", CUDNN_AND_FLASH, "efficient", "plain")
left_out = set[str]()
"""Kernels that "auto" does not choose in this process, because they were wrong on their device. It
never has "plain".
"""
Grads = tuple[Tensor, Tensor, Tensor]
BlockGrads = tuple[TokenIndex, TokenIndex, Tensor, Tensor, Tensor]
"""Indices of queries and of keys, dq, dk and dv."""


def attend_blocks(
    q_XNH: Tensor, k_YKH: Tensor, v_YKH: Tensor, blocks: ScoreBlocks, *, kernel: str = "auto"
) -> Iterator[tuple[TokenIndex, Tensor, Tensor]]:
    """Attention with scale H ** -0.5, one or several blocks per kernel call.

    Yields (queries, output [P, N, H], log-sum-exp [N, P] in `accumulation_dtype`).
    """
    softcap = blocks.scores.softcap
    for name, part in _assigned(blocks, select_kernel(q_XNH, kernel, scores=blocks.scores)):
        if name == "flash":
            for batch in part.varlen_batches(q_XNH.device):
                q = q_XNH[batch.queries]
                k = k_YKH[batch.keys]
                v = v_YKH[batch.keys]
                yield batch.queries, *_flash_forward(q, k, v, batch, part.window)
            continue
        # Only matrix products know a soft cap: `select_kernel` refuses any other kernel with one.
        forward = (
            DENSE_KERNELS[name][0] if softcap is None else partial(_plain_forward, softcap=softcap)
        )
        # In a function, so that nothing of a block lives on beside the next one.
        attend = partial(_attend_block, name, forward, [q_XNH], [k_YKH, v_YKH])
        yield from map(attend, each(part.blocks, ScoreBlock.shape))


def _attend_block(
    name: str,
    forward: Callable[..., tuple[Tensor, Tensor]],
    queries: list[Tensor],
    keys: list[Tensor],
    block: ScoreBlock,
) -> tuple[TokenIndex, Tensor, Tensor]:
    """Queries of a block, their output and log-sum-exp, as `attend_blocks` yields them."""
    num_queries = block.q1 - block.q0
    length = _call_length(name, block)
    out, lse = forward(*_block_tokens(block, queries, keys, length), block.mask != "full")
    # The call may be longer than the block (`_call_length`).
    out_PNH = out[0].transpose(0, 1)[:num_queries]
    lse_NP = lse[0, :, :num_queries]
    # It ran in reversed order, where a flipped block is causal.
    if block.mask == "flipped":
        out_PNH = out_PNH.flip(0)
        lse_NP = lse_NP.flip(1)
    return slice(block.q0, block.q1), out_PNH, lse_NP


def attend_blocks_backward(
    grad_XNH: Tensor,
    q_XNH: Tensor,
    k_YKH: Tensor,
    v_YKH: Tensor,
    out_XNH: Tensor,
    lse_NX: Tensor,
    blocks: ScoreBlocks,
    *,
    kernel: str = "auto",
) -> Iterator[BlockGrads]:
    """The gradient contributions of one or several blocks at a time.

    `out_XNH` and `lse_NX` are the results over *all* keys of each query, also those that other
    ranks hold. With them the contribution of any subset of the keys is exact (FlashAttention, Dao
    et al., 2022, appendix B).
    """
    softcap = blocks.scores.softcap
    for name, part in _assigned(blocks, select_kernel(q_XNH, kernel, scores=blocks.scores)):
        if name == "flash":
            for batch in part.varlen_batches(q_XNH.device):
                grad, q, out = (x[batch.queries] for x in (grad_XNH, q_XNH, out_XNH))
                k, v = (x[batch.keys] for x in (k_YKH, v_YKH))
                lse = lse_NX[:, batch.queries]
                grads = _flash_backward(grad, q, k, v, out, lse, batch, part.window)
                yield batch.queries, batch.keys, *grads
                del grads
            continue
        backward = (
            DENSE_KERNELS[name][1]
            if softcap is None
            else partial(_plain_backward, softcap=softcap)
        )
        of_block = partial(
            _block_grads, name, backward, [grad_XNH, q_XNH, out_XNH], [k_YKH, v_YKH], lse_NX
        )
        yield from map(of_block, each(part.blocks, ScoreBlock.shape))


def _block_grads(
    name: str,
    backward: Callable[..., Grads],
    queries: list[Tensor],
    keys: list[Tensor],
    lse_NX: Tensor,
    block: ScoreBlock,
) -> BlockGrads:
    """The gradient contributions of a block."""
    num_queries = block.q1 - block.q0
    length = _call_length(name, block)
    grad, q, out, k, v = _block_tokens(block, queries, keys, length)
    lse = lse_NX[None, :, block.q0 : block.q1]
    lse = lse.flip(2) if block.mask == "flipped" else lse
    # A row that only fills up gets no weight, so it adds nothing to the gradients.
    lse = lse if length is None else F.pad(lse, (0, length - num_queries), value=torch.inf)
    grads = backward(grad, q, k, v, out, lse, block.mask != "full")
    dq, dk, dv = (x[0].transpose(0, 1)[: None if length is None else num_queries] for x in grads)
    if block.mask == "flipped":
        dq, dk, dv = (x.flip(0) for x in (dq, dk, dv))
    return slice(block.q0, block.q1), slice(block.k0, block.k1), dq, dk, dv


def _block_tokens(
    block: ScoreBlock, queries: list[Tensor], keys: list[Tensor], length: int | None = None
) -> Iterator[Tensor]:
    """A block's tokens of each tensor as dense kernels take them, [1, heads, P, H]; reversed if it
    is flipped.

    `length`: that of the call, if it is not the block's own. The tokens that follow fill it up,
    then zeros.
    """
    ranges = [(block.q0, block.q1)] * len(queries) + [(block.k0, block.k1)] * len(keys)
    for x, (start, end) in zip(queries + keys, ranges, strict=True):
        part = x[start : end if length is None else start + length]
        part = part.flip(0) if block.mask == "flipped" else part
        part = part if length is None else F.pad(part, (0, 0, 0, 0, 0, length - len(part)))
        yield part[None].transpose(1, 2)


def _call_length(kernel: str, block: ScoreBlock) -> int | None:
    """The tokens of a causal block's call, if the kernel builds a plan for every length: a query
    does not see later keys.
    """
    if kernel != "cudnn" or block.mask != "causal":
        return None
    length = planned_length(block.q1 - block.q0)
    return length if length > block.q1 - block.q0 else None


def accumulate_grads(accumulators: Grads, block_grads: Iterable[BlockGrads]) -> None:
    """Adds what `attend_blocks_backward` yields to the accumulators of dq, dk and dv, in place."""
    total_dq, total_dk, total_dv = accumulators
    for queries, keys, dq, dk, dv in block_grads:
        total_dq[queries] += dq
        total_dk[keys] += dk
        total_dv[keys] += dv
        # Freed before the next block allocates its own.
        del dq, dk, dv


def select_kernel(q_XNH: Tensor, kernel: str = "auto", *, scores: Scores = FULL_SCORES) -> str:
    """The kernel for queries of this device and dtype; on CPU always "cpu" or "plain".

    Raises ValueError if the name is unknown, and for soft-capped scores, unless it is that of
    matrix products.
    """
    if kernel not in KERNELS:
        raise ValueError(
            f'attention kernel "{kernel}" is unknown; choose from {", ".join(KERNELS)}'
        )
    if not runs_as_on_gpu(q_XNH):
        return "plain" if kernel == "plain" or scores.softcap is not None else "cpu"
    if kernel == "auto":
        choices = _auto_choices(q_XNH.dtype, q_XNH.shape[-1], scores.softcap, q_XNH.device)
        return next(each for each in choices if each not in left_out)
    if scores.softcap is not None and kernel != "plain":
        raise ValueError(SOFTCAP_PROBLEM.format(kernel=kernel, softcap=scores.softcap))
    return kernel


@lru_cache
def _auto_choices(
    dtype: torch.dtype, head_dim: int, softcap: float | None, device: torch.device
) -> list[str]:
    name = str(dtype).removeprefix("torch.")
    generation = device_generation(device)
    return auto_choices(
        AttentionNeeds(dtype=name, head_dim=head_dim, softcap=softcap, generation=generation)
    )


GENERATIONS = {
    (8, 0): "ampere",
    (8, 6): "ampere rtx",
    (8, 9): "ada",
    (9, 0): "hopper",
    (10, 0): "blackwell",
    (10, 3): "blackwell",
    (12, 0): "blackwell rtx",
    (12, 1): "blackwell rtx",
}
"""Generations of devices by compute capability."""


@lru_cache
def device_generation(device: torch.device) -> str | None:
    """Generation of a device, as the device tables name it; None if unknown."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return (
        "cdna" if torch.version.hip else GENERATIONS.get(torch.cuda.get_device_capability(device))
    )


def supported_blocks(blocks: ScoreBlocks, kernel: str) -> ScoreBlocks:
    """Blocks of the same pairs as the kernel takes them: only flash has windows."""
    return blocks if "flash" in kernel else blocks.without_window


def prepare(blocks: ScoreBlocks, kernel: str) -> None:
    """Computes what a kernel's calls need on the host, and keeps it with the blocks.

    `kernel`: a name other than "auto".
    """
    for name, part in _assigned(blocks, kernel):
        _ = part.host_varlen_batches if name == "flash" else part.blocks


def _assigned(blocks: ScoreBlocks, name: str) -> Iterator[tuple[str, ScoreBlocks]]:
    """Kernels and the blocks that they take.

    cuDNN rejects a single key, and its results for a single query are unreliable: flash takes
    those blocks.
    """
    blocks = supported_blocks(blocks, name)
    if name == "cudnn":
        parts = [*zip(("flash", "cudnn"), blocks.single_and_longer, strict=True)]
    elif name == CUDNN_AND_FLASH:
        parts = [*zip(("flash", "cudnn"), blocks.short_and_long, strict=True)]
    else:
        parts = [(name, blocks)]
    return ((name, part) for name, part in parts if len(part))


# ---- CPU flash: takes any strides, grouped-query heads and float64.


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Grads:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal
    )
    return dq, dk, dv


# ---- CUDA flash (FlashAttention 2, or 3 and 4 if activated): several blocks per varlen call.


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, batch: VarlenBatch, window: int | None
) -> tuple[Tensor, Tensor]:
    causal = batch.mask != "full"
    return_debug_mask = False
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, *batch.lengths, 0.0, causal, return_debug_mask, **_window_option(batch, window)
    )
    return out, lse


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    batch: VarlenBatch,
    window: int | None,
) -> Grads:
    contiguous = [x.contiguous() for x in (grad, q, k, v, out, lse)]
    # The operator needs the state of its random numbers, also without dropout.
    no_dropout_state = (
        torch.empty(2, dtype=torch.uint64, device=q.device),
        torch.empty(0, device=q.device),
    )
    options = _window_option(batch, window)
    dq, dk, dv = aten._flash_attention_backward(
        *contiguous, *batch.lengths, 0.0, batch.mask != "full", *no_dropout_state, **options
    )
    return dq, dk, dv


def _window_option(batch: VarlenBatch, window: int | None) -> dict[str, int]:
    """The option for a window: the kernel counts the keys before a query's own."""
    return {} if window is None or batch.mask != "causal" else {"window_size_left": window - 1}


# ---- CUDA cuDNN, 16-bit dtypes: one call per block.


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    compute_lse = True
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, compute_lse, 0.0, causal
    )
    return out, lse.view(q.shape[:3])


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Grads:
    empty = torch.empty(0, dtype=torch.int64, device=q.device)
    seqlen_arguments = (None, None, q.shape[2], k.shape[2])
    # cuDNN takes the log-sum-exp as [B, N, S, 1].
    saved = (out.contiguous(), lse.contiguous()[..., None])
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, *saved, empty, empty, None, *seqlen_arguments, 0.0, causal
    )
    return dq, dk, dv


# ---- CUDA memory-efficient, for float32: one call per block, without grouped-query heads.


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    compute_lse = True
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, keys, values, None, compute_lse, 0.0, causal
    )
    # The log-sum-exp is padded to a multiple of 32 queries; the backward kernel expects the
    # padding too.
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Grads:
    head_groups = (k.shape[1], q.shape[1] // k.shape[1])
    keys, values = (x.repeat_interleave(head_groups[1], dim=1) for x in (k, v))
    # Padded rows weigh nothing: exp(score - inf) = 0.
    padded_lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    empty = torch.empty((), dtype=torch.int64, device=q.device)
    grad_mask = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, keys, values, None, out, padded_lse, empty, empty, 0.0, grad_mask, causal
    )
    # KV heads were repeated for their queries' heads, so their gradients are summed.
    return dq, dk.unflatten(1, head_groups).sum(2), dv.unflatten(1, head_groups).sum(2)


# ---- Matrix products on any device: the reference of the other kernels, and the choice for float64 on CUDA.


def _plain_scores(
    q: Tensor, k: Tensor, causal: bool, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Scores, and the derivative of the soft cap, if there is one."""
    repeated = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores: Tensor = q @ repeated.transpose(-2, -1) * q.shape[-1] ** -0.5
    slope: Tensor | None = None
    if softcap is not None:
        # s' = c tanh(s / c), so ds' / ds = 1 - tanh(s / c) ** 2.
        saturation = (scores / softcap).tanh()
        scores = softcap * saturation
        slope = 1 - saturation.square()
    if causal:
        causal_mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(causal_mask, -torch.inf)
    return scores, slope


def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    q_accum, k_accum, v_accum = (x.to(accumulation_dtype(x.dtype)) for x in (q, k, v))
    scores, _ = _plain_scores(q_accum, k_accum, causal, softcap)
    out = scores.softmax(-1) @ v_accum.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return out.to(q.dtype), scores.logsumexp(-1)


def _plain_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    softcap: float | None = None,
) -> Grads:
    # Written explicitly: the body of an operator runs below autograd.
    input_dtype = q.dtype
    grad, q, k, v, out = (x.to(accumulation_dtype(x.dtype)) for x in (grad, q, k, v, out))
    head_groups = (k.shape[1], q.shape[1] // k.shape[1])
    scores, slope = _plain_scores(q, k, causal, softcap)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    k_all, v_all = (x.repeat_interleave(head_groups[1], dim=1) for x in (k, v))
    # Gradient of the softmax: dS = P (dP - sum(P dP)), where sum(P dP) = grad . out.
    grad_weights = grad @ v_all.transpose(-2, -1) - (grad * out).sum(-1, keepdim=True)
    grad_scores = weights * grad_weights * q.shape[-1] ** -0.5
    if slope is not None:
        grad_scores = grad_scores * slope
    dk = (grad_scores.transpose(-2, -1) @ q).unflatten(1, head_groups).sum(2)
    dv = (weights.transpose(-2, -1) @ grad).unflatten(1, head_groups).sum(2)
    return (grad_scores @ k_all).to(input_dtype), dk.to(input_dtype), dv.to(input_dtype)


DENSE_KERNELS: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Grads]]] = {
    "cpu": (_cpu_forward, _cpu_backward),
    "cudnn": (_cudnn_forward, _cudnn_backward),
    "efficient": (_efficient_forward, _efficient_backward),
    "plain": (_plain_forward, _plain_backward),
}
