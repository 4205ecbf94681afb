"""What attention holds in its backward pass, and the scratch memory of its kernels. Imports no
torch.

Shapes are those of `block.py`. Scratch is what the kernels' host code allocates beside inputs and
outputs:

    flash       FlashAttention 2, csrc/flash_attn/flash_api.cpp, mha_varlen_bwd; the same in ATen/native/transformers/cuda
    fa3, fa4    hopper/flash_api.cpp, mha_bwd, and flash_attn/cute/interface.py
    cudnn       cudnn_frontend, node/scaled_dot_product_flash_attention.h, the backward node's tensors
    efficient   ATen/native/transformers/cuda/attention_backward.cu, and what `models/kernels.py` repeats for it
    plain       `models/kernels.py`

The CPU's is not counted: it is allocated by each thread, and no device has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import ceil

from trainer.memory.block import VARLEN_KERNELS, WHILE_RUNNING, BlockMemory, Moments, transient
from trainer.memory.tensors import MemoryTensor, total_bytes

PADDING = 128
"""Tokens by which FlashAttention's backward pads each sequence."""
SINK_TOKENS = 4096
"""As in models/online_softmax.py."""
SINK = "models/online_softmax.py: sink_grad"
NARROWED = "gradients of KV, narrowed to be sent"
MULTIPROCESSORS = 132
"""Of an H100: a deterministic FlashAttention 2 sums the gradient of queries in as many parts, over
its heads.
"""


def operator_moments(block: BlockMemory, grad_dtype: str, share: float = 1) -> Moments:
    """The backward pass of attention for a share of the heads.

    `grad_dtype`: of KV gradients on the wire.
    """
    grad_output = block.queries("gradient of the output", share)
    ring = block.ring_degree
    kv = block.kv_shape
    own = transient(
        "models/attention_op.py: backward", WHILE_RUNNING, grad_output, *_own_keys(block, share)
    )
    if ring == 1:
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
    part = partial(transient, "parallelisms/context/ring.py: backward", WHILE_RUNNING)
    sums = grad_output, *_sums(block, share)
    if block.kind.sink:
        yield (
            "the gradient of sinks",
            part(*sums, block.kv("gradients of KV", share), _sink(block, share)),
        )
    if block.halo is not None:
        buffers = part(
            block.kv("KV for other ranks", share * block.halo[0]),
            block.kv("halo", share * block.halo[1]),
        )
        yield "attention to own keys", own + buffers
        for name, alive in _halo_moments(block, grad_dtype, share):
            yield name, part(*sums, *alive)
        return
    on_wire = MemoryTensor("gradients of KV on the wire", kv, grad_dtype)
    is_narrowed = grad_dtype != block.stats_dtype
    if block.gathers_kv:
        gathering = part(
            block.kv("own KV, being gathered", share), block.kv("gathered KV", share * ring)
        )
        yield "attention to own keys", own + gathering
        yield "the sums of gradients", gathering + part(*sums, block.kv("gradients of KV", share))
        pieces = share * (ring - 1)
        remote_sum = block.sums(
            "sum of the gradients of the KV of other ranks", *kv, copies=pieces
        )
        calls = call_backward(block, share, ring - 1, queries=0.5)
        yield (
            "attention",
            part(*sums, *calls, block.kv("KV of other ranks", copies=pieces), remote_sum),
        )
        wire = (
            on_wire._replace(copies=share * ring),
            on_wire._replace(name=NARROWED, copies=pieces * is_narrowed),
        )
        yield "the reduce-scatter of KV gradients", part(*sums, remote_sum, *wire)
        return
    in_transit = share * (ring > 2)
    held = part(
        *sums,
        block.kv("KV of another rank", share),
        block.sums("sum of the gradients of its KV", *kv, copies=share),
        block.kv("KV in transit", copies=in_transit),
        on_wire._replace(copies=in_transit),
    )
    yield (
        "attention",
        held + part(*call_backward(block, share), on_wire._replace(copies=in_transit)),
    )
    wire = (
        on_wire._replace(copies=share),
        on_wire._replace(name=NARROWED, copies=share * is_narrowed),
    )
    yield "the rotation of KV gradients", held + part(*wire)


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
    """Gradients of attention to own keys, and what its kernel calls hold."""
    dq = block.queries("gradient of queries", share)
    dkv = block.kv("gradients of KV", share)
    if block.window_parts is None:
        copies = (each._replace(copies=each.copies * block.joins_calls) for each in (dq, dkv))
        return *call_backward(block, share), *(
            each._replace(name=f"{each.name}, of all calls") for each in copies
        )
    causal, flipped = block.window_parts
    calls = (
        call_backward(block, share, causal, queries=causal),
        _flipped_call(block, share, flipped, flipped, earlier=2),
        # Of the sums, narrowed.
        tuple(each._replace(copies=share * block.is_mixed) for each in (dq, dkv)),
    )
    return *_sums(block, share), *max(calls, key=total_bytes)


def _flipped_call(
    block: BlockMemory, share: float, queries: float, keys: float, *, earlier: int
) -> tuple[MemoryTensor, ...]:
    """A call for a part of the tokens in reversed order, whose results are put in order while
    earlier ones are held.
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
    """Products of a chunk of tokens, and the gradient widened."""
    numel = (
        block.heads * block.model.head_dim * min(SINK_TOKENS, block.tokens * block.ulysses_degree)
    )
    return block.sums(
        "products of a chunk", numel, copies=(1 + block.is_mixed) * share / block.ulysses_degree
    )


def _halo_call(block: BlockMemory, share: float) -> tuple[MemoryTensor, ...]:
    """Of a flipped part before a piece of the sequence or, with a longer window, of two pieces; on
    a GPU all at once.
    """
    (_, received), layout = block.halo or (0, 0), block.layout
    if layout is None or block.kernel in VARLEN_KERNELS:
        return _flipped_call(block, share, min(1, received), received, earlier=1)
    window = block.kind.window or 0
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
    """Beside the sums of gradients: attention to the halo, and the return of its gradients."""
    sent, received = (share * each for each in block.halo or (0, 0))
    kv = block.kv_shape
    is_narrowed = grad_dtype != block.stats_dtype
    rounded = (
        block.queries("gradient of queries", share * block.is_mixed),
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
    narrowed = returned._replace(name=NARROWED, copies=received * is_narrowed)
    yield "the return of the halo's gradients", (remote_sum, narrowed, returned)
    added = block.sums("sum of the gradients from other ranks", *kv, copies=share)
    of_rank = block.sums("those of a rank", *kv, copies=min(share, sent))
    yield "the sum of returned gradients", (added, returned, of_rank)


def call_backward(
    block: BlockMemory, share: float, keys: float = 1, *, queries: float = 1
) -> tuple[MemoryTensor, ...]:
    """Outputs and scratch of a kernel call for a share of the heads and `queries`, with `keys`
    keys per query of a rank.

    Of several calls, one for each sequence, the last one's outputs are alive while the next runs.
    """
    kernel = block.kernel
    padded = block.tokens + PADDING * block.sequences
    width = -(-block.model.head_dim // 32) * 32
    is_grouped = block.kv_numel < 2 * block.q_numel
    share = share / block.calls
    outputs = (
        block.queries("gradient of queries", share * queries),
        block.kv("gradients of KV", share * keys),
    )
    previous = [each._replace(name=f"{each.name}, of the call before") for each in outputs] * (
        block.calls > 1
    )
    dq_sum = block.sums(
        "sum of the gradient of queries, in the kernel",
        padded,
        block.heads,
        width,
        copies=share * queries,
    )
    row_sums = block.sums(
        "a number per row of scores", padded, block.heads, copies=share * queries
    )
    expanded_kv = block.queries("KV of every query head", 2 * share * keys)
    expanded_dkv = block.queries("gradients of KV, of every query head", 2 * share * keys)
    match kernel:
        case "flash":
            heads = block.heads * share / block.ulysses_degree
            parts = ceil(MULTIPROCESSORS / (block.sequences * heads)) if block.deterministic else 1
            return (
                *outputs,
                dq_sum._replace(copies=parts * share * queries),
                row_sums,
                *[expanded_dkv] * is_grouped,
            )
        case "fa3" | "fa4":
            dkv_sum = block.sums(
                "sum of the gradients of KV, in the kernel", *block.kv_shape, copies=share * keys
            )
            return (
                *outputs,
                dq_sum,
                row_sums._replace(copies=2 * share * queries),
                *[dkv_sum] * is_grouped,
            )
        case "cudnn":
            output = block.queries("attention output, heads first", share * queries)
            return *outputs, *previous, output, dq_sum, row_sums, *[expanded_dkv] * is_grouped
        case "efficient":
            # In the kernel a sum or product of float32, then the sums over the query heads of a KV
            # head.
            dq, dkv = outputs
            in_call = *previous, dq, expanded_kv, expanded_dkv
            return max((*in_call, dq_sum, row_sums), (*in_call, dkv), key=total_bytes)
        case "plain":
            length = block.tokens * block.ulysses_degree // block.sequences
            copies = 4 * queries * keys * share * block.calls / block.ulysses_degree
            scores = block.sums(
                "scores, weights and their gradients", block.heads, length, length, copies=copies
            )
            return *previous, scores, expanded_kv
        case _:
            return *outputs, *previous
