"""Bytes that memory-bound operations of an update read and write, estimated operation by operation. Without torch.

Each operation is counted as it stands in the code: its inputs are read once and its results written once, in the type of
computation (narrow) or that of statistics (wide). Compiled ones keep what lies between in registers. Numbers per token
or per weight of a norm, tables of angles and copies between tiles are left out.
"""

from __future__ import annotations

from typing import NamedTuple

from trainer.memory.estimator import Rank
from trainer.plan.comm_volume import attends_again, chunks_of, made_again_of, units


class Moved(NamedTuple):
    """How often a number is read or written, in either type."""

    narrow: float
    wide: float = 0


# Eager, and compiled.
NORM = Moved(5, 2), Moved(2)
NORM_BACKWARD = Moved(7, 14), Moved(5)
ROTATION = Moved(2, 9), Moved(2)
GATE = Moved(5), Moved(3)
GATE_BACKWARD = Moved(14), Moved(6)
# Below operators, which no compiler looks into.
ADD = Moved(3)
COPY = Moved(2)
MERGE = Moved(1, 6)
WIDENED = Moved(2, 2)
LOGITS = Moved(2, 10)


class Sizes:
    """Numbers of a micro-batch, as a rank holds them, and bytes that operations on them move."""

    def __init__(self, rank: Rank) -> None:
        self.rank, model = rank, rank.model
        self.compiled = rank.config.training.compile
        self.stream = rank.block.stream // rank.compute
        self.gathered = model.dim * rank.tokens
        self.queries = rank.block.queries
        self.heads = self.queries + max(1, model.num_kv_heads // rank.tp) * model.head_dim * rank.tokens
        self.inner = model.ffn_dim * rank.tokens // rank.tp
        self.keys = rank.block.keys

    def bytes(self, numbers: float, how: Moved | tuple[Moved, Moved]) -> float:
        if not isinstance(how, Moved):
            how = how[self.compiled]
        return numbers * (how.narrow * self.rank.compute + how.wide * self.rank.stored)


def moved(rank: Rank) -> dict[str, float]:
    """Of all micro-batches: "forward", "backward", "again", "head"."""
    sizes, batches, blocks = Sizes(rank), rank.micro_batches, rank.blocks
    gathered = _gathered(rank)
    embedded = sizes.bytes(sizes.stream, COPY) * rank.is_first
    forward = blocks * (_entered(sizes) + _attended(sizes) + _fed(sizes)) + embedded
    return {
        "forward": batches * forward + gathered["forward"],
        "backward": batches * blocks * _backward(sizes) + gathered["backward"] + _scattered(rank),
        "again": batches * _again(sizes) + gathered["again"],
        "head": batches * _head(sizes) * rank.is_last,
    }


def _entered(sizes: Sizes) -> float:
    """Of a block: norm, and queries and keys normalised and rotated."""
    found = sizes.bytes(sizes.stream, NORM) + sizes.bytes(sizes.heads, ROTATION)
    return found + sizes.bytes(sizes.heads, NORM) * sizes.rank.model.qk_norm


def _fed(sizes: Sizes) -> float:
    """Of a block: two sums with the stream, a norm and the gate."""
    return 2 * sizes.bytes(sizes.stream, ADD) + sizes.bytes(sizes.stream, NORM) + sizes.bytes(sizes.inner, GATE)


def _attended(sizes: Sizes) -> float:
    """Of a block: what is copied for an exchange of heads, or for a ring, and the parts of attention joined."""
    plan = sizes.rank.block.context
    if plan is None:
        return 0
    found = 0.0
    if plan.ulysses > 1:
        found += 2 * sizes.bytes(2 * sizes.queries + sizes.keys, COPY)
    if plan.ring > 1:
        found += sizes.bytes(sizes.keys, COPY) + sizes.bytes(sizes.queries, WIDENED)
        found += _parts(sizes) * sizes.bytes(sizes.queries, MERGE)
        found += _foreign(sizes) * sizes.bytes(sizes.keys, COPY)
    return found


def _parts(sizes: Sizes) -> float:
    """How many parts of attention are joined with the first, in units of all queries: of a ring's, half see half."""
    plan = sizes.rank.block.context
    if plan is None or plan.ring == 1:
        return 0
    return 1 if plan.rotation == "allgather" else 0.75 * (plan.ring - 1)


def _foreign(sizes: Sizes) -> int:
    """Other ranks whose keys are put in order."""
    plan = sizes.rank.block.context
    return plan.ring - 1 if plan is not None and plan.rotation == "allgather" else 0


def _backward(sizes: Sizes) -> float:
    found = 2 * (sizes.bytes(sizes.stream, NORM_BACKWARD) + sizes.bytes(sizes.stream, ADD))
    found += sizes.bytes(sizes.heads, ROTATION) + sizes.bytes(sizes.inner, GATE_BACKWARD)
    found += sizes.bytes(sizes.heads, NORM_BACKWARD) * sizes.rank.model.qk_norm
    if sizes.rank.config.memory.recompute == "none":
        # Autograd adds what comes from queries, keys and values, and from gate and up.
        found += 3 * sizes.bytes(sizes.gathered, ADD)
    return found + _attended_backward(sizes)


def _attended_backward(sizes: Sizes) -> float:
    plan = sizes.rank.block.context
    if plan is None:
        return 0
    found = 2 * sizes.bytes(2 * sizes.queries + sizes.keys, COPY) * (plan.ulysses > 1)
    if plan.ring > 1:
        others = plan.ring - 1
        found += sizes.bytes(sizes.keys, COPY) + sizes.bytes(sizes.queries + sizes.keys, WIDENED)
        found += _parts(sizes) * sizes.bytes(sizes.queries, Moved(1, 2))
        # Gradients of others' keys: zeros, sums, and the type in which they travel.
        found += others * sizes.bytes(sizes.keys, Moved(1, 8)) + _foreign(sizes) * sizes.bytes(sizes.keys, COPY)
    return found


def _again(sizes: Sizes) -> float:
    rank, memory = sizes.rank, sizes.rank.config.memory
    if memory.recompute == "none":
        return 0
    plan, share = rank.block.context, attends_again(rank)
    block = _entered(sizes) + sizes.bytes(sizes.stream, NORM) + sizes.bytes(sizes.stream, ADD)
    if plan is not None and plan.ulysses > 1:
        block += 2 * sizes.bytes(2 * sizes.queries + sizes.keys, COPY)
    block += share * (_entered(sizes) + _attended(sizes))
    return rank.blocks * block + made_again_of(rank) * _fed(sizes)


def _head(sizes: Sizes) -> float:
    """Both passes: norm, logits chunk by chunk, and the sum of the chunks' gradients of the weight."""
    rank = sizes.rank
    rows, width = rank.head_shapes()[0]
    chunk, count, rest = chunks_of(rank)
    tokens, chunks = chunk * count + rest, count + (rest > 0)
    eager = Sizes(rank)
    eager.compiled = False  # It has no compiled parts.
    found = eager.bytes(sizes.stream, NORM) + eager.bytes(sizes.stream, NORM_BACKWARD)
    found += sizes.bytes(tokens * rows, LOGITS) + sizes.bytes(tokens * width, COPY)
    return found + sizes.bytes(rows * width, Moved(chunks + 1, 2 * chunks + 4))


def _gathered(rank: Rank) -> dict[str, float]:
    """What FSDP copies around its gathers, by phase: weights narrowed, and laid out where they come from several ranks."""
    found = dict.fromkeys(("forward", "backward", "again"), 0.0)
    for unit in units(rank) if rank.is_sharded else ():
        shard = rank.shard(unit.shapes)
        once = shard * (rank.stored + rank.compute) + 2 * rank.compute * shard * rank.shards * (rank.shards > 1)
        for phase, times in unit.gathers.items():
            found["forward" if phase == "update" else phase] += times * once
    return found


def _scattered(rank: Rank) -> float:
    """The same of gradients: put in, and added to those that are there."""
    found = 0.0
    for unit in units(rank) if rank.is_sharded else ():
        shard = rank.shard(unit.shapes)
        once = shard * rank.shards * (rank.compute + rank.reduced) + shard * (rank.reduced + 2 * rank.stored)
        found += unit.scatters * once
    return found


def of_optimizer(rank: Rank) -> float:
    """Bytes that AdamW reads and writes: norm and clipping of gradients, weights, and both moments.

    Narrow moments are widened and rounded again, which moves each four times wide and twice narrow, as bytes.
    """
    moments = 4 * rank.moment if rank.moment == rank.stored else 4 * rank.moment + 8 * rank.stored
    return rank.parameters() * (6 * rank.stored + moments)
