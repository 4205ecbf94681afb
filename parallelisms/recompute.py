"""Activation checkpointing (Chen et al., 2016): what the backward pass computes again, block by block or by tiles."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from models import tiles
from models.transformer import Layer, Transformer

Policy = Literal["none", "full", "keep_attention"]

ATTENTION = ("attention", "context_attention")


def recompute_everything(layer: Layer, x_BSE: Tensor, rotation_2BS1F: Tensor, boundaries_BD: Tensor) -> Tensor:
    """Keeps a block's input only. Nothing in a block draws random numbers, so their state is not kept."""
    out: Tensor = checkpoint(layer, x_BSE, rotation_2BS1F, boundaries_BD, use_reentrant=False, preserve_rng_state=False)
    return out


def recompute_all_but_attention(layer: Layer, x_BSE: Tensor, rotation_2BS1F: Tensor, boundaries_BD: Tensor) -> Tensor:
    """Keeps a block's input, and attention's output and log-sum-exp, which take longest to compute (DISTFLASHATTN,
    Li et al., 2024).
    """
    out: Tensor = checkpoint(
        layer,
        x_BSE,
        rotation_2BS1F,
        boundaries_BD,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=partial(create_selective_checkpoint_contexts, _keep_attention),
    )
    return out


def apply(model: Transformer, *, policy: Policy) -> None:
    policies = {"full": recompute_everything, "keep_attention": recompute_all_but_attention}
    if policy in policies:
        for block in model.layers():
            block.policy = policies[policy]


def apply_tiles(model: Transformer, *, mib: int | None) -> None:
    """Lets feed-forwards keep nothing but their input, and compute it again tile by tile, whatever their block does."""
    if mib is not None:
        for block in model.layers():
            block.feed_forward.run = partial(tiles.feed_forward, limit=mib << 20)


def is_attention(operator: Any) -> bool:
    """Whether this operator attends, forward, on one rank or over rows that ranks share."""
    namespace = torch.ops.longhaul
    return operator in [getattr(namespace, name).default for name in ATTENTION if hasattr(namespace, name)]


def _keep_attention(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    del context, arguments, options
    return CheckpointPolicy.MUST_SAVE if is_attention(operator) else CheckpointPolicy.PREFER_RECOMPUTE
