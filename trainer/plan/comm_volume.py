"""Closed formulas for the communication volume of a rank in one step, by channel, collective and
phase. No torch.

Messages below MIN_COUNTED_BYTES are ignored: scalar metrics, and norm weights of small models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from models.layers import LayerKind
from parallelisms.mesh.context_plan import ContextPlan
from parallelisms.mesh.message_bytes import MIN_COUNTED_BYTES, sent_bytes
from trainer.memory.rank import RankMemory, Shapes

Phase = Literal["forward", "backward", "recompute", "step"]
"""`recompute` is recomputation inside the backward pass; `step` is once per step, outside of
forward and backward.
"""
HALO = "the halo"
"""Payload of layers with a window: the KV that another rank's queries still see."""


@dataclass(frozen=True, kw_only=True)
class CommVolume:
    """One kind of communication of a rank in one step."""

    channel: str
    """A channel of `parallelisms.mesh.process_groups`, or `world`."""
    kind: str
    """One of `parallelisms.mesh.message_bytes.MESSAGE_KINDS`."""
    phase: Phase
    what: str
    """Description of the payload."""
    bytes: float
    """Bytes that this rank sends in the step."""
    calls: float
    """Calls in the step."""


def comm_volumes(rank: RankMemory) -> list[CommVolume]:
    """Communication of the busiest rank with that pp rank, merged by channel, kind, phase and
    payload.
    """
    by_key: dict[tuple[str, ...], CommVolume] = {}
    volumes = (_fsdp_volumes, _tp_volumes, _cp_volumes, _expert_volumes, _pp_volumes)
    for message in (each for volumes_of in volumes for each in volumes_of(rank)):
        key = (message.channel, message.kind, message.phase, message.what)
        previous = by_key.get(key)
        if previous is not None:
            message = replace(
                previous,
                bytes=previous.bytes + message.bytes,
                calls=previous.calls + message.calls,
            )
        by_key[key] = message
    return [*by_key.values()]


def _volume(
    channel: str, kind: str, phase: Phase, what: str, *, size: float, ranks: int, calls: float
) -> Iterator[CommVolume]:
    """Communication in a group of `ranks`; nothing in a group of one. `size`: that of one call, as
    in `sent_bytes`.
    """
    if ranks > 1 and calls and size >= MIN_COUNTED_BYTES:
        total_bytes = calls * sent_bytes(kind, size, ranks)
        yield CommVolume(
            channel=channel, kind=kind, phase=phase, what=what, bytes=total_bytes, calls=calls
        )


# ---- FSDP: weights and gradients


@dataclass(frozen=True)
class FSDPUnit:
    """The modules that FSDP gathers together; counts cover all units of that kind on a rank in one
    step.
    """

    name: str
    shapes: Shapes
    all_gathers: dict[Phase, float]
    """All-gathers of one unit, by phase."""
    reduce_scatters: float
    """Reduce-scatters of one unit."""
    channel: str = "fsdp"

    @property
    def ep(self) -> int:
        """Expert-parallel ranks, each of which has other experts."""
        return max((shape[2] for shape in self.shapes if len(shape) > 2), default=1)


def fsdp_units(rank: RankMemory) -> Iterator[FSDPUnit]:
    """Blocks, embedding and loss head; a tied head belongs to the embedding's unit."""
    final_norm = (rank.model.dim, 1)
    head = *rank.head_shapes, final_norm
    # A pipeline gathers weights once per step, because stages alternate between micro-batches.
    if rank.pipeline.pp > 1:
        times = rank.num_micro_batches if rank.pipeline.reduces_per_micro_batch else 1
        for kind, count in rank.kinds.items():
            yield from _block_units(rank, kind, {"step": count}, times * count)
        if rank.has_first_stage:
            yield FSDPUnit("embedding", rank.embed_shapes, {"step": 1}, times)
        if rank.has_last_stage:
            yield FSDPUnit("loss head", head, {"step": 1}, times)
        return
    micro_batches = rank.num_micro_batches
    for kind, count in rank.kinds.items():
        block_runs = micro_batches * count
        gathers: dict[Phase, float] = {"forward": block_runs}
        if rank.parallelism.reshard_after_forward:
            # The backward pass gathers a block once for itself, and once more to recompute the
            # next block's input.
            again = rank.num_recomputed_blocks * count / rank.num_blocks
            gathers |= {"backward": block_runs, "recompute": micro_batches * again}
        yield from _block_units(rank, kind, gathers, block_runs)
    if rank.model.tie_embeddings:
        yield FSDPUnit(
            "tied embedding",
            (*rank.embed_shapes, final_norm),
            {"forward": micro_batches},
            micro_batches,
        )
        return
    yield FSDPUnit("embedding", rank.embed_shapes, {"forward": micro_batches}, micro_batches)
    yield FSDPUnit("loss head", head, {"forward": micro_batches}, micro_batches)


def _block_units(
    rank: RankMemory, kind: LayerKind, all_gathers: dict[Phase, float], reduce_scatters: float
) -> Iterator[FSDPUnit]:
    """Units of one kind of block. Experts that are distributed over ranks are a unit by
    themselves.
    """
    shapes = rank.shapes_of(kind)
    experts = tuple(shape for shape in shapes if len(shape) > 2 and shape[2] > 1)
    yield FSDPUnit(
        "blocks",
        tuple(each for each in shapes if each not in experts),
        all_gathers,
        reduce_scatters,
    )
    if experts:
        yield FSDPUnit("experts", experts, all_gathers, reduce_scatters, channel="efsdp")


def _fsdp_volumes(rank: RankMemory) -> Iterator[CommVolume]:
    # Gradients that are reduced once follow the last backward pass, outside of any micro-batch.
    reduces_once = rank.pipeline.pp > 1 and not rank.pipeline.reduces_per_micro_batch
    reduce_phase: Phase = "step" if reduces_once else "backward"
    replicas = rank.parallelism.dp_replicate
    for unit in fsdp_units(rank):
        shards = rank.num_shards // unit.ep
        channel = unit.channel
        shard = rank.sharded_numel(unit.shapes)
        weights = f"weights of {unit.name}"
        gradients = f"gradients of {unit.name}"
        for phase, calls in unit.all_gathers.items():
            size = rank.compute_bytes * shard
            yield from _volume(
                channel, "all_gather", phase, weights, size=size, ranks=shards, calls=calls
            )
        size = rank.reduce_bytes * shard
        calls = unit.reduce_scatters
        yield from _volume(
            channel,
            "reduce_scatter",
            reduce_phase,
            gradients,
            size=size,
            ranks=shards,
            calls=calls,
        )
        yield from _volume(
            "dp_replicate",
            "all_reduce",
            reduce_phase,
            gradients,
            size=size,
            ranks=replicas,
            calls=calls,
        )


# ---- tensor parallelism: activations and replicated gradients


def _tp_volumes(rank: RankMemory) -> Iterator[CommVolume]:
    for calls_of in (_block_calls, _embedding_and_head_calls, _replicated_grad_calls, _loss_calls):
        for what, kind, phase, size, count in calls_of(rank) if rank.tp > 1 else ():
            calls = count * rank.num_micro_batches
            yield from _volume("tp", kind, phase, what, size=size, ranks=rank.tp, calls=calls)


TPCalls = Iterator[tuple[str, str, Phase, float, float]]
"""(payload, kind, phase, size of a call, calls per micro-batch)."""


def _block_calls(rank: RankMemory) -> TPCalls:
    """Hidden states entering the column-parallel and leaving the row-parallel layers of the
    blocks.
    """
    is_sequence_parallel = rank.block.sequence_parallel
    size = rank.block.residual_bytes
    reduction = "reduce_scatter" if is_sequence_parallel else "all_reduce"
    # Without sequence parallelism every tp rank has all tokens: inputs need no gather, outputs an
    # all-reduce.
    for is_input, phase, count, tiles in _block_collectives(rank):
        if not is_input or is_sequence_parallel:
            yield (
                "hidden states",
                "all_gather" if is_input else reduction,
                phase,
                size / tiles,
                count * tiles,
            )


def _block_collectives(rank: RankMemory) -> Iterator[tuple[bool, Phase, float, int]]:
    """(gather rather than reduce, phase, count, tiles) over all blocks; feed-forwards with experts
    have others.
    """
    blocks = rank.num_blocks
    tiles = rank.block.num_tiles(rank.training.micro_batch_size)
    dense = blocks - sum(count for kind, count in rank.kinds.items() if kind.feed_forward == "moe")
    again = rank.num_recomputed_blocks
    both: tuple[Phase, Phase] = ("forward", "backward")
    if not rank.recomputes:
        yield from (
            (is_input, phase, blocks + dense, 1) for phase in both for is_input in (True, False)
        )
        return
    for phase in both:
        yield True, phase, blocks, 1  # Shared by all head groups.
        yield True, phase, dense, tiles
        yield False, phase, blocks + dense, tiles
    yield True, "recompute", blocks * (1 + rank.attention_recompute_fraction), 1
    yield True, "recompute", dense * (1 + again / blocks), tiles
    yield False, "recompute", blocks + again * (1 + dense / blocks), tiles


def _embedding_and_head_calls(rank: RankMemory) -> TPCalls:
    """Hidden states leaving a sharded embedding or entering a sharded loss head."""
    is_sequence_parallel = rank.block.sequence_parallel
    size = rank.block.residual_bytes
    is_loss_parallel = rank.parallelism.loss_parallel
    gathers = 1 if is_sequence_parallel else 0
    reduction = "reduce_scatter" if is_sequence_parallel else "all_reduce"
    if rank.has_first_stage and (is_loss_parallel or not rank.model.tie_embeddings):
        yield "hidden states of the embedding", reduction, "forward", size, 1
        yield (
            "hidden states of the embedding",
            "all_gather",
            "backward",
            size,
            gathers,
        )
    if rank.has_last_stage and is_loss_parallel:
        yield "hidden states of the loss head", "all_gather", "forward", size, gathers
        yield "hidden states of the loss head", reduction, "backward", size, 1


def _replicated_grad_calls(rank: RankMemory) -> TPCalls:
    """Partial gradients of weights replicated over tp, reduced in float32 or wider."""
    model = rank.model
    in_head = 1 if rank.has_last_stage else 0
    in_embedding = 1 if rank.has_first_stage and model.tie_embeddings else 0
    weights = []
    for each, blocks in (
        (each, count) for kind, count in rank.kinds.items() for each in kind.parameters.values()
    ):
        style = each.style_over(model.sizes, rank.tp)
        if (
            style != each.style
            or style == "replicate_partial"
            or (style == "replicate" and rank.block.sequence_parallel)
        ):
            weights.append((prod(each.shape_of(model.sizes)), blocks))
    if rank.block.sequence_parallel:
        weights.append((model.dim, in_head))
        if not rank.parallelism.loss_parallel:
            weights.append((model.vocab_size * model.dim, in_head + in_embedding))
    for elements, calls in weights:
        yield (
            "gradients of replicated weights",
            "all_reduce",
            "backward",
            rank.master_bytes * elements,
            calls,
        )


def _loss_calls(rank: RankMemory) -> TPCalls:
    """Loss parallel: the maximum logit per token, then the sum of exponentials and the target
    logit; else the losses.
    """
    if not rank.has_last_stage:
        return
    if not rank.parallelism.loss_parallel:
        if rank.block.sequence_parallel:
            yield "losses", "all_gather", "forward", rank.master_bytes * rank.tokens / rank.tp, 1
        return
    chunks, remainder = divmod(rank.head_tokens, rank.loss_chunk_tokens)
    for tokens, calls in ((rank.loss_chunk_tokens, chunks), (remainder, 1)):
        # One reduction of the maximum, then one of the two sums stacked.
        for numbers in (1, 2):
            yield (
                "loss reductions",
                "all_reduce",
                "forward",
                numbers * rank.master_bytes * tokens,
                calls,
            )


# ---- context parallelism: queries, keys and values


def _cp_volumes(rank: RankMemory) -> Iterator[CommVolume]:
    if (plan := rank.block.context_plan) is not None:
        for kind, count in rank.kinds.items():
            yield from _cp_volumes_of(rank, plan, kind, count)


def _cp_volumes_of(
    rank: RankMemory, plan: ContextPlan, kind: LayerKind, num_layers: int
) -> Iterator[CommVolume]:
    groups = rank.memory.head_groups
    halo = rank.blocks[kind].halo
    calls = rank.num_micro_batches * num_layers * groups
    queries, kv = (
        rank.compute_bytes * elements / groups
        for elements in (rank.block.q_numel, rank.block.kv_numel)
    )
    channel = "exchange" if plan.resolved_method == "hybrid" else "cp"
    recomputed = rank.attention_recompute_fraction
    # Recomputing blocks do not save the exchanged heads, so they exchange them once more.
    runs: dict[Phase, float] = {
        "forward": 1,
        "backward": 1,
        "recompute": 1 + recomputed if rank.recomputes else 0,
    }
    for phase, num_runs in runs.items():
        exchanges = 2 * calls * num_runs
        # Or their gradients, in the backward pass.
        for what, size in (("queries and outputs", queries), ("KV", kv / 2)):
            ranks = plan.ulysses_degree
            yield from _volume(
                channel, "all_to_all", phase, what, size=size, ranks=ranks, calls=exchanges
            )
    # Gradients travel in `cp_reduce_dtype`, which may be wider than KV.
    kv_grads = rank.kv_grad_bytes * rank.block.kv_numel / groups
    for phase, num_runs in (runs | {"recompute": recomputed}).items():
        yield from _ring_volumes(plan, phase, "KV", kv, calls * num_runs, halo=halo and halo[0])
    # What was received goes back.
    yield from _ring_volumes(
        plan, "backward", "gradients of KV", kv_grads, calls, halo=halo and halo[1]
    )


def attention_bytes(rank: RankMemory) -> dict[int | None, float]:
    """Bytes that attention sends, by window."""
    by_window = dict.fromkeys((kind.window for kind in rank.kinds), 0.0)
    if (plan := rank.block.context_plan) is not None:
        for kind, count in rank.kinds.items():
            by_window[kind.window] += sum(
                each.bytes for each in _cp_volumes_of(rank, plan, kind, count)
            )
    return by_window


def _ring_volumes(
    plan: ContextPlan, phase: Phase, what: str, size: float, num_runs: float, *, halo: float | None
) -> Iterator[CommVolume]:
    """Distribution to all other ranks of the ring, or reduction on the way back, `num_runs` times.

    An all-to-all hop has one destination, so it sends as many bytes as send-recv. `halo`: what is
    sent instead, relative to `size`.
    """
    if plan.rotate_method is None or plan.ring_degree == 1 or not num_runs:
        return
    channel = "rotate" if plan.resolved_method == "hybrid" else "cp"
    if halo is not None:
        ranks = plan.ring_degree
        # As if some of it stayed here, as in an all-to-all of equal parts.
        size *= halo * ranks / (ranks - 1)
        what = what.replace("KV", HALO)
        yield from _volume(
            channel, "all_to_all", phase, what, size=size, ranks=ranks, calls=num_runs
        )
        return
    if size < MIN_COUNTED_BYTES:
        return
    collective = "reduce_scatter" if what.startswith("gradients") else "all_gather"
    # Each of the other ranks' KV passes through this rank once, whatever collective carries it.
    hops = plan.ring_degree - 1
    yield CommVolume(
        channel=channel,
        kind={"ring": "send", "alltoall": "all_to_all"}.get(plan.rotate_method, collective),
        phase=phase,
        what=what,
        bytes=num_runs * hops * size,
        calls=num_runs * (1 if plan.rotate_method == "allgather" else hops),
    )


def _expert_volumes(rank: RankMemory) -> Iterator[CommVolume]:
    """Tokens and weights of experts: over ep, to the experts and back; over tp, each tp rank's
    rows to all of them.
    """
    model = rank.model
    sequence_shards = rank.block.sequence_shards
    layers = sum(count for kind, count in rank.kinds.items() if kind.feed_forward == "moe")
    shared = sum(count for kind, count in rank.kinds.items() if kind.shared_expert)
    tiles = rank.block.num_tiles() if rank.recomputes else 1
    # Each tp rank dispatches its own tokens, `top_k` rows for each, as if all experts were equally
    # loaded.
    rows = rank.tokens // sequence_shards * model.top_k / tiles
    calls = layers * rank.num_micro_batches * tiles
    x = rank.compute_bytes * model.dim * rows
    weights = rank.master_bytes * rows
    # int64 counts of rows by expert, for every tile in one call.
    counts = 8.0 * model.num_experts * tiles
    yield from _volume(
        "ep",
        "all_gather",
        "forward",
        "counts of experts",
        size=counts,
        ranks=rank.ep,
        calls=layers * rank.num_micro_batches,
    )
    # The recomputation needs no outputs, and so no way back.
    ways: list[tuple[Phase, float, float]] = [
        ("forward", 1, 1),
        ("backward", 1, 1),
        ("recompute", 1 if rank.recomputes else 0, 0),
    ]
    for phase, there, back in ways:
        if sequence_shards > 1:
            size = rank.compute_bytes * model.dim * rank.tokens / tiles
            runs = shared * rank.num_micro_batches * tiles
            what = "tokens of the shared expert"
            yield from _volume(
                "tp",
                "all_to_all",
                phase,
                what,
                size=size,
                ranks=rank.tp,
                calls=runs * (there + back),
            )
        for what, size, count in (
            ("tokens", x, there + back),
            ("weights of experts", weights, there),
        ):
            yield from _row_exchange(rank, phase, what, size=size, calls=calls * count)


def _row_exchange(
    rank: RankMemory, phase: Phase, what: str, *, size: float, calls: float
) -> Iterator[CommVolume]:
    """Rows over ep; with sequence parallelism also over tp, where each rank holds a shard."""
    yield from _volume("ep", "all_to_all", phase, what, size=size, ranks=rank.ep, calls=calls)
    shards = rank.block.sequence_shards
    if shards > 1:
        yield from _volume(
            "tp", "all_to_all", phase, what, size=size * shards, ranks=rank.tp, calls=calls
        )


def _pp_volumes(rank: RankMemory) -> Iterator[CommVolume]:
    """The residual stream forward and its gradient backward."""
    plan = rank.pipeline
    size = rank.block.residual_bytes
    stages = plan.stages_per_rank
    sends = (stages - 1 if rank.has_last_stage else stages) * rank.num_micro_batches
    returns = (stages - 1 if rank.has_first_stage else stages) * rank.num_micro_batches
    yield from _volume(
        "pp", "send", "forward", "residual stream", size=size, ranks=plan.pp, calls=sends
    )
    what = "gradients of the residual stream"
    yield from _volume("pp", "send", "backward", what, size=size, ranks=plan.pp, calls=returns)
