"""Rotary position embedding (Su et al., 2021) by position, in the rotate-half layout of Hugging Face.

Shape suffixes: B rows, S tokens, N heads, H head width, F frequencies = H / 2.

Angles are products of position and frequency in float64, reduced before they are rounded: in float32 the relative
angle of two tokens 1000 apart is off by 0.05 rad at position 1M. `precision = "float32"` asks for just that, bit by bit
as Hugging Face has it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from models import rope_scaling
from models.config import RopeConfig


@lru_cache(maxsize=64)
def rope_frequencies(
    config: RopeConfig, head_dim: int, device: torch.device | None = None, *, seq_len: int = 0
) -> Tensor:
    """Radians per position [F], in the configuration's precision."""
    # Kept, because a copy to the device would wait for it, in every batch.
    if config.precision == "float64":
        values = rope_scaling.frequencies(config, head_dim, seq_len=seq_len)
        return torch.tensor(values, dtype=torch.float64, device=device)
    powers_F = config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    indices_F = torch.arange(head_dim // 2, dtype=torch.float32)
    return torch.stack(rope_scaling.scale_frequencies(config, powers_F, indices_F, seq_len=seq_len)).to(device)


def cos_sin_table(
    config: RopeConfig, head_dim: int, position_ids_BS: Tensor, dtype: torch.dtype, *, seq_len: int = 0
) -> Tensor:
    """Cosine and sine of every angle, times the attention factor: [2, B, S, 1, F], in `dtype`.

    Computed once a step for all layers, whose rows have `seq_len` tokens.
    """
    frequencies_F = rope_frequencies(config, head_dim, position_ids_BS.device, seq_len=seq_len)
    angles_BSF = position_ids_BS.to(frequencies_F.dtype).unsqueeze(-1) * frequencies_F
    if config.precision == "float64":
        angles_BSF = angles_BSF.remainder(2 * math.pi).to(dtype)
    cos_sin_2BSF = torch.stack((angles_BSF.cos(), angles_BSF.sin())).mul_(rope_scaling.attention_factor(config))
    return cos_sin_2BSF.to(dtype).unsqueeze(3)


def identity_rotation(cos_sin_2BS1F: Tensor) -> Tensor:
    """The table of the same shape that turns nothing, and takes no room."""
    # Counted down on the device: a list would be copied there, which waits.
    one_zero_2 = torch.arange(1, -1, -1, dtype=cos_sin_2BS1F.dtype, device=cos_sin_2BS1F.device)
    return one_zero_2.view(2, 1, 1, 1, 1).expand_as(cos_sin_2BS1F)


class ApplyRotaryEmb(torch.autograd.Function):
    """Turns by the angles; its transpose turns back by them, times the same factor. Keeps no activation."""

    @staticmethod
    def forward(ctx: Any, x_BSNH: Tensor, cos_BS1F: Tensor, sin_BS1F: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BS1F, sin_BS1F)
        return apply_rotary(x_BSNH, cos_BS1F, sin_BS1F)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos_BS1F, sin_BS1F = ctx.saved_tensors
        return apply_rotary(grads[0], cos_BS1F, -sin_BS1F), None, None


def apply_rotary(x_BSNH: Tensor, cos_BS1F: Tensor, sin_BS1F: Tensor) -> Tensor:
    """What `rotate` computes, below autograd."""
    # Written half by half into one tensor: a temporary per product would leave holes in the heap of a CPU run.
    left, right = x_BSNH.to(cos_BS1F.dtype).chunk(2, dim=-1)
    out_BSNH = torch.empty_like(x_BSNH, dtype=cos_BS1F.dtype)
    out_left, out_right = out_BSNH.chunk(2, dim=-1)
    out_left.copy_(left).mul_(cos_BS1F).addcmul_(right, sin_BS1F, value=-1)
    out_right.copy_(right).mul_(cos_BS1F).addcmul_(left, sin_BS1F)
    return out_BSNH.to(x_BSNH.dtype)


def apply_rotary_emb(x_BSNH: Tensor, cos_sin_2BS1F: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + F]) by its angle, in the rotation's precision; returns x's dtype."""
    cos_BS1F, sin_BS1F = cos_sin_2BS1F.unbind(0)
    out_BSNH: Tensor = ApplyRotaryEmb.apply(x_BSNH, cos_BS1F, sin_BS1F)
    return out_BSNH
