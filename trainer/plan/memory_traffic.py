"""Estimates the memory traffic of memory-bound operations in one step, operation by operation. Imports no torch.

Each operation reads its inputs and writes its outputs once, in the compute dtype (low precision) or the statistics dtype
(high precision). Compiled code keeps intermediates in registers. Per-token statistics, norm weights, rotary tables and
copies between tiles are ignored.
"""

from __future__ import annotations

from typing import NamedTuple

from trainer.memory.estimator import RankMemory
from trainer.plan.comm_volume import attention_recompute_fraction, fsdp_units, loss_chunks, num_recomputed_blocks


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

    def __init__(self, rank: RankMemory) -> None:
        self.rank, model = rank, rank.model
        self.compiled = rank.config.training.compile
        self.hidden = rank.block_memory.residual_bytes // rank.compute_bytes
        self.gathered_hidden = model.dim * rank.tokens
        self.queries = rank.block_memory.q_numel
        self.qk = self.queries + max(1, model.num_kv_heads // rank.tp) * model.head_dim * rank.tokens
        self.ffn = model.ffn_dim * rank.tokens // rank.tp
        self.kv = rank.block_memory.kv_numel

    def bytes_moved(self, elements: float, accesses: MemoryAccesses | tuple[MemoryAccesses, MemoryAccesses]) -> float:
        if not isinstance(accesses, MemoryAccesses):
            accesses = accesses[self.compiled]
        return elements * (
            accesses.low_precision * self.rank.compute_bytes + accesses.high_precision * self.rank.master_bytes
        )


def memory_traffic(rank: RankMemory) -> dict[str, float]:
    """Bytes over all micro-batches by "forward", "backward", "recompute" and "head"."""
    sizes, micro_batches, blocks = ActivationSizes(rank), rank.num_micro_batches, rank.num_blocks
    all_gather_copies = _all_gather_copies(rank)
    embedding = sizes.bytes_moved(sizes.hidden, COPY) * rank.has_first_stage
    forward = blocks * (_attention_input(sizes) + _cp_attention(sizes) + _feed_forward(sizes)) + embedding
    return {
        "forward": micro_batches * forward + all_gather_copies["forward"],
        "backward": micro_batches * blocks * _backward(sizes)
        + all_gather_copies["backward"]
        + _reduce_scatter_copies(rank),
        "recompute": micro_batches * _recompute(sizes) + all_gather_copies["recompute"],
        "head": micro_batches * _loss_head(sizes) * rank.has_last_stage,
    }


def _attention_input(sizes: ActivationSizes) -> float:
    """Of a block: norm, query and key norms, and rotary embedding."""
    total = sizes.bytes_moved(sizes.hidden, NORM) + sizes.bytes_moved(sizes.qk, ROPE)
    return total + sizes.bytes_moved(sizes.qk, NORM) * sizes.rank.model.qk_norm


def _feed_forward(sizes: ActivationSizes) -> float:
    """Of a block: two residual additions, a norm and the SwiGLU gate."""
    return (
        2 * sizes.bytes_moved(sizes.hidden, ADD)
        + sizes.bytes_moved(sizes.hidden, NORM)
        + sizes.bytes_moved(sizes.ffn, SWIGLU)
    )


def _cp_attention(sizes: ActivationSizes) -> float:
    """Of a block: copies for all-to-all or ring communication, and merging of partial attention outputs."""
    plan = sizes.rank.block_memory.context_plan
    if plan is None:
        return 0
    total = 0.0
    if plan.ulysses_degree > 1:
        total += 2 * sizes.bytes_moved(2 * sizes.queries + sizes.kv, COPY)
    if plan.ring_degree > 1:
        total += sizes.bytes_moved(sizes.kv, COPY) + sizes.bytes_moved(sizes.queries, UPCAST)
        total += _num_merges(sizes) * sizes.bytes_moved(sizes.queries, MERGE)
        total += _num_reordered_ranks(sizes) * sizes.bytes_moved(sizes.kv, COPY)
    return total


def _num_merges(sizes: ActivationSizes) -> float:
    """Merges of partial attention outputs, in units of all queries: half of a ring's blocks cover half the queries."""
    plan = sizes.rank.block_memory.context_plan
    if plan is None or plan.ring_degree == 1:
        return 0
    return 1 if plan.rotate_method == "allgather" else 0.75 * (plan.ring_degree - 1)


def _num_reordered_ranks(sizes: ActivationSizes) -> int:
    """Remote ranks whose gathered KV is reordered."""
    plan = sizes.rank.block_memory.context_plan
    return plan.ring_degree - 1 if plan is not None and plan.rotate_method == "allgather" else 0


def _backward(sizes: ActivationSizes) -> float:
    total = 2 * (sizes.bytes_moved(sizes.hidden, NORM_BACKWARD) + sizes.bytes_moved(sizes.hidden, ADD))
    total += sizes.bytes_moved(sizes.qk, ROPE) + sizes.bytes_moved(sizes.ffn, SWIGLU_BACKWARD)
    total += sizes.bytes_moved(sizes.qk, NORM_BACKWARD) * sizes.rank.model.qk_norm
    if sizes.rank.config.memory.recompute == "none":
        # Autograd sums the input gradients of queries, keys and values, and of gate and up.
        total += 3 * sizes.bytes_moved(sizes.gathered_hidden, ADD)
    return total + _cp_attention_backward(sizes)


def _cp_attention_backward(sizes: ActivationSizes) -> float:
    plan = sizes.rank.block_memory.context_plan
    if plan is None:
        return 0
    total = 2 * sizes.bytes_moved(2 * sizes.queries + sizes.kv, COPY) * (plan.ulysses_degree > 1)
    if plan.ring_degree > 1:
        other_ranks = plan.ring_degree - 1
        total += sizes.bytes_moved(sizes.kv, COPY) + sizes.bytes_moved(sizes.queries + sizes.kv, UPCAST)
        total += _num_merges(sizes) * sizes.bytes_moved(sizes.queries, MemoryAccesses(1, 2))
        # Remote KV gradients: zero-fill, accumulation, and the cast to the communication dtype.
        total += other_ranks * sizes.bytes_moved(sizes.kv, MemoryAccesses(1, 8)) + _num_reordered_ranks(
            sizes
        ) * sizes.bytes_moved(sizes.kv, COPY)
    return total


def _recompute(sizes: ActivationSizes) -> float:
    rank, memory = sizes.rank, sizes.rank.config.memory
    if memory.recompute == "none":
        return 0
    plan, recompute_fraction = rank.block_memory.context_plan, attention_recompute_fraction(rank)
    block = _attention_input(sizes) + sizes.bytes_moved(sizes.hidden, NORM) + sizes.bytes_moved(sizes.hidden, ADD)
    if plan is not None and plan.ulysses_degree > 1:
        block += 2 * sizes.bytes_moved(2 * sizes.queries + sizes.kv, COPY)
    block += recompute_fraction * (_attention_input(sizes) + _cp_attention(sizes))
    return rank.num_blocks * block + num_recomputed_blocks(rank) * _feed_forward(sizes)


def _loss_head(sizes: ActivationSizes) -> float:
    """Forward and backward: final norm, chunked logits, and accumulation of the weight gradient."""
    rank = sizes.rank
    vocab_rows, model_dim = rank.head_shapes()[0]
    chunk, count, remainder = loss_chunks(rank)
    tokens, chunks = chunk * count + remainder, count + (remainder > 0)
    eager = ActivationSizes(rank)
    eager.compiled = False  # The loss head is not compiled.
    total = eager.bytes_moved(sizes.hidden, NORM) + eager.bytes_moved(sizes.hidden, NORM_BACKWARD)
    total += sizes.bytes_moved(tokens * vocab_rows, LOGITS) + sizes.bytes_moved(tokens * model_dim, COPY)
    return total + sizes.bytes_moved(vocab_rows * model_dim, MemoryAccesses(chunks + 1, 2 * chunks + 4))


def _all_gather_copies(rank: RankMemory) -> dict[str, float]:
    """Copies around FSDP all-gathers, by phase: the cast of the shard, and the copy-out if sharded over several ranks."""
    bytes_by_phase = dict.fromkeys(("forward", "backward", "recompute"), 0.0)
    for unit in fsdp_units(rank) if rank.is_sharded else ():
        shard = rank.sharded_numel(unit.shapes)
        bytes_per_gather = shard * (
            rank.master_bytes + rank.compute_bytes
        ) + 2 * rank.compute_bytes * shard * rank.num_shards * (rank.num_shards > 1)
        for phase, num_gathers in unit.all_gathers.items():
            bytes_by_phase["forward" if phase == "step" else phase] += num_gathers * bytes_per_gather
    return bytes_by_phase


def _reduce_scatter_copies(rank: RankMemory) -> float:
    """Copies around FSDP reduce-scatters: copy-in, and accumulation."""
    total = 0.0
    for unit in fsdp_units(rank) if rank.is_sharded else ():
        shard = rank.sharded_numel(unit.shapes)
        bytes_per_scatter = shard * rank.num_shards * (rank.compute_bytes + rank.reduce_bytes) + shard * (
            rank.reduce_bytes + 2 * rank.master_bytes
        )
        total += unit.reduce_scatters * bytes_per_scatter
    return total


def optimizer_traffic(rank: RankMemory) -> float:
    """Memory traffic of AdamW: gradient norm and clipping, weights, and both moments.

    Bfloat16 moments are upcast and rounded back: four more high-precision accesses each.
    """
    moments = (
        4 * rank.moment_bytes
        if rank.moment_bytes == rank.master_bytes
        else 4 * rank.moment_bytes + 8 * rank.master_bytes
    )
    return rank.local_numel() * (6 * rank.master_bytes + moments)
