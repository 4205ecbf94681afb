"""The model of a configuration in plain matrix operations: no module, kernel, tile or operator of the product.

Only scaled rotary frequencies are the product's; `test_rope_scaling.py` has their reference.

Shape suffixes: B batch, S tokens, N heads, H head dim, F rotary frequencies, E model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from models.batch import IGNORE_INDEX, Batch
from models.config import ModelConfig, RopeConfig
from models.rope_scaling import attention_factor, frequencies
from models.transformer import Transformer
from tests.models.dense_attention import dense

Weights = Mapping[str, Tensor]


def dense_gradients(model: Transformer, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses, and the gradient of their mean over targets for each of the model's weights."""
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    losses_BS = dense_losses(model.config, weights, batch)
    (losses_BS.sum() / (batch.labels != IGNORE_INDEX).sum()).backward()
    return losses_BS.detach(), {name: weight.grad for name, weight in weights.items() if weight.grad is not None}


def dense_losses(config: ModelConfig, weights: Weights, batch: Batch) -> Tensor:
    """[B, S], zero where there is no label."""
    x_BSE = weights["embed.weight"][batch.tokens] * config.embedding_multiplier
    for layer in range(config.num_layers):
        prefix = f"blocks.{layer}."
        own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        kind: Any = config.layers[layer % len(config.layers)] if config.layers else config
        x_BSE = _block(config, kind, _rope(config, layer), own, x_BSE, batch)
    x_BSE = _norm(config, x_BSE, weights["head.norm.weight"])
    logits_BSV = x_BSE @ weights.get("head.proj.weight", weights["embed.weight"]).T / config.logits_scaling
    if config.logit_softcap is not None:
        logits_BSV = config.logit_softcap * (logits_BSV / config.logit_softcap).tanh()
    return F.cross_entropy(logits_BSV.flatten(0, 1), batch.labels.flatten(), reduction="none").view_as(batch.labels)


def _rope(config: ModelConfig, layer: int) -> RopeConfig | None:
    if config.layers:
        by_name = {"global": config.rope, "local": config.local_rope, "none": None}
        return by_name[config.layers[layer % len(config.layers)].rope]
    return None if config.nope_every is not None and (layer + 1) % config.nope_every == 0 else config.rope


def _block(
    config: ModelConfig, kind: Any, rope: RopeConfig | None, weights: Weights, x_BSE: Tensor, batch: Batch
) -> Tensor:
    """`kind`: the layer's options, which a configuration without a pattern of layers has itself."""
    for module, norm in (("attention", "attention"), ("feed_forward", "ffn")):
        out_BSE = x_BSE
        if kind.norms in ("pre", "sandwich"):
            out_BSE = _norm(config, out_BSE, weights[f"{norm}_norm.weight"])
        own = {name.removeprefix(f"{module}."): each for name, each in weights.items() if name.startswith(f"{module}.")}
        if module == "attention":
            out_BSE = _attention(config, kind, rope, own, out_BSE, batch)
        else:
            out_BSE = _feed_forward(kind, own, out_BSE)
        if kind.norms in ("post", "sandwich"):
            out_BSE = _norm(config, out_BSE, weights[f"{norm}_post_norm.weight"])
        x_BSE = x_BSE + config.residual_multiplier * out_BSE
    return x_BSE


def _norm(config: ModelConfig, x: Tensor, weight: Tensor) -> Tensor:
    scale = 1 + weight if config.zero_centered_norms else weight
    return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * scale


def _attention(
    config: ModelConfig, kind: Any, rope: RopeConfig | None, weights: Weights, x_BSE: Tensor, batch: Batch
) -> Tensor:
    q, k, v = (x_BSE @ weights[f"{name}_proj.weight"].T for name in "qkv")
    if kind.qkv_bias:
        q, k, v = (x + weights[f"{name}_proj.bias"] for x, name in zip((q, k, v), "qkv", strict=True))
    if kind.full_qk_norm:
        q, k = (_norm(config, x, weights[f"wide_{name}_norm.weight"]) for x, name in ((q, "q"), (k, "k")))
    q, k, v = (x.unflatten(-1, (-1, config.head_dim)) for x in (q, k, v))
    if kind.qk_norm:
        q, k = (_norm(config, x, weights[f"{name}_norm.weight"]) for x, name in ((q, "q"), (k, "k")))
    if rope is not None:
        q, k = (_rotated(x, rope, batch.positions) for x in (q, k))
    if config.attention_scale is not None:
        q = q * config.attention_scale * config.head_dim**0.5  # `dense` divides by the root.
    sinks = weights["sinks"] if kind.sink else None
    out_BSNH, _ = dense(q, k, v, batch.boundaries, sinks, window=kind.window, softcap=kind.softcap)
    return out_BSNH.flatten(-2) @ weights["o_proj.weight"].T


def _rotated(x_BSNH: Tensor, rope: RopeConfig, positions_BS: Tensor) -> Tensor:
    """Each pair (x[i], x[i + F]) as a complex number, times that of its angle."""
    half = x_BSNH.shape[-1] // 2
    frequencies_F = rope.theta ** (-torch.arange(half, dtype=torch.float64) / half)
    if rope.kind != "default":
        frequencies_F = torch.tensor(frequencies(rope, 2 * half, seq_len=0), dtype=torch.float64)
    turns_BS1F = torch.exp(1j * positions_BS[..., None, None] * frequencies_F) * attention_factor(rope)
    rotated = torch.complex(x_BSNH[..., :half], x_BSNH[..., half:]) * turns_BS1F
    return torch.cat((rotated.real, rotated.imag), -1)


def _feed_forward(kind: Any, weights: Weights, x_BSE: Tensor) -> Tensor:
    gate, up = (x_BSE @ weights[f"{name}_proj.weight"].T for name in ("gate", "up"))
    if kind.activation == "silu":
        gate = gate * gate.sigmoid()
    else:
        gate = gate / 2 * (1 + ((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh())
    return (gate * up) @ weights["down_proj.weight"].T
