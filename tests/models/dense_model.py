"""The model of a configuration in plain matrix operations: no module, kernel, tile or operator of
the product.

Only scaled rotary frequencies are the product's; `test_rope_scaling.py` has their reference.

Shape suffixes: B batch, S tokens, N heads, H head dim, F rotary frequencies, E model dim, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from models.batch import IGNORE_INDEX, Batch
from models.config import ModelConfig
from models.rope_config import RopeConfig
from models.rope_scaling import attention_factor, frequencies
from models.transformer import Transformer
from tests.models.dense_attention import dense

Weights = Mapping[str, Tensor]


class RouterLosses(NamedTuple):
    """Weights of the losses of routers, means over the tokens with a target."""

    balance: float = 0.0
    balances_sequences: bool = False
    z: float = 0.0


NO_ROUTER_LOSSES = RouterLosses()


def dense_gradients(
    model: Transformer, batch: Batch, router_losses: RouterLosses = NO_ROUTER_LOSSES
) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses, and the gradient of their mean over targets for each of the model's weights."""
    weights = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in model.named_parameters()
    }
    added = list[Tensor]()
    losses_BS = dense_losses(
        model.config, weights | dict(model.named_buffers()), batch, router_losses, added
    )
    ((losses_BS.sum() + sum(added)) / (batch.labels != IGNORE_INDEX).sum()).backward()
    return losses_BS.detach(), {
        name: weight.grad for name, weight in weights.items() if weight.grad is not None
    }


def dense_losses(
    config: ModelConfig,
    weights: Weights,
    batch: Batch,
    router_losses: RouterLosses = NO_ROUTER_LOSSES,
    added: list[Tensor] | None = None,
) -> Tensor:
    """[B, S], zero where there is no label. To `added` go the sums of the losses of routers."""
    x_BSE = weights["embed.weight"][batch.tokens] * config.embedding_multiplier
    for layer in range(config.num_layers):
        prefix = f"blocks.{layer}."
        own = {
            name.removeprefix(prefix): weight
            for name, weight in weights.items()
            if name.startswith(prefix)
        }
        kind: Any = config.layers[layer % len(config.layers)] if config.layers else config
        x_BSE = _block(config, kind, _rope(config, layer), own, x_BSE, batch, router_losses, added)
    x_BSE = _norm(config, x_BSE, weights["head.norm.weight"])
    logits_BSV = (
        x_BSE @ weights.get("head.proj.weight", weights["embed.weight"]).T / config.logits_scaling
    )
    if config.logit_softcap is not None:
        logits_BSV = config.logit_softcap * (logits_BSV / config.logit_softcap).tanh()
    return F.cross_entropy(
        logits_BSV.flatten(0, 1), batch.labels.flatten(), reduction="none"
    ).view_as(batch.labels)


def _rope(config: ModelConfig, layer: int) -> RopeConfig | None:
    if config.layers:
        by_name = {"global": config.rope, "local": config.local_rope, "none": None}
        return by_name[config.layers[layer % len(config.layers)].rope]
    return (
        None
        if config.nope_every is not None and (layer + 1) % config.nope_every == 0
        else config.rope
    )


def _block(
    config: ModelConfig,
    kind: Any,
    rope: RopeConfig | None,
    weights: Weights,
    x_BSE: Tensor,
    batch: Batch,
    router_losses: RouterLosses,
    added: list[Tensor] | None,
) -> Tensor:
    """`kind`: the layer's options, which a configuration without a pattern of layers has
    itself.
    """
    for module, norm in (("attention", "attention"), ("feed_forward", "ffn")):
        out_BSE = x_BSE
        if kind.norms in ("pre", "sandwich"):
            out_BSE = _norm(config, out_BSE, weights[f"{norm}_norm.weight"])
        own = {
            name.removeprefix(f"{module}."): each
            for name, each in weights.items()
            if name.startswith(f"{module}.")
        }
        if module == "attention":
            out_BSE = _attention(config, kind, rope, own, out_BSE, batch)
        elif kind.feed_forward == "moe":
            if added is not None:
                added.append(
                    _router_loss(config, own, out_BSE, batch.labels != IGNORE_INDEX, router_losses)
                )
            out_BSE = _mixture(config, kind, own, out_BSE)
        else:
            products = (out_BSE @ own[f"{name}_proj.weight"].T for name in ("gate", "up"))
            out_BSE = _gated(kind, *products) @ own["down_proj.weight"].T
        if kind.norms in ("post", "sandwich"):
            out_BSE = _norm(config, out_BSE, weights[f"{norm}_post_norm.weight"])
        x_BSE = x_BSE + config.residual_multiplier * out_BSE
    return x_BSE


def _norm(config: ModelConfig, x: Tensor, weight: Tensor) -> Tensor:
    scale = 1 + weight if config.zero_centered_norms else weight
    return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * scale


def _attention(
    config: ModelConfig,
    kind: Any,
    rope: RopeConfig | None,
    weights: Weights,
    x_BSE: Tensor,
    batch: Batch,
) -> Tensor:
    q, k, v = (x_BSE @ weights[f"{name}_proj.weight"].T for name in "qkv")
    if kind.qkv_bias:
        q, k, v = (
            x + weights[f"{name}_proj.bias"] for x, name in zip((q, k, v), "qkv", strict=True)
        )
    if kind.full_qk_norm:
        q, k = (
            _norm(config, x, weights[f"wide_{name}_norm.weight"])
            for x, name in ((q, "q"), (k, "k"))
        )
    q, k, v = (x.unflatten(-1, (-1, config.head_dim)) for x in (q, k, v))
    if kind.qk_norm:
        q, k = (
            _norm(config, x, weights[f"{name}_norm.weight"]) for x, name in ((q, "q"), (k, "k"))
        )
    if rope is not None:
        q, k = (_rotated(x, rope, batch.positions) for x in (q, k))
    if config.attention_scale is not None:
        q = q * config.attention_scale * config.head_dim**0.5  # `dense` divides by the root.
    sinks = weights["sinks"] if kind.sink else None
    out_BSNH, _ = dense(q, k, v, batch.boundaries, sinks, window=kind.window, softcap=kind.softcap)
    projected_BSE: Tensor = out_BSNH.flatten(-2) @ weights["o_proj.weight"].T + weights.get(
        "o_proj.bias", 0
    )
    return projected_BSE


def _rotated(x_BSNH: Tensor, rope: RopeConfig, positions_BS: Tensor) -> Tensor:
    """Each pair (x[i], x[i + F]) as a complex number, times that of its angle."""
    rotated_dim = int(x_BSNH.shape[-1] * rope.partial)
    x_BSNH, rest_BSNH = x_BSNH[..., :rotated_dim], x_BSNH[..., rotated_dim:]
    half = rotated_dim // 2
    frequencies_F = rope.theta ** (-torch.arange(half, dtype=torch.float64) / half)
    if rope.kind != "default":
        frequencies_F = torch.tensor(frequencies(rope, 2 * half, seq_len=0), dtype=torch.float64)
    turns_BS1F = torch.exp(1j * positions_BS[..., None, None] * frequencies_F) * attention_factor(
        rope
    )
    rotated = torch.complex(x_BSNH[..., :half], x_BSNH[..., half:]) * turns_BS1F
    return torch.cat((rotated.real, rotated.imag, rest_BSNH), -1)


def _gated(kind: Any, gate: Tensor, up: Tensor) -> Tensor:
    if kind.activation == "silu":
        return gate * gate.sigmoid() * up
    if kind.activation == "clamped_swiglu":
        gate = gate.clamp(max=7)
        up = up.clamp(-7, 7)
        return (up + 1) * gate * (1.702 * gate).sigmoid()
    gelu: Tensor = gate / 2 * (1 + ((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh())
    return gelu * up


def _mixture(config: ModelConfig, kind: Any, weights: Weights, x_BSE: Tensor) -> Tensor:
    """Every expert of every token, most of them times zero."""
    logits_BSX = _router_logits(weights, x_BSE)
    scores_BSX = _router_scores(config, logits_BSX)
    weight_BSX = scores_BSX * _chosen(config, weights, scores_BSX)
    if config.normalize_top_k:
        weight_BSX = weight_BSX / weight_BSX.sum(-1, keepdim=True)
    out_BSE = torch.zeros_like(x_BSE)
    for expert in range(config.num_experts):
        own = {
            name.removeprefix("experts."): each[expert]
            for name, each in weights.items()
            if name.startswith("experts.")
        }
        gate, up = (
            x_BSE @ own[f"{name}_proj"].T + own.get(f"{name}_bias", 0) for name in ("gate", "up")
        )
        expert_BSE = _gated(kind, gate, up) @ own["down_proj"].T + own.get("down_bias", 0)
        out_BSE = out_BSE + config.router_scaling * weight_BSX[..., expert, None] * expert_BSE
    if kind.shared_expert:
        gate, up = (x_BSE @ weights[f"shared_{name}_proj.weight"].T for name in ("gate", "up"))
        out_BSE = out_BSE + _gated(kind, gate, up) @ weights["shared_down_proj.weight"].T
    return out_BSE


def _router_logits(weights: Weights, x_BSE: Tensor) -> Tensor:
    logits_BSX: Tensor = x_BSE @ weights["router.weight"].T + weights.get("router.bias", 0)
    return logits_BSX


def _router_scores(config: ModelConfig, logits_BSX: Tensor) -> Tensor:
    return logits_BSX.sigmoid() if config.router == "sigmoid" else logits_BSX.softmax(-1)


def _chosen(config: ModelConfig, weights: Weights, scores_BSX: Tensor) -> Tensor:
    """1 for the experts of a token, else 0."""
    chosen_BSX = torch.zeros_like(scores_BSX)
    corrected_BSX = (scores_BSX + weights.get("correction_bias", 0)).detach()
    size = config.num_experts // config.expert_groups
    for corrected, chosen in zip(
        corrected_BSX.flatten(0, 1).tolist(),
        chosen_BSX.view(-1, chosen_BSX.shape[-1]),
        strict=True,
    ):
        groups = [[*range(first, first + size)] for first in range(0, config.num_experts, size)]
        groups.sort(
            key=lambda group: -sum(sorted((corrected[each] for each in group), reverse=True)[:2])
        )
        allowed = sorted(expert for group in groups[: config.top_k_groups] for expert in group)
        for expert in sorted(allowed, key=lambda each: -corrected[each])[: config.top_k]:
            chosen[expert] = 1
    return chosen_BSX


def _router_loss(
    config: ModelConfig,
    weights: Weights,
    x_BSE: Tensor,
    is_target_BS: Tensor,
    losses: RouterLosses,
) -> Tensor:
    """Summed over tokens with a target."""
    logits_BSX = _router_logits(weights, x_BSE)
    scores_BSX = _router_scores(config, logits_BSX)
    share_BSX = scores_BSX / scores_BSX.sum(-1, keepdim=True)
    load_BSX = weights["last_load"].expand_as(share_BSX)
    if losses.balances_sequences:
        counts_B1X = (_chosen(config, weights, scores_BSX) * is_target_BS[..., None]).sum(
            1, keepdim=True
        )
        load_BSX = counts_B1X / counts_B1X.mean(-1, keepdim=True)
    loss_BS = (
        losses.balance * (load_BSX * share_BSX).sum(-1) + losses.z * logits_BSX.logsumexp(-1) ** 2
    )
    total: Tensor = (loss_BS * is_target_BS).sum()
    return total
