"""What a rank computes in an update, in closed formulas: FLOPs, and bytes that operations move. Without torch.

All micro-batches count as full ones: the last of a rank may be empty, and is computed like the others. What kernels of
attention compute again in their backward pass is theirs: five products instead of four. Schedules that find gradients of
weights later carry out two products of the feed-forward once more; `DualPipeV` does so for few micro-batches, which are
left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parallelisms.pipeline_plan import Schedule
from trainer.config.job_config import Config
from trainer.memory.estimator import Rank
from trainer.plan.comm_volume import attends_again, chunks_of, made_again_of, units
from trainer.plan.memory_traffic import moved, of_optimizer

TWICE: tuple[Schedule, ...] = ("InterleavedZeroBubble", "ZBVZeroBubble")
"""Schedules that go back through a stage for its input, and then for its weights."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Of a rank at a place of the pipeline, in a whole update."""

    matmul: Mapping[str, float]
    """FLOPs of matrix products: "forward", "backward", "again" (recomputation), "head" (both passes of the head)."""
    attention: Mapping[str, float]
    """FLOPs that kernels of attention carry out: "forward", "backward", "again"."""
    moved: Mapping[str, float]
    """Bytes that memory-bound operations read and write: "forward", "backward", "again", "head"."""
    offloaded: float
    """Bytes copied to the host; as many come back."""
    optimizer: float
    """Bytes that the optimizer reads and writes."""
    on_host: bool
    """Where it does."""
    tokens: float
    """Of the whole global batch, without padding."""
    pairs: float
    """(query, key) pairs of the whole global batch that the mask allows, one document per row."""
    fetched: float = 0
    """Bytes of weights that come from the host, where states lie there."""
    returned: float = 0
    """Bytes of gradients that go there."""


def work(config: Config, world_size: int, place: int) -> Work:
    """Of the fullest rank at that place of the pipeline. The configuration must have no problems."""
    return work_of(Rank(config, world_size, place))


def work_of(rank: Rank) -> Work:
    """The same, of a rank that is there already."""
    training = rank.config.training
    found, length = [*units(rank)], training.seq_len
    gathered = sum(sum(unit.gathers.values()) * rank.shard(unit.shapes) for unit in found)
    scattered = sum(unit.scatters * rank.shard(unit.shapes) for unit in found)
    return Work(
        matmul=_products(rank),
        attention=_attention(rank),
        moved=moved(rank),
        offloaded=rank.micro_batches * rank.by_blocks(rank.blocks)[1],
        optimizer=of_optimizer(rank),
        on_host=rank.on_host,
        tokens=training.global_batch_size * length,
        pairs=training.global_batch_size * pairs_of(length),
        fetched=rank.stored * gathered * rank.on_host,
        returned=rank.stored * scattered * rank.on_host,
    )


def pairs_of(length: int) -> float:
    """(query, key) pairs of a document."""
    return length * (length + 1) / 2


def _products(rank: Rank) -> dict[str, float]:
    model, width = rank.model, rank.model.dim
    queries = model.num_heads // rank.tp * model.head_dim
    keys = max(1, model.num_kv_heads // rank.tp) * model.head_dim
    projected, out, inner = width * (queries + 2 * keys), width * queries, width * model.ffn_dim // rank.tp
    block = projected + out + 3 * inner
    each = 2.0 * rank.tokens * rank.micro_batches
    again = 0.0
    if rank.config.memory.recompute != "none":
        # All but the last product, whose result no gradient needs; norms of heads need what entered them once more.
        again = rank.blocks * (block - inner + width * (queries + keys) * model.qk_norm)
        again += rank.blocks * attends_again(rank) * projected + made_again_of(rank) * (out + 3 * inner)
    elif rank.pipeline.pp > 1 and rank.pipeline.schedule in TWICE:
        # What finds gradients of input and weight at once runs for each; the first stage has no input.
        again = (rank.blocks - rank.pipeline.blocks[0] * rank.is_first) * 2 * inner
    rows, _ = rank.head_shapes()[0]
    chunk, count, rest = chunks_of(rank)
    head = 6.0 * rank.micro_batches * (chunk * count + rest) * rows * width * rank.is_last
    return {
        "forward": each * rank.blocks * block,
        "backward": 2 * each * rank.blocks * block,
        "again": each * again,
        "head": head,
    }


def attended(rank: Rank) -> float:
    """(query, key) pairs of a head that the busiest of the ranks that share rows computes in a micro-batch.

    Padding at a row's end is a document of its own. Every layout but `contiguous` gives one document in equal parts.
    """
    training, plan = rank.config.training, rank.config.context_plan()
    length = training.seq_len
    row = plan.padded(length)
    pairs = pairs_of(length) + pairs_of(row - length)
    if plan.kind == "contiguous" and plan.ring > 1:
        held = row // plan.ring
        pairs = plan.ring * (held * (row - held) + pairs_of(held))
    return training.micro_batch_size * pairs / plan.cp


def _attention(rank: Rank) -> dict[str, float]:
    heads = rank.model.num_heads // rank.tp * rank.model.head_dim
    forward = 4.0 * heads * attended(rank) * rank.blocks * rank.micro_batches
    return {"forward": forward, "backward": 2.5 * forward, "again": attends_again(rank) * forward}
