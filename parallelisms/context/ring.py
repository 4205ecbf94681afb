"""Attention of a rank of a ring to its own KV and to that of the other ranks, which `Ring` rotates or `AllGather` gathers.

Attention to the rank's own keys overlaps the first transfer. Partial results over disjoint keys are merged.

Shape suffixes: B batch, S tokens of this rank, X those of all sequences concatenated, Y remote tokens at hand, P tokens of a block, R ranks,
N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from models import attention_op, kernels
from models.kernels import Grads, ScoreBlocks, TokenIndex
from models.linear import accumulation_dtype
from parallelisms.context.attention_plan import RankAttentionPlan


class Waitable(Protocol):
    """A tensor in flight, such as `collectives.AsyncHandle`."""

    def wait(self) -> Tensor: ...


Transfer = Callable[[Tensor], Waitable]
"""Starts a collective on a tensor."""


class KVExchange(Protocol):
    """How this rank gets the KV of other ranks, and returns its gradients."""

    @property
    def plan(self) -> RankAttentionPlan: ...

    def remote_kv(self, pending_kv: Waitable) -> Iterator[tuple[Tensor, ScoreBlocks]]:
        """Yields KV [2, Y, K, H] and the score blocks of this rank's queries with it. `pending_kv` is in flight."""

    def send_grads(self, dkv_2YKH: Tensor, pending_dkv: Waitable | None) -> Waitable:
        """Starts to return the gradients of the KV yielded last; the previous call gave `pending_dkv`.

        After the last KV, the result is the gradient of this rank's own KV, from all other ranks.
        """


@dataclass(frozen=True)
class Ring:
    """Ring attention (Liu et al., 2023): passes KV shards around; each rank attends to every shard in turn.

        4 ranks, step    0        1        2        3
        rank 0 sees     KV 0     KV 3     KV 2     KV 1
        rank 1          KV 1     KV 0     KV 3     KV 2        the next step's transfer overlaps this step's attention

    In the backward pass the gradients of a KV shard follow it around the ring, one step behind. Each rank keeps its own
    contribution, so both directions take one transfer less than there are ranks.
    """

    plan: RankAttentionPlan
    rotate: Transfer
    """Sends a tensor to the next rank of the ring and receives one from the previous rank."""
    reduce_dtype: torch.dtype
    """The dtype in which gradients are sent."""

    def remote_kv(self, pending_kv: Waitable) -> Iterator[tuple[Tensor, ScoreBlocks]]:
        for step, blocks in enumerate(self.plan.ring_step_blocks, start=1):
            kv_2XKH = pending_kv.wait()
            if step < self.plan.ring_degree - 1:
                pending_kv = self.rotate(kv_2XKH)
            yield kv_2XKH, blocks

    def send_grads(self, dkv_2YKH: Tensor, pending_dkv: Waitable | None) -> Waitable:
        if pending_dkv is not None:
            dkv_2YKH += pending_dkv.wait()
        return self.rotate(dkv_2YKH.to(self.reduce_dtype))


@dataclass(frozen=True)
class AllGather:
    """All-gather attention (Llama 3): every rank gathers the KV of all ranks and attends to the keys that it needs.

    They are selected in sequence order, so that each span of queries attends to one contiguous range. A reduce-scatter
    sums their gradients.
    """

    plan: RankAttentionPlan
    reduce_scatter: Transfer
    reduce_dtype: torch.dtype
    """The dtype in which gradients are summed."""

    def remote_kv(self, pending_kv: Waitable) -> Iterator[tuple[Tensor, ScoreBlocks]]:
        flat = pending_kv.wait().flatten(0, 2)
        index_2Y = self.plan.remote_kv_index(flat.device)
        kv_2YKH = flat.index_select(0, index_2Y.flatten()).view(*index_2Y.shape, *flat.shape[1:])
        del flat
        yield kv_2YKH, self.plan.remote_blocks

    def send_grads(self, dkv_2YKH: Tensor, pending_dkv: Waitable | None) -> Waitable:
        del pending_dkv
        shape = (self.plan.ring_degree, 2, self.plan.tokens_per_rank, *dkv_2YKH.shape[2:])
        dkv_R2XKH = torch.zeros(shape, dtype=self.reduce_dtype, device=dkv_2YKH.device)
        index = self.plan.remote_kv_index(dkv_2YKH.device).flatten()
        dkv_R2XKH.flatten(0, 2).index_copy_(0, index, dkv_2YKH.flatten(0, 1).to(self.reduce_dtype))
        return self.reduce_scatter(dkv_R2XKH)


def forward(
    q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, pending_kv: Waitable, exchange: KVExchange, *, kernel: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Output, in q's dtype, and log-sum-exp [B, N, S]. `pending_kv` is the first transfer of k and v, stacked."""
    q_XNH, k_XKH, v_XKH = (x.flatten(0, 1) for x in (q_BSNH, k_BSKH, v_BSKH))
    softmax = OnlineSoftmax(*attention_op.forward(q_XNH, k_XKH, v_XKH, exchange.plan.local_blocks, kernel=kernel))
    for kv_2YKH, blocks in exchange.remote_kv(pending_kv):
        for block_output in kernels.attend_blocks(q_XNH, kv_2YKH[0], kv_2YKH[1], blocks, kernel=kernel):
            softmax.merge(*block_output)
        del kv_2YKH  # Freed before the next rotation allocates its receive buffer.
    out_BSNH = softmax.out_XNH.to(q_BSNH.dtype).view_as(q_BSNH)
    return out_BSNH, attention_op.unflatten_lse(softmax.lse_NX, q_BSNH.shape[0])


def backward(
    grad_BSNH: Tensor,
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    pending_kv: Waitable,
    out_BSNH: Tensor,
    lse_BNS: Tensor,
    exchange: KVExchange,
    *,
    kernel: str = "auto",
) -> Grads:
    """dq, dk and dv in their inputs' dtypes. `pending_kv` is a new first transfer."""
    grad_XNH, q_XNH, k_XKH, v_XKH, out_XNH = (x.flatten(0, 1) for x in (grad_BSNH, q_BSNH, k_BSKH, v_BSKH, out_BSNH))
    lse_NX = attention_op.flatten_lse(lse_BNS)
    local_inputs = (grad_XNH, q_XNH, k_XKH, v_XKH, out_XNH, lse_NX)
    dq_XNH, dk_XKH, dv_XKH = attention_op.backward(*local_inputs, exchange.plan.local_blocks, kernel=kernel)
    dtype = accumulation_dtype(dq_XNH.dtype)
    dq_XNH, dkv_2XKH = dq_XNH.to(dtype), torch.empty(2, *dk_XKH.shape, dtype=dtype, device=dk_XKH.device)
    dkv_2XKH[0], dkv_2XKH[1] = dk_XKH, dv_XKH
    del dk_XKH, dv_XKH
    pending_dkv: Waitable | None = None
    for kv_2YKH, blocks in exchange.remote_kv(pending_kv):
        dkv_2YKH = torch.zeros_like(kv_2YKH, dtype=dtype)
        inputs = (grad_XNH, q_XNH, kv_2YKH[0], kv_2YKH[1], out_XNH, lse_NX)
        kernels.accumulate_grads(*inputs, blocks, (dq_XNH, dkv_2YKH[0], dkv_2YKH[1]), kernel=kernel)
        del kv_2YKH, inputs
        pending_dkv = exchange.send_grads(dkv_2YKH, pending_dkv)
        del dkv_2YKH
    if pending_dkv is not None:
        dkv_2XKH += pending_dkv.wait()
    # In separate storages, because an operator's outputs must not alias each other.
    dk_BSKH, dv_BSKH = (x.to(k_BSKH.dtype, copy=True).view_as(k_BSKH) for x in dkv_2XKH)
    return dq_XNH.to(q_BSNH.dtype).view_as(q_BSNH), dk_BSKH, dv_BSKH


class OnlineSoftmax:
    """Output [X, N, H] and log-sum-exp [N, X] over the keys merged so far, in `accumulation_dtype`.

    A partial result (out', lse') has weight w = sigmoid(lse' - lse) and is merged by out += w (out' - out). This neither
    overflows nor loses precision, however far apart the two are; online softmax (Milakov & Gimelshein, 2018).
    """

    def __init__(self, out_XNH: Tensor, lse_NX: Tensor) -> None:
        """Takes ownership of both tensors: `merge` writes to them."""
        self.out_XNH = out_XNH.to(accumulation_dtype(out_XNH.dtype))
        self.lse_NX = lse_NX

    def merge(self, queries: TokenIndex, out_PNH: Tensor, lse_NP: Tensor) -> None:
        """Merges the result of some queries over further keys; an lse of -inf means no keys."""
        out, lse = self.out_XNH[queries], self.lse_NX[:, queries]
        weight_NP = torch.where(lse_NP == -torch.inf, 0.0, torch.sigmoid(lse_NP - lse))
        self.out_XNH[queries] = out.lerp_(out_PNH.to(out.dtype), weight_NP.T.unsqueeze(-1).contiguous())
        self.lse_NX[:, queries] = torch.logaddexp(lse, lse_NP)
