"""Gated feed-forward (Shazeer, 2020), SwiGLU by default.

Shape suffixes, after any leading dimensions: E model dim, G feed-forward dim of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.config import ModelConfig
from models.linear import Linear


class ActivationFunction(NamedTuple):
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    """(gradient of the output, gate) -> gradient of the gate, written in place into the first argument."""


def _silu_backward(grad_G: Tensor, gate_G: Tensor) -> Tensor:
    out: Tensor = torch.ops.aten.silu_backward.grad_input(grad_G, gate_G, grad_input=grad_G)
    return out


ACTIVATIONS = {"silu": ActivationFunction(F.silu, _silu_backward)}


def gated_linear(gate_G: Tensor, up_G: Tensor, weight_EG: Tensor, *, activation: str) -> Tensor:
    """`(activation(gate) * up) @ weight.T`."""
    return F.linear(ACTIVATIONS[activation].forward(gate_G).mul_(up_G), weight_EG)


def gated_linear_backward(
    grad_E: Tensor, gate_G: Tensor, up_G: Tensor, weight_EG: Tensor, *, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate, up and weight, from the gradient of the output."""
    activated_G = ACTIVATIONS[activation].forward(gate_G)
    grad_weight_EG = grad_E.flatten(0, -2).T @ (activated_G * up_G).flatten(0, -2)
    grad_product_G = grad_E @ weight_EG
    grad_up_G = activated_G.mul_(grad_product_G)
    grad_product_G.mul_(up_G)
    return ACTIVATIONS[activation].backward(grad_product_G, gate_G), grad_up_G, grad_weight_EG


class GatedLinearFunction(torch.autograd.Function):
    """`gated_linear` that saves gate and up, and recomputes their product in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate_G: Tensor, up_G: Tensor, weight_EG: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate_G, up_G, weight_EG)
        ctx.activation = activation
        return gated_linear(gate_G, up_G, weight_EG, activation=activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_E,) = grads
        return *gated_linear_backward(grad_E, *ctx.saved_tensors, activation=ctx.activation), None


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate_proj = Linear(config.dim, config.ffn_dim)
        self.up_proj = Linear(config.dim, config.ffn_dim)
        self.down_proj = Linear(config.ffn_dim, config.dim)

    def forward(self, x_E: Tensor) -> Tensor:
        gate_G, up_G = self.gate_proj(x_E), self.up_proj(x_E)
        out: Tensor = GatedLinearFunction.apply(gate_G, up_G, self.down_proj.local_weight(), self.activation)
        return out
