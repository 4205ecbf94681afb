"""Estimates the memory traffic of memory-bound operations in one step, operation by operation.
Imports no torch.

Each operation reads its inputs and writes its outputs once, in the compute dtype or the statistics
dtype. Compiled code keeps intermediates in registers. Per-token statistics, norm weights and
copies between tiles are ignored.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

from models.layers import LayerKind
from trainer.memory import norms
from trainer.memory.rank import RankMemory
from trainer.plan.comm_volume import fsdp_units

# Reads and writes per element in the compute dtype and in the statistics dtype: eager, then
# compiled. Eager counts follow models/norm.py operator by operator: `rms_norm` reads x for its RMS
# and for the product, which is rounded and then multiplied in place.
NORM = (5, 2), (2, 0)
NORM_BACKWARD = (7, 14), (5, 0)
FUSED_NORM = ((2, 0),)
FUSED_NORM_BACKWARD = ((5, 0),)
ROPE = (3, 2), (2, 0)
ROPE_TABLES = (0, 4), (0, 2)
SWIGLU = (5, 0), (3, 0)
SWIGLU_BACKWARD = (14, 0), (6, 0)
# Inside custom operators, which torch.compile does not fuse.
ADD = ((3, 0),)
COPY = ((2, 0),)
MERGE = ((1, 6),)
MERGE_BACKWARD = ((1, 2),)
UPCAST = ((2, 2),)
WIDEN = ((1, 2),)
ACCUMULATE = ((1, 8),)
# Of a chunk, beyond its product: eager, then compiled. A product that rounds to the compute dtype
# is widened.
LOGITS = (1, 7), (1, 2)


class BlockTraffic:
    """Bytes that the memory-bound operations of one block move for a micro-batch on one rank."""

    def __init__(self, rank: RankMemory, kind: LayerKind | None = None, *, compiled: bool) -> None:
        """`kind`: the block's; None for what is in no block."""
        self.rank = rank
        self.block = rank.block if kind is None else rank.blocks[kind]
        self.compiled = compiled
        self.num_norms = self.block.num_norms
        self.hidden = rank.block.residual_bytes // rank.compute_bytes
        self.queries = rank.block.q_numel
        self.kv = rank.block.kv_numel
        self.qk = self.queries + rank.block.kv_heads * rank.model.head_dim * rank.tokens
        self.angles = rank.model.head_dim // 2 * rank.tokens
        self.ffn = rank.model.ffn_dim * rank.tokens // rank.tp
        self.rows = rank.tokens * rank.model.top_k if self.block.has_experts else 0
        """Rows: each token counts once for each of its experts."""
        if self.rows:
            shared = rank.tokens * rank.model.sizes["Z"] if self.block.kind.shared_expert else 0
            self.ffn = (self.rows * rank.model.expert_dim + shared) // rank.tp

    def moved(self, elements: float, operation: tuple[tuple[int, int], ...]) -> float:
        in_compute_dtype, in_stats_dtype = operation[-1 if self.compiled else 0]
        return elements * (
            in_compute_dtype * self.rank.compute_bytes + in_stats_dtype * self.rank.master_bytes
        )

    def norm(self, elements: float) -> float:
        return self.moved(elements, FUSED_NORM if norms.are_fused(self.block) else NORM)

    def norm_backward(self, elements: float) -> float:
        return self.moved(
            elements, FUSED_NORM_BACKWARD if norms.are_fused(self.block) else NORM_BACKWARD
        )

    @cached_property
    def rotation(self) -> float:
        """Rotation of queries and keys, each of which reads the tables of angles."""
        return self.moved(self.qk, ROPE) + 2 * self.moved(self.angles, ROPE_TABLES)

    @cached_property
    def attention_input(self) -> float:
        """Norm, query and key norms, and rotary embedding."""
        total = self.norm(self.hidden) + self.rotation
        return total + (self.norm(self.qk) if self.block.norms_heads else 0)

    @cached_property
    def feed_forward(self) -> float:
        """Two residual additions, all norms of the residual stream but one, and the SwiGLU
        gate.
        """
        norms = (self.num_norms - 1) * self.norm(self.hidden)
        # Rows are copied on the way to their experts and on the way back.
        dispatched = 2 * self.moved(
            self.rows * self.rank.model.dim / self.block.sequence_shards, COPY
        )
        return 2 * self.moved(self.hidden, ADD) + norms + self.moved(self.ffn, SWIGLU) + dispatched

    @cached_property
    def exchange(self) -> float:
        """Copies before and after the all-to-all of heads, of which one sequence needs half."""
        if self.block.ulysses_degree == 1:
            return 0
        return min(2, self.block.sequences) * self.moved(2 * self.queries + self.kv, COPY)

    @property
    def merged_queries(self) -> float:
        """Queries of all merges of partial attention outputs: half of a ring's blocks cover half
        the queries.
        """
        if self.block.halo is not None:  # About as many as there are keys.
            return self.queries * min(1, self.block.halo[1])
        return self.queries * (1 if self.block.gathers_kv else 0.75 * (self.block.ring_degree - 1))

    @property
    def kv_copies(self) -> float:
        """The rank's own KV, and the reordered KV of other ranks if gathered; of a halo, what is
        sent.
        """
        if self.block.halo is not None:
            return self.moved(self.kv, COPY) * self.block.halo[0]
        return self.moved(self.kv, COPY) * (self.block.ring_degree if self.block.gathers_kv else 1)

    @cached_property
    def cp_attention(self) -> float:
        """Copies for all-to-all or ring communication, and merging of partial attention
        outputs.
        """
        if self.block.ring_degree == 1:
            return self.exchange
        # The sum of outputs is in the dtype of statistics: widened at first, rounded in the end.
        total = self.exchange + self.kv_copies + self.moved(self.queries, UPCAST)
        return total + self.moved(self.merged_queries, MERGE)

    @cached_property
    def cp_attention_backward(self) -> float:
        if self.block.ring_degree == 1:
            return self.exchange
        total = self.exchange + self.kv_copies + self.moved(self.queries + self.kv, UPCAST)
        total += self.moved(self.merged_queries, MERGE_BACKWARD)
        # Remote KV gradients: zero-fill, accumulation, and the cast to the communication dtype.
        remote = self.block.ring_degree - 1 if self.block.halo is None else self.block.halo[1]
        return total + remote * self.moved(self.kv, ACCUMULATE)

    @cached_property
    def backward(self) -> float:
        total = self.num_norms * self.norm_backward(self.hidden) + 2 * self.moved(self.hidden, ADD)
        total += self.rotation + self.moved(self.ffn, SWIGLU_BACKWARD)
        if self.block.norms_heads:
            total += self.norm_backward(self.qk)
        if not self.rank.recomputes:
            # Autograd sums the input gradients of queries, keys and values, and of gate and up.
            total += 3 * self.moved(self.rank.model.dim * self.rank.tokens, ADD)
        return total + self.cp_attention_backward

    @cached_property
    def recompute(self) -> float:
        """Recomputation of a block, without its feed-forward's output."""
        if not self.rank.recomputes:
            return 0
        norms = (self.num_norms - 1) * self.norm(self.hidden)
        total = self.attention_input + norms + self.moved(self.hidden, ADD) + self.exchange
        attention = self.attention_input + self.cp_attention
        return total + self.rank.attention_recompute_fraction * attention


def memory_traffic(rank: RankMemory) -> dict[str, float]:
    """Bytes over all micro-batches by "forward", "backward", "recompute" and "head"."""
    copies = _fsdp_copies(rank)
    micro_batches = rank.num_micro_batches
    forward = backward = recompute = 0.0
    for kind, count in rank.kinds.items():
        block = BlockTraffic(rank, kind, compiled=rank.block.compiled)
        forward += count * (block.attention_input + block.cp_attention + block.feed_forward)
        backward += count * block.backward
        if rank.recomputes:
            again = count / rank.num_blocks * rank.num_recomputed_blocks
            recompute += count * block.recompute + again * block.feed_forward
    return {
        "forward": micro_batches * (forward + _embedding(rank)) + copies["forward"],
        "backward": micro_batches * (backward + _embedding_backward(rank)) + copies["backward"],
        "recompute": micro_batches * recompute + copies["recompute"],
        "head": micro_batches * _loss_head(rank) if rank.has_last_stage else 0,
    }


def _embedding(rank: RankMemory) -> float:
    """Traffic of the embedding: the lookup, and the mask of a vocabulary shard."""
    if not rank.has_first_stage:
        return 0
    block = BlockTraffic(rank, compiled=False)
    elements = rank.tokens * rank.model.dim
    mask = block.moved(elements, ADD) if rank.tp > 1 else 0
    return block.moved(elements, COPY) + mask


def _embedding_backward(rank: RankMemory) -> float:
    """Traffic of the embedding's gradient: the mask again, and sums of a wider dtype."""
    if not rank.has_first_stage:
        return 0
    block = BlockTraffic(rank, compiled=False)
    elements = rank.tokens * rank.model.dim
    widened = block.moved(elements, WIDEN) if rank.is_mixed else 0
    return widened + (block.moved(elements, ADD) if rank.tp > 1 else 0)


def _loss_head(rank: RankMemory) -> float:
    """Forward and backward: final norm, chunked logits, and the weight gradient, which the
    products add up by themselves.
    """
    head = BlockTraffic(rank, compiled=False)
    tokens = rank.head_tokens
    rows, dim = rank.head_shapes[0]
    chunks = -(-tokens // rank.loss_chunk_tokens)
    total = head.norm(head.hidden) + head.norm_backward(head.hidden)
    logits = BlockTraffic(rank, compiled=rank.block.compiled)
    total += logits.moved(tokens * rows, LOGITS) + head.moved(tokens * dim, COPY)
    # The weight gradient is zero-filled once, and at the end read, scaled and rounded.
    total += head.moved(rows * dim, ((1, 2),))
    if rank.has_wide_products:
        return total
    return (
        total
        + head.moved(tokens * rows, ((1, 1),))
        + head.moved(rows * dim, ((chunks, 2 * chunks),))
    )


def _fsdp_copies(rank: RankMemory) -> defaultdict[str, float]:
    """Copies around FSDP collectives, by phase: the cast of the shard, and the copy-out if sharded
    over several ranks; the copy-in of gradients, and their accumulation.
    """
    copies = defaultdict[str, float](float)
    for unit in fsdp_units(rank) if rank.is_sharded else ():
        shard = rank.sharded_numel(unit.shapes)
        ranks = rank.num_shards // unit.ep
        copied_out = 2 * rank.compute_bytes * shard * ranks if ranks > 1 else 0
        for phase, num_gathers in unit.all_gathers.items():
            gather_bytes = shard * (rank.master_bytes + rank.compute_bytes) + copied_out
            copies["forward" if phase == "step" else phase] += num_gathers * gather_bytes
        copied_in = shard * ranks * (rank.compute_bytes + rank.reduce_bytes)
        copies["backward"] += unit.reduce_scatters * (
            copied_in + shard * (rank.reduce_bytes + 2 * rank.master_bytes)
        )
    return copies


def optimizer_traffic(rank: RankMemory) -> float:
    """Memory traffic of AdamW: the gradient for its norm, then clipped and written with weights
    and both moments in one pass.

    Bfloat16 moments are upcast and rounded back: four more accesses each in the statistics dtype.
    """
    # The gradient is read for the norm, then read and written by clipping and AdamW: with the
    # weight five accesses, and two for either moment.
    bytes_per_element = 5 * rank.master_bytes + 4 * rank.moment_bytes
    if rank.moment_bytes < rank.master_bytes:
        bytes_per_element += 8 * rank.master_bytes
    return rank.local_numel * bytes_per_element
