"""What a block holds in its backward pass without recomputation. Imports no torch.

Shapes are those of `block.py`.
"""

from __future__ import annotations

from trainer.memory.attention_operator import operator_moments
from trainer.memory.block import (
    ATTENTION,
    FEED_FORWARD,
    UNTIL_BACKWARD,
    WHILE_RUNNING,
    BlockMemory,
    Moments,
    saved_tensors,
    transient,
)
from trainer.memory.tensors import Tensors


def autograd_moments(block: BlockMemory, grad_dtype: str, *, leaves_weights: bool) -> Moments:
    """`grad_dtype` is that of KV gradients on the wire; `leaves_weights` for later, with what their gradients need."""
    for name, alive in _feed_forward_moments(block, leaves_weights=leaves_weights):
        yield name, block.attention_saved() + alive
    attention, after = block.attention_saved(), block.feed_forward_left() if leaves_weights else ()
    # Without a gather, the gradient of a half's output is that of the residual stream, and stays for its weights.
    is_left = leaves_weights and not block.is_gathered
    yield (
        "the norm before the feed-forward",
        attention + after + _norm_backward(block, "the feed-forward", has_gradient=is_left),
    )
    after += (
        block.left(block.numbers("gradient of attention's output", block.tokens, block.model.dim))
        if leaves_weights
        else ()
    )
    stream = transient(ATTENTION, WHILE_RUNNING, block.stream("gradient of the residual stream", not is_left))
    operands = attention if leaves_weights else block.attention_operator_saved()
    for name, operator in operator_moments(block, grad_dtype):
        yield name, operands + after + stream + operator
    after += block.left(block.queries("attention output")) if leaves_weights else ()
    yield "the rotation of gradients", block.projections_saved() + after + stream + _rotation_backward(block)
    if block.model.qk_norm:
        yield "norms of heads", block.attention_inputs_saved() + after + stream + _query_norm_backward(block)
    after = block.left_for_weight_gradients() if leaves_weights else block.attention_left()[:3]
    residual = saved_tensors(ATTENTION, UNTIL_BACKWARD, block.stream("residual stream before attention"))
    yield (
        "the input gradients of queries, keys and values",
        after + residual + stream + _summed_input_gradients(block, ATTENTION),
    )
    after = after if leaves_weights else ()
    yield "the norm before attention", after + _norm_backward(block, "attention", has_gradient=is_left)


def _feed_forward_moments(block: BlockMemory, *, leaves_weights: bool) -> Moments:
    yield (
        "feed-forward",
        block.feed_forward_saved()
        + transient(
            FEED_FORWARD,
            WHILE_RUNNING,
            block.stream("gradient of the output"),
            block.gathered("gathered gradient of the output"),
            max(
                block.numbers("gradients of gate and up", 2, block.tokens, block.ffn_dim),
                block.by_rank("the same, by rank", block.tokens),
                key=lambda each: each.bytes,
            ),
        ),
    )
    after = block.feed_forward_left() if leaves_weights else ()
    residual = saved_tensors(FEED_FORWARD, UNTIL_BACKWARD, block.stream("residual stream before the feed-forward"))
    stream = transient(FEED_FORWARD, WHILE_RUNNING, block.stream("gradient of the output", not leaves_weights))
    yield (
        "the input gradient of the feed-forward",
        (after or block.feed_forward_left()[:1])
        + residual
        + stream
        + transient(
            FEED_FORWARD,
            WHILE_RUNNING,
            block.numbers("gradient of gate or up", block.tokens, block.ffn_dim, copies=not leaves_weights),
            block.numbers("gradients of the normalized input, by matrix", 2, block.tokens, block.model.dim),
        ),
    )
    yield (
        "the sum of the input gradients of the feed-forward",
        after + residual + stream + _summed_input_gradients(block, FEED_FORWARD),
    )


def autograd_forward(block: BlockMemory) -> Tensors:
    """In the forward pass of a feed-forward, beside what it saves."""
    product = block.numbers("product of gate and up", block.tokens, block.ffn_dim)
    return transient(
        FEED_FORWARD,
        WHILE_RUNNING,
        block.stream("output"),
        block.numbers("output, before it is reduced", block.tokens, block.model.dim),
        max(product, block.by_rank("the same, by rank", block.tokens), key=lambda each: each.bytes),
    )


def _summed_input_gradients(block: BlockMemory, source: str) -> Tensors:
    gradients = block.numbers(
        "gradients of the normalized input, by matrix, and a sum", 3, block.tokens, block.model.dim
    )
    return transient(source, WHILE_RUNNING, gradients)


def _norm_backward(block: BlockMemory, before: str, *, has_gradient: bool) -> Tensors:
    """`has_gradient`: the gradient of the residual stream is counted elsewhere."""
    return saved_tensors(ATTENTION, UNTIL_BACKWARD, block.stream(f"residual stream before {before}")) + transient(
        "models/norm.py: rms_norm_backward",
        WHILE_RUNNING,
        block.stream("gradient of the residual stream", not has_gradient),
        block.stream("gradients of the norm's output, also by its weight", 2),
        block.sums("products of the norm's backward pass", 3, block.local_tokens, block.model.dim),
    )


def _rotation_backward(block: BlockMemory) -> Tensors:
    rotated = block.queries("gradient of queries, rotated back")
    gradients = block.queries("gradient of queries"), block.kv("gradients of KV")
    return transient("models/rope.py: apply_rotary", WHILE_RUNNING, *gradients, rotated, block.widened(rotated))


def _query_norm_backward(block: BlockMemory) -> Tensors:
    return transient(
        "models/norm.py: rms_norm_backward",
        WHILE_RUNNING,
        block.queries("gradients of queries"),
        block.sums("products of the norm's backward pass", 3, block.q_numel),
    )
