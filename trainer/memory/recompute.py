"""Moments of a block's backward pass with recomputation. Imports no torch.

Shapes are those of `block.py`.
"""

from __future__ import annotations

from functools import partial

from trainer.memory import experts, norms
from trainer.memory.attention_operator import operator_moments
from trainer.memory.block import WHILE_RUNNING, BlockMemory, Moments, transient
from trainer.trace.tensors import MemoryTensor, Tensors, total_bytes

RECOMPUTE = "parallelisms/block_recompute.py: BlockCompute"


def recompute_moments(block: BlockMemory, grad_dtype: str, prefetched: Tensors) -> Moments:
    """Moments of a block's backward pass. `prefetched`: activations of the preceding block on
    their way from the host.
    """
    for name, alive in _feed_forward_moments(block):
        yield name, alive
    groups = block.head_groups
    is_single = groups == 1
    # `BlockCompute.attention_backward` prefetches before its only head group, or after the last of
    # several, which indicate that memory is short.
    beside_group = prefetched if is_single else ()
    inputs = transient(
        f"{RECOMPUTE}.attention_backward",
        WHILE_RUNNING,
        block.stream("block input and its gradient", 2),
        block.gathered("gathered input and gradient", 2),
        block.stream(
            "gradient of the last product",
            1 if block.has_after("attention") and not block.is_gathered else 0,
        ),
        block.queries("attention output"),
        block.sums("log-sum-exp", block.heads, block.tokens),
        # The largest moment is that of the last group but one, while KV of the last is exchanged.
        # Of the finished groups only KV gradients add: the output of a group is freed for its dq.
        block.own_kv("gradients of finished head groups", max(0, groups - 2) / groups),
    )
    part = partial(transient, f"{RECOMPUTE}.attention_backward", WHILE_RUNNING)
    group = part(
        block.queries("queries", 1 / groups),
        block.kv("keys and values", 1 / groups),
        block.queries(
            "output and its gradient, heads exchanged",
            1 / groups,
            copies=2 if block.ulysses_degree > 1 else 0,
        ),
    )
    # KV of the next group is exchanged while this one runs: see `BlockCompute._exchanged_qkv`.
    next_group = part(*(() if is_single else _prefetched_group(block, 1 / groups)))
    if block.is_normed("attention", output=True):
        yield "the norm of attention's output", _output_norm(block) + beside_group
    yield (
        "the gather of gradients",
        inputs + part(block.by_rank("gathered gradient, by rank", block.tokens)),
    )
    for name, rotated in _rotation_moments(block):
        yield name, inputs + (() if is_single else group) + rotated + beside_group
    for name, operator in operator_moments(block, grad_dtype, 1 / groups):
        yield name, inputs + group + operator + next_group + beside_group
    for name, alive in _projection_moments(block):
        yield name, alive + prefetched


def _output_norm(block: BlockMemory) -> Tensors:
    """Norm of attention's output, backward, whose input is recomputed tile by tile."""
    local = block.tile_tokens // block.sequence_shards
    return transient(
        f"{RECOMPUTE}.attention_backward",
        WHILE_RUNNING,
        block.stream("block input and its gradient", 2),
        block.gathered("gathered input"),
        block.queries("attention output"),
        block.sums("log-sum-exp", block.heads, block.tokens),
        block.stream("gradient of the last product", 1 if block.num_tiles() > 1 else 0),
        block.numbers("a tile of the last product", local, block.model.dim),
        *norms.backward(block, "a tile of the gradient", local),
    )


def _rotation_moments(block: BlockMemory) -> Moments:
    """Projections of a head group and their rotation, recomputed tile by tile."""
    tile = block.tile_tokens
    groups = block.head_groups
    share = tile / block.tokens / groups
    part = partial(transient, "models/attention.py: Attention.inner", WHILE_RUNNING)
    projected = part(
        block.normalized_tile(),
        block.queries("a tile of the queries", share),
        block.own_kv("a tile of keys and values", share),
        block.queries(
            "a tile of the scaled queries", share if block.model.query_multiplier != 1 else 0
        ),
        block.queries("a tile of the rotated queries", share),
        *(
            ()
            if block.num_tiles() == 1
            else (block.queries("queries", 1 / groups), block.own_kv("KV", 1 / groups))
        ),
    )
    keys = block.own_kv("a tile of the rotated keys", share / 2)
    yield (
        "the rotation of queries",
        projected + part(block.widened(block.queries("a tile of the queries", share))),
    )
    yield "the rotation of keys", projected + part(keys, block.widened(keys))


def recomputed_input(block: BlockMemory) -> Tensors:
    """Recomputation of the preceding block's output, which is this block's input: its feed-forward
    holds most.
    """
    return feed_forward_pass(block) + transient(
        f"{RECOMPUTE}.feed_forward",
        WHILE_RUNNING,
        block.stream("gradient of the output"),
        block.queries("attention output"),
        block.sums("log-sum-exp", block.heads, block.tokens),
    )


def feed_forward_pass(block: BlockMemory) -> Tensors:
    """Transient activations of a feed-forward's forward pass, beside the input and the attention
    output of its block.
    """
    if block.has_experts:
        return experts.forward_pass(block)
    tile = block.tile_tokens
    dim = block.model.dim
    part = partial(transient, f"{RECOMPUTE}.feed_forward", WHILE_RUNNING)
    output = block.numbers("a tile of the output", tile, dim)
    gate_and_up = part(
        block.numbers(
            "a tile of the normalized input",
            tile,
            dim,
            copies=1 if block.is_normed("feed_forward") else 0,
        ),
        block.numbers("gate and up", 2, tile, block.ffn_dim),
    )
    product = part(
        block.numbers(
            "gate, up, and their product", 4 if block.is_gelu else 3, tile, block.ffn_dim
        )
    )
    after = block.numbers("the same, also normed", block.tile_tokens // block.sequence_shards, dim)
    reducing = part(
        output,
        block.by_rank("the same, by rank", tile),
        after._replace(copies=1 if block.has_after("feed_forward") else 0),
    )
    return part(
        block.stream("hidden state"),
        block.stream("output", 1 if block.num_tiles() > 1 or block.is_gathered else 0),
    ) + max(gate_and_up, product, reducing, key=total_bytes)


def _prefetched_group(block: BlockMemory, share: float) -> tuple[MemoryTensor, ...]:
    """Queries, keys and values of the next head group, with buffers of their exchange."""
    if block.ulysses_degree > 1:
        return (
            block.queries("queries of the next head group", share, copies=2),
            block.kv("KV of the next head group", share, copies=2),
        )
    # Beside the group's own KV: a copy that is sent, and KV of one rank or of the whole ring.
    buffers: float = (
        1 + (block.ring_degree if block.gathers_kv else 1) if block.ring_degree > 1 else 0
    )
    buffers = buffers if block.halo is None else block.halo[0] + block.halo[1]
    return (
        block.queries("queries of the next head group", share),
        block.kv("KV of the next head group", share, copies=1 + buffers),
    )


def _feed_forward_moments(block: BlockMemory) -> Moments:
    part = partial(transient, f"{RECOMPUTE}.feed_forward_backward", WHILE_RUNNING)
    is_tiled = block.num_tiles() > 1
    dim = block.model.dim
    held = part(
        block.stream("block input and gradient of the output", 2),
        block.stream("gradient of the hidden state", 1 if is_tiled else 0),
        block.queries("attention output"),
        block.sums("log-sum-exp", block.heads, block.tokens),
    )
    if block.has_experts:
        yield from experts.recompute_moments(block, held)
        return
    # Weight gradients of tiles add up in the dtype of sums; those of a single tile are final.
    if is_tiled:
        held += part(block.sums("sums of weight gradients", 3, dim, block.ffn_dim))
    held += part(block.numbers("a tile of the hidden state", _local_tile(block), dim))
    for name, alive in (*_gated_moments(block), *_input_gradient_moments(block)):
        yield name, held + alive


def _local_tile(block: BlockMemory) -> int:
    """Tokens of a tile of the residual stream on this rank."""
    return block.tile_tokens // block.sequence_shards


def _gated_moments(block: BlockMemory) -> Moments:
    """The products of a gated feed-forward, backward, on one tile."""
    tile = block.tile_tokens
    dim = block.model.dim
    ffn_dim = block.ffn_dim
    local = _local_tile(block)
    part = partial(transient, "models/feed_forward.py: SwiGLU.backward", WHILE_RUNNING)
    normed: Tensors = ()
    if block.is_normed("feed_forward") and not block.is_gathered:
        normed = part(block.numbers("a tile of the normalized input", local, dim))
    inputs = normed
    if block.is_gathered:
        inputs += part(block.numbers("a gathered tile of input and gradient", 2, tile, dim))
    if block.is_normed("feed_forward", output=True):
        inner = block.numbers("gate, up, activated gate, and product", 4, tile, ffn_dim)
        product = block.numbers("a tile of the last product", local, dim)
        norm = norms.backward(block, "a tile of the gradient", local)
        yield "the norm of the feed-forward's output", normed + part(inner, product, *norm)
    if block.has_after("feed_forward"):
        inputs += part(block.numbers("a tile of the last product's gradient", local, dim))
    gate = block.numbers("gate, up, and both gradients", 6 if block.is_gelu else 4, tile, ffn_dim)
    weight = block.numbers("gradient of a matrix", dim, ffn_dim)
    yield "feed-forward", inputs + part(gate, weight)
    gradients = (
        block.numbers("gradients of gate and up", 2, tile, ffn_dim),
        weight._replace(copies=3),
        block.numbers("a tile of the input gradient", tile, dim),
    )
    yield "the input gradient of the feed-forward", inputs + part(*gradients)


def _input_gradient_moments(block: BlockMemory) -> Moments:
    """The input gradient of one tile: its reduction over tp ranks, then the norm's backward."""
    dim = block.model.dim
    local = _local_tile(block)
    part = partial(transient, "models/feed_forward.py: SwiGLU.backward", WHILE_RUNNING)
    weights = part(block.numbers("gradient of a matrix", dim, block.ffn_dim, copies=3))
    reducing = part(
        block.numbers("a tile of the gradient, before it is reduced", block.tile_tokens, dim),
        block.numbers("a tile of the gradient", local, dim, copies=1 if block.tp > 1 else 0),
        block.by_rank("the same, by rank", block.tile_tokens),
    )
    yield "the reduction of the feed-forward's gradient", reducing + weights
    alive: Tensors = ()
    if block.is_normed("feed_forward"):
        alive = part(*norms.backward(block, "a tile of the gradient", local))
    alive += weights
    if block.num_tiles() > 1:
        alive += part(block.numbers("the gradient of the tile before", local, dim))
    yield "the norm before the feed-forward", alive


def _projection_moments(block: BlockMemory) -> Moments:
    tile = block.tile_tokens
    dim = block.model.dim
    local = tile // block.sequence_shards
    share = tile / block.tokens
    rows = (block.heads + 2 * block.kv_heads) * block.model.head_dim
    held = transient(
        f"{RECOMPUTE}.attention_backward",
        WHILE_RUNNING,
        block.stream("block input and its gradient", 2),
        block.gathered("gathered input"),
        block.queries("gradient of queries"),
        block.own_kv("gradients of KV"),
        block.sums(
            "sums of weight gradients", rows, dim, copies=1 if block.num_tiles() > 1 else 0
        ),
    )
    normed = transient(f"{RECOMPUTE}.attention_backward", WHILE_RUNNING, block.normalized_tile())
    for name, alive in _head_gradient_moments(block, share):
        yield name, held + normed + alive
    part = partial(
        transient, "parallelisms/sublayer_pass.py: SublayerPass.linears_backward", WHILE_RUNNING
    )
    weights = block.numbers("gradients of weights", rows, dim)
    products = part(
        block.queries("gradient of the query projection", share),
        block.own_kv("gradient of the key projection", share / 2),
        block.own_kv(
            "gradient of the value projection", share / 2 if block.head_groups > 1 else 0
        ),
        block.numbers("a tile of the input gradient, before it is reduced", tile, dim),
    )
    yield "the weights of projections", held + normed + products + part(weights)
    is_normed = block.is_normed("attention")
    norm = norms.backward(block, "a tile of the input gradient", local) if is_normed else ()
    yield "projections", held + part(weights, *norm)


def _head_gradient_moments(block: BlockMemory, share: float) -> Moments:
    """From the gradients of queries, keys and values to those of the projections, on one tile with
    this share of the tokens.
    """
    groups = block.head_groups
    part = partial(transient, f"{RECOMPUTE}._product_grads", WHILE_RUNNING)
    # A tile of gathered tokens has a part of every tp rank's tokens, which makes it a copy.
    copied = share / groups if block.is_gathered and block.num_tiles() > 1 else 0
    queries = block.queries("gradient of queries, rotated back", share / groups)
    group = part(
        block.queries("a tile of the gradient of queries", copied),
        block.own_kv("a tile of the gradients of KV", copied),
        block.queries(
            "gradient of the query projections of other head groups", share * (groups - 1) / groups
        ),
        block.own_kv(
            "gradient of the key projections of other head groups",
            share * (groups - 1) / groups / 2,
        ),
        queries,
        block.own_kv("gradient of keys, rotated back", share / groups / 2),
    )
    yield "the rotation of gradients", group + part(block.widened(queries))
    products = share / groups if norms.have_temporaries(block) else 0
    if block.norms_heads:
        yield (
            "norms of heads",
            group
            + part(
                block.queries("queries and their gradient", share / groups, copies=2),
                block.own_kv("keys", share / groups / 2),
                block.sums(
                    "products of the norm's backward pass", 3, block.q_numel, copies=products
                ),
            ),
        )
    # The gradients of all groups are concatenated, so that one product covers all heads.
    if groups > 1:
        yield (
            "gradients of all head groups, side by side",
            part(
                block.queries("gradient of the query projections", share, copies=2),
                block.own_kv(
                    "gradients of the key projections, also side by side, and of values",
                    1.5 * share,
                ),
            ),
        )
