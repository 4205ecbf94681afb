"""Attention kernels of torch that return the log-sum-exp, selected by device and dtype.

The score matrix is given as rectangular blocks. A block covers all pairs of its queries and keys or, if it is square,
the causal half. The queries of one `ScoreBlocks` are disjoint, so each block's output is final for its keys.

Shape suffixes: X query tokens and Y key tokens (all sequences of a batch concatenated), P tokens of a block, N query
heads, K KV heads (N is a multiple of K), H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from models.linear import accumulation_dtype

aten = torch.ops.aten

KERNELS = ("auto", "cpu", "flash", "cudnn", "efficient", "plain")
TokenIndex = slice | Tensor
"""A range of tokens, or distinct int64 indices."""


class ScoreBlock(NamedTuple):
    """Queries [q0, q1) and keys [k0, k1)."""

    q0: int
    q1: int
    k0: int
    k1: int


class ScoreBlocks:
    """Blocks of the score matrix, ascending and disjoint in their queries; validated once for all layers.

    Raises ValueError for an empty block, and for a causal block that is not square.
    """

    def __init__(self, blocks: Iterable[tuple[int, int, int, int]], *, causal: bool) -> None:
        self.blocks = tuple(ScoreBlock(*block) for block in blocks)
        self.causal = causal
        self._varlen_batches: dict[torch.device, list[VarlenBatch]] = {}
        # The CPU kernel crashes on length zero; kernels disagree on the diagonal of a block that is not square.
        for block in self.blocks:
            queries, keys = block.q1 - block.q0, block.k1 - block.k0
            if queries <= 0 or keys <= 0:
                raise ValueError(f"{block} is empty: attention needs at least one query and one key")
            if causal and queries != keys:
                raise ValueError(f"{block} is causal, and must have as many queries as keys")

    @cached_property
    def by_length(self) -> tuple[ScoreBlocks, ScoreBlocks]:
        """(the blocks of a single query or key, all others)."""
        single = [block for block in self.blocks if min(block.q1 - block.q0, block.k1 - block.k0) == 1]
        longer = [block for block in self.blocks if min(block.q1 - block.q0, block.k1 - block.k0) > 1]
        return ScoreBlocks(single, causal=self.causal), ScoreBlocks(longer, causal=self.causal)

    def varlen_batches(self, device: torch.device) -> list[VarlenBatch]:
        """The blocks grouped into varlen calls, within each of which the keys are disjoint too; cached by device."""
        if device not in self._varlen_batches:
            batches: list[list[ScoreBlock]] = []
            for block in self.blocks:
                batch = next((batch for batch in batches if batch[-1].k1 <= block.k0), None)
                if batch is None:
                    batches.append(batch := [])
                batch.append(block)
            self._varlen_batches[device] = [_varlen_batch(batch, device) for batch in batches]
        return self._varlen_batches[device]


class VarlenBatch(NamedTuple):
    """Arguments of one varlen flash attention call."""

    queries: TokenIndex
    keys: TokenIndex
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


Grads = tuple[Tensor, Tensor, Tensor]
BlockGrads = tuple[TokenIndex, TokenIndex, Tensor, Tensor, Tensor]
"""Queries, keys, dq, dk and dv."""


def attend_blocks(
    q_XNH: Tensor, k_YKH: Tensor, v_YKH: Tensor, blocks: ScoreBlocks, *, kernel: str = "auto"
) -> Iterator[tuple[TokenIndex, Tensor, Tensor]]:
    """Attention with scale H ** -0.5, one or several blocks per kernel call.

    Yields (queries, output [P, N, H], log-sum-exp [N, P] in `accumulation_dtype`).
    """
    for name, part in _assigned(blocks, select_kernel(q_XNH, kernel)):
        if name == "flash":
            for batch in part.varlen_batches(q_XNH.device):
                q, k, v = q_XNH[batch.queries], k_YKH[batch.keys], v_YKH[batch.keys]
                yield batch.queries, *_flash_forward(q, k, v, batch, part.causal)
            continue
        forward, _ = DENSE_KERNELS[name]
        for q0, q1, k0, k1 in part.blocks:
            q, k, v = (x[None].transpose(1, 2) for x in (q_XNH[q0:q1], k_YKH[k0:k1], v_YKH[k0:k1]))
            out, lse = forward(q, k, v, part.causal)
            yield slice(q0, q1), out[0].transpose(0, 1), lse[0]


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

    `out_XNH` and `lse_NX` are the results over *all* keys of each query, also those that other ranks hold. With them
    the contribution of any subset of the keys is exact (FlashAttention, Dao et al., 2022, appendix B).
    """
    for name, part in _assigned(blocks, select_kernel(q_XNH, kernel)):
        if name == "flash":
            for batch in part.varlen_batches(q_XNH.device):
                grad, q, out = (x[batch.queries] for x in (grad_XNH, q_XNH, out_XNH))
                k, v = (x[batch.keys] for x in (k_YKH, v_YKH))
                grads = _flash_backward(grad, q, k, v, out, lse_NX[:, batch.queries], batch, part.causal)
                yield batch.queries, batch.keys, *grads
            continue
        _, backward = DENSE_KERNELS[name]
        for q0, q1, k0, k1 in part.blocks:
            dense = (grad_XNH[q0:q1], q_XNH[q0:q1], k_YKH[k0:k1], v_YKH[k0:k1], out_XNH[q0:q1])
            grad, q, k, v, out = (x[None].transpose(1, 2) for x in dense)
            grads = backward(grad, q, k, v, out, lse_NX[None, :, q0:q1], part.causal)
            dq, dk, dv = (x[0].transpose(0, 1) for x in grads)
            yield slice(q0, q1), slice(k0, k1), dq, dk, dv


def accumulate_grads(accumulators: Grads, block_grads: Iterable[BlockGrads]) -> None:
    """Adds what `attend_blocks_backward` yields to the accumulators of dq, dk and dv, in place."""
    total_dq, total_dk, total_dv = accumulators
    for queries, keys, dq, dk, dv in block_grads:
        total_dq[queries] += dq
        total_dk[keys] += dk
        total_dv[keys] += dv


def select_kernel(q_XNH: Tensor, kernel: str = "auto") -> str:
    """The kernel for queries of this device and dtype; on CPU always "cpu" or "plain". Raises ValueError if unknown."""
    if kernel not in KERNELS:
        raise ValueError(f'attention kernel "{kernel}" is unknown; choose from {", ".join(KERNELS)}')
    if q_XNH.device.type == "cpu":
        return "plain" if kernel == "plain" else "cpu"
    if kernel != "auto":
        return kernel
    # Not cuDNN: reports of wrong gradients for some short lengths, and a new plan for every shape.
    by_dtype = {torch.bfloat16: "flash", torch.float16: "flash", torch.float32: "efficient"}
    return by_dtype.get(q_XNH.dtype, "plain")


def _assigned(blocks: ScoreBlocks, name: str) -> Iterator[tuple[str, ScoreBlocks]]:
    """Kernels and the blocks that they take.

    cuDNN rejects a single key, and its results for a single query are unreliable: flash takes those blocks.
    """
    parts = zip(("flash", "cudnn"), blocks.by_length, strict=True) if name == "cudnn" else [(name, blocks)]
    return ((name, part) for name, part in parts if part.blocks)


# ---- CPU flash: takes any strides, grouped-query heads and float64.


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse


def _cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Grads:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    return dq, dk, dv


# ---- CUDA flash (FlashAttention 2, or 3 and 4 if activated): several blocks per varlen call.


def _varlen_batch(blocks: list[ScoreBlock], device: torch.device) -> VarlenBatch:
    queries, cu_seqlens_q, max_seqlen_q = _varlen_spans([(q0, q1) for q0, q1, _, _ in blocks], device)
    keys, cu_seqlens_k, max_seqlen_k = _varlen_spans([(k0, k1) for _, _, k0, k1 in blocks], device)
    return VarlenBatch(queries, keys, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


def _varlen_spans(spans: list[tuple[int, int]], device: torch.device) -> tuple[TokenIndex, Tensor, int]:
    """The tokens of the spans, cu_seqlens and the longest length."""
    starts, lengths = [start for start, _ in spans], [end - start for start, end in spans]
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cpu")
    tokens: TokenIndex = slice(starts[0], spans[-1][1])
    if any(end != start for (_, end), (start, _) in pairwise(spans)):
        tokens = to_device(concatenated_ranges(starts, lengths), device)
    return tokens, to_device(cu_seqlens, device), max(lengths)


def concatenated_ranges(starts: list[int], lengths: list[int]) -> Tensor:
    """int64 on the CPU: `arange(start, start + length)` of every pair, concatenated."""
    start_tensor, length_tensor = torch.tensor([starts, lengths], dtype=torch.int64, device="cpu")
    offsets: Tensor = (start_tensor - (length_tensor.cumsum(0) - length_tensor)).repeat_interleave(length_tensor)
    return offsets + torch.arange(len(offsets), device="cpu")


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copies without blocking the host; a copy from pageable memory would wait for the device's queue."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, batch: VarlenBatch, causal: bool) -> tuple[Tensor, Tensor]:
    return_debug_mask = False
    out, lse, *_ = aten._flash_attention_forward(q, k, v, *batch[2:], 0.0, causal, return_debug_mask)
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, batch: VarlenBatch, causal: bool
) -> Grads:
    contiguous = [x.contiguous() for x in (grad, q, k, v, out, lse)]
    no_dropout_state = (torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device))
    dq, dk, dv = aten._flash_attention_backward(*contiguous, *batch[2:], 0.0, causal, *no_dropout_state)
    return dq, dk, dv


# ---- CUDA cuDNN, 16-bit dtypes: one call per block.


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    compute_lse = True
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, compute_lse, 0.0, causal)
    return out, lse.view(q.shape[:3])


def _cudnn_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Grads:
    empty = torch.empty(0, dtype=torch.int64, device=q.device)
    seqlen_arguments = (None, None, q.shape[2], k.shape[2])
    saved = (out.contiguous(), lse.contiguous()[..., None])
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, *saved, empty, empty, None, *seqlen_arguments, 0.0, causal
    )
    return dq, dk, dv


# ---- CUDA memory-efficient, for float32: one call per block, without grouped-query heads.


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    compute_lse = True
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, keys, values, None, compute_lse, 0.0, causal)
    # The log-sum-exp is padded to a multiple of 32 queries; the backward kernel expects the padding too.
    return out, lse[..., : q.shape[2]]


def _efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Grads:
    head_groups = (k.shape[1], q.shape[1] // k.shape[1])
    keys, values = (x.repeat_interleave(head_groups[1], dim=1) for x in (k, v))
    padded_lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    empty = torch.empty((), dtype=torch.int64, device=q.device)
    grad_mask = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, keys, values, None, out, padded_lse, empty, empty, 0.0, grad_mask, causal
    )
    return dq, dk.unflatten(1, head_groups).sum(2), dv.unflatten(1, head_groups).sum(2)


# ---- Matrix products on any device: the reference of the other kernels, and the choice for float64 on CUDA.


def _plain_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    repeated = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores: Tensor = q @ repeated.transpose(-2, -1) * q.shape[-1] ** -0.5
    if not causal:
        return scores
    causal_mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(causal_mask, -torch.inf)


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    q_accum, k_accum, v_accum = (x.to(accumulation_dtype(x.dtype)) for x in (q, k, v))
    scores = _plain_scores(q_accum, k_accum, causal)
    out = scores.softmax(-1) @ v_accum.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return out.to(q.dtype), scores.logsumexp(-1)


def _plain_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Grads:
    # Written explicitly: the body of an operator runs below autograd.
    input_dtype = q.dtype
    grad, q, k, v, out = (x.to(accumulation_dtype(x.dtype)) for x in (grad, q, k, v, out))
    head_groups = (k.shape[1], q.shape[1] // k.shape[1])
    weights = (_plain_scores(q, k, causal) - lse.unsqueeze(-1)).exp()
    k_all, v_all = (x.repeat_interleave(head_groups[1], dim=1) for x in (k, v))
    grad_weights = grad @ v_all.transpose(-2, -1) - (grad * out).sum(-1, keepdim=True)
    grad_scores = weights * grad_weights * q.shape[-1] ** -0.5
    dk = (grad_scores.transpose(-2, -1) @ q).unflatten(1, head_groups).sum(2)
    dv = (weights.transpose(-2, -1) @ grad).unflatten(1, head_groups).sum(2)
    return (grad_scores @ k_all).to(input_dtype), dk.to(input_dtype), dv.to(input_dtype)


DENSE_KERNELS: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Grads]]] = {
    "cpu": (_cpu_forward, _cpu_backward),
    "cudnn": (_cudnn_forward, _cudnn_backward),
    "efficient": (_efficient_forward, _efficient_backward),
    "plain": (_plain_forward, _plain_backward),
}
