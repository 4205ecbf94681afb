"""`longhaul::context_attention`: attention over sequences sharded across a ring of ranks, as one operator.

A rank attends to its own KV during the first transfer, then to that of the other ranks, which `Ring` rotates (methods
`ring` and `alltoall`) or `AllGather` gathers. All of it runs inside the operator. Every rank therefore traces the same
graph, whichever tokens it holds, and a new batch of documents needs no recompilation.

Shape suffixes: B batch, S tokens of this rank, X those of all sequences concatenated, Y remote tokens at hand, P tokens
of a block, R ranks, N query heads, K KV heads, H head dim, D document boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from models import attention_op, kernels
from models.kernels import Grads, ScoreBlocks, TokenIndex
from models.linear import accumulation_dtype
from parallelisms import collectives
from parallelisms.context.attention_plan import RankAttentionPlan
from parallelisms.context.shard_layout import SeqLayout
from parallelisms.parallel_dims import ShardLayout


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
        # A local variable would keep the tensor alive until the generator ends.
        yield self._select_remote(pending_kv.wait()), self.plan.remote_blocks

    def _select_remote(self, kv_R2XKH: Tensor) -> Tensor:
        index_2Y = self.plan.remote_kv_index(kv_R2XKH.device)
        kv_2YKH: Tensor = kv_R2XKH.flatten(0, 2).index_select(0, index_2Y.flatten()).unflatten(0, index_2Y.shape)
        return kv_2YKH

    def send_grads(self, dkv_2YKH: Tensor, pending_dkv: Waitable | None) -> Waitable:
        del pending_dkv
        shape = (self.plan.ring_degree, 2, self.plan.tokens_per_rank, *dkv_2YKH.shape[2:])
        dkv_R2XKH = torch.zeros(shape, dtype=self.reduce_dtype, device=dkv_2YKH.device)
        index = self.plan.remote_kv_index(dkv_2YKH.device).flatten()
        dkv_R2XKH.flatten(0, 2).index_copy_(0, index, dkv_2YKH.flatten(0, 1).to(self.reduce_dtype))
        del dkv_2YKH  # Freed before the reduce-scatter allocates its result.
        return self.reduce_scatter(dkv_R2XKH)


StartedQKV = tuple[Tensor, Tensor, Tensor, Waitable]
"""Queries, keys, values, and the first transfer of the latter two, stacked."""
FIRST_TRANSFER: dict[str, Callable[..., Waitable]] = {
    "ring": collectives.ring_shift,
    "alltoall": collectives.ring_shift_all_to_all,
    "allgather": collectives.all_gather_async,
}


@dataclass(frozen=True)
class RingAttentionCore:
    """`models.attention.AttentionCore` over a ring; the same on all ranks and for all layers."""

    rotate_method: str
    layout: ShardLayout
    group_name: str
    """The ring's process group. Operators take a name, because a graph cannot hold a group."""
    reduce_dtype: torch.dtype
    """The dtype in which dk and dv are sent if the inputs are 16-bit; otherwise they are sent in their own dtype."""
    kernel: str

    def __call__(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor) -> Tensor:
        options = (self.rotate_method, self.layout, self.group_name, self.reduce_dtype, self.kernel)
        out_BSNH: Tensor = attention(q_BSNH, k_BSKH, v_BSKH, boundaries_BD, *options)[0]
        return out_BSNH

    def start(self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> StartedQKV:
        """Starts the first rotation, or the all-gather, of keys and values."""
        kv_2XKH = torch.stack((k_BSKH.flatten(0, 1), v_BSKH.flatten(0, 1)))
        group = collectives.resolve_process_group(self.group_name)
        return q_BSNH, k_BSKH, v_BSKH, FIRST_TRANSFER[self.rotate_method](kv_2XKH, group)

    def forward(self, pending: StartedQKV, boundaries_BD: Tensor) -> tuple[Tensor, Tensor]:
        return forward(*pending, self.exchange(pending[0], boundaries_BD), kernel=self.kernel)

    def backward(
        self, grad_BSNH: Tensor, pending: StartedQKV, out_BSNH: Tensor, lse: Tensor, boundaries_BD: Tensor
    ) -> Grads:
        exchange = self.exchange(pending[0], boundaries_BD)
        return backward(grad_BSNH, *pending, out_BSNH, lse, exchange, kernel=self.kernel)

    def exchange(self, q_BSNH: Tensor, boundaries_BD: Tensor) -> KVExchange:
        """Raises ValueError for boundaries that do not fit the full sequences."""
        batch_size, tokens_per_rank = q_BSNH.shape[:2]
        boundaries = attention_op.boundary_tuples(boundaries_BD, batch_size)
        group = collectives.resolve_process_group(self.group_name)
        plan = _rank_attention_plan(boundaries, self.layout, group.size(), group.rank(), tokens_per_rank)
        dtype = self.reduce_dtype if q_BSNH.dtype.itemsize < 4 else q_BSNH.dtype
        if self.rotate_method == "allgather":
            return AllGather(plan, partial(collectives.reduce_scatter_async, group=group), dtype)
        return Ring(plan, partial(FIRST_TRANSFER[self.rotate_method], group=group), dtype)


@lru_cache(maxsize=8)
def _rank_attention_plan(
    batch_boundaries: attention_op.Boundaries, layout: ShardLayout, ring_degree: int, rank: int, tokens_per_rank: int
) -> RankAttentionPlan:
    # Cached because every layer asks for the same plan. Few, because one may hold 15 MiB on the device at 1M tokens.
    attention_op.validate_boundaries(batch_boundaries, tokens_per_rank * ring_degree)
    return RankAttentionPlan([SeqLayout(layout, ring_degree, boundaries) for boundaries in batch_boundaries], rank)


# ---- below autograd


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
        remote_grads = [torch.zeros_like(kv_2YKH, dtype=dtype)]
        inputs = (grad_XNH, q_XNH, kv_2YKH[0], kv_2YKH[1], out_XNH, lse_NX)
        block_grads = kernels.attend_blocks_backward(*inputs, blocks, kernel=kernel)
        kernels.accumulate_grads((dq_XNH, remote_grads[0][0], remote_grads[0][1]), block_grads)
        del kv_2YKH, inputs, block_grads
        pending_dkv = exchange.send_grads(remote_grads.pop(), pending_dkv)  # Passed on, so that it can be freed there.
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
        self.out_XNH[queries] = out.lerp_(out_PNH.to(out.dtype), weight_NP.T.unsqueeze(-1).to(out.dtype).contiguous())
        self.lse_NX[:, queries] = torch.logaddexp(lse, lse_NP)


# ---- operators


@torch.library.custom_op("longhaul::context_attention", mutates_args=())
def attention(
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
    core = RingAttentionCore(rotate_method, cast(ShardLayout, layout), group_name, reduce_dtype, kernel)
    # Validated before sending: a message that no rank waits for would be matched with the next receive.
    core.exchange(q_BSNH, boundaries_BD)
    return core.forward(core.start(q_BSNH, k_BSKH, v_BSKH), boundaries_BD)


@torch.library.custom_op("longhaul::context_attention_backward", mutates_args=())
def attention_backward(
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
    core = RingAttentionCore(rotate_method, cast(ShardLayout, layout), group_name, reduce_dtype, kernel)
    return core.backward(grad_BSNH, core.start(q_BSNH, k_BSKH, v_BSKH), out_BSNH, lse_BNS, boundaries_BD)


def _autograd_backward(ctx: Any, grad_BSNH: Tensor, grad_lse: None) -> tuple[Tensor | None, ...]:
    del grad_lse
    grads = attention_backward(grad_BSNH.contiguous(), *ctx.saved_tensors, *ctx.options)
    return *grads, None, *[None] * len(ctx.options)


attention.register_fake(lambda q_BSNH, *_: attention_op.empty_output(q_BSNH))
attention_backward.register_fake(
    lambda _, q_BSNH, k_BSKH, v_BSKH, *__: attention_op.empty_grads(q_BSNH, k_BSKH, v_BSKH)
)
attention.register_autograd(_autograd_backward, setup_context=attention_op.setup_context)
