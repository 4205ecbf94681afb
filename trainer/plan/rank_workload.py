"""Closed formulas for the work of a rank in one step: executed FLOPs and bytes of memory traffic.
Imports no torch.

All micro-batches count as full: a rank's last one may be empty and is computed all the same. The
recomputation inside attention kernels is part of their backward (five products instead of four).
Model FLOPs are in models/config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from models.score_pairs import causal_pairs
from trainer.memory.rank import RankMemory
from trainer.plan.comm_volume import fsdp_units
from trainer.plan.memory_traffic import memory_traffic, optimizer_traffic


@dataclass(frozen=True, kw_only=True)
class RankWorkload:
    """Work of one pipeline rank in one step."""

    matmul_flops: Mapping[str, float]
    """By "forward", "backward", "recompute" and "head" (forward and backward of the loss head)."""
    attention_by_window: Mapping[int | None, Mapping[str, float]]
    """FLOPs executed by attention kernels, by window and by "forward", "backward" and
    "recompute".
    """
    memory_traffic: Mapping[str, float]
    """Bytes read and written by memory-bound operations, by "forward", "backward", "recompute" and
    "head".
    """
    offloaded_bytes: float
    """Activations copied to the host; as many come back."""
    optimizer_bytes: float
    """Memory traffic of the optimizer."""
    fetched_bytes: float
    """Weights copied from the host, with the optimizer on the host."""
    returned_bytes: float
    """Gradients copied to the host, with the optimizer on the host."""

    @property
    def attention_flops(self) -> dict[str, float]:
        """FLOPs of attention over all windows."""
        by_window = self.attention_by_window.values()
        return {
            phase: sum(flops[phase] for flops in by_window)
            for phase in ("forward", "backward", "recompute")
        }


def rank_workload(rank: RankMemory) -> RankWorkload:
    """Work of the busiest rank with that pp rank."""
    units = [(rank.sharded_numel(unit.shapes), unit) for unit in fsdp_units(rank)]
    gathered = sum(sum(unit.all_gathers.values()) * shard for shard, unit in units)
    scattered = sum(unit.reduce_scatters * shard for shard, unit in units)
    return RankWorkload(
        matmul_flops=_matmul_flops(rank),
        attention_by_window=_attention_flops(rank),
        memory_traffic=memory_traffic(rank),
        offloaded_bytes=rank.num_micro_batches * rank.offloaded_bytes,
        optimizer_bytes=optimizer_traffic(rank),
        fetched_bytes=rank.master_bytes * gathered if rank.optimizer_on_host else 0,
        returned_bytes=rank.master_bytes * scattered if rank.optimizer_on_host else 0,
    )


def _matmul_flops(rank: RankMemory) -> dict[str, float]:
    # A multiplication and an addition per weight and token; the backward pass has two such
    # products.
    flops_per_weight = 2.0 * rank.tokens * rank.num_micro_batches
    every = recomputed = 0.0
    for kind, count in rank.kinds.items():
        products = rank.model.products_of(kind, rank.tp)
        every += count * products.every
        if rank.recomputes:
            recomputed += count * (
                products.recomputed + rank.attention_recompute_fraction * products.attention_inputs
            )
            every_but_attention = products.every - products.attention_inputs
            recomputed += (
                count * rank.num_recomputed_blocks / rank.num_blocks * every_but_attention
            )
    head = 0.0
    if rank.has_last_stage:
        logits = rank.head_tokens * rank.head_rows
        head = 6.0 * rank.num_micro_batches * logits * rank.model.dim
    return {
        "forward": flops_per_weight * every,
        "backward": 2 * flops_per_weight * every,
        "recompute": flops_per_weight * recomputed,
        "head": head,
    }


def attention_pairs(rank: RankMemory, window: int | None = None) -> float:
    """(query, key) pairs per head and micro-batch of a layer on the busiest cp rank.

    Padding is a separate document. Every shard layout but `contiguous` splits one document into
    equal work, if there is no window.
    """
    training = rank.training
    plan = rank.settings.context_plan
    if window is not None:
        return (
            training.micro_batch_size
            * max(rank.layout.pairs_per_rank(window))
            / plan.ulysses_degree
        )
    length = training.seq_len
    padded_length = plan.padded_length(length)
    pairs = causal_pairs(length) + causal_pairs(padded_length - length)
    if plan.resolved_layout == "contiguous" and plan.ring_degree > 1:
        tokens_per_rank = padded_length // plan.ring_degree
        pairs = plan.ring_degree * (
            tokens_per_rank * (padded_length - tokens_per_rank) + causal_pairs(tokens_per_rank)
        )
    return training.micro_batch_size * pairs / plan.cp


def _attention_flops(rank: RankMemory) -> dict[int | None, dict[str, float]]:
    by_window = dict[int | None, dict[str, float]]()
    for window in dict.fromkeys(kind.window for kind in rank.kinds):
        alike = (kind for kind in rank.kinds.elements() if kind.window == window)
        forward = (
            rank.model.attention_flops(alike, attention_pairs(rank, window))
            / rank.tp
            * rank.num_micro_batches
        )
        again = rank.attention_recompute_fraction * forward
        by_window[window] = {"forward": forward, "backward": 2.5 * forward, "recompute": again}
    return by_window
