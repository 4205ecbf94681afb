"""Closed formulas for the communication volume of a rank in one step, by channel, collective and phase. No torch.

Messages below MIN_COUNTED_BYTES are ignored: scalar metrics, and norm weights of small models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from trainer.config.job_config import Config
from trainer.memory.estimator import DTYPE_BYTES, GIB, RankMemory, Shapes
from trainer.plan.fsdp_gathers import weight_gathers_per_stage

Phase = Literal["forward", "backward", "recompute", "step"]
"""`recompute` is recomputation inside the backward pass; `step` is once per step, outside of forward and backward."""
MESSAGE_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
MIN_COUNTED_BYTES = 4096
"""Messages below this size are sums of a few scalars, whose volume does not grow with the model."""


@dataclass(frozen=True, kw_only=True)
class CommVolume:
    """One kind of communication of a rank in one step."""

    channel: str
    """A channel of `parallelisms.process_groups`, or `world`."""
    kind: str
    """One of MESSAGE_KINDS."""
    phase: Phase
    what: str
    """Description of the payload."""
    bytes: float
    """Sent by this rank in the step."""
    calls: float
    """Calls in the step."""


def sent_bytes(kind: str, size: float, ranks: int) -> float:
    """Bytes that a rank sends in one call in a group of `ranks`.

    `size` is the input shard for all_gather, the output shard for reduce_scatter, the whole tensor for all_reduce, the
    evenly split input for all_to_all, and the message for send. Raises ValueError for any other kind.
    """
    if kind not in MESSAGE_KINDS:
        raise ValueError(f'kind = "{kind}" must be one of {", ".join(MESSAGE_KINDS)}')
    if kind in ("all_gather", "reduce_scatter"):
        return size * (ranks - 1)
    if kind == "all_reduce":
        return 2 * size * (ranks - 1) / ranks
    return size * (ranks - 1) / ranks if kind == "all_to_all" else size


def comm_volumes(config: Config, world_size: int, pp_rank: int) -> list[CommVolume]:
    """Of the busiest rank with that pp rank. The configuration must be valid."""
    return rank_comm_volumes(RankMemory(config, world_size, pp_rank))


def rank_comm_volumes(rank: RankMemory) -> list[CommVolume]:
    """Merged by channel, kind, phase and payload."""
    by_key: dict[tuple[str, ...], CommVolume] = {}
    for message in (*_fsdp_volumes(rank), *_tp_volumes(rank), *_cp_volumes(rank), *_pp_volumes(rank)):
        key = (message.channel, message.kind, message.phase, message.what)
        previous = by_key.get(key)
        if previous is not None:
            message = replace(previous, bytes=previous.bytes + message.bytes, calls=previous.calls + message.calls)
        by_key[key] = message
    return [*by_key.values()]


def _volume(
    channel: str, kind: str, phase: Phase, what: str, *, size: float, ranks: int, calls: float
) -> Iterator[CommVolume]:
    """Nothing in a group of one rank. `size` is that of one call, as in `sent_bytes`."""
    if ranks > 1 and calls and size >= MIN_COUNTED_BYTES:
        total_bytes = calls * sent_bytes(kind, size, ranks)
        yield CommVolume(channel=channel, kind=kind, phase=phase, what=what, bytes=total_bytes, calls=calls)


# ---- FSDP: weights and gradients


@dataclass(frozen=True)
class FSDPUnit:
    """The modules that FSDP gathers together; counts cover all units of that kind on a rank in one step."""

    name: str
    shapes: Shapes
    all_gathers: dict[Phase, float]
    """All-gathers of one unit, by phase."""
    reduce_scatters: float
    """Reduce-scatters of one unit."""


def fsdp_units(rank: RankMemory) -> Iterator[FSDPUnit]:
    """Blocks, embedding and loss head; a tied head belongs to the embedding's unit."""
    blocks, is_tied = rank.block_shapes(), rank.model.tie_embeddings
    embed, head = rank.embed_shapes(), [*rank.head_shapes(), (rank.model.dim, 1)]
    if rank.pipeline.pp > 1:
        gathers_per_stage = weight_gathers_per_stage(rank.pipeline, rank.pp_rank)
        blocks_per_stage = rank.pipeline.blocks_per_stage
        yield FSDPUnit(
            "blocks",
            blocks,
            {"step": sum(blocks_per_stage[stage] * num_gathers for stage, num_gathers in gathers_per_stage.items())},
            rank.num_blocks,
        )
        if rank.has_first_stage:
            yield FSDPUnit("embedding", embed, {"step": gathers_per_stage[0]}, 1)
        if rank.has_last_stage:
            yield FSDPUnit("loss head", head, {"step": gathers_per_stage[rank.pipeline.num_stages - 1]}, 1)
        return
    micro_batches = rank.num_micro_batches
    block_runs, num_recomputed = micro_batches * rank.num_blocks, micro_batches * num_recomputed_blocks(rank)
    gathers: dict[Phase, float] = {"forward": block_runs}
    if rank.config.parallelism.reshard_after_forward:
        gathers |= {"backward": block_runs, "recompute": num_recomputed}
    yield FSDPUnit("blocks", blocks, gathers, block_runs)
    if is_tied:
        yield FSDPUnit("tied embedding", [*embed, (rank.model.dim, 1)], {"forward": micro_batches}, micro_batches)
        return
    yield FSDPUnit("embedding", embed, {"forward": micro_batches}, micro_batches)
    yield FSDPUnit("loss head", head, {"forward": micro_batches}, micro_batches)


def num_recomputed_blocks(rank: RankMemory) -> int:
    """Blocks whose output is recomputed in the backward pass because it is the unsaved input of the next block."""
    blocks_per_stage = (rank.pipeline.blocks_per_stage[stage] for stage in rank.pipeline.stages_of(rank.pp_rank))
    return sum(blocks - -(-blocks // rank.config.memory.blocks_per_checkpoint) for blocks in blocks_per_stage)


def _fsdp_volumes(rank: RankMemory) -> Iterator[CommVolume]:
    replicas = rank.config.parallelism.dp_replicate
    for unit in fsdp_units(rank):
        shard = rank.sharded_numel(unit.shapes)
        what = f"weights of {unit.name}"
        for phase, num_gathers in unit.all_gathers.items():
            size = rank.compute_bytes * shard
            yield from _volume("fsdp", "all_gather", phase, what, size=size, ranks=rank.num_shards, calls=num_gathers)
        phase = "step" if rank.pipeline.pp > 1 else "backward"
        what, size = f"gradients of {unit.name}", rank.reduce_bytes * shard
        for channel, kind, ranks in (
            ("fsdp", "reduce_scatter", rank.num_shards),
            ("dp_replicate", "all_reduce", replicas),
        ):
            yield from _volume(channel, kind, phase, what, size=size, ranks=ranks, calls=unit.reduce_scatters)


# ---- tensor parallelism: activations and replicated gradients


def num_mlp_tiles(rank: RankMemory) -> int:
    tile, micro_batch_size = rank.block_memory.mlp_tile_bytes, rank.config.training.micro_batch_size
    if tile is None or rank.config.memory.recompute == "none":
        return 1
    sequence_shards = rank.tp if rank.block_memory.sequence_parallel else 1
    model_dim, ffn_dim = rank.model.dim, rank.model.ffn_dim // rank.tp
    bytes_per_token = rank.compute_bytes * (2 * ffn_dim + 2 * max(ffn_dim, model_dim) + model_dim)
    return -(
        -(rank.tokens // micro_batch_size // sequence_shards)
        // max(1, tile // bytes_per_token // micro_batch_size // sequence_shards)
    )


def attention_recompute_fraction(rank: RankMemory) -> float:
    """Share of the rank's blocks that recompute attention: all, none, or those whose output exceeds the host budget."""
    memory = rank.config.memory
    if memory.recompute != "keep_attention":
        return float(memory.recompute == "full")
    if memory.offload != "inputs_and_attention" or memory.host_budget_gib is None or not rank.num_blocks:
        return 0
    inputs = rank.pipeline.max_in_flight * (rank.num_blocks - num_recomputed_blocks(rank))
    budget = memory.host_budget_gib * GIB / rank.ranks_per_node - inputs * rank.block_memory.residual_bytes
    return 1 - min(
        1,
        max(0, budget // rank.block_memory.attention_output_bytes) / (rank.in_flight_micro_batches() * rank.num_blocks),
    )


def _tp_volumes(rank: RankMemory) -> Iterator[CommVolume]:
    calls = (
        ()
        if rank.tp == 1
        else (*_block_calls(rank), *_embedding_and_head_calls(rank), *_replicated_grad_calls(rank), *_loss_calls(rank))
    )
    for what, kind, phase, size, count in calls:
        yield from _volume("tp", kind, phase, what, size=size, ranks=rank.tp, calls=count * rank.num_micro_batches)


TPCalls = Iterator[tuple[str, str, Phase, float, float]]
"""(payload, kind, phase, size of a call, calls per micro-batch)."""


def _block_calls(rank: RankMemory) -> TPCalls:
    """Hidden states entering the column-parallel and leaving the row-parallel layers of the blocks."""
    is_sequence_parallel, full_size = rank.block_memory.sequence_parallel, rank.block_memory.residual_bytes
    for is_input, phase, count, tiles in _block_collectives(rank):
        if not is_input:
            yield (
                "hidden states",
                "reduce_scatter" if is_sequence_parallel else "all_reduce",
                phase,
                full_size / tiles,
                count * tiles,
            )
        elif is_sequence_parallel:
            yield "hidden states", "all_gather", phase, full_size / tiles, count * tiles


def _block_collectives(rank: RankMemory) -> Iterator[tuple[bool, Phase, float, int]]:
    """(gather rather than reduce, phase, count, tiles) over all blocks."""
    blocks, tiles, recomputed = rank.num_blocks, num_mlp_tiles(rank), num_recomputed_blocks(rank)
    both: tuple[Phase, Phase] = ("forward", "backward")
    if rank.config.memory.recompute == "none":
        yield from ((is_input, phase, 2 * blocks, 1) for phase in both for is_input in (True, False))
        return
    for phase in both:
        yield True, phase, blocks, 1  # Shared by all head groups.
        yield True, phase, blocks, tiles
        yield False, phase, 2 * blocks, tiles
    yield True, "recompute", blocks * (1 + attention_recompute_fraction(rank)), 1
    yield True, "recompute", blocks + recomputed, tiles
    yield False, "recompute", blocks + 2 * recomputed, tiles


def _embedding_and_head_calls(rank: RankMemory) -> TPCalls:
    """Hidden states leaving a sharded embedding or entering a sharded loss head."""
    is_sequence_parallel, size, is_loss_parallel = (
        rank.block_memory.sequence_parallel,
        rank.block_memory.residual_bytes,
        rank.config.parallelism.loss_parallel,
    )
    reduction = "reduce_scatter" if is_sequence_parallel else "all_reduce"
    if rank.has_first_stage and (is_loss_parallel or not rank.model.tie_embeddings):
        yield "hidden states of the embedding", reduction, "forward", size, 1
        yield "hidden states of the embedding", "all_gather", "backward", size, is_sequence_parallel
    if rank.has_last_stage and is_loss_parallel:
        yield "hidden states of the loss head", "all_gather", "forward", size, is_sequence_parallel
        yield "hidden states of the loss head", reduction, "backward", size, 1


def _replicated_grad_calls(rank: RankMemory) -> TPCalls:
    """Partial gradients of weights replicated over tp, reduced in float32 or wider."""
    is_sequence_parallel, model_dim, vocabulary = (
        rank.block_memory.sequence_parallel,
        rank.model.dim,
        rank.model.vocab_size,
    )
    is_loss_parallel, grad_bytes = rank.config.parallelism.loss_parallel, rank.master_bytes
    heads = rank.model.num_kv_heads * rank.model.head_dim
    # Query and key norms are replicated too, but too small to count.
    weights = [(heads * model_dim, 2 * rank.num_blocks * (rank.model.num_kv_heads < rank.tp))]
    if is_sequence_parallel:
        weights.append((model_dim, 2 * rank.num_blocks + rank.has_last_stage))
        if not is_loss_parallel:
            weights.append(
                (vocabulary * model_dim, rank.has_last_stage + rank.has_first_stage * rank.model.tie_embeddings)
            )
    for elements, calls in weights:
        yield "gradients of replicated weights", "all_reduce", "backward", grad_bytes * elements, calls


def _loss_calls(rank: RankMemory) -> TPCalls:
    """Loss parallel: the maximum logit per token, then the sum of exponentials and the target logit; else the losses."""
    if not rank.has_last_stage:
        return
    if not rank.config.parallelism.loss_parallel:
        if rank.block_memory.sequence_parallel:
            yield "losses", "all_gather", "forward", rank.master_bytes * rank.tokens / rank.tp, 1
        return
    chunk, count, remainder = loss_chunks(rank)
    for tokens, calls in ((chunk, count), (remainder, 1)):
        for numbers in (1, 2):
            yield "loss reductions", "all_reduce", "forward", numbers * rank.master_bytes * tokens, calls


def loss_chunks(rank: RankMemory) -> tuple[int, int, int]:
    """(tokens of a loss chunk, full chunks per micro-batch, tokens of the last partial chunk)."""
    vocab_rows, _ = rank.head_shapes()[0]
    has_all_tokens = rank.config.parallelism.loss_parallel or not rank.block_memory.sequence_parallel
    tokens = rank.tokens if has_all_tokens else rank.tokens // rank.tp
    chunk = max(1, (rank.config.memory.loss_chunk_mib << 20) // (rank.master_bytes * vocab_rows))
    return chunk, *divmod(tokens, chunk)


# ---- context parallelism: queries, keys and values


def _cp_volumes(rank: RankMemory) -> Iterator[CommVolume]:
    plan = rank.block_memory.context_plan
    if plan is None:
        return
    groups, recompute_fraction = rank.config.memory.head_groups, attention_recompute_fraction(rank)
    calls = rank.num_micro_batches * rank.num_blocks * groups
    queries, kv = (
        rank.compute_bytes * elements / groups for elements in (rank.block_memory.q_numel, rank.block_memory.kv_numel)
    )
    channel = "exchange" if plan.resolved_method == "hybrid" else "cp"
    # Recomputing blocks do not save the exchanged heads, so they exchange them once more.
    runs: dict[Phase, float] = {
        "forward": 1,
        "backward": 1,
        "recompute": (rank.config.memory.recompute != "none") + recompute_fraction,
    }
    for phase, num_runs in runs.items():
        # Or their gradients, in the backward pass.
        for what, size in (("queries and outputs", queries), ("KV", kv / 2)):
            yield from _volume(
                channel, "all_to_all", phase, what, size=size, ranks=plan.ulysses_degree, calls=2 * calls * num_runs
            )
    grad_bytes = DTYPE_BYTES[rank.config.parallelism.cp_reduce_dtype] if rank.compute_bytes < 4 else rank.compute_bytes
    runs["recompute"] = recompute_fraction
    for phase, num_runs in runs.items():
        yield from _ring_volumes(rank, phase, "KV", kv, calls * num_runs)
    size = grad_bytes * rank.block_memory.kv_numel / groups
    yield from _ring_volumes(rank, "backward", "gradients of KV", size, calls)


def _ring_volumes(rank: RankMemory, phase: Phase, what: str, size: float, num_runs: float) -> Iterator[CommVolume]:
    """Distribution to all other ranks of the ring, or reduction on the way back, `num_runs` times.

    An all-to-all hop has one destination, so it sends as many bytes as send-recv.
    """
    plan = rank.block_memory.context_plan
    if plan is None or plan.rotate_method is None or plan.ring_degree == 1 or not num_runs or size < MIN_COUNTED_BYTES:
        return
    kinds = {"ring": "send", "alltoall": "all_to_all"}
    collective = "reduce_scatter" if what.startswith("gradients") else "all_gather"
    hops = plan.ring_degree - 1
    yield CommVolume(
        channel="rotate" if plan.resolved_method == "hybrid" else "cp",
        kind=kinds.get(plan.rotate_method, collective),
        phase=phase,
        what=what,
        bytes=num_runs * hops * size,
        calls=num_runs * (hops if plan.rotate_method in kinds else 1),
    )


def _pp_volumes(rank: RankMemory) -> Iterator[CommVolume]:
    """The residual stream forward and its gradient backward, unless the adjacent stage is on the same rank."""
    plan, last = rank.pipeline, rank.pipeline.num_stages - 1
    stages = plan.stages_of(rank.pp_rank)
    forward_sends = sum(stage < last and plan.stage_ranks[stage + 1] != rank.pp_rank for stage in stages)
    backward_sends = sum(stage > 0 and plan.stage_ranks[stage - 1] != rank.pp_rank for stage in stages)
    size = rank.block_memory.residual_bytes
    directions: tuple[tuple[Phase, str, int], ...] = (
        ("forward", "residual stream", forward_sends),
        ("backward", "gradients of the residual stream", backward_sends),
    )
    for phase, what, count in directions:
        calls = count * rank.num_micro_batches
        yield from _volume("pp", "send", phase, what, size=size, ranks=plan.pp, calls=calls)
