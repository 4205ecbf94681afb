"""Tensors of the embedding and of the loss head. Imports no torch."""

from __future__ import annotations

from functools import partial

from models.layers import embedding_grad_columns
from trainer.memory import norms
from trainer.memory.rank import RankMemory, numel
from trainer.trace.tensors import (
    TRANSIENT_ACTIVATIONS,
    MemoryTensor,
    Tensors,
    tensors,
    total_bytes,
)

LOSS_HEAD = "loss head"
SOURCE = "models/loss_head.py: LinearCrossEntropy"
head = partial(tensors, LOSS_HEAD)
transient = partial(tensors, TRANSIENT_ACTIVATIONS)


def saved_head(rank: RankMemory) -> Tensors:
    # The forward pass computes the gradients from each chunk of logits: they are saved instead of
    # logits.
    return head(
        SOURCE,
        "until the head's backward pass",
        MemoryTensor(
            "input of the final norm",
            (rank.block.local_tokens, rank.model.dim),
            rank.compute_dtype,
        ),
        MemoryTensor(
            "gradient of the head's input", (rank.head_tokens, rank.model.dim), rank.compute_dtype
        ),
        MemoryTensor(
            "gradient of the head's weight", (numel(rank.head_shapes),), rank.master_dtype
        ),
    )


def head_forward(rank: RankMemory) -> Tensors:
    """Transient tensors of the loss head's forward pass, beside what it saves."""
    rows, dim = rank.head_shapes[0]
    logits = MemoryTensor(
        "a chunk of logits",
        (min(rank.loss_chunk_tokens, rank.head_tokens), rows),
        rank.master_dtype,
    )
    # In one dtype and eager, gradients overwrite the logits.
    is_apart = rank.is_mixed or rank.block.compiled
    gradients = (
        logits._replace(
            name="a chunk of their gradients",
            dtype=rank.compute_dtype,
            copies=1 if is_apart else 0,
        ),
        MemoryTensor(
            "a chunk's gradient of the weight",
            (rows, dim),
            rank.compute_dtype,
            copies=0 if rank.has_wide_products else 1,
        ),
    )
    # The soft cap's tanh is freed before the gradients exist, so only the larger of both counts.
    saturation = logits._replace(name="saturation of the soft cap")
    is_capped = rank.model.logit_softcap is not None
    return head(
        f"{SOURCE}.forward",
        "while the head runs",
        MemoryTensor("normalized input", (rank.head_tokens, dim), rank.compute_dtype),
        logits,
        logits._replace(
            name="slope of the soft cap", copies=1 if is_capped and not rank.block.compiled else 0
        ),
        *max(gradients, (saturation,) if is_capped else (), key=total_bytes),
    )


def head_backward(rank: RankMemory) -> Tensors:
    """Transient tensors of the loss head's backward pass, beside what it saved."""
    rows, dim = rank.head_shapes[0]
    return head(
        f"{SOURCE}.backward",
        "while the head runs",
        MemoryTensor(
            "scaled gradient of the head's input", (rank.head_tokens, dim), rank.compute_dtype
        ),
        MemoryTensor("scaled gradient of the weight", (rows, dim), rank.compute_dtype),
    )


def final_norm_backward(rank: RankMemory) -> Tensors:
    """Backward pass of the final norm, which runs in the chunks of the loss head unless it is a
    fused kernel.
    """
    tokens = rank.block.local_tokens
    dim = rank.model.dim
    chunk = 0 if norms.are_fused(rank.block) else min(rank.loss_chunk_tokens, tokens)
    return head(
        "models/norm.py: RMSNormFunction.backward",
        "while the norm runs",
        MemoryTensor(
            "input and gradients of the final norm", (3, tokens, dim), rank.compute_dtype
        ),
        MemoryTensor("products of a chunk", (3, chunk, dim), rank.master_dtype),
        MemoryTensor("a chunk of the gradient", (chunk, dim), rank.compute_dtype),
    )


def embedding_forward(rank: RankMemory) -> Tensors:
    """Embedding forward, until its output is the residual stream. A vocabulary shard zeroes the
    outputs for tokens of other shards.
    """
    output = MemoryTensor(
        "output of the embedding", (rank.tokens, rank.model.dim), rank.compute_dtype
    )
    stream = MemoryTensor(
        "residual stream", (rank.block.local_tokens, rank.model.dim), rank.compute_dtype
    )
    by_rank = output._replace(
        name="the same, by rank", copies=1 if rank.training.micro_batch_size > 1 else 0
    )
    masked = output._replace(name="the same, of this shard's tokens")
    # Sequence parallelism reduce-scatters the output; without it, all tp ranks keep all tokens.
    scattered = (output, by_rank, stream) if rank.block.is_gathered else (output, masked)
    multiplied = stream._replace(
        name="the same, multiplied", copies=1 if rank.model.embedding_multiplier != 1 else 0
    )
    at_once = max(scattered if rank.tp > 1 else (output,), (stream, multiplied), key=total_bytes)
    return transient("models/linear.py: Embedding.forward", "while it runs", *at_once)


def embedding_backward(rank: RankMemory) -> Tensors:
    """Embedding backward, beside the gradient of its weight."""
    rows, dim = rank.embed_shapes[0]
    # The gradient is summed in float32, some columns at a time, so that no whole float32 copy
    # exists.
    columns = embedding_grad_columns(rows, rank.tokens, dim) if rank.is_mixed else dim
    return transient(
        "models/linear.py: EmbeddingFunction.backward",
        "while the embedding runs",
        MemoryTensor("gradient of the embedding's output", (rank.tokens, dim), rank.compute_dtype),
        MemoryTensor("gradient of some columns", (rows, columns), rank.master_dtype),
        MemoryTensor(
            "some columns of the output's gradient",
            (rank.tokens, columns),
            rank.master_dtype,
            copies=1 if rank.is_mixed else 0,
        ),
    )


def masked_gradient(rank: RankMemory) -> Tensors:
    """Mask of a vocabulary shard: gradients of tokens of other shards are zeroed."""
    return transient(
        "models/linear.py: Embedding.forward",
        "while it runs",
        MemoryTensor(
            "gradient of the residual stream", (rank.tokens, rank.model.dim), rank.compute_dtype
        ),
        MemoryTensor(
            "the same, of this shard's tokens", (rank.tokens, rank.model.dim), rank.compute_dtype
        ),
    )


def sum_over_tp(rank: RankMemory) -> Tensors:
    """All-reduce over tp of a weight gradient: every tp rank has the weight and uses it for its
    own tokens.
    """
    rows, dim = rank.embed_shapes[0]
    return transient(
        "parallelisms/tensor_parallel.py: replicated_part",
        "while it runs",
        MemoryTensor(
            "gradient of the weight, widened",
            (rows, dim),
            rank.master_dtype,
            copies=1 if rank.is_mixed else 0,
        ),
        MemoryTensor("its sum over the tp ranks", (rows, dim), rank.master_dtype),
    )


def gather_over_tp(rank: RankMemory) -> Tensors:
    """All-gather of a residual stream over tp. With several sequences the result comes rank by
    rank, and is copied into order.
    """
    gathered = MemoryTensor(
        "gathered residual stream", (rank.tokens, rank.model.dim), rank.compute_dtype
    )
    return transient(
        "parallelisms/mesh/collectives.py: all_gather_tokens",
        "while it runs",
        MemoryTensor(
            "residual stream", (rank.block.local_tokens, rank.model.dim), rank.compute_dtype
        ),
        gathered,
        gathered._replace(
            name="the same, in order", copies=1 if rank.training.micro_batch_size > 1 else 0
        ),
    )
