"""Bytes of activations that one transformer block saves for backward, and needs while it runs. Imports no torch.

Counted against real tensors in tests/memory/test_estimator.py and tests/memory/test_block.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from models.config import ModelConfig
from parallelisms.parallel_dims import ContextPlan


@dataclass(frozen=True)
class BlockMemory:
    """Activations of one block for `tokens` tokens, counted over all tp ranks; sizes are per rank."""

    model: ModelConfig
    tokens: int
    compute_bytes: int = 2
    stats_bytes: int = 4
    """Element size of softmax and norm statistics."""
    tp: int = 1
    sequence_parallel: bool = True
    compiled: bool = False
    context_plan: ContextPlan | None = None
    head_groups: int = 1
    mlp_tile_bytes: int | None = None
    """Size of an MLP tile, with recomputation."""

    @property
    def sequence_shards(self) -> int:
        """Tp ranks that share the tokens of the residual stream."""
        return self.tp if self.sequence_parallel else 1

    @property
    def ulysses_degree(self) -> int:
        return 1 if self.context_plan is None else self.context_plan.ulysses_degree

    @property
    def ring_degree(self) -> int:
        return 1 if self.context_plan is None else self.context_plan.ring_degree

    @property
    def gathers_kv(self) -> bool:
        """Whether KV is all-gathered over the ring, rather than sent from rank to rank."""
        return self.context_plan is not None and self.context_plan.rotate_method == "allgather"

    @property
    def residual_bytes(self) -> int:
        return self.compute_bytes * self.model.dim * self.tokens // self.sequence_shards

    @property
    def q_numel(self) -> int:
        """Elements of the queries; also of the attention output and of the gradients of either."""
        return self.model.num_heads * self.model.head_dim * self.tokens // self.tp

    @property
    def kv_heads(self) -> int:
        """KV heads that a rank computes."""
        return max(1, self.model.num_kv_heads // self.tp)

    @property
    def kv_numel(self) -> int:
        """Elements of keys and values; the heads of a group are repeated until the Ulysses degree divides them."""
        heads = self.kv_heads // self.head_groups
        return 2 * self.head_groups * lcm(heads, self.ulysses_degree) * self.model.head_dim * self.tokens

    @property
    def qkv_bytes(self) -> int:
        return self.compute_bytes * (self.q_numel + self.kv_numel)

    @property
    def ffn_bytes(self) -> int:
        return self.compute_bytes * self.model.ffn_dim * self.tokens // self.tp

    def saved_bytes(self, policy: str) -> int:
        """Saved activations of attention and feed-forward under a recompute policy."""
        return self.attention_saved_bytes(policy) + (self.feed_forward_saved_bytes() if policy == "none" else 0)

    @property
    def attention_output_bytes(self) -> int:
        """Attention output and log-sum-exp."""
        return self.compute_bytes * self.q_numel + self.stats_bytes * self.model.num_heads * self.tokens // self.tp

    def attention_saved_bytes(self, policy: str) -> int:
        output_bytes = self.attention_output_bytes
        if policy != "none":
            return self.residual_bytes + output_bytes * (policy == "keep_attention")
        qkv_bytes = self.qkv_bytes + self.compute_bytes * self.q_numel * (self.ulysses_degree > 1)  # Also exchanged.
        return self._norm_saved_bytes() + qkv_bytes + output_bytes + self._qk_norm_saved_bytes()

    def feed_forward_saved_bytes(self) -> int:
        return self._norm_saved_bytes() + (3 if self.compiled else 2) * self.ffn_bytes

    def _qk_norm_saved_bytes(self) -> int:
        """Inputs of the query and key norms, and one statistic per head."""
        heads = (self.model.num_heads // self.tp + self.kv_heads) * self.model.qk_norm
        return heads * (self.compute_bytes * self.model.head_dim + self.stats_bytes) * self.tokens

    def _norm_saved_bytes(self) -> int:
        """Norm input, one statistic per token, and the output gathered over the tp ranks."""
        statistics_bytes = self.stats_bytes * self.residual_bytes // (self.compute_bytes * self.model.dim)
        return self.residual_bytes + statistics_bytes + self.compute_bytes * self.model.dim * self.tokens

    @property
    def gathered_bytes(self) -> int:
        """Hidden states gathered over the tp ranks; 0 without sequence parallelism."""
        return self.compute_bytes * self.model.dim * self.tokens * (self.tp > 1 and self.sequence_parallel)

    def feed_forward_backward_bytes(self) -> int:
        """Transient bytes of the feed-forward backward without recomputation: gradients of the output (gathered under tp),
        gate and up.
        """
        return self.residual_bytes + self.gathered_bytes + 2 * self.ffn_bytes

    def attention_backward_bytes(self, grad_comm_bytes: int) -> int:
        """Transient bytes of the attention backward without recomputation: the residual gradient and the operator's
        buffers. Query norms run after the operator has freed its output.
        """
        return self.residual_bytes + max(
            self._attention_op_backward_bytes(grad_comm_bytes),
            self._qk_norm_backward_bytes(self.compute_bytes) - self.attention_output_bytes,
        )

    def _qk_norm_backward_bytes(self, bytes_per_element: int) -> int:
        """Backward of the query norm: `bytes_per_element`, and three statistics-typed values, per query element."""
        return (bytes_per_element + 3 * self.stats_bytes) * self.q_numel * self.model.qk_norm

    def _attention_op_backward_bytes(self, grad_comm_bytes: int) -> int:
        """Gradients of output, queries, keys and values, and receive buffers. `grad_comm_bytes` is the element size of KV
        gradients on the wire.
        """
        local_bytes = self.compute_bytes * 2 * self.q_numel
        ring = self.ring_degree
        if ring == 1:
            return local_bytes + self.compute_bytes * self.kv_numel
        # Accumulators have the statistics type; the gradients of the current block are held too.
        local_bytes += self.stats_bytes * (self.q_numel + self.kv_numel)
        if self.gathers_kv:
            before_reduce = (ring - 1) * (2 * self.compute_bytes + self.stats_bytes)
            during_reduce = (ring - 1) * self.stats_bytes + ring * grad_comm_bytes
            return local_bytes + self.kv_numel * max(before_reduce, during_reduce)
        in_transit = 2 * grad_comm_bytes + self.compute_bytes if ring > 2 else 0  # KV and KV gradients in transit.
        return local_bytes + self.kv_numel * (2 * self.compute_bytes + self.stats_bytes + in_transit)

    # ---- backward with recomputation, without the saved activations of other blocks

    def num_tiles(self, sequences: int = 1) -> int:
        """A tile holds equally many tokens of each of the micro-batch's `sequences`."""
        if self.mlp_tile_bytes is None:
            return 1
        shards = self.sequence_shards * sequences
        return -(-(self.tokens // shards) // max(1, self.mlp_tile_bytes // self._tile_bytes_per_token() // shards))

    @property
    def tile_tokens(self) -> int:
        """Tokens of the largest tile, over all tp ranks."""
        shards = self.sequence_shards
        return -(-(self.tokens // shards) // self.num_tiles()) * shards

    def _tile_bytes_per_token(self) -> int:
        dim, ffn_dim = self.model.dim, self.model.ffn_dim // self.tp
        return self.compute_bytes * (2 * ffn_dim + 2 * max(ffn_dim, dim) + dim)

    def feed_forward_recompute_bytes(self) -> int:
        """Block input, attention output, incoming and outgoing gradient, and one tile in the feed-forward or its norm with
        the gradients of all matrices.
        """
        count, tokens, dim, ffn_dim = self.num_tiles(), self.tile_tokens, self.model.dim, self.model.ffn_dim // self.tp
        local_bytes = self.compute_bytes * dim * tokens // self.sequence_shards
        gathered_bytes = self.compute_bytes * dim * tokens * (self.tp > 1 and self.sequence_parallel)
        gate_bytes = self.compute_bytes * ffn_dim * tokens
        weight_grad_bytes = self.compute_bytes * dim * ffn_dim
        ffn_peak = max(4 * gate_bytes + weight_grad_bytes, 2 * gate_bytes + 3 * weight_grad_bytes + local_bytes)
        norm_peak = 3 * weight_grad_bytes + local_bytes + 3 * self.stats_bytes * local_bytes // self.compute_bytes
        accumulator_bytes = self.stats_bytes * 3 * dim * ffn_dim * (count > 1)
        gathered_bytes = max(local_bytes + gathered_bytes, 2 * gathered_bytes)
        tile_bytes = local_bytes + gathered_bytes + max(ffn_peak, norm_peak - local_bytes)
        return (2 + (count > 1)) * self.residual_bytes + self.attention_output_bytes + accumulator_bytes + tile_bytes

    def attention_recompute_bytes(self, grad_comm_bytes: int) -> int:
        """Block input and its gradient (also gathered under tp), gradients of finished head groups, and QKV of the active and
        the prefetched group. Query gradients reuse the memory of the attention output.
        """
        groups = self.head_groups
        finished_groups = max(0, groups - 2) * self.compute_bytes * self.kv_numel // groups
        active_groups = self._active_group_bytes() + self._prefetched_group_bytes() * (groups > 1)
        active_groups += self._attention_op_backward_bytes(grad_comm_bytes)
        inputs = 2 * self.residual_bytes + 2 * self.gathered_bytes
        return inputs + self.attention_output_bytes + finished_groups + active_groups // groups

    def _active_group_bytes(self) -> int:
        """QKV over all heads. Ulysses also holds the output and its gradient before and after the all-to-all."""
        return self.qkv_bytes + 2 * self.compute_bytes * self.q_numel * (self.ulysses_degree > 1)

    def _prefetched_group_bytes(self) -> int:
        """QKV over all heads, with communication buffers."""
        if self.ulysses_degree > 1:
            return 2 * self.qkv_bytes
        num_kv_buffers = 1 + (self.ring_degree if self.gathers_kv else 1) if self.ring_degree > 1 else 0
        return self.qkv_bytes + self.compute_bytes * self.kv_numel * num_kv_buffers

    def qkv_recompute_bytes(self) -> int:
        """Block input and its gradient, QKV gradients, and one tile in the rotary or norm backward."""
        is_tiled, tokens, dim, qkv_bytes = self.num_tiles() > 1, self.tile_tokens, self.model.dim, self.qkv_bytes
        local_bytes = self.compute_bytes * dim * tokens // self.sequence_shards
        weight_grad_bytes = dim * qkv_bytes // self.tokens
        tile_bytes = qkv_bytes * tokens // self.tokens
        transient = max(2 * self.stats_bytes * self.q_numel, self._qk_norm_backward_bytes(2 * self.compute_bytes))
        rope_peak = tile_bytes * (self.head_groups > 1) + tile_bytes + transient * tokens // self.tokens
        norm_peak = weight_grad_bytes + local_bytes + 3 * self.stats_bytes * local_bytes // self.compute_bytes
        accumulator_bytes = (self.stats_bytes * weight_grad_bytes // self.compute_bytes) * is_tiled
        held_bytes = 2 * self.residual_bytes + self.gathered_bytes + qkv_bytes + local_bytes
        return held_bytes + accumulator_bytes + max(rope_peak, norm_peak)
