"""cuDNN's attention without cuDNN: checks what torch would pass to it, and returns tensors of the
right shapes.

Shape suffixes: B sequences, N query heads, K KV heads, X queries, Y keys, H head dim.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


@cache
def replace_cudnn_attention() -> torch.library.Library:
    """From now on torch's cuDNN attention on CUDA tensors is this.

    The library returned must live as long.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", forward, "CUDA")
    library.impl("_scaled_dot_product_cudnn_attention_backward", backward, "CUDA")
    return library


def forward(
    q_BNXH: Tensor,
    k_BKYH: Tensor,
    v_BKYH: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,  # noqa: FBT001 - torch's signature
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    return_debug_mask: bool = False,  # noqa: FBT001, FBT002
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, None]:
    check(q_BNXH, k_BKYH, v_BKYH, is_causal=is_causal)
    assert (attn_bias, compute_log_sumexp, dropout_p, return_debug_mask, scale) == (
        None,
        True,
        0.0,
        False,
        None,
    )
    # In memory as the queries are, and one number for each of them.
    out = torch.empty_like(q_BNXH)
    lse = q_BNXH.new_empty((*q_BNXH.shape[:3], 1), dtype=torch.float32)
    state = q_BNXH.new_empty((), dtype=torch.int64)
    return out, lse, None, None, q_BNXH.shape[2], k_BKYH.shape[2], state, state, None


def backward(
    grad_BNXH: Tensor,
    q_BNXH: Tensor,
    k_BKYH: Tensor,
    v_BKYH: Tensor,
    out_BNXH: Tensor,
    lse_BNX1: Tensor,
    seed: Tensor,
    offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,  # noqa: FBT001
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    check(q_BNXH, k_BKYH, v_BKYH, is_causal=is_causal)
    assert (attn_bias, cum_seq_q, cum_seq_k, dropout_p, scale) == (None, None, None, 0.0, None)
    assert (max_q, max_k) == (q_BNXH.shape[2], k_BKYH.shape[2])
    assert (seed.dtype, offset.dtype) == (torch.int64, torch.int64)
    assert grad_BNXH.shape == out_BNXH.shape == q_BNXH.shape
    assert grad_BNXH.dtype == out_BNXH.dtype == q_BNXH.dtype
    assert lse_BNX1.shape == (*q_BNXH.shape[:3], 1)
    assert (lse_BNX1.dtype, lse_BNX1.is_contiguous()) == (torch.float32, True)
    return torch.empty_like(q_BNXH), torch.empty_like(k_BKYH), torch.empty_like(v_BKYH)


def check(q_BNXH: Tensor, k_BKYH: Tensor, v_BKYH: Tensor, *, is_causal: bool) -> None:
    """What cuDNN's attention takes: 16-bit tensors with adjacent numbers of a head, and more than
    one query and key.
    """
    batch, num_heads, num_queries, head_dim = q_BNXH.shape
    _, num_kv_heads, num_keys, _ = k_BKYH.shape
    assert k_BKYH.shape == v_BKYH.shape == (batch, num_kv_heads, num_keys, head_dim)
    assert num_heads % num_kv_heads == 0
    assert head_dim % 8 == 0
    assert head_dim <= 128
    assert min(num_queries, num_keys) > 1
    assert num_queries == num_keys or not is_causal
    for tensor in (q_BNXH, k_BKYH, v_BKYH):
        assert tensor.dtype == q_BNXH.dtype
        assert tensor.dtype in HALF
        assert tensor.device == q_BNXH.device
        assert tensor.stride(-1) == 1
