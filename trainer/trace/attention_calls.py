"""Calls of attention kernels: their FLOPs, and the scratch memory that they allocate beside inputs
and outputs.

Kernels are opaque to a trace, so the scratch is a table, taken from what the kernels' host code
allocates:

    flash       FlashAttention 2, csrc/flash_attn/flash_api.cpp, mha_varlen_bwd; the same in ATen/native/transformers/cuda
    cudnn       cudnn_frontend, node/scaled_dot_product_flash_attention.h, the backward node's tensors
    efficient   ATen/native/transformers/cuda/attention_backward.cu
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from sys import maxsize
from typing import Any, NamedTuple

import torch

aten = torch.ops.aten
WIDTH_MULTIPLE = 32
MULTIPROCESSORS = 132
"""An H100 has as many: a deterministic FlashAttention 2 sums the gradient of queries in parts that
fill them.
"""
FLASH_PADDING = 128
"""Tokens by which FlashAttention's backward pads each sequence."""


class AttentionCall(NamedTuple):
    """One kernel call."""

    kernel: str
    """Name of the kernel in `training.attention`."""
    products: int
    """Products of matrices of scores: two forward, five backward."""
    pairs: float
    """(query, key) pairs, summed over the sequences and heads of queries."""
    keys: int
    """Keys that the last query of a sequence sees, on average over all pairs."""
    head_dim: int

    @property
    def flops(self) -> int:
        return int(2 * self.products * self.head_dim * self.pairs)


def _dense(
    args: Sequence[Any], kernel: str, products: int, first: int, causal: int
) -> AttentionCall:
    """Call of a kernel that takes heads first: [B, N, Q, H] and [B, K, S, H].

    `first` and `causal` are indices of the queries and of the flag.
    """
    q = args[first]
    k = args[first + 1]
    batch, heads, queries, head_dim = q.shape
    # Defaults at the end of a call are left out: a slice, where an index would raise.
    is_causal = args[causal : causal + 1] == (True,)
    keys = k.shape[2]
    pairs = queries * (queries + 1) // 2 if is_causal else queries * keys
    return AttentionCall(kernel, products, batch * heads * pairs, keys, head_dim)


def _varlen(
    args: Sequence[Any], products: int, first: int, kwargs: dict[str, Any]
) -> AttentionCall:
    """Call of a kernel that takes [X, N, H] of sequences one after the other, whose boundaries
    follow. `first` is the index of the queries.
    """
    q = args[first]
    # The output and its log-sum-exp come between.
    after = first + 3 if products == 2 else first + 5
    ends_q, ends_k, _, _, _, is_causal = args[after : after + 6]
    window = kwargs.get("window_size_left")
    seen = maxsize if window is None else window + 1
    lengths = [*zip(ends_q.diff().tolist(), ends_k.diff().tolist(), strict=True)]
    pairs = [
        _causal_pairs(queries, keys, seen) if is_causal else queries * keys
        for queries, keys in lengths
    ]
    total = sum(pairs)
    # Weighted by pairs: long sequences take most of the time, and their length sets the rate.
    keys = sum(
        each * min(keys, seen) for each, (_, keys) in zip(pairs, lengths, strict=True)
    ) // max(1, total)
    return AttentionCall("flash", products, q.shape[1] * total, keys, q.shape[2])


def _causal_pairs(queries: int, keys: int, window: int) -> int:
    """(query, key) pairs of a causal mask in which the last query sees the last key, and at most
    `window` keys.
    """
    seen = min(window, keys)
    first = keys - queries + 1  # Keys that the first query may see.
    # Each query sees one key more than the one before, until the window is full.
    growing = max(0, min(queries, seen - first + 1))
    return growing * first + growing * (growing - 1) // 2 + (queries - growing) * seen


def _flash_scratch(args: Sequence[Any], *, deterministic: bool) -> int:
    q = args[1]
    k = args[2]
    sequences = len(args[6]) - 1
    tokens, heads, head_dim = q.shape
    padded = tokens + FLASH_PADDING * sequences
    # Separate sums take the place of atomic additions.
    parts = ceil(MULTIPROCESSORS / (sequences * heads)) if deterministic else 1
    # Float32 sums of the gradient of queries, and one number per row.
    sums = 4 * padded * heads * (parts * _rounded(head_dim) + 1)
    # Gradients of keys and values for every query head.
    expanded = 2 * len(k) * heads * head_dim * q.element_size()
    return int(sums + (expanded if k.shape[1] < heads else 0))


def _cudnn_scratch(args: Sequence[Any], **_: bool) -> int:
    q = args[1]
    k = args[2]
    batch, heads, queries, head_dim = q.shape
    sums = batch * heads * queries * (head_dim * q.element_size() + 4 * (_rounded(head_dim) + 1))
    expanded = 2 * batch * heads * k.shape[2] * head_dim * q.element_size()
    return int(sums + (expanded if k.shape[1] < heads else 0))


def _efficient_scratch(args: Sequence[Any], **_: bool) -> int:
    batch, heads, queries, head_dim = args[1].shape
    return int(4 * batch * heads * queries * (_rounded(head_dim) + 1))


def _rounded(head_dim: int) -> int:
    return -(-head_dim // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


Reader = Callable[[Sequence[Any], dict[str, Any]], AttentionCall]


CALLS: dict[Any, Reader] = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda args, _: _dense(args, "cpu", 2, 0, 4),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda args, _: _dense(
        args, "cpu", 5, 1, 7
    ),
    aten._flash_attention_forward: lambda args, kwargs: _varlen(args, 2, 0, kwargs),
    aten._flash_attention_backward: lambda args, kwargs: _varlen(args, 5, 1, kwargs),
    aten._scaled_dot_product_cudnn_attention: lambda args, _: _dense(args, "cudnn", 2, 0, 6),
    aten._scaled_dot_product_cudnn_attention_backward: lambda args, _: _dense(
        args, "cudnn", 5, 1, 14
    ),
    aten._scaled_dot_product_efficient_attention: lambda args, _: _dense(
        args, "efficient", 2, 0, 6
    ),
    aten._scaled_dot_product_efficient_attention_backward: lambda args, _: _dense(
        args, "efficient", 5, 1, 11
    ),
}
"""How to read a call of an operator."""
SCRATCH: dict[Any, Callable[..., int]] = {
    aten._flash_attention_backward: _flash_scratch,
    aten._scaled_dot_product_cudnn_attention_backward: _cudnn_scratch,
    aten._scaled_dot_product_efficient_attention_backward: _efficient_scratch,
}


def attention_call(
    packet: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> AttentionCall | None:
    """The call of an attention kernel; None for any other operator.

    Shapes are those of `models/kernels.py`, whose integers are real.
    """
    read = CALLS.get(packet)
    return None if read is None else read(args, kwargs)


def scratch_bytes(packet: Any, args: Sequence[Any], *, deterministic: bool) -> int:
    """Memory that a kernel allocates and frees while it runs. `deterministic`: on a GPU."""
    scratch = SCRATCH.get(packet)
    return 0 if scratch is None else scratch(args, deterministic=deterministic)
