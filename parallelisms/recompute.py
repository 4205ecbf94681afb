"""Activation checkpointing (Chen et al., 2016): what the backward pass computes again."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models.transformer import Layer, Transformer

Policy = Literal["none", "full"]


def recompute_everything(layer: Layer, x_BSE: Tensor, rotation_2BS1F: Tensor, boundaries_BD: Tensor) -> Tensor:
    """Keeps a block's input only. Nothing in a block draws random numbers, so their state is not kept."""
    out: Tensor = checkpoint(layer, x_BSE, rotation_2BS1F, boundaries_BD, use_reentrant=False, preserve_rng_state=False)
    return out


def apply(model: Transformer, *, policy: Policy) -> None:
    if policy == "full":
        for block in model.layers():
            block.policy = recompute_everything
