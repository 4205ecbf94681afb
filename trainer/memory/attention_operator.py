"""Tensors alive in the backward pass of attention, and the scratch memory of its kernels. Imports
no torch.

Shapes are those of `block.py`. Scratch is what the kernels' host code allocates beside inputs and
outputs:

    flash       FlashAttention 2, csrc/flash_attn/flash_api.cpp, mha_varlen_bwd; the same in ATen/native/transformers/cuda
    fa3, fa4    hopper/flash_api.cpp, mha_bwd, and flash_attn/cute/interface.py
    cudnn       cudnn_frontend, node/scaled_dot_product_flash_attention.h, the backward node's tensors
    efficient   ATen/native/transformers/cuda/attention_backward.cu, and what `models/kernels.py` repeats for it
    plain       `models/kernels.py`

The scratch of the CPU's kernel is not counted: each thread allocates it, and no device has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import ceil

from trainer.memory.block import VARLEN_KERNELS, WHILE_RUNNING, BlockMemory, Moments, transient
from trainer.trace.tensors import MemoryTensor, Tensors, total_bytes

PADDING = 128
"""Tokens by which FlashAttention's backward pads each sequence."""
SINK_TOKENS = 4096
"""Tokens per chunk of `sink_grad` in models/online_softmax.py."""
SINK = "models/online_softmax.py: sink_grad"
_ring_part = partial(transient, "parallelisms/context/ring.py: backward", WHILE_RUNNING)
NARROWED = "gradients of KV, narrowed to be sent"
MULTIPROCESSORS = 132
"""Streaming multiprocessors of an H100. A deterministic FlashAttention 2 sums the gradient of
queries in as many parts, divided by its batch and heads.
"""


def operator_moments(block: BlockMemory, grad_dtype: str, share: float = 1) -> Moments:
    """Moments of attention's backward pass for a share of the heads. `grad_dtype`: the dtype in
    which KV gradients are sent.
    """
    grad_output = block.queries("gradient of the output", share)
    own = transient(
        "models/attention_op.py: backward", WHILE_RUNNING, grad_output, *_own_keys(block, share)
    )
    # One rank has all keys: no sums in float32 and no messages.
    if block.ring_degree == 1:
        yield "attention", own
        if block.kind.sink:
            results = (
                block.queries("gradient of queries", share),
                block.kv("gradients of KV", share),
            )
            yield (
                "the gradient of sinks",
                transient(SINK, WHILE_RUNNING, grad_output, *results, _sink(block, share)),
            )
        return
    # From here on gradients of several KV parts add up, in the dtype of sums.
    sums = _ring_part(grad_output, *_sums(block, share))
    if block.kind.sink:
        yield (
            "the gradient of sinks",
            sums + _ring_part(block.kv("gradients of KV", share), _sink(block, share)),
        )
    if block.halo is not None:
        buffers = _ring_part(
            block.kv("KV for other ranks", share * block.halo[0]),
            block.kv("halo", share * block.halo[1]),
        )
        yield "attention to own keys", own + buffers
        for name, alive in _halo_moments(block, grad_dtype, share):
            yield name, sums + _ring_part(*alive)
    elif block.gathers_kv:
        gathering = _ring_part(
            block.kv("own KV, being gathered", share),
            block.kv("gathered KV", share * block.ring_degree),
        )
        yield "attention to own keys", own + gathering
        gradients = _ring_part(block.kv("gradients of KV", share))
        yield "the sums of gradients", gathering + sums + gradients
        for name, alive in _gathered_moments(block, grad_dtype, share):
            yield name, sums + alive
    else:
        for name, alive in _rotated_moments(block, grad_dtype, share):
            yield name, sums + alive


def _gathered_moments(block: BlockMemory, grad_dtype: str, share: float) -> Moments:
    """Attention to the gathered KV of other ranks, and the reduce-scatter of its gradients; beside
    the sums of gradients, which the caller adds.
    """
    ring = block.ring_degree
    pieces = share * (ring - 1)
    remote_sum = block.sums(
        "sum of the gradients of the KV of other ranks", *block.kv_shape, copies=pieces
    )
    calls = call_backward(block, share, ring - 1, queries=0.5)
    yield (
        "attention",
        _ring_part(*calls, block.kv("KV of other ranks", copies=pieces), remote_sum),
    )
    on_wire = _on_wire(block, grad_dtype, share * ring)
    narrowed = _narrowed(block, grad_dtype, pieces)
    yield "the reduce-scatter of KV gradients", _ring_part(remote_sum, on_wire, narrowed)


def _rotated_moments(block: BlockMemory, grad_dtype: str, share: float) -> Moments:
    """Attention to KV that travels around the ring, and the send of its gradients; beside the sums
    of gradients, which the caller adds.
    """
    # With two ranks KV arrives once and nothing is sent on; a longer ring receives the next KV and
    # sends gradients while a kernel runs.
    in_transit = share if block.ring_degree > 2 else 0
    held = _ring_part(
        block.kv("KV of another rank", share),
        block.sums("sum of the gradients of its KV", *block.kv_shape, copies=share),
        block.kv("KV in transit", copies=in_transit),
        _on_wire(block, grad_dtype, in_transit),
    )
    yield (
        "attention",
        held + _ring_part(*call_backward(block, share), _on_wire(block, grad_dtype, in_transit)),
    )
    wire = _on_wire(block, grad_dtype, share), _narrowed(block, grad_dtype, share)
    yield "the rotation of KV gradients", held + _ring_part(*wire)


def _on_wire(block: BlockMemory, grad_dtype: str, copies: float) -> MemoryTensor:
    return MemoryTensor("gradients of KV on the wire", block.kv_shape, grad_dtype, copies=copies)


def _narrowed(block: BlockMemory, grad_dtype: str, copies: float) -> MemoryTensor:
    """Copy of the float32 sums in the dtype in which they are sent, if it is narrower."""
    return MemoryTensor(
        NARROWED,
        block.kv_shape,
        grad_dtype,
        copies=copies if grad_dtype != block.stats_dtype else 0,
    )


def _sums(block: BlockMemory, share: float) -> tuple[MemoryTensor, MemoryTensor]:
    return (
        block.sums(
            "sum of the gradient of queries",
            block.tokens,
            block.heads,
            block.model.head_dim,
            copies=share,
        ),
        block.sums("sum of the gradients of own KV", *block.kv_shape, copies=share),
    )


def _own_keys(block: BlockMemory, share: float) -> tuple[MemoryTensor, ...]:
    """Gradients of attention to the rank's own keys, and what the kernel calls hold beside them."""
    dq = block.queries("gradient of queries", share)
    dkv = block.kv("gradients of KV", share)
    if block.window_parts is None:
        of_call = call_backward(block, share)
        if not block.joins_calls:
            return of_call
        return *of_call, *(each._replace(name=f"{each.name}, of all calls") for each in (dq, dkv))
    causal, flipped = block.window_parts
    # The causal part and the flipped part run one after the other, then the sums are rounded: only
    # the largest of the three counts.
    calls: tuple[Tensors, ...] = (
        call_backward(block, share, causal, queries=causal),
        _flipped_call(block, share, flipped, flipped, earlier=2),
        # The sums are narrowed to the compute dtype in the end.
        (dq, dkv) if block.is_mixed else (),
    )
    return *_sums(block, share), *max(calls, key=total_bytes)


def _flipped_call(
    block: BlockMemory, share: float, queries: float, keys: float, *, earlier: int
) -> tuple[MemoryTensor, ...]:
    """Kernel call for a part of the tokens in reversed order. Its results are put back in order
    while `earlier` results are held.
    """
    each = share / block.calls
    return (
        *call_backward(block, share, keys, queries=queries),
        block.queries("queries, outputs and their gradient, reversed", 3 * each * queries),
        block.kv("KV, reversed", each * keys),
        block.queries("gradients of queries in order, and earlier ones", each * queries, copies=2),
        block.kv("gradients of KV in order, and earlier ones", each * keys, copies=earlier),
    )


def _sink(block: BlockMemory, share: float) -> MemoryTensor:
    """Products of one chunk of tokens, and the gradient widened to the dtype of sums."""
    numel = (
        block.heads * block.model.head_dim * min(SINK_TOKENS, block.tokens * block.ulysses_degree)
    )
    copies = 2 if block.is_mixed else 1
    return block.sums("products of a chunk", numel, copies=copies * share / block.ulysses_degree)


def _halo_call(block: BlockMemory, share: float) -> tuple[MemoryTensor, ...]:
    """Call for the flipped part before a piece of the sequence or, if the window is longer than a
    remote piece, for two pieces. Kernels with variable lengths run all of them at once.
    """
    _, received = block.halo or (0, 0)
    layout = block.layout
    if layout is None or block.kernel in VARLEN_KERNELS:
        return _flipped_call(block, share, min(1, received), received, earlier=1)
    window = block.kind.window or 0
    # Kernels without variable lengths take one pair of pieces at a time: the longest one counts.
    tokens = layout.num_tokens / layout.ring_degree
    remote = max(
        span.length
        for rank in range(layout.ring_degree)
        if (spans := layout.spans(rank)) not in block.spans
        for span in spans
    )
    part = min(window, block.longest_span, remote) / tokens
    flipped = _flipped_call(block, share, part, min(part, received), earlier=1)
    if window <= remote:
        return flipped
    calls = call_backward(block, share, remote / tokens, queries=block.longest_span / tokens)
    return max(flipped, calls + calls[:2], key=total_bytes)


def _halo_moments(
    block: BlockMemory, grad_dtype: str, share: float
) -> Iterator[tuple[str, tuple[MemoryTensor, ...]]]:
    """Attention to the halo, and the return of its gradients; beside the sums of gradients, which
    the caller adds.
    """
    sent, received = (share * each for each in block.halo or (0, 0))
    kv = block.kv_shape
    rounded = (
        block.queries("gradient of queries", share if block.is_mixed else 0),
        block.kv("gradients of KV", share),
    )
    yield (
        "the sums of gradients",
        (*rounded, block.kv("KV for other ranks", sent), block.kv("halo", received)),
    )
    remote_sum = block.sums("sum of the gradients of the halo", *kv, copies=received)
    yield (
        "attention to the halo",
        (block.kv("halo", received), remote_sum, *_halo_call(block, share)),
    )
    returned = MemoryTensor("gradients from other ranks", kv, grad_dtype, copies=sent)
    narrowed = _narrowed(block, grad_dtype, received)
    yield "the return of the halo's gradients", (remote_sum, narrowed, returned)
    added = block.sums("sum of the gradients from other ranks", *kv, copies=share)
    of_rank = block.sums("those of a rank", *kv, copies=min(share, sent))
    yield "the sum of returned gradients", (added, returned, of_rank)


def call_backward(
    block: BlockMemory, share: float, keys: float = 1, *, queries: float = 1
) -> tuple[MemoryTensor, ...]:
    """Outputs and scratch of a kernel call for a share of the heads and `queries`, with `keys`
    keys per query of a rank.

    With one call per sequence, the outputs of a call stay alive while the next one runs.
    """
    share = share / block.calls
    outputs = (
        block.queries("gradient of queries", share * queries),
        block.kv("gradients of KV", share * keys),
    )
    previous: tuple[MemoryTensor, ...] = ()
    if block.calls > 1:
        previous = tuple(
            each._replace(name=f"{each.name}, of the call before") for each in outputs
        )
    expanded_kv = block.queries("KV of every query head", 2 * share * keys)
    match block.kernel:
        case "flash" | "fa3" | "fa4":
            return *outputs, *_flash_scratch(block, share, keys, queries=queries)
        case "cudnn":
            output = block.queries("attention output, heads first", share * queries)
            return (
                *outputs,
                *previous,
                output,
                *_row_scratch(block, share * queries),
                *_expanded_grads(block, share * keys),
            )
        case "efficient":
            # Two moments: float32 scratch inside the kernel, then the sum over the query heads of each
            # KV head, outside of it.
            dq, dkv = outputs
            expanded_dkv = block.queries("gradients of KV, of every query head", 2 * share * keys)
            in_call = *previous, dq, expanded_kv, expanded_dkv
            scratch = _row_scratch(block, share * queries)
            return max((*in_call, *scratch), (*in_call, dkv), key=total_bytes)
        case "plain":
            # Eager operators materialize four score matrices: scores, weights, and the gradient of
            # either.
            length = block.tokens * block.ulysses_degree // block.sequences
            copies = 4 * queries * keys * share * block.calls / block.ulysses_degree
            scores = block.sums(
                "scores, weights and their gradients", block.heads, length, length, copies=copies
            )
            return *previous, scores, expanded_kv
        case _:
            return *outputs, *previous


def _row_scratch(block: BlockMemory, share: float) -> tuple[MemoryTensor, MemoryTensor]:
    """The float32 sum of the gradient of queries, and a number per row of scores, both padded as
    FlashAttention pads them.
    """
    padded = block.tokens + PADDING * block.sequences
    # The kernels round the head dim up to a multiple of 32, and pad each sequence by a block of
    # 128.
    width = -(-block.model.head_dim // 32) * 32
    dq_sum = block.sums(
        "sum of the gradient of queries, in the kernel", padded, block.heads, width, copies=share
    )
    return dq_sum, block.sums("a number per row of scores", padded, block.heads, copies=share)


def _expanded_grads(block: BlockMemory, share: float) -> tuple[MemoryTensor, ...]:
    """Gradients of KV per query head, which the host code sums with grouped-query attention."""
    if block.kv_numel >= 2 * block.q_numel:
        return ()
    return (block.queries("gradients of KV, of every query head", 2 * share),)


def _flash_scratch(
    block: BlockMemory, share: float, keys: float, *, queries: float
) -> tuple[MemoryTensor, ...]:
    """Scratch of the three FlashAttention kernels, beside their outputs."""
    dq_sum, row_sums = _row_scratch(block, share * queries)
    if block.kernel == "flash":
        # mha_varlen_bwd avoids atomic adds by ceil(SMs / (batch * heads)) separate sums.
        heads = block.heads * share / block.ulysses_degree
        parts = ceil(MULTIPROCESSORS / (block.sequences * heads)) if block.deterministic else 1
        dq_sum = dq_sum._replace(copies=parts * share * queries)
        return dq_sum, row_sums, *_expanded_grads(block, share * keys)
    # FlashAttention 3 and 4 keep two numbers per row: the scaled log-sum-exp and dot(gradient,
    # output).
    row_sums = row_sums._replace(copies=2 * share * queries)
    if block.kv_numel >= 2 * block.q_numel:
        return dq_sum, row_sums
    dkv_sum = block.sums(
        "sum of the gradients of KV, in the kernel", *block.kv_shape, copies=share * keys
    )
    return dq_sum, row_sums, dkv_sum
