"""Predicts the peak memory of each pipeline rank from the configuration alone. Imports no torch.

Sums the items alive in each candidate phase of a step and takes the maximum. Kernel workspaces, communication library
buffers and allocator fragmentation are not included. Symbols are those of docs/parallelism.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from parallelisms.pipeline_plan import SINGLE_STAGE_SCHEDULES
from trainer.config.job_config import Config
from trainer.config.sections import OPTIMIZER_CHUNK_ELEMENTS
from trainer.memory.rank import RankMemory, Shapes, numel

SAVED_ACTIVATIONS, TRANSIENT_ACTIVATIONS = "saved activations", "transient activations"


@dataclass(frozen=True)
class MemoryItem:
    name: str
    device_bytes: float = 0
    host_bytes: float = 0


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of a rank in one phase of a step."""

    phase: str
    pp_rank: int
    pp: int
    items: tuple[MemoryItem, ...]

    @property
    def device_bytes(self) -> float:
        return sum(item.device_bytes for item in self.items)

    @property
    def host_bytes(self) -> float:
        return sum(item.host_bytes for item in self.items)

    def item(self, name: str) -> MemoryItem:
        return next(item for item in self.items if item.name == name)

    @property
    def largest_items(self) -> list[MemoryItem]:
        """The three that need most of the device."""
        return sorted(self.items, key=lambda item: -item.device_bytes)[:3]


def estimate_memory(config: Config, world_size: int) -> MemoryEstimate:
    """Of the rank with the highest peak. The configuration must be valid."""
    return max(estimate_memory_per_pp_rank(config, world_size), key=lambda estimate: estimate.device_bytes)


def estimate_memory_per_pp_rank(config: Config, world_size: int) -> list[MemoryEstimate]:
    """The peak of each pipeline rank."""
    ranks = (RankMemory(config, world_size, pp_rank) for pp_rank in range(config.parallelism.pp))
    return [_peak([*phase_estimates(rank)]) for rank in ranks]


def _peak(estimates: list[MemoryEstimate]) -> MemoryEstimate:
    """The phase with the device's peak, with the host's own peak, which is at the end of the forward pass."""
    peak = max(estimates, key=lambda estimate: estimate.device_bytes)
    saved = replace(
        peak.item(SAVED_ACTIVATIONS), host_bytes=max(each.item(SAVED_ACTIVATIONS).host_bytes for each in estimates)
    )
    return replace(peak, items=tuple(saved if item.name == SAVED_ACTIVATIONS else item for item in peak.items))


def phase_estimates(rank: RankMemory) -> Iterator[MemoryEstimate]:
    """The phases of a step that can be the peak."""
    if rank.has_last_stage:
        yield from _head_estimates(rank)
    for index in sorted({0, min(1, rank.num_blocks - 1), rank.num_blocks - 1} - {-1}):
        yield from _block_backward_estimates(rank, index)
    if rank.has_first_stage:
        yield _embedding_estimate(rank)
    # Bfloat16 moments are upcast chunk by chunk.
    chunk = min(
        OPTIMIZER_CHUNK_ELEMENTS, max(rank.sharded_numel([shape]) for shape in rank.block_shapes + rank.end_shapes)
    )
    is_upcast = rank.moment_bytes < rank.master_bytes and not rank.optimizer_on_host
    transient = 2 * rank.master_bytes * chunk * is_upcast
    yield _estimate(rank, "in the optimizer step", gradients=rank.local_numel, transient=transient)


def _head_estimates(rank: RankMemory) -> Iterator[MemoryEstimate]:
    rows, dim = rank.head_shapes[0]
    input_bytes, weight_bytes = rank.compute_bytes * rank.head_tokens * dim, rank.master_bytes * rows * dim
    low_precision_bytes = rank.compute_bytes * (rank.compute_bytes < rank.master_bytes)
    chunk = min(rank.loss_chunk_tokens, rank.head_tokens)
    # With the chunk's weight gradient.
    logits_bytes = (rank.master_bytes + low_precision_bytes) * rows * chunk + rank.compute_bytes * rows * dim
    head = rank.gathered_bytes([] if rank.model.tie_embeddings else rank.head_shapes) * (rank.pipeline.pp == 1)
    last_block = rank.gathered_bytes(rank.block_shapes)
    has_copy = rank.num_shards > 1  # The last all-gather output and its copy-out both exist.
    weights = rank.resident_weight_bytes(rank.num_blocks) + head
    estimate = partial(
        _estimate,
        rank,
        gradients=_gradient_numel(rank, 0),
        saved=rank.saved_bytes,
        on_host=rank.in_flight_micro_batches * rank.saved_block_bytes(rank.num_blocks)[1],
    )
    yield estimate(
        "in the loss head, forward",
        weights=weights - last_block * rank.reshards_after_forward + has_copy * (head or last_block),
        unreduced=rank.pipeline_gradient_bytes,
        head=2 * input_bytes + weight_bytes + logits_bytes,
    )
    yield estimate(
        "in the loss head, backward",
        weights=weights + has_copy * head,
        unreduced=rank.pipeline_gradient_bytes,
        head=2 * input_bytes + 2 * weight_bytes + low_precision_bytes * rows * dim,
    )
    # The norm backward runs in float32 chunks from the incoming to the outgoing gradient.
    residual = rank.block.residual_bytes
    chunk = min(rank.loss_chunk_tokens, residual // (rank.compute_bytes * dim))
    yield estimate(
        "in the final norm, backward",
        weights=weights,
        unreduced=rank.pipeline_gradient_bytes or rank.compute_bytes * rows * dim,
        head=2 * residual + chunk * dim * (3 * rank.master_bytes + rank.compute_bytes),
    )


def _block_backward_estimates(rank: RankMemory, index: int) -> Iterator[MemoryEstimate]:
    """Backward of block `index` of the rank, after all later blocks."""
    shapes, residual, is_tied = rank.block_shapes, rank.block.residual_bytes, rank.model.tie_embeddings
    is_last_block, num_later_blocks = index == rank.num_blocks - 1, rank.num_blocks - 1 - index
    head_numel = rank.sharded_numel(rank.head_shapes) * rank.has_last_stage
    gradients = _gradient_numel(rank, num_later_blocks * rank.sharded_numel(shapes) + head_numel)
    all_on_device, all_on_host = rank.saved_block_bytes(rank.num_blocks)
    still_on_device, still_on_host = rank.saved_block_bytes(index + (not rank.recomputes), in_backward=rank.recomputes)
    saved = rank.saved_bytes - all_on_device + still_on_device - residual * rank.has_last_stage
    on_host = rank.in_flight_micro_batches * all_on_host - all_on_host + still_on_host
    block = rank.gathered_bytes(shapes)
    prefetched = block * (rank.reshards_after_forward and rank.num_shards > 1 and index > 0)
    previous_unit = ([] if is_tied else rank.head_shapes) if is_last_block else shapes
    unreduced = rank.pipeline_gradient_bytes + rank.gathered_bytes(rank.head_shapes) * is_tied
    estimate = partial(_estimate, rank, on_host=on_host)
    for name, transient, computed in _block_backward_phases(rank, index):
        yield estimate(
            f"in {name} of block {index}, backward",
            gradients=gradients + numel(computed) * (not rank.is_sharded),
            weights=rank.resident_weight_bytes(index + 1) + prefetched,
            unreduced=rank.unreduced_gradient_bytes(previous_unit) + unreduced + rank.gathered_bytes(computed),
            saved=saved,
            # The incoming gradient may already be counted as a pipeline buffer.
            transient=transient - residual * (is_last_block and not rank.has_last_stage),
        )
    if not rank.is_sharded:
        return
    gathered = (
        rank.resident_weight_bytes(0) + prefetched if rank.reshards_after_forward else rank.resident_weight_bytes(index)
    )
    yield estimate(
        f"reduce-scatter after block {index}",
        gradients=gradients,
        weights=gathered,
        unreduced=unreduced + block + rank.unreduced_gradient_bytes(shapes),
        saved=saved - (0 if rank.recomputes else rank.block.saved_bytes("none")),
        transient=residual + _prefetched_activation_bytes(rank, index) if rank.recomputes else 0,
    )


def _block_backward_phases(rank: RankMemory, index: int) -> Iterator[tuple[str, float, Shapes]]:
    """(name, transient bytes, matrices whose gradients exist) of each part of a block's backward."""
    block = rank.block
    _, _, _, output, *ffn_shapes = rank.block_shapes[:7]
    if not rank.recomputes:
        yield "feed-forward", block.feed_forward_backward_bytes(), ffn_shapes[2:]
        transient = block.attention_backward_bytes(rank.kv_grad_bytes) - block.feed_forward_saved_bytes()
        yield "attention", transient, [output, *ffn_shapes]
        return
    inputs = index % rank.config.memory.blocks_per_checkpoint * block.residual_bytes
    prefetched = _prefetched_activation_bytes(rank, index)
    yield "feed-forward", block.feed_forward_recompute_bytes() + inputs, []
    attention = block.attention_recompute_bytes(rank.kv_grad_bytes) + inputs
    yield "attention", attention + prefetched * (rank.config.memory.head_groups == 1), [output, *ffn_shapes]
    yield "projections", block.qkv_recompute_bytes() + inputs + prefetched, [output, *ffn_shapes]


def _prefetched_activation_bytes(rank: RankMemory, index: int) -> float:
    """Activations being copied back from the host for the preceding block; of several head groups only its input."""
    if rank.config.memory.offload == "none" or index == 0:
        return 0
    on_host = rank.saved_block_bytes(1)[1]
    return on_host if rank.config.memory.head_groups == 1 else min(rank.block.residual_bytes, on_host)


def _embedding_estimate(rank: RankMemory) -> MemoryEstimate:
    unit = rank.embed_shapes
    return _estimate(
        rank,
        "in the embedding, backward",
        gradients=rank.local_numel + numel(unit) * (not rank.is_sharded and rank.num_micro_batches > 1),
        weights=rank.resident_weight_bytes(0),
        unreduced=rank.gathered_bytes(unit) + rank.unreduced_gradient_bytes(unit) + rank.pipeline_gradient_bytes,
    )


def _estimate(
    rank: RankMemory,
    phase: str,
    *,
    gradients: float,
    weights: float = 0,
    unreduced: float = 0,
    saved: float = 0,
    on_host: float = 0,
    transient: float = 0,
    head: float = 0,
) -> MemoryEstimate:
    """`gradients` is in elements, everything else in bytes."""
    plan, micro_batches = rank.pipeline, rank.num_micro_batches
    # Every micro-batch in the loss head holds its gradients.
    waiting = {"GPipe": micro_batches, "InterleavedZeroBubble": plan.pp}.get(plan.schedule, 1) - 1
    if rank.has_last_stage and plan.pp > 1:
        head += waiting * (
            rank.compute_bytes * rank.head_tokens * rank.model.dim + rank.master_bytes * numel(rank.head_shapes)
        )
    batch = 32 * rank.tokens  # Tokens, labels, positions and document ids are int64.
    parameters, moments = rank.master_bytes * rank.local_numel, 2 * rank.moment_bytes * rank.local_numel
    staged = rank.config.checkpoint.enabled and rank.config.checkpoint.asynchronous
    if rank.optimizer_on_host:
        gradients = rank.local_numel
    states = {"parameters": parameters, "gradients": rank.master_bytes * gradients, "optimizer state": moments}
    items = (
        *(
            MemoryItem(name, 0, size) if rank.optimizer_on_host else MemoryItem(name, size)
            for name, size in states.items()
        ),
        MemoryItem("gathered weights", weights),
        MemoryItem("unreduced gradients", unreduced),
        MemoryItem(SAVED_ACTIVATIONS, saved, on_host),
        MemoryItem(TRANSIENT_ACTIVATIONS, transient),
        MemoryItem("loss head", head),
        MemoryItem("pipeline buffers", _num_pipeline_buffers(rank) * rank.block.residual_bytes),
        MemoryItem("async-checkpoint staging", 0, (parameters + moments) * staged),
        # The host also prefetches the next step.
        MemoryItem("batch", batch * (micro_batches if plan.pp > 1 else 1), 2 * batch * micro_batches),
    )
    return MemoryEstimate(phase, rank.pp_rank, plan.pp, items)


def _num_pipeline_buffers(rank: RankMemory) -> float:
    """One per input and gradient that a stage receives in a step, and what multi-stage schedules keep of those they sent."""
    plan, first, last = rank.pipeline, rank.has_first_stage, rank.has_last_stage
    if plan.pp == 1:
        return 0
    received = rank.num_micro_batches * (2 * plan.stages_per_rank - first - last)
    if plan.schedule in SINGLE_STAGE_SCHEDULES:
        return received
    finished = plan.stages_per_rank * (rank.num_micro_batches - rank.in_flight_micro_batches)
    at_ends = first * (finished // plan.stages_per_rank) + last * -(-finished // plan.stages_per_rank)
    return received + max(0, 2 * finished - at_ends)


def _gradient_numel(rank: RankMemory, arrived: int) -> int:
    """Elements of existing gradients: all from the second micro-batch's backward on, else those that `arrived`."""
    if rank.pipeline.pp > 1 and rank.is_sharded:
        return 0  # Reduce-scattered once, at the end of the step.
    return rank.local_numel if rank.num_micro_batches > rank.in_flight_micro_batches else arrived
