"""Estimates the memory traffic of memory-bound operations in one step, operation by operation. Imports no torch.

Each operation reads its inputs and writes its outputs once, in the compute dtype (low precision) or the statistics dtype
(high precision). Compiled code keeps intermediates in registers. Per-token statistics, norm weights, rotary tables and
copies between tiles are ignored.
"""

from __future__ import annotations

from typing import NamedTuple

from trainer.memory.rank import RankMemory
from trainer.plan.comm_volume import fsdp_units


class MemoryAccesses(NamedTuple):
    """Reads and writes per element, by precision."""

    low_precision: float
    high_precision: float = 0


# Pairs: eager, then compiled.
NORM = MemoryAccesses(5, 2), MemoryAccesses(2)
NORM_BACKWARD = MemoryAccesses(7, 14), MemoryAccesses(5)
ROPE = MemoryAccesses(2, 9), MemoryAccesses(2)
SWIGLU = MemoryAccesses(5), MemoryAccesses(3)
SWIGLU_BACKWARD = MemoryAccesses(14), MemoryAccesses(6)
# Inside custom operators, which torch.compile does not fuse.
ADD = MemoryAccesses(3)
COPY = MemoryAccesses(2)
MERGE = MemoryAccesses(1, 6)
UPCAST = MemoryAccesses(2, 2)
LOGITS = MemoryAccesses(2, 10)


class ActivationSizes:
    """Elements of the activations of a micro-batch on one rank."""

    def __init__(self, rank: RankMemory, *, compiled: bool) -> None:
        self.rank, self.block, self.compiled = rank, rank.block, compiled
        self.hidden = rank.block.residual_bytes // rank.compute_bytes
        self.queries, self.kv = rank.block.q_numel, rank.block.kv_numel
        self.qk = self.queries + rank.block.kv_heads * rank.model.head_dim * rank.tokens
        self.ffn = rank.model.ffn_dim * rank.tokens // rank.tp

    def moved(self, elements: float, accesses: MemoryAccesses | tuple[MemoryAccesses, MemoryAccesses]) -> float:
        """Bytes."""
        low, high = accesses if isinstance(accesses, MemoryAccesses) else accesses[self.compiled]
        return elements * (low * self.rank.compute_bytes + high * self.rank.master_bytes)

    @property
    def merges(self) -> float:
        """Merges of partial attention outputs, in units of all queries: half of a ring's blocks cover half the queries."""
        return 1 if self.block.gathers_kv else 0.75 * (self.block.ring_degree - 1)

    @property
    def reordered_ranks(self) -> int:
        """Remote ranks whose gathered KV is reordered."""
        return self.block.ring_degree - 1 if self.block.gathers_kv else 0


def memory_traffic(rank: RankMemory) -> dict[str, float]:
    """Bytes over all micro-batches by "forward", "backward", "recompute" and "head"."""
    sizes, micro_batches, blocks = (
        ActivationSizes(rank, compiled=rank.config.training.compile),
        rank.num_micro_batches,
        rank.num_blocks,
    )
    copies = _all_gather_copies(rank)
    embedding = sizes.moved(sizes.hidden, COPY) * rank.has_first_stage
    forward = blocks * (_attention_input(sizes) + _cp_attention(sizes) + _feed_forward(sizes)) + embedding
    return {
        "forward": micro_batches * forward + copies["forward"],
        "backward": micro_batches * blocks * _backward(sizes) + copies["backward"] + _reduce_scatter_copies(rank),
        "recompute": micro_batches * _recompute(sizes) + copies["recompute"],
        "head": micro_batches * _loss_head(rank) * rank.has_last_stage,
    }


def _attention_input(sizes: ActivationSizes) -> float:
    """Of a block: norm, query and key norms, and rotary embedding."""
    total = sizes.moved(sizes.hidden, NORM) + sizes.moved(sizes.qk, ROPE)
    return total + sizes.moved(sizes.qk, NORM) * sizes.rank.model.qk_norm


def _feed_forward(sizes: ActivationSizes) -> float:
    """Of a block: two residual additions, a norm and the SwiGLU gate."""
    return 2 * sizes.moved(sizes.hidden, ADD) + sizes.moved(sizes.hidden, NORM) + sizes.moved(sizes.ffn, SWIGLU)


def _exchange_copies(sizes: ActivationSizes) -> float:
    """Of a block: copies before and after the all-to-all of heads."""
    return 2 * sizes.moved(2 * sizes.queries + sizes.kv, COPY) * (sizes.block.ulysses_degree > 1)


def _cp_attention(sizes: ActivationSizes) -> float:
    """Of a block: copies for all-to-all or ring communication, and merging of partial attention outputs."""
    total = _exchange_copies(sizes)
    if sizes.block.ring_degree > 1:
        total += sizes.moved(sizes.kv, COPY) + sizes.moved(sizes.queries, UPCAST)
        total += sizes.merges * sizes.moved(sizes.queries, MERGE)
        total += sizes.reordered_ranks * sizes.moved(sizes.kv, COPY)
    return total


def _backward(sizes: ActivationSizes) -> float:
    total = 2 * (sizes.moved(sizes.hidden, NORM_BACKWARD) + sizes.moved(sizes.hidden, ADD))
    total += sizes.moved(sizes.qk, ROPE) + sizes.moved(sizes.ffn, SWIGLU_BACKWARD)
    total += sizes.moved(sizes.qk, NORM_BACKWARD) * sizes.rank.model.qk_norm
    if not sizes.rank.recomputes:
        # Autograd sums the input gradients of queries, keys and values, and of gate and up.
        total += 3 * sizes.moved(sizes.rank.model.dim * sizes.rank.tokens, ADD)
    return total + _cp_attention_backward(sizes)


def _cp_attention_backward(sizes: ActivationSizes) -> float:
    total, other_ranks = _exchange_copies(sizes), sizes.block.ring_degree - 1
    if other_ranks:
        total += sizes.moved(sizes.kv, COPY) + sizes.moved(sizes.queries + sizes.kv, UPCAST)
        total += sizes.merges * sizes.moved(sizes.queries, MemoryAccesses(1, 2))
        # Remote KV gradients: zero-fill, accumulation, and the cast to the communication dtype.
        remote = other_ranks * sizes.moved(sizes.kv, MemoryAccesses(1, 8))
        total += remote + sizes.reordered_ranks * sizes.moved(sizes.kv, COPY)
    return total


def _recompute(sizes: ActivationSizes) -> float:
    rank = sizes.rank
    if not rank.recomputes:
        return 0
    block = _attention_input(sizes) + sizes.moved(sizes.hidden, NORM) + sizes.moved(sizes.hidden, ADD)
    block += _exchange_copies(sizes)
    block += rank.attention_recompute_fraction * (_attention_input(sizes) + _cp_attention(sizes))
    return rank.num_blocks * block + rank.num_recomputed_blocks * _feed_forward(sizes)


def _loss_head(rank: RankMemory) -> float:
    """Forward and backward: final norm, chunked logits, and accumulation of the weight gradient."""
    sizes, tokens = ActivationSizes(rank, compiled=False), rank.head_tokens
    rows, dim = rank.head_shapes[0]
    chunks = -(-tokens // rank.loss_chunk_tokens)
    total = sizes.moved(sizes.hidden, NORM) + sizes.moved(sizes.hidden, NORM_BACKWARD)
    total += sizes.moved(tokens * rows, LOGITS) + sizes.moved(tokens * dim, COPY)
    return total + sizes.moved(rows * dim, MemoryAccesses(chunks + 1, 2 * chunks + 4))


def _all_gather_copies(rank: RankMemory) -> dict[str, float]:
    """Copies around FSDP all-gathers, by phase: the cast of the shard, and the copy-out if sharded over several ranks."""
    bytes_by_phase = dict.fromkeys(("forward", "backward", "recompute"), 0.0)
    for unit in fsdp_units(rank) if rank.is_sharded else ():
        shard, ranks = rank.sharded_numel(unit.shapes), rank.num_shards
        copied_out = 2 * rank.compute_bytes * shard * ranks * (ranks > 1)
        for phase, num_gathers in unit.all_gathers.items():
            gather_bytes = shard * (rank.master_bytes + rank.compute_bytes) + copied_out
            bytes_by_phase["forward" if phase == "step" else phase] += num_gathers * gather_bytes
    return bytes_by_phase


def _reduce_scatter_copies(rank: RankMemory) -> float:
    """Copies around FSDP reduce-scatters: copy-in, and accumulation."""
    total = 0.0
    for unit in fsdp_units(rank) if rank.is_sharded else ():
        shard = rank.sharded_numel(unit.shapes)
        copied_in = shard * rank.num_shards * (rank.compute_bytes + rank.reduce_bytes)
        total += unit.reduce_scatters * (copied_in + shard * (rank.reduce_bytes + 2 * rank.master_bytes))
    return total


def optimizer_traffic(rank: RankMemory) -> float:
    """Memory traffic of AdamW: gradient norm and clipping, weights, and both moments.

    Bfloat16 moments are upcast and rounded back: four more high-precision accesses each.
    """
    is_upcast = rank.moment_bytes < rank.master_bytes
    return rank.local_numel * (6 * rank.master_bytes + 4 * rank.moment_bytes + 8 * rank.master_bytes * is_upcast)
