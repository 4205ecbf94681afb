"""Rotary position embedding (Su et al., 2021) by position id, in Hugging Face's rotate-half
layout.

Angles are position times frequency in float64, reduced modulo 2 pi before rounding. In float32 the
relative angle of two tokens 1000 apart is off by 0.05 rad at position 1M. `precision = "float32"`
reproduces Hugging Face bitwise.

Shape suffixes: B batch, S tokens, N heads, H head dim, F frequencies = H / 2.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from models import rope_scaling
from models.rope_config import RopeConfig


@lru_cache(maxsize=64)
def rope_frequencies(
    config: RopeConfig, head_dim: int, device: torch.device | None = None, *, seq_len: int = 0
) -> Tensor:
    """Radians per position [F], in `config.precision`."""
    # Cached because a copy to the device blocks the host.
    if config.precision == "float64":
        values = rope_scaling.frequencies(config, head_dim, seq_len=seq_len)
        return torch.tensor(values, dtype=torch.float64, device=device)
    # transformers' operations in its order: they give bitwise the same float32 numbers.
    powers_F = config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    indices_F = torch.arange(head_dim // 2, dtype=torch.float32)
    return torch.stack(
        rope_scaling.scale_frequencies(config, powers_F, indices_F, seq_len=seq_len)
    ).to(device)


def cos_sin_table(
    config: RopeConfig,
    head_dim: int,
    position_ids_BS: Tensor,
    dtype: torch.dtype,
    *,
    seq_len: int = 0,
) -> Tensor:
    """Cosine and sine of every angle, times the attention factor: [2, B, S, 1, F], in `dtype`.

    Computed once per micro-batch for all layers; `seq_len` is the length of the full sequence.
    """
    frequencies_F = rope_frequencies(config, head_dim, position_ids_BS.device, seq_len=seq_len)
    angles_BSF = position_ids_BS.to(frequencies_F.dtype).unsqueeze(-1) * frequencies_F
    if config.precision == "float64":
        # Reduced before rounding: near position 1M neighbouring float32 numbers are 0.06 apart.
        angles_BSF = angles_BSF.remainder(2 * math.pi).to(dtype)
    cos_sin_2BSF = torch.stack((angles_BSF.cos(), angles_BSF.sin())).mul_(
        rope_scaling.attention_factor(config)
    )
    return cos_sin_2BSF.to(dtype).unsqueeze(3)


def identity_rotation(cos_sin_2BS1F: Tensor) -> Tensor:
    """A table of the same shape that rotates by zero: an expanded view without memory cost."""
    # arange on the device: a copy of [1, 0] to the device would block the host.
    one_zero_2 = torch.arange(1, -1, -1, dtype=cos_sin_2BS1F.dtype, device=cos_sin_2BS1F.device)
    return one_zero_2.view(2, 1, 1, 1, 1).expand_as(cos_sin_2BS1F)


class ApplyRotaryEmb(torch.autograd.Function):
    """Rotation whose backward pass is the inverse rotation (with the same factor); saves no
    activation.
    """

    @staticmethod
    def forward(ctx: Any, x_BSNH: Tensor, cos_BS1F: Tensor, sin_BS1F: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BS1F, sin_BS1F)
        return apply_rotary(x_BSNH, cos_BS1F, sin_BS1F)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos_BS1F, sin_BS1F = ctx.saved_tensors
        return apply_rotary(grads[0], cos_BS1F, sin_BS1F, direction=-1), None, None


def apply_rotary(
    x_BSNH: Tensor, cos_BS1F: Tensor, sin_BS1F: Tensor, *, direction: int = 1
) -> Tensor:
    """`apply_rotary_emb`, below autograd; `direction` -1 rotates back."""
    # The kernels widen x and narrow the result, so that neither is copied; of equal dtypes the
    # sums are in place.
    out_BSNH = torch.empty_like(x_BSNH)
    is_wide = x_BSNH.dtype == cos_BS1F.dtype
    product_BSNH = out_BSNH if is_wide else torch.empty_like(x_BSNH, dtype=cos_BS1F.dtype)
    x_BSN2F = _halves(x_BSNH)
    product_BSN2F = _halves(product_BSNH)
    torch.mul(x_BSN2F, cos_BS1F.unsqueeze(-2), out=product_BSN2F)
    left, right = x_BSN2F.unbind(-2)
    product_left, product_right = product_BSN2F.unbind(-2)
    out_left, out_right = _halves(out_BSNH).unbind(-2)
    # (left, right) become (left cos - right sin, right cos + left sin); turning back negates sin.
    torch.addcmul(product_left, right, sin_BS1F, value=-direction, out=out_left)
    torch.addcmul(product_right, left, sin_BS1F, value=direction, out=out_right)
    return out_BSNH


def _halves(x_BSNH: Tensor) -> Tensor:
    return x_BSNH.view(*x_BSNH.shape[:-1], 2, x_BSNH.shape[-1] // 2)


def apply_rotary_emb(x_BSNH: Tensor, cos_sin_2BS1F: Tensor) -> Tensor:
    """Rotates each pair (x[i], x[i + F]) by its angle, computed in the table's dtype; returns x's
    dtype. Dimensions from 2 F on stay as they are.
    """
    rotary_dim = 2 * cos_sin_2BS1F.shape[-1]
    if rotary_dim < x_BSNH.shape[-1]:
        rotated, rest = x_BSNH.tensor_split([rotary_dim], dim=-1)
        return torch.cat((apply_rotary_emb(rotated, cos_sin_2BS1F), rest), dim=-1)
    cos_BS1F, sin_BS1F = cos_sin_2BS1F.unbind(0)
    # Dynamo of torch 2.11 loses the gradient of the function below.
    if torch.compiler.is_compiling():
        left, right = x_BSNH.to(cos_BS1F.dtype).chunk(2, dim=-1)
        halves = left * cos_BS1F - right * sin_BS1F, right * cos_BS1F + left * sin_BS1F
        return torch.cat(halves, dim=-1).to(x_BSNH.dtype)
    rotate = ApplyRotaryEmb.apply if torch.is_grad_enabled() else apply_rotary
    out_BSNH: Tensor = rotate(x_BSNH, cos_BS1F, sin_BS1F)
    return out_BSNH
