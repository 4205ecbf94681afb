"""`longhaul::context_attention`: attention over sequences sharded across a ring of ranks, as one operator.

The methods `ring`, `alltoall` and `allgather` run inside it. Every rank therefore traces the same graph, whichever tokens
it holds, and a new batch of documents needs no recompilation.

Shape suffixes: B batch, S tokens of this rank, N query heads, K KV heads, H head dim, D document boundaries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from models import attention_op
from parallelisms import collectives
from parallelisms.context import ring
from parallelisms.context.attention_plan import RankAttentionPlan
from parallelisms.context.ring import AllGather, KVExchange, Ring, Waitable
from parallelisms.context.shard_layout import SeqLayout
from parallelisms.parallel_dims import ShardLayout

FIRST_TRANSFER: dict[str, Callable[..., Waitable]] = {
    "ring": collectives.ring_shift,
    "alltoall": collectives.ring_shift_all_to_all,
    "allgather": collectives.all_gather_async,
}


class CPAttentionOptions(NamedTuple):
    """The same on all ranks and for all layers; the operator takes the fields in this order."""

    rotate_method: str
    layout: str
    group_name: str
    """The ring's process group. Operators take a name, because a graph cannot hold a group."""
    reduce_dtype: torch.dtype
    """The dtype in which dk and dv are sent if the inputs are 16-bit; otherwise they are sent in their own dtype."""
    kernel: str

    @property
    def group(self) -> ProcessGroup:
        return collectives.resolve_process_group(self.group_name)

    def start(self, k_BSKH: Tensor, v_BSKH: Tensor) -> Waitable:
        """Starts the first rotation, or the all-gather, of keys and values."""
        kv_2XKH = torch.stack((k_BSKH.flatten(0, 1), v_BSKH.flatten(0, 1)))
        return FIRST_TRANSFER[self.rotate_method](kv_2XKH, self.group)

    def exchange(self, q_BSNH: Tensor, boundaries_BD: Tensor) -> KVExchange:
        """Raises ValueError for boundaries that do not fit the full sequences."""
        batch_size, tokens_per_rank = q_BSNH.shape[:2]
        boundaries = attention_op.boundary_tuples(boundaries_BD, batch_size)
        group, layout = self.group, cast(ShardLayout, self.layout)
        plan = _rank_attention_plan(boundaries, layout, group.size(), group.rank(), tokens_per_rank)
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
    options = CPAttentionOptions(rotate_method, layout, group_name, reduce_dtype, kernel)
    # Validated before sending: a message that no rank waits for would be matched with the next receive.
    exchange = options.exchange(q_BSNH, boundaries_BD)
    return ring.forward(q_BSNH, k_BSKH, v_BSKH, options.start(k_BSKH, v_BSKH), exchange, kernel=kernel)


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
    options = CPAttentionOptions(rotate_method, layout, group_name, reduce_dtype, kernel)
    exchange, pending_kv = options.exchange(q_BSNH, boundaries_BD), options.start(k_BSKH, v_BSKH)
    return ring.backward(grad_BSNH, q_BSNH, k_BSKH, v_BSKH, pending_kv, out_BSNH, lse_BNS, exchange, kernel=kernel)


def _autograd_backward(ctx: Any, grad_BSNH: Tensor, grad_lse: None) -> tuple[Tensor | None, ...]:
    del grad_lse
    grads = attention_backward(grad_BSNH.contiguous(), *ctx.saved_tensors, *ctx.options)
    return *grads, None, *[None] * len(ctx.options)


attention.register_fake(lambda q_BSNH, *_: attention_op.empty_output(q_BSNH))
attention_backward.register_fake(
    lambda _, q_BSNH, k_BSKH, v_BSKH, *__: attention_op.empty_grads(q_BSNH, k_BSKH, v_BSKH)
)
attention.register_autograd(_autograd_backward, setup_context=attention_op.setup_context)
