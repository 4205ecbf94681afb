"""What a rank sends in an update, in closed formulas: bytes by channel, kind and phase. Without torch.

Messages of fewer than `SMALL` bytes are left out: numbers about an update, and weights of small models' norms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from trainer.config.job_config import Config
from trainer.memory.estimator import BYTES, GIB, Rank, Shapes
from trainer.plan.fsdp_gathers import times_gathered

Phase = Literal["forward", "backward", "again", "update"]
"""`again` is recomputation within the backward pass, `update` once in an update, beside the passes."""
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
SMALL = 4096


@dataclass(frozen=True, kw_only=True)
class Message:
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


def sent(kind: str, size: float, ranks: int) -> float:
    """Bytes that a rank sends in one call of a group of `ranks`.

    `size` is its own part for all_gather, the part that is left to it for reduce_scatter, the whole tensor for
    all_reduce, its input, evenly spread, for all_to_all, and the message for send. Raises ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f'kind = "{kind}" is unknown; there are {", ".join(KINDS)}')
    if kind in ("all_gather", "reduce_scatter"):
        return size * (ranks - 1)
    if kind == "all_reduce":
        return 2 * size * (ranks - 1) / ranks
    return size * (ranks - 1) / ranks if kind == "all_to_all" else size


def traffic(config: Config, world_size: int, place: int) -> list[Message]:
    """Of the fullest rank at that place of the pipeline. The configuration must have no problems."""
    return messages(Rank(config, world_size, place))


def messages(rank: Rank) -> list[Message]:
    """The same, of a rank that is there already: one of each channel, kind, phase and purpose."""
    found: dict[tuple[str, ...], Message] = {}
    for message in (*_of_weights(rank), *_of_matrices(rank), *_of_attention(rank), *_of_stages(rank)):
        key = (message.channel, message.kind, message.phase, message.what)
        known = found.get(key)
        if known is not None:
            message = replace(known, bytes=known.bytes + message.bytes, calls=known.calls + message.calls)
        found[key] = message
    return [*found.values()]


def _message(
    channel: str, kind: str, phase: Phase, what: str, *, size: float, ranks: int, calls: float
) -> Iterator[Message]:
    """Nothing if there is nobody to send to. `size` is that of `sent`, for one call."""
    if ranks > 1 and calls and size >= SMALL:
        found = calls * sent(kind, size, ranks)
        yield Message(channel=channel, kind=kind, phase=phase, what=what, bytes=found, calls=calls)


# ---- weights and their gradients: FSDP


@dataclass(frozen=True)
class Unit:
    """What FSDP gathers at once, of all such units of a rank together, in an update."""

    name: str
    shapes: Shapes
    gathers: dict[Phase, float]
    """How often one of them is gathered."""
    scatters: float
    """How often the gradients of one of them are scattered."""


def units(rank: Rank) -> Iterator[Unit]:
    """Blocks, embedding and head; a tied head is the embedding's."""
    blocks, is_tied = rank.block_shapes(), rank.model.tie_embeddings
    embed, head = rank.embed_shapes(), [*rank.head_shapes(), (rank.model.dim, 1)]
    if rank.pipeline.pp > 1:
        stages = times_gathered(rank.pipeline, rank.place)
        held = rank.pipeline.blocks
        yield Unit(
            "blocks", blocks, {"update": sum(held[stage] * times for stage, times in stages.items())}, rank.blocks
        )
        if rank.is_first:
            yield Unit("the embedding", embed, {"update": stages[0]}, 1)
        if rank.is_last:
            yield Unit("the head", head, {"update": stages[rank.pipeline.num_stages - 1]}, 1)
        return
    batches = rank.micro_batches
    all_blocks, made_again = batches * rank.blocks, batches * made_again_of(rank)
    gathers: dict[Phase, float] = {"forward": all_blocks}
    if rank.config.parallelism.reshard_after_forward:
        gathers |= {"backward": all_blocks, "again": made_again}
    yield Unit("blocks", blocks, gathers, all_blocks)
    if is_tied:
        yield Unit("embedding and head", [*embed, (rank.model.dim, 1)], {"forward": batches}, batches)
        return
    yield Unit("the embedding", embed, {"forward": batches}, batches)
    yield Unit("the head", head, {"forward": batches}, batches)


def made_again_of(rank: Rank) -> int:
    """Blocks of the rank whose output is made again, in the backward pass of a micro-batch, as input of the next."""
    held = (rank.pipeline.blocks[stage] for stage in rank.pipeline.stages_of(rank.place))
    return sum(blocks - -(-blocks // rank.config.memory.input_every) for blocks in held)


def _of_weights(rank: Rank) -> Iterator[Message]:
    replicas = rank.config.parallelism.dp_replicate
    for unit in units(rank):
        shard = rank.shard(unit.shapes)
        whose = f"weights of {unit.name}"
        for phase, times in unit.gathers.items():
            size = rank.compute * shard
            yield from _message("fsdp", "all_gather", phase, whose, size=size, ranks=rank.shards, calls=times)
        phase = "update" if rank.pipeline.pp > 1 else "backward"
        whose, size = f"gradients of {unit.name}", rank.reduced * shard
        for channel, kind, ranks in (("fsdp", "reduce_scatter", rank.shards), ("dp_replicate", "all_reduce", replicas)):
            yield from _message(channel, kind, phase, whose, size=size, ranks=ranks, calls=unit.scatters)


# ---- tokens and matrices: tensor parallelism


def tiles_of(rank: Rank) -> int:
    """In how many tiles a block takes a micro-batch."""
    tile, rows = rank.block.tile, rank.config.training.micro_batch_size
    if tile is None or rank.config.memory.recompute == "none":
        return 1
    parts = rank.tp if rank.block.shares_tokens else 1
    width, inner = rank.model.dim, rank.model.ffn_dim // rank.tp
    token = rank.compute * (2 * inner + 2 * max(inner, width) + width)
    return -(-(rank.tokens // rows // parts) // max(1, tile // token // rows // parts))


def attends_again(rank: Rank) -> float:
    """The share of the rank's blocks that compute attention again: all, none, or those whose results find no room."""
    memory = rank.config.memory
    if memory.recompute != "keep_attention":
        return float(memory.recompute == "full")
    if memory.offload != "inputs_and_attention" or memory.host_budget_gib is None or not rank.blocks:
        return 0
    inputs = rank.pipeline.most_in_flight * (rank.blocks - made_again_of(rank))
    room = memory.host_budget_gib * GIB / rank.node - inputs * rank.block.stream
    return 1 - min(1, max(0, room // rank.block.attended) / (rank.in_flight() * rank.blocks))


def _of_matrices(rank: Rank) -> Iterator[Message]:
    calls = () if rank.tp == 1 else (*_of_pairs(rank), *_of_ends(rank), *_alike(rank), *_of_loss(rank))
    for what, kind, phase, size, count in calls:
        yield from _message("tp", kind, phase, what, size=size, ranks=rank.tp, calls=count * rank.micro_batches)


Calls = Iterator[tuple[str, str, Phase, float, float]]
"""In words, kind, phase, and size and number of calls in a micro-batch."""


def _of_pairs(rank: Rank) -> Calls:
    """Tokens that enter a pair of matrices of a block, or leave it."""
    shares, whole = rank.block.shares_tokens, rank.block.stream
    for enters, phase, count, pieces in _exchanges(rank):
        if not enters:
            yield "tokens", "reduce_scatter" if shares else "all_reduce", phase, whole / pieces, count * pieces
        elif shares:
            yield "tokens", "all_gather", phase, whole / pieces, count * pieces


def _exchanges(rank: Rank) -> Iterator[tuple[bool, Phase, float, int]]:
    """Of all blocks: whether tokens of all ranks are needed, or summed; the phase; how often, and in how many pieces."""
    blocks, tiles, made_again = rank.blocks, tiles_of(rank), made_again_of(rank)
    both: tuple[Phase, Phase] = ("forward", "backward")
    if rank.config.memory.recompute == "none":
        yield from ((enters, phase, 2 * blocks, 1) for phase in both for enters in (True, False))
        return
    for phase in both:
        yield True, phase, blocks, 1  # All groups of heads begin with the same tokens.
        yield True, phase, blocks, tiles
        yield False, phase, 2 * blocks, tiles
    yield True, "again", blocks * (1 + attends_again(rank)), 1
    yield True, "again", blocks + made_again, tiles
    yield False, "again", blocks + 2 * made_again, tiles


def _of_ends(rank: Rank) -> Calls:
    """Tokens that leave the embedding, or enter the head, where these are cut."""
    shares, size, is_cut = rank.block.shares_tokens, rank.block.stream, rank.config.parallelism.loss_parallel
    total = "reduce_scatter" if shares else "all_reduce"
    if rank.is_first and (is_cut or not rank.model.tie_embeddings):
        yield "tokens of the embedding", total, "forward", size, 1
        yield "tokens of the embedding", "all_gather", "backward", size, shares
    if rank.is_last and is_cut:
        yield "tokens of the head", "all_gather", "forward", size, shares
        yield "tokens of the head", total, "backward", size, 1


def _alike(rank: Rank) -> Calls:
    """Gradients of what all ranks have whole, of which each finds a part; summed in single precision at least."""
    shares, width, vocabulary = rank.block.shares_tokens, rank.model.dim, rank.model.vocab_size
    is_cut, wide = rank.config.parallelism.loss_parallel, rank.stored
    heads = rank.model.num_kv_heads * rank.model.head_dim
    # Norms of heads are alike too, and small.
    weights = [(heads * width, 2 * rank.blocks * (rank.model.num_kv_heads < rank.tp))]
    if shares:
        weights.append((width, 2 * rank.blocks + rank.is_last))
        if not is_cut:
            weights.append((vocabulary * width, rank.is_last + rank.is_first * rank.model.tie_embeddings))
    for elements, calls in weights:
        yield "gradients of weights that all have", "all_reduce", "backward", wide * elements, calls


def _of_loss(rank: Rank) -> Calls:
    """Of each token the largest logit, then the sum of exponentials and the label's logit; or losses."""
    if not rank.is_last:
        return
    if not rank.config.parallelism.loss_parallel:
        if rank.block.shares_tokens:
            yield "losses", "all_gather", "forward", rank.stored * rank.tokens / rank.tp, 1
        return
    chunk, count, rest = chunks_of(rank)
    for tokens, calls in ((chunk, count), (rest, 1)):
        for numbers in (1, 2):
            yield "sums of the loss", "all_reduce", "forward", numbers * rank.stored * tokens, calls


def chunks_of(rank: Rank) -> tuple[int, int, int]:
    """Tokens of a chunk of logits, how many such chunks a micro-batch has, and what is left."""
    rows, _ = rank.head_shapes()[0]
    shares = rank.config.parallelism.loss_parallel or not rank.block.shares_tokens
    tokens = rank.tokens if shares else rank.tokens // rank.tp
    chunk = max(1, (rank.config.memory.head_chunk_mib << 20) // (rank.stored * rows))
    return chunk, *divmod(tokens, chunk)


# ---- queries, keys and values: context parallelism


def _of_attention(rank: Rank) -> Iterator[Message]:
    plan = rank.block.context
    if plan is None:
        return
    groups, again = rank.config.memory.head_groups, attends_again(rank)
    calls = rank.micro_batches * rank.blocks * groups
    queries, keys = (rank.compute * elements / groups for elements in (rank.block.queries, rank.block.keys))
    channel = "exchange" if plan.chosen == "hybrid" else "cp"
    # What was got for its heads is not kept by blocks that compute again: it goes there once more.
    passes: dict[Phase, float] = {
        "forward": 1,
        "backward": 1,
        "again": (rank.config.memory.recompute != "none") + again,
    }
    for phase, times in passes.items():
        # Queries and outputs, keys and values; or their gradients.
        for what, size in (("queries and outputs", queries), ("keys and values", keys / 2)):
            yield from _message(
                channel, "all_to_all", phase, what, size=size, ranks=plan.ulysses, calls=2 * calls * times
            )
    wire = BYTES[rank.config.parallelism.cp_reduce_dtype] if rank.compute < 4 else rank.compute
    passes["again"] = again
    for phase, times in passes.items():
        yield from _rotated(rank, phase, "keys and values", keys, calls * times)
    size = wire * rank.block.keys / groups
    yield from _rotated(rank, "backward", "gradients of keys and values", size, calls)


def _rotated(rank: Rank, phase: Phase, what: str, size: float, times: float) -> Iterator[Message]:
    """From every rank of the ring to all others, or summed over them on its way back, so many times.

    Hops of an all-to-all go to one rank: as many bytes as if they were sent.
    """
    plan = rank.block.context
    if plan is None or plan.rotation is None or plan.ring == 1 or not times or size < SMALL:
        return
    kinds = {"ring": "send", "alltoall": "all_to_all"}
    gathered = "reduce_scatter" if what.startswith("gradients") else "all_gather"
    hops = plan.ring - 1
    yield Message(
        channel="rotate" if plan.chosen == "hybrid" else "cp",
        kind=kinds.get(plan.rotation, gathered),
        phase=phase,
        what=what,
        bytes=times * hops * size,
        calls=times * (hops if plan.rotation in kinds else 1),
    )


def _of_stages(rank: Rank) -> Iterator[Message]:
    """The stream onward and its gradient back, unless the neighbouring stage is here too."""
    plan, last = rank.pipeline, rank.pipeline.num_stages - 1
    stages = plan.stages_of(rank.place)
    onward = sum(stage < last and plan.rank_of(stage + 1) != rank.place for stage in stages)
    back = sum(stage > 0 and plan.rank_of(stage - 1) != rank.place for stage in stages)
    size = rank.block.stream
    ways: tuple[tuple[Phase, str, int], ...] = (
        ("forward", "the stream", onward),
        ("backward", "gradients of the stream", back),
    )
    for phase, what, count in ways:
        calls = count * rank.micro_batches
        yield from _message("pp", "send", phase, what, size=size, ranks=plan.pp, calls=calls)
