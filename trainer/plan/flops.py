"""Closed formulas for the work of a rank in one step: FLOPs and bytes of memory traffic. Imports no torch.

All micro-batches count as full: a rank's last one may be empty and is computed all the same. The recomputation inside
attention kernels is part of their backward (five products instead of four). Split-backward schedules repeat two
feed-forward products; DualPipeV does so for few micro-batches, which are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parallelisms.pipeline_plan import PipelineSchedule
from trainer.config.job_config import Config
from trainer.memory.estimator import RankMemory
from trainer.plan.comm_volume import attention_recompute_fraction, fsdp_units, loss_chunks, num_recomputed_blocks
from trainer.plan.memory_traffic import memory_traffic, optimizer_traffic

SPLIT_BACKWARD_SCHEDULES: tuple[PipelineSchedule, ...] = ("InterleavedZeroBubble", "ZBVZeroBubble")
"""Schedules that compute input and weight gradients separately."""


@dataclass(frozen=True, kw_only=True)
class RankWorkload:
    """Work of one pipeline rank in one step."""

    matmul_flops: Mapping[str, float]
    """By "forward", "backward", "recompute" and "head" (forward and backward of the loss head)."""
    attention_flops: Mapping[str, float]
    """Executed by attention kernels, by "forward", "backward" and "recompute"."""
    memory_traffic: Mapping[str, float]
    """Bytes read and written by memory-bound operations, by "forward", "backward", "recompute" and "head"."""
    offloaded_bytes: float
    """Activations copied to the host; as many come back."""
    optimizer_bytes: float
    """Memory traffic of the optimizer."""
    optimizer_on_host: bool
    tokens: float
    """Of the global batch, without padding."""
    pairs: float
    """(query, key) pairs of the global batch under a causal mask, one document per sequence."""
    fetched_bytes: float = 0
    """Weights copied from the host, with the optimizer on the host."""
    returned_bytes: float = 0
    """Gradients copied to the host, with the optimizer on the host."""


def rank_workload(config: Config, world_size: int, pp_rank: int) -> RankWorkload:
    """Of the busiest rank with that pp rank. The configuration must be valid."""
    return workload_of(RankMemory(config, world_size, pp_rank))


def workload_of(rank: RankMemory) -> RankWorkload:
    training = rank.config.training
    fsdp_units_of_rank, length = [*fsdp_units(rank)], training.seq_len
    gathered_elements = sum(
        sum(unit.all_gathers.values()) * rank.sharded_numel(unit.shapes) for unit in fsdp_units_of_rank
    )
    scattered_elements = sum(unit.reduce_scatters * rank.sharded_numel(unit.shapes) for unit in fsdp_units_of_rank)
    return RankWorkload(
        matmul_flops=_matmul_flops(rank),
        attention_flops=_attention_flops(rank),
        memory_traffic=memory_traffic(rank),
        offloaded_bytes=rank.num_micro_batches * rank.saved_block_bytes(rank.num_blocks)[1],
        optimizer_bytes=optimizer_traffic(rank),
        optimizer_on_host=rank.optimizer_on_host,
        tokens=training.global_batch_size * length,
        pairs=training.global_batch_size * causal_pairs(length),
        fetched_bytes=rank.master_bytes * gathered_elements * rank.optimizer_on_host,
        returned_bytes=rank.master_bytes * scattered_elements * rank.optimizer_on_host,
    )


def causal_pairs(length: int) -> float:
    """(query, key) pairs of one document."""
    return length * (length + 1) / 2


def _matmul_flops(rank: RankMemory) -> dict[str, float]:
    model, width = rank.model, rank.model.dim
    queries = model.num_heads // rank.tp * model.head_dim
    keys = max(1, model.num_kv_heads // rank.tp) * model.head_dim
    qkv, out, ffn = width * (queries + 2 * keys), width * queries, width * model.ffn_dim // rank.tp
    block = qkv + out + 3 * ffn
    flops_per_weight = 2.0 * rank.tokens * rank.num_micro_batches
    recomputed = 0.0
    if rank.config.memory.recompute != "none":
        # All products but the last, whose result no gradient needs; query and key norms need their input again.
        recomputed = rank.num_blocks * (block - ffn + width * (queries + keys) * model.qk_norm)
        recomputed += rank.num_blocks * attention_recompute_fraction(rank) * qkv + num_recomputed_blocks(rank) * (
            out + 3 * ffn
        )
    elif rank.pipeline.pp > 1 and rank.pipeline.schedule in SPLIT_BACKWARD_SCHEDULES:
        # The fused SwiGLU backward runs for input and for weight gradients; the first stage has no input gradient.
        recomputed = (rank.num_blocks - rank.pipeline.blocks_per_stage[0] * rank.has_first_stage) * 2 * ffn
    rows, _ = rank.head_shapes()[0]
    chunk, count, remainder = loss_chunks(rank)
    head = 6.0 * rank.num_micro_batches * (chunk * count + remainder) * rows * width * rank.has_last_stage
    return {
        "forward": flops_per_weight * rank.num_blocks * block,
        "backward": 2 * flops_per_weight * rank.num_blocks * block,
        "recompute": flops_per_weight * recomputed,
        "head": head,
    }


def attention_pairs(rank: RankMemory) -> float:
    """(query, key) pairs per head and micro-batch on the busiest cp rank.

    Padding is a separate document. Every shard layout but `contiguous` splits one document into equal work.
    """
    training, plan = rank.config.training, rank.config.context_plan()
    length = training.seq_len
    padded_length = plan.padded_length(length)
    pairs = causal_pairs(length) + causal_pairs(padded_length - length)
    if plan.resolved_layout == "contiguous" and plan.ring_degree > 1:
        tokens_per_rank = padded_length // plan.ring_degree
        pairs = plan.ring_degree * (tokens_per_rank * (padded_length - tokens_per_rank) + causal_pairs(tokens_per_rank))
    return training.micro_batch_size * pairs / plan.cp


def _attention_flops(rank: RankMemory) -> dict[str, float]:
    query_dim = rank.model.num_heads // rank.tp * rank.model.head_dim
    forward = 4.0 * query_dim * attention_pairs(rank) * rank.num_blocks * rank.num_micro_batches
    return {"forward": forward, "backward": 2.5 * forward, "recompute": attention_recompute_fraction(rank) * forward}
