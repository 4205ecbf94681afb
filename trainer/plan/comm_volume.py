"""What a rank sends in an update, in closed formulas: bytes by channel, kind and phase. Without torch.

Messages of fewer than `SMALL` bytes are left out: numbers about an update, and weights of small models' norms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from trainer.config.job_config import Config
from trainer.memory.estimator import DTYPE_BYTES, GIB, RankMemory, Shapes
from trainer.plan.fsdp_gathers import weight_gathers_per_stage

Phase = Literal["forward", "backward", "again", "update"]
"""`again` is recomputation within the backward pass, `update` once in an update, beside the passes."""
MESSAGE_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
MIN_COUNTED_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class CommVolume:
    """What a rank sends of one kind in an update."""

    channel: str
    """A name of `parallelisms.process_groups.channels`, or `world`."""
    kind: str
    """As `sent` knows it."""
    phase: Phase
    what: str
    """In words."""
    bytes: float
    """Sent by this rank in the whole update."""
    calls: float
    """Collective calls in the whole update."""


def sent_bytes(kind: str, size: float, ranks: int) -> float:
    """Bytes that a rank sends in one call of a group of `ranks`.

    `size` is its own part for all_gather, the part that is left to it for reduce_scatter, the whole tensor for
    all_reduce, its input, evenly spread, for all_to_all, and the message for send. Raises ValueError for another kind.
    """
    if kind not in MESSAGE_KINDS:
        raise ValueError(f'kind = "{kind}" is unknown; there are {", ".join(MESSAGE_KINDS)}')
    if kind in ("all_gather", "reduce_scatter"):
        return size * (ranks - 1)
    if kind == "all_reduce":
        return 2 * size * (ranks - 1) / ranks
    return size * (ranks - 1) / ranks if kind == "all_to_all" else size


def comm_volumes(config: Config, world_size: int, pp_rank: int) -> list[CommVolume]:
    """Of the fullest rank at that place of the pipeline. The configuration must have no problems."""
    return rank_comm_volumes(RankMemory(config, world_size, pp_rank))


def rank_comm_volumes(rank: RankMemory) -> list[CommVolume]:
    """The same, of a rank that is there already: one of each channel, kind, phase and purpose."""
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
    """Nothing if there is nobody to send to. `size` is that of `sent`, for one call."""
    if ranks > 1 and calls and size >= MIN_COUNTED_BYTES:
        total_bytes = calls * sent_bytes(kind, size, ranks)
        yield CommVolume(channel=channel, kind=kind, phase=phase, what=what, bytes=total_bytes, calls=calls)


# ---- weights and their gradients: FSDP


@dataclass(frozen=True)
class FSDPUnit:
    """What FSDP gathers at once, of all such units of a rank together, in an update."""

    name: str
    shapes: Shapes
    all_gathers: dict[Phase, float]
    """How often one of them is gathered."""
    reduce_scatters: float
    """How often the gradients of one of them are scattered."""


def fsdp_units(rank: RankMemory) -> Iterator[FSDPUnit]:
    """Blocks, embedding and head; a tied head is the embedding's."""
    blocks, is_tied = rank.block_shapes(), rank.model.tie_embeddings
    embed, head = rank.embed_shapes(), [*rank.head_shapes(), (rank.model.dim, 1)]
    if rank.pipeline.pp > 1:
        gathers_per_stage = weight_gathers_per_stage(rank.pipeline, rank.pp_rank)
        blocks_per_stage = rank.pipeline.blocks_per_stage
        yield FSDPUnit(
            "blocks",
            blocks,
            {"update": sum(blocks_per_stage[stage] * num_gathers for stage, num_gathers in gathers_per_stage.items())},
            rank.num_blocks,
        )
        if rank.has_first_stage:
            yield FSDPUnit("the embedding", embed, {"update": gathers_per_stage[0]}, 1)
        if rank.has_last_stage:
            yield FSDPUnit("the head", head, {"update": gathers_per_stage[rank.pipeline.num_stages - 1]}, 1)
        return
    micro_batches = rank.num_micro_batches
    block_runs, num_recomputed = micro_batches * rank.num_blocks, micro_batches * num_recomputed_blocks(rank)
    gathers: dict[Phase, float] = {"forward": block_runs}
    if rank.config.parallelism.reshard_after_forward:
        gathers |= {"backward": block_runs, "again": num_recomputed}
    yield FSDPUnit("blocks", blocks, gathers, block_runs)
    if is_tied:
        yield FSDPUnit("embedding and head", [*embed, (rank.model.dim, 1)], {"forward": micro_batches}, micro_batches)
        return
    yield FSDPUnit("the embedding", embed, {"forward": micro_batches}, micro_batches)
    yield FSDPUnit("the head", head, {"forward": micro_batches}, micro_batches)


def num_recomputed_blocks(rank: RankMemory) -> int:
    """Blocks of the rank whose output is made again, in the backward pass of a micro-batch, as input of the next."""
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
        phase = "update" if rank.pipeline.pp > 1 else "backward"
        what, size = f"gradients of {unit.name}", rank.reduce_bytes * shard
        for channel, kind, ranks in (
            ("fsdp", "reduce_scatter", rank.num_shards),
            ("dp_replicate", "all_reduce", replicas),
        ):
            yield from _volume(channel, kind, phase, what, size=size, ranks=ranks, calls=unit.reduce_scatters)


# ---- tokens and matrices: tensor parallelism


def num_mlp_tiles(rank: RankMemory) -> int:
    """In how many tiles a block takes a micro-batch."""
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
    """The share of the rank's blocks that compute attention again: all, none, or those whose results find no room."""
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
"""In words, kind, phase, and size and number of calls in a micro-batch."""


def _block_calls(rank: RankMemory) -> TPCalls:
    """Tokens that enter a pair of matrices of a block, or leave it."""
    is_sequence_parallel, full_size = rank.block_memory.sequence_parallel, rank.block_memory.residual_bytes
    for is_input, phase, count, tiles in _block_collectives(rank):
        if not is_input:
            yield (
                "tokens",
                "reduce_scatter" if is_sequence_parallel else "all_reduce",
                phase,
                full_size / tiles,
                count * tiles,
            )
        elif is_sequence_parallel:
            yield "tokens", "all_gather", phase, full_size / tiles, count * tiles


def _block_collectives(rank: RankMemory) -> Iterator[tuple[bool, Phase, float, int]]:
    """Of all blocks: whether tokens of all ranks are needed, or summed; the phase; how often, and in how many pieces."""
    blocks, tiles, recomputed = rank.num_blocks, num_mlp_tiles(rank), num_recomputed_blocks(rank)
    both: tuple[Phase, Phase] = ("forward", "backward")
    if rank.config.memory.recompute == "none":
        yield from ((is_input, phase, 2 * blocks, 1) for phase in both for is_input in (True, False))
        return
    for phase in both:
        yield True, phase, blocks, 1  # All groups of heads begin with the same tokens.
        yield True, phase, blocks, tiles
        yield False, phase, 2 * blocks, tiles
    yield True, "again", blocks * (1 + attention_recompute_fraction(rank)), 1
    yield True, "again", blocks + recomputed, tiles
    yield False, "again", blocks + 2 * recomputed, tiles


def _embedding_and_head_calls(rank: RankMemory) -> TPCalls:
    """Tokens that leave the embedding, or enter the head, where these are cut."""
    is_sequence_parallel, size, is_loss_parallel = (
        rank.block_memory.sequence_parallel,
        rank.block_memory.residual_bytes,
        rank.config.parallelism.loss_parallel,
    )
    reduction = "reduce_scatter" if is_sequence_parallel else "all_reduce"
    if rank.has_first_stage and (is_loss_parallel or not rank.model.tie_embeddings):
        yield "tokens of the embedding", reduction, "forward", size, 1
        yield "tokens of the embedding", "all_gather", "backward", size, is_sequence_parallel
    if rank.has_last_stage and is_loss_parallel:
        yield "tokens of the head", "all_gather", "forward", size, is_sequence_parallel
        yield "tokens of the head", reduction, "backward", size, 1


def _replicated_grad_calls(rank: RankMemory) -> TPCalls:
    """Gradients of what all ranks have whole, of which each finds a part; summed in single precision at least."""
    is_sequence_parallel, model_dim, vocabulary = (
        rank.block_memory.sequence_parallel,
        rank.model.dim,
        rank.model.vocab_size,
    )
    is_loss_parallel, grad_bytes = rank.config.parallelism.loss_parallel, rank.master_bytes
    heads = rank.model.num_kv_heads * rank.model.head_dim
    # Norms of heads are alike too, and small.
    weights = [(heads * model_dim, 2 * rank.num_blocks * (rank.model.num_kv_heads < rank.tp))]
    if is_sequence_parallel:
        weights.append((model_dim, 2 * rank.num_blocks + rank.has_last_stage))
        if not is_loss_parallel:
            weights.append(
                (vocabulary * model_dim, rank.has_last_stage + rank.has_first_stage * rank.model.tie_embeddings)
            )
    for elements, calls in weights:
        yield "gradients of weights that all have", "all_reduce", "backward", grad_bytes * elements, calls


def _loss_calls(rank: RankMemory) -> TPCalls:
    """Of each token the largest logit, then the sum of exponentials and the label's logit; or losses."""
    if not rank.has_last_stage:
        return
    if not rank.config.parallelism.loss_parallel:
        if rank.block_memory.sequence_parallel:
            yield "losses", "all_gather", "forward", rank.master_bytes * rank.tokens / rank.tp, 1
        return
    chunk, count, remainder = loss_chunks(rank)
    for tokens, calls in ((chunk, count), (remainder, 1)):
        for numbers in (1, 2):
            yield "sums of the loss", "all_reduce", "forward", numbers * rank.master_bytes * tokens, calls


def loss_chunks(rank: RankMemory) -> tuple[int, int, int]:
    """Tokens of a chunk of logits, how many such chunks a micro-batch has, and what is left."""
    vocab_rows, _ = rank.head_shapes()[0]
    has_all_tokens = rank.config.parallelism.loss_parallel or not rank.block_memory.sequence_parallel
    tokens = rank.tokens if has_all_tokens else rank.tokens // rank.tp
    chunk = max(1, (rank.config.memory.loss_chunk_mib << 20) // (rank.master_bytes * vocab_rows))
    return chunk, *divmod(tokens, chunk)


# ---- queries, keys and values: context parallelism


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
    # What was got for its heads is not kept by blocks that compute again: it goes there once more.
    runs: dict[Phase, float] = {
        "forward": 1,
        "backward": 1,
        "again": (rank.config.memory.recompute != "none") + recompute_fraction,
    }
    for phase, num_runs in runs.items():
        # Queries and outputs, keys and values; or their gradients.
        for what, size in (("queries and outputs", queries), ("keys and values", kv / 2)):
            yield from _volume(
                channel, "all_to_all", phase, what, size=size, ranks=plan.ulysses_degree, calls=2 * calls * num_runs
            )
    grad_bytes = DTYPE_BYTES[rank.config.parallelism.cp_reduce_dtype] if rank.compute_bytes < 4 else rank.compute_bytes
    runs["again"] = recompute_fraction
    for phase, num_runs in runs.items():
        yield from _ring_volumes(rank, phase, "keys and values", kv, calls * num_runs)
    size = grad_bytes * rank.block_memory.kv_numel / groups
    yield from _ring_volumes(rank, "backward", "gradients of keys and values", size, calls)


def _ring_volumes(rank: RankMemory, phase: Phase, what: str, size: float, num_runs: float) -> Iterator[CommVolume]:
    """From every rank of the ring to all others, or summed over them on its way back, so many times.

    Hops of an all-to-all go to one rank: as many bytes as if they were sent.
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
    """The stream onward and its gradient back, unless the neighbouring stage is here too."""
    plan, last = rank.pipeline, rank.pipeline.num_stages - 1
    stages = plan.stages_of(rank.pp_rank)
    forward_sends = sum(stage < last and plan.rank_of(stage + 1) != rank.pp_rank for stage in stages)
    backward_sends = sum(stage > 0 and plan.rank_of(stage - 1) != rank.pp_rank for stage in stages)
    size = rank.block_memory.residual_bytes
    directions: tuple[tuple[Phase, str, int], ...] = (
        ("forward", "the stream", forward_sends),
        ("backward", "gradients of the stream", backward_sends),
    )
    for phase, what, count in directions:
        calls = count * rank.num_micro_batches
        yield from _volume("pp", "send", phase, what, size=size, ranks=plan.pp, calls=calls)
