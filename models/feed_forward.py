"""The feed-forward half of a block: SwiGLU (Shazeer, 2020).

Shape suffixes: E width of the residual stream, G inner width, after any leading sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.config import ModelConfig
from models.linear import Linear


def gated_backward(grad_E: Tensor, gate_G: Tensor, up_G: Tensor, weight_EG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate, up and weight, where `(silu(gate) * up) @ weight.T` has this one."""
    open_G = F.silu(gate_G)
    grad_weight_EG = grad_E.flatten(0, -2).T @ (open_G * up_G).flatten(0, -2)
    grad_product_G = grad_E @ weight_EG
    grad_up_G = open_G.mul_(grad_product_G)
    grad_product_G.mul_(up_G)
    grad_gate_G = torch.ops.aten.silu_backward.grad_input(grad_product_G, gate_G, grad_input=grad_product_G)
    return grad_gate_G, grad_up_G, grad_weight_EG


class GatedProjection(torch.autograd.Function):
    """`(silu(gate) * up) @ weight.T`; keeps gate and up, and forms their product again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate_G: Tensor, up_G: Tensor, weight_EG: Tensor) -> Tensor:
        ctx.save_for_backward(gate_G, up_G, weight_EG)
        return F.linear(F.silu(gate_G).mul_(up_G), weight_EG)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        (grad_E,) = grads
        return gated_backward(grad_E, *ctx.saved_tensors)


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.dim, config.ffn_dim)
        self.up_proj = Linear(config.dim, config.ffn_dim)
        self.down_proj = Linear(config.ffn_dim, config.dim)

    def forward(self, x_E: Tensor) -> Tensor:
        out: Tensor = GatedProjection.apply(self.gate_proj(x_E), self.up_proj(x_E), self.down_proj.matrix())
        return out
