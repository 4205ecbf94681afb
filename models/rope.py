"""Rotary position embedding (Su et al., 2021) by position, in the rotate-half layout of Hugging Face.

Shape suffixes: B rows, S tokens, N heads, H head width, F frequencies = H / 2.

Angles are products of position and frequency in float64, reduced before they are rounded: in float32 the relative
angle of two tokens 1000 apart is off by 0.05 rad at position 1M.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from models.config import RopeConfig


def frequencies(config: RopeConfig, head_dim: int, device: torch.device | None = None) -> Tensor:
    """Radians per position, float64 [F]; `llama3` stretches long wavelengths as Llama 3.1's release does."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    base_F = config.theta**-exponents
    if config.kind == "default":
        return base_F
    turns_F = config.original_length * base_F / (2 * math.pi)
    low, high = config.low_freq_factor, config.high_freq_factor
    kept_F = ((turns_F - low) / (high - low)).clamp(0, 1)
    return base_F * (kept_F + (1 - kept_F) / config.factor)


def rotation(config: RopeConfig, head_dim: int, positions_BS: Tensor, dtype: torch.dtype) -> Tensor:
    """Cosine and sine of every angle, [2, B, S, 1, F], in `dtype`; computed once a step for all layers."""
    frequencies_F = frequencies(config, head_dim, positions_BS.device)
    angles_BSF = (positions_BS.to(torch.float64).unsqueeze(-1) * frequencies_F).remainder(2 * math.pi)
    angles_BSF = angles_BSF.to(dtype)
    return torch.stack((angles_BSF.cos(), angles_BSF.sin())).unsqueeze(3)


class Rotation(torch.autograd.Function):
    """Turns by the angles; the backward pass turns back by them, and keeps no activation."""

    @staticmethod
    def forward(ctx: Any, x_BSNH: Tensor, cos_BS1F: Tensor, sin_BS1F: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BS1F, sin_BS1F)
        return turn(x_BSNH, cos_BS1F, sin_BS1F)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos_BS1F, sin_BS1F = ctx.saved_tensors
        return turn(grads[0], cos_BS1F, -sin_BS1F), None, None


def turn(x_BSNH: Tensor, cos_BS1F: Tensor, sin_BS1F: Tensor) -> Tensor:
    """What `rotate` computes, below autograd."""
    # Written half by half into one tensor: a temporary per product would leave holes in the heap of a CPU run.
    left, right = x_BSNH.to(cos_BS1F.dtype).chunk(2, dim=-1)
    out_BSNH = torch.empty_like(x_BSNH, dtype=cos_BS1F.dtype)
    out_left, out_right = out_BSNH.chunk(2, dim=-1)
    out_left.copy_(left).mul_(cos_BS1F).addcmul_(right, sin_BS1F, value=-1)
    out_right.copy_(right).mul_(cos_BS1F).addcmul_(left, sin_BS1F)
    return out_BSNH.to(x_BSNH.dtype)


def rotate(x_BSNH: Tensor, rotation_2BS1F: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + F]) by its angle, in the rotation's precision; returns x's dtype."""
    cos_BS1F, sin_BS1F = rotation_2BS1F.unbind(0)
    out_BSNH: Tensor = Rotation.apply(x_BSNH, cos_BS1F, sin_BS1F)
    return out_BSNH
