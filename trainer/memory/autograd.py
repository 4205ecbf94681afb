"""Moments of a block's backward pass without recomputation. Imports no torch.

Shapes are those of `block.py`.
"""

from __future__ import annotations

from trainer.memory import experts, norms
from trainer.memory.attention_operator import operator_moments
from trainer.memory.block import (
    ATTENTION,
    FEED_FORWARD,
    GELU,
    TITLES,
    UNTIL_BACKWARD,
    WHILE_RUNNING,
    BlockMemory,
    Moments,
    saved_tensors,
    transient,
)
from trainer.trace.tensors import MemoryTensor, Tensors

FEED_FORWARD_NORM = "the norm of the feed-forward's output"
ATTENTION_NORM = "the norm of attention's output"


def autograd_moments(block: BlockMemory, grad_dtype: str) -> Moments:
    """Moments of a block's backward pass, from its output to its input. `grad_dtype`: the dtype in
    which KV gradients are sent.
    """
    # The feed-forward runs backward first, while everything that attention saved is still alive.
    for name, alive in _feed_forward_moments(block):
        yield name, block.attention_saved() + alive
    if block.is_normed("attention", output=True):
        yield ATTENTION_NORM, block.attention_saved() + _norm_backward(block)
    stream = transient(ATTENTION, WHILE_RUNNING, block.stream("gradient of the residual stream"))
    # Autograd frees the saved tensors of an operator when its backward pass ends, so every moment
    # holds less of the attention than the one before.
    for name, operator in operator_moments(block, grad_dtype):
        yield name, block.attention_operator_saved() + stream + operator
    yield (
        "the rotation of gradients",
        block.projections_saved() + stream + _rotation_backward(block),
    )
    if block.norms_heads:
        yield (
            "norms of heads",
            block.attention_inputs_saved() + stream + _query_norm_backward(block),
        )
    yield (
        "the input gradients of queries, keys and values",
        saved_tensors(
            ATTENTION,
            UNTIL_BACKWARD,
            block.stream(
                "residual stream before attention", 1 if block.is_normed("attention") else 0
            ),
            block.normalized_input("attention"),
        )
        + stream
        + transient(
            ATTENTION,
            WHILE_RUNNING,
            block.queries("gradients of queries"),
            block.kv("gradients of KV"),
            _summed_input_gradients(block),
        ),
    )
    if block.is_normed("attention"):
        yield "the norm before attention", _residual(block, "attention") + _norm_backward(block)


def whole_block_moment(block: BlockMemory) -> Tensors:
    """Everything that autograd saves of a block that does not run in pieces, and a few tensors
    like its widest activation.
    """
    widest = max(
        block.width(letter) for kind in block.kind.sublayers.values() for letter in kind.saved
    )
    return block.saved("none") + transient(
        "parallelisms/activation_checkpoint.py: checkpointed_block_forward",
        WHILE_RUNNING,
        block.stream("gradients of the output and of the residual stream", 2),
        block.numbers(
            "an activation, its gradient, and what leads from one to the other",
            4,
            block.tokens,
            widest,
        ),
    )


def _feed_forward_moments(block: BlockMemory) -> Moments:
    if block.has_experts:
        yield from experts.autograd_moments(block)
        if block.is_normed("feed_forward"):
            yield (
                "the norm before the feed-forward",
                _residual(block, "feed_forward") + _norm_backward(block),
            )
        return
    if block.is_normed("feed_forward", output=True):
        saved = block.feed_forward_saved() + block.output_norm_saved("feed_forward")
        yield FEED_FORWARD_NORM, saved + _norm_backward(block)
    yield (
        "feed-forward",
        block.feed_forward_saved()
        + transient(
            FEED_FORWARD,
            WHILE_RUNNING,
            block.stream("gradient of the output"),
            block.stream(
                "gradient of the last product", 1 if block.has_after("feed_forward") else 0
            ),
            block.gathered("gathered gradient of the output"),
            block.numbers(GELU, 2, block.tokens, block.ffn_dim, copies=1 if block.is_gelu else 0),
            max(
                block.numbers("gradients of gate and up", 2, block.tokens, block.ffn_dim),
                block.by_rank("the same, by rank", block.tokens),
                key=lambda each: each.bytes,
            ),
        ),
    )
    residual = block.stream(
        "residual stream before the feed-forward", 1 if block.is_normed("feed_forward") else 0
    )
    stream = block.stream("gradient of the output")
    yield (
        "the input gradient of the feed-forward",
        saved_tensors(
            FEED_FORWARD, UNTIL_BACKWARD, residual, block.normalized_input("the feed-forward")
        )
        + transient(
            FEED_FORWARD,
            WHILE_RUNNING,
            stream,
            block.numbers("gradient of gate or up", block.tokens, block.ffn_dim),
            block.numbers(
                "gradients of the normalized input, by matrix", 2, block.tokens, block.model.dim
            ),
        ),
    )
    yield (
        "the sum of the input gradients of the feed-forward",
        saved_tensors(FEED_FORWARD, UNTIL_BACKWARD, residual)
        + transient(FEED_FORWARD, WHILE_RUNNING, stream, _summed_input_gradients(block)),
    )
    if block.is_normed("feed_forward"):
        yield (
            "the norm before the feed-forward",
            _residual(block, "feed_forward") + _norm_backward(block),
        )


def autograd_forward(block: BlockMemory) -> Tensors:
    """Transient activations of a feed-forward's forward pass, beside what it saves."""
    product = block.numbers(
        "product of gate and up", block.tokens, block.ffn_dim, copies=2 if block.is_gelu else 1
    )
    return transient(
        FEED_FORWARD,
        WHILE_RUNNING,
        block.stream("output"),
        block.numbers("output, before it is reduced", block.tokens, block.model.dim),
        max(
            product, block.by_rank("the same, by rank", block.tokens), key=lambda each: each.bytes
        ),
    )


def _summed_input_gradients(block: BlockMemory) -> MemoryTensor:
    return block.numbers(
        "gradients of the normalized input, by matrix, and a sum", 3, block.tokens, block.model.dim
    )


def _residual(block: BlockMemory, module: str) -> Tensors:
    return saved_tensors(
        ATTENTION, UNTIL_BACKWARD, block.stream(f"residual stream before {TITLES[module]}")
    )


def _norm_backward(block: BlockMemory) -> Tensors:
    return transient(
        "models/norm.py: rms_norm_backward",
        WHILE_RUNNING,
        block.stream("gradient of the residual stream"),
        *norms.backward(block, "gradient of the norm's output", block.local_tokens),
    )


def _rotation_backward(block: BlockMemory) -> Tensors:
    rotated = block.queries("gradient of queries, rotated back")
    gradients = block.queries("gradient of queries"), block.kv("gradients of KV")
    return transient(
        "models/rope.py: apply_rotary", WHILE_RUNNING, *gradients, rotated, block.widened(rotated)
    )


def _query_norm_backward(block: BlockMemory) -> Tensors:
    has_temporaries = norms.have_temporaries(block)
    return transient(
        "models/norm.py: rms_norm_backward",
        WHILE_RUNNING,
        block.queries("gradients of queries"),
        block.sums(
            "products of the norm's backward pass",
            3,
            block.q_numel,
            copies=1 if has_temporaries else 0,
        ),
        block.queries(
            "gradients of queries before their norm", copies=0 if has_temporaries else 1
        ),
    )
