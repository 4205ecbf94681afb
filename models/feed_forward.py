"""Gated feed-forward (Shazeer, 2020): SwiGLU, or GeGLU as in Gemma.

Shape suffixes, after any leading dimensions: E model dim, G feed-forward dim of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from models.config import ModelConfig
from models.layers import LayerKind
from models.sublayer import SublayerModule, Weights

# gpt-oss's limit and slope. An import refuses other values.
CLAMP = 7.0
CLAMPED_SLOPE = 1.702


class SwiGLU(torch.autograd.Function):
    """`silu(gate) * up`, differentiated within four tensors of this size, the gradients of gate
    and up included.

    Overwrites `up`, which autograd refuses to anything else that saved it for a later backward
    pass.
    """

    @staticmethod
    def forward(ctx: Any, gate_G: Tensor, up_G: Tensor) -> Tensor:
        activated_G = F.silu(gate_G)
        ctx.save_for_backward(gate_G, up_G, activated_G)
        return activated_G * up_G

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad_G,) = grads
        gate_G, up_G, activated_G = ctx.saved_tensors
        # out = silu(gate) up: the gradient of up is grad silu(gate), that of gate is grad up
        # silu'(gate). Each is written over a tensor that nothing needs any more.
        grad_up_G = activated_G.mul_(grad_G)
        grad_activated_G = up_G.mul_(grad_G)
        inputs = grad_activated_G, gate_G
        return torch.ops.aten.silu_backward.grad_input(
            *inputs, grad_input=grad_activated_G
        ), grad_up_G


def swiglu(gate_G: Tensor, up_G: Tensor) -> Tensor:
    # Dynamo of torch 2.11 differentiates what writes in place wrongly.
    if torch.compiler.is_compiling():
        return F.silu(gate_G) * up_G
    if not torch.is_grad_enabled():
        return F.silu(gate_G).mul_(up_G)
    out: Tensor = SwiGLU.apply(gate_G, up_G)
    return out


def geglu(gate_G: Tensor, up_G: Tensor) -> Tensor:
    return F.gelu(gate_G, approximate="tanh") * up_G


def clamped_swiglu(gate_G: Tensor, up_G: Tensor) -> Tensor:
    """gpt-oss's SwiGLU: both inputs stay within a limit, and one is added to `up`."""
    gate_G = gate_G.clamp(max=CLAMP)
    up_G = up_G.clamp(min=-CLAMP, max=CLAMP)
    return (up_G + 1) * gate_G * torch.sigmoid(CLAMPED_SLOPE * gate_G)


GATES = {"silu": swiglu, "gelu_tanh": geglu, "clamped_swiglu": clamped_swiglu}
"""From gate and up to their product, by `LayerKind.activation`."""


class FeedForward(SublayerModule):
    linears = ("gate_proj", "up_proj")
    last = "down_proj"

    def __init__(self, config: ModelConfig, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.activation = kind.activation

    def inner(
        self, products: Sequence[Tensor], rotation: object, weights: Weights
    ) -> tuple[Tensor]:
        del rotation, weights
        return (GATES[self.activation](*products),)
