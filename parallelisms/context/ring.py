"""`longhaul::context_attention`: attention over sequences sharded across a ring of ranks, as one
operator.

A rank attends to its own KV during the first transfer, then to that of the other ranks, which
`Ring` rotates (methods `ring` and `alltoall`) or `AllGather` gathers; layers with a window get a
`Halo`. All of it runs inside the operator. Every rank therefore traces the same graph, whichever
tokens it holds, and a new batch of documents needs no recompilation.

Shape suffixes: B batch, S tokens of this rank, X those of all sequences concatenated, Y remote
tokens at hand, P tokens of a block, R ranks, N query heads, K KV heads, H head dim, D document
boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol, cast

import torch
from torch import Tensor

from models import attention_op, kernels
from models.attention_core import QKVGrads
from models.dtypes import accumulation_dtype
from models.online_softmax import OnlineSoftmax, add_sink
from models.score_blocks import ScoreBlocks
from models.score_pairs import FULL_SCORES, Scores
from models.tiling import each
from parallelisms.context.attention_plan import RankAttentionPlan, RingPlace, plan_of
from parallelisms.mesh import collectives
from parallelisms.mesh.context_plan import ShardLayout
from parallelisms.mesh.shard_layout import halo_fits


class Waitable(Protocol):
    """A tensor in flight, such as `collectives.AsyncHandle`."""

    def wait(self) -> Tensor: ...


Transfer = Callable[[Tensor], Waitable]
"""Starts a collective on a tensor."""


class KVExchange(Protocol):
    """Exchange of KV with other ranks, and of its gradients back."""

    @property
    def plan(self) -> RankAttentionPlan: ...

    def prepare(self) -> Sequence[ScoreBlocks]:
        """Computes what the transfers need of the host.

        Returns the blocks that `remote_kv` yields.
        """

    def start(self, k_XKH: Tensor, v_XKH: Tensor) -> Waitable:
        """Starts the first transfer of this rank's KV."""

    def remote_kv(self, pending_kv: Waitable) -> Iterator[tuple[Tensor, ScoreBlocks]]:
        """Yields KV [2, Y, K, H] and the score blocks of this rank's queries with it.

        `pending_kv` is in flight.
        """

    def send_grads(self, dkv_2YKH: Tensor, pending_dkv: Waitable | None) -> Waitable:
        """Starts to return the gradients of the KV yielded last; the previous call gave
        `pending_dkv`.

        After the last KV, the result is the gradient of this rank's own KV, from all other ranks.
        """


@dataclass(frozen=True)
class Ring:
    """Ring attention (Liu et al., 2023): passes KV shards around; each rank attends to every shard
    in turn.

        4 ranks, step    0        1        2        3
        rank 0 sees     KV 0     KV 3     KV 2     KV 1
        rank 1          KV 1     KV 0     KV 3     KV 2        the next step's transfer overlaps this step's attention

    In the backward pass the gradients of a KV shard follow it around the ring, one step behind.
    Each rank keeps its own contribution, so both directions take one transfer less than there are
    ranks.
    """

    plan: RankAttentionPlan
    rotate: Transfer
    """Sends a tensor to the next rank of the ring and receives one from the previous rank."""
    reduce_dtype: torch.dtype
    """The dtype in which gradients are sent."""

    def prepare(self) -> Sequence[ScoreBlocks]:
        return self.plan.ring_step_blocks

    def start(self, k_XKH: Tensor, v_XKH: Tensor) -> Waitable:
        return self.rotate(torch.stack((k_XKH, v_XKH)))

    def remote_kv(self, pending_kv: Waitable) -> Iterator[tuple[Tensor, ScoreBlocks]]:
        hops = [*enumerate(self.plan.ring_step_blocks, start=1)]
        for step, blocks in each(hops, lambda hop: hop[1].blocks):
            kv_2XKH = pending_kv.wait()
            # The last shard has seen every rank.
            if step < self.plan.ring_degree - 1:
                pending_kv = self.rotate(kv_2XKH)
            yield kv_2XKH, blocks
            # Otherwise the generator holds it while the next one is in flight.
            del kv_2XKH

    def send_grads(self, dkv_2YKH: Tensor, pending_dkv: Waitable | None) -> Waitable:
        # The sum of the ranks before arrives in `reduce_dtype`, and is added to in the wider one.
        if pending_dkv is not None:
            dkv_2YKH += pending_dkv.wait()
        return self.rotate(dkv_2YKH.to(self.reduce_dtype))


@dataclass(frozen=True)
class AllGather:
    """All-gather attention (Llama 3): every rank gathers the KV of all ranks and attends to the
    keys that it needs.

    They are selected in sequence order, so that each span of queries attends to one contiguous
    range. A reduce-scatter sums their gradients.
    """

    plan: RankAttentionPlan
    all_gather: Transfer
    reduce_scatter: Transfer
    reduce_dtype: torch.dtype
    """The dtype in which gradients are summed."""

    def prepare(self) -> Sequence[ScoreBlocks]:
        self.plan.remote_kv_index(torch.device("cpu"))
        return [self.plan.remote_blocks]

    def start(self, k_XKH: Tensor, v_XKH: Tensor) -> Waitable:
        return self.all_gather(torch.stack((k_XKH, v_XKH)))

    def remote_kv(self, pending_kv: Waitable) -> Iterator[tuple[Tensor, ScoreBlocks]]:
        # A local variable would keep the tensor alive until the generator ends.
        yield self._select_remote(pending_kv.wait()), self.plan.remote_blocks

    def _select_remote(self, kv_R2XKH: Tensor) -> Tensor:
        index_2Y = self.plan.remote_kv_index(kv_R2XKH.device)
        kv_2YKH: Tensor = (
            kv_R2XKH.flatten(0, 2).index_select(0, index_2Y.flatten()).unflatten(0, index_2Y.shape)
        )
        return kv_2YKH

    def send_grads(self, dkv_2YKH: Tensor, pending_dkv: Waitable | None) -> Waitable:
        del pending_dkv
        shape = (self.plan.ring_degree, 2, self.plan.tokens_per_rank, *dkv_2YKH.shape[2:])
        # Keys that no query of this rank sees have zeros. Indices are distinct, so a copy will do.
        dkv_R2XKH = torch.zeros(shape, dtype=self.reduce_dtype, device=dkv_2YKH.device)
        index = self.plan.remote_kv_index(dkv_2YKH.device).flatten()
        dkv_R2XKH.flatten(0, 2).index_copy_(0, index, dkv_2YKH.flatten(0, 1).to(self.reduce_dtype))
        # Freed before the reduce-scatter allocates its result.
        del dkv_2YKH
        return self.reduce_scatter(dkv_R2XKH)


@dataclass(frozen=True)
class Halo:
    """Sends each rank the keys that its queries see: with a window of w tokens, w - 1 before each
    of its spans.

    4 ranks, contiguous    | 0 0 0 0 | 1 1 1 1 | 2 2 2 2 | 3 3 3 3 |
    w = 3: rank 1 needs          ^ ^   and rank 2 the last two of rank 1
    """

    plan: RankAttentionPlan
    exchange: Callable[[Tensor, list[int], list[int]], Waitable]
    """All-to-all of tokens: (tensor, tokens for each rank, tokens from each rank)."""
    reduce_dtype: torch.dtype
    """The dtype in which gradients are sent."""

    def prepare(self) -> Sequence[ScoreBlocks]:
        self.plan.halo_index(torch.device("cpu"))
        return [self.plan.halo_blocks]

    def start(self, k_XKH: Tensor, v_XKH: Tensor) -> Waitable:
        index_Y = torch.cat(self.plan.halo_index(k_XKH.device))
        return self.exchange(
            torch.stack((k_XKH[index_Y], v_XKH[index_Y]), dim=1),
            self.plan.halo_sent,
            self.plan.halo_received,
        )

    def remote_kv(self, pending_kv: Waitable) -> Iterator[tuple[Tensor, ScoreBlocks]]:
        yield pending_kv.wait().movedim(1, 0), self.plan.halo_blocks

    def send_grads(self, dkv_2YKH: Tensor, pending_dkv: Waitable | None) -> Waitable:
        del pending_dkv
        dkv_Y2KH = dkv_2YKH.movedim(0, 1).to(self.reduce_dtype)
        return HaloGrads(
            self.exchange(dkv_Y2KH, self.plan.halo_received, self.plan.halo_sent), self.plan
        )


@dataclass(frozen=True)
class HaloGrads:
    """Gradients that other ranks send for keys of this one."""

    pending: Waitable
    plan: RankAttentionPlan

    def wait(self) -> Tensor:
        """[2, X, K, H], summed over the ranks."""
        received_Y2KH = self.pending.wait()
        indices = self.plan.halo_index(received_Y2KH.device)
        shape = (2, self.plan.tokens_per_rank, *received_Y2KH.shape[2:])
        total_2XKH = received_Y2KH.new_zeros(shape, dtype=accumulation_dtype(received_Y2KH.dtype))
        # Rank by rank: within one rank's, no key occurs twice, so the sum is deterministic.
        for index_Y, grads_Y2KH in zip(
            indices, received_Y2KH.split([len(index) for index in indices]), strict=True
        ):
            total_2XKH[:, index_Y] += grads_Y2KH.movedim(1, 0)
        return total_2XKH


StartedQKV = tuple[Tensor, Tensor, Tensor, Waitable]
"""Queries, keys, values, and the first transfer of the latter two."""
ROTATIONS: dict[str, Callable[..., Waitable]] = {
    "ring": collectives.ring_shift,
    "alltoall": collectives.ring_shift_all_to_all,
}


@dataclass(frozen=True)
class RingAttentionCore:
    """The attention core over a ring (`models.attention_core.AttentionCore`); the same on all
    ranks.
    """

    rotate_method: str
    layout: ShardLayout
    group_name: str
    """The ring's process group. Operators take a name, because a graph cannot hold a group."""
    reduce_dtype: torch.dtype
    """The dtype in which dk and dv are sent if the inputs are 16-bit; otherwise they are sent in
    their own dtype.
    """
    kernel: str
    scores: Scores = FULL_SCORES

    @property
    def options(self) -> str:
        """All options but the scores as words, for `core_of`: a graph cannot hold objects."""
        dtype = str(self.reduce_dtype).removeprefix("torch.")
        return " ".join((self.rotate_method, self.layout, dtype, self.kernel, self.group_name))

    def __call__(
        self,
        q_BSNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        boundaries_BD: Tensor,
        sink_N: Tensor | None = None,
    ) -> Tensor:
        return self.attend(self.scores, q_BSNH, k_BSKH, v_BSKH, boundaries_BD, sink_N)

    def attend(self, scores: Scores, *inputs: Tensor | None) -> Tensor:
        """`__call__` for a layer with other scores."""
        out_BSNH: Tensor = attend(*inputs, *scores, self.options)[0]
        return out_BSNH

    def start(
        self, q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, boundaries_BD: Tensor
    ) -> StartedQKV:
        """Starts the first transfer of keys and values."""
        # Validated before sending: a message that no rank waits for would be matched with the next
        # receive.
        exchange = self.exchange(q_BSNH, k_BSKH, boundaries_BD)
        return q_BSNH, k_BSKH, v_BSKH, exchange.start(k_BSKH.flatten(0, 1), v_BSKH.flatten(0, 1))

    def forward(
        self, pending: StartedQKV, boundaries_BD: Tensor, sink_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        exchange = self.exchange(*pending[:2], boundaries_BD)
        return forward(pending, exchange, sink_N, kernel=self.kernel)

    def backward(
        self,
        grad_BSNH: Tensor,
        pending: StartedQKV,
        out_BSNH: Tensor,
        lse: Tensor,
        boundaries_BD: Tensor,
        sink_N: Tensor | None = None,
    ) -> QKVGrads:
        exchange = self.exchange(*pending[:2], boundaries_BD)
        return backward(grad_BSNH, pending, out_BSNH, lse, exchange, sink_N, kernel=self.kernel)

    def prepare(self, boundaries_BD: Tensor) -> object:
        batch_size = len(boundaries_BD)
        seq_len = int(boundaries_BD[0, -1])
        exchange = self._exchange(boundaries_BD, self.reduce_dtype, batch_size, seq_len, seq_len)
        for blocks in (exchange.plan.local_blocks, *exchange.prepare()):
            kernels.prepare(blocks, self.kernel)
        return exchange.plan

    def exchange(self, q_BSNH: Tensor, k_BSKH: Tensor, boundaries_BD: Tensor) -> KVExchange:
        """The exchange for these queries and keys. Raises ValueError for boundaries that do not
        fit the full sequences.
        """
        ranks = collectives.resolve_process_group(self.group_name).size()
        seq_len, kv_len = (x.shape[1] * ranks for x in (q_BSNH, k_BSKH))
        dtype = self.reduce_dtype if q_BSNH.dtype.itemsize < 4 else q_BSNH.dtype
        return self._exchange(boundaries_BD, dtype, len(q_BSNH), seq_len, kv_len)

    def _exchange(
        self, boundaries_BD: Tensor, dtype: torch.dtype, batch_size: int, seq_len: int, kv_len: int
    ) -> KVExchange:
        group = collectives.resolve_process_group(self.group_name)
        place = RingPlace(self.layout, group.size(), group.rank())
        plan = plan_of(boundaries_BD, batch_size, seq_len, kv_len, place, self.scores)
        if sends_halo(plan, self.rotate_method):
            return Halo(plan, partial(collectives.all_to_all_tokens_async, group), dtype)
        if self.rotate_method == "allgather":
            gather = collectives.all_gather_async
            scatter = collectives.reduce_scatter_async
            return AllGather(
                plan, partial(gather, group=group), partial(scatter, group=group), dtype
            )
        return Ring(plan, partial(ROTATIONS[self.rotate_method], group=group), dtype)


def sends_halo(plan: RankAttentionPlan, rotate_method: str) -> bool:
    """Whether ranks send each other the keys that a window needs, instead of all keys.

    The same on all ranks.
    """
    return plan.window is not None and halo_fits(
        plan.max_halo_tokens, plan.tokens_per_rank, rotate_method
    )


# ---- below autograd


def forward(
    started: StartedQKV,
    exchange: KVExchange,
    sink_N: Tensor | None = None,
    *,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Output, in q's dtype, and log-sum-exp [B, N, S]."""
    q_BSNH, k_BSKH, v_BSKH, pending_kv = started
    q_XNH, k_XKH, v_XKH = (x.flatten(0, 1) for x in (q_BSNH, k_BSKH, v_BSKH))
    # Attention to the rank's own keys overlaps the first transfer.
    softmax = OnlineSoftmax(
        *attention_op.forward(q_XNH, k_XKH, v_XKH, exchange.plan.local_blocks, kernel=kernel)
    )
    for kv_2YKH, blocks in exchange.remote_kv(pending_kv):
        softmax.merge_all(
            kernels.attend_blocks(q_XNH, kv_2YKH[0], kv_2YKH[1], blocks, kernel=kernel)
        )
        # Freed before the next rotation allocates its receive buffer.
        del kv_2YKH
    out_XNH = softmax.out_XNH
    lse_NX = softmax.lse_NX
    if sink_N is not None:
        out_XNH, lse_NX = add_sink(out_XNH, lse_NX, sink_N)
    return out_XNH.to(q_BSNH.dtype).view_as(q_BSNH), attention_op.unflatten_lse(
        lse_NX, q_BSNH.shape[0]
    )


def backward(
    grad_BSNH: Tensor,
    started: StartedQKV,
    out_BSNH: Tensor,
    lse_BNS: Tensor,
    exchange: KVExchange,
    sink_N: Tensor | None = None,
    *,
    kernel: str = "auto",
) -> QKVGrads:
    """dq, dk and dv in their inputs' dtypes, and the gradient of the sink.

    `started` holds a new first transfer.
    """
    q_BSNH, k_BSKH, v_BSKH, pending_kv = started
    grad_XNH, q_XNH, k_XKH, v_XKH, out_XNH = (
        x.flatten(0, 1) for x in (grad_BSNH, q_BSNH, k_BSKH, v_BSKH, out_BSNH)
    )
    lse_NX = attention_op.flatten_lse(lse_BNS)
    local_inputs = (grad_XNH, q_XNH, k_XKH, v_XKH, out_XNH, lse_NX)
    dq_XNH, dk_XKH, dv_XKH = attention_op.backward(
        *local_inputs, exchange.plan.local_blocks, kernel=kernel
    )
    # Each remote shard of keys adds to dq, and each other rank to dk and dv: these sums are
    # rounded to the inputs' dtype once, at the end.
    dtype = accumulation_dtype(dq_XNH.dtype)
    dq_XNH = dq_XNH.to(dtype)
    dkv_2XKH = torch.empty(2, *dk_XKH.shape, dtype=dtype, device=dk_XKH.device)
    dkv_2XKH[0] = dk_XKH
    dkv_2XKH[1] = dv_XKH
    del dk_XKH, dv_XKH
    pending_dkv: Waitable | None = None
    for kv_2YKH, blocks in exchange.remote_kv(pending_kv):
        remote_grads = [torch.zeros_like(kv_2YKH, dtype=dtype)]
        inputs = (grad_XNH, q_XNH, kv_2YKH[0], kv_2YKH[1], out_XNH, lse_NX)
        block_grads = kernels.attend_blocks_backward(*inputs, blocks, kernel=kernel)
        kernels.accumulate_grads((dq_XNH, remote_grads[0][0], remote_grads[0][1]), block_grads)
        del kv_2YKH, inputs, block_grads
        # Passed on, so that it can be freed there.
        pending_dkv = exchange.send_grads(remote_grads.pop(), pending_dkv)
    if pending_dkv is not None:
        dkv_2XKH += pending_dkv.wait()
    # In separate storages, because an operator's outputs must not alias each other.
    dk_BSKH, dv_BSKH = (x.to(k_BSKH.dtype, copy=True).view_as(k_BSKH) for x in dkv_2XKH)
    grad_sink_N = attention_op.optional_sink_grad(grad_XNH, out_XNH, lse_NX, sink_N)
    return dq_XNH.to(q_BSNH.dtype).view_as(q_BSNH), dk_BSKH, dv_BSKH, grad_sink_N


# ---- operators


@lru_cache
def core_of(scores: Scores, options: str) -> RingAttentionCore:
    """The core that has these scores and options."""
    rotate_method, layout, dtype, kernel, group_name = options.split(" ", 4)
    return RingAttentionCore(
        rotate_method, cast(ShardLayout, layout), group_name, getattr(torch, dtype), kernel, scores
    )


def _attention(
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    boundaries_BD: Tensor,
    sink_N: Tensor | None,
    window: int | None,
    softcap: float | None,
    options: str,
) -> tuple[Tensor, Tensor]:
    core = core_of(Scores(window, softcap), options)
    return core.forward(core.start(q_BSNH, k_BSKH, v_BSKH, boundaries_BD), boundaries_BD, sink_N)


def _attention_backward(
    grad_BSNH: Tensor,
    saved: list[Tensor],
    boundaries_BD: Tensor,
    sink_N: Tensor | None,
    window: int | None,
    softcap: float | None,
    options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    core = core_of(Scores(window, softcap), options)
    q_BSNH, k_BSKH, v_BSKH, out_BSNH, lse_BNS = saved
    pending = core.start(q_BSNH, k_BSKH, v_BSKH, boundaries_BD)
    return core.backward(grad_BSNH, pending, out_BSNH, lse_BNS, boundaries_BD, sink_N)


attention = torch.library.custom_op("longhaul::context_attention", _attention, mutates_args=())
attention_backward = torch.library.custom_op(
    "longhaul::context_attention_backward", _attention_backward, mutates_args=()
)
attention.register_fake(lambda q_BSNH, *_: attention_op.empty_output(q_BSNH))
attention_backward.register_fake(attention_op.fake_backward)
attention.register_autograd(
    attention_op.backward_of(attention_backward), setup_context=attention_op.setup_context
)
attend = attention_op.undispatched(attention, _attention, _attention_backward)
