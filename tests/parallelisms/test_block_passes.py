"""Memory traffic and kernels of an eager block in bfloat16, beside its products and attention, as
on CUDA.

The norms of torch's CUDA build have stand-ins: an operator forward, and two backward, as its
kernels are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models import norm
from models.transformer import Transformer
from parallelisms.activation_checkpoint import RecomputeConfig, RecomputePolicy, apply
from tests.models.small_models import SMALL, TouchedElements

TOKENS = 256
WIDTH = 128
HALF_HEAD = 16
# Llama 3's shapes: a quarter as many KV heads as query heads, four times the width in the
# feed-forward.
CONFIG = replace(
    SMALL,
    dim=WIDTH,
    num_layers=1,
    num_heads=4,
    num_kv_heads=1,
    head_dim=2 * HALF_HEAD,
    ffn_dim=4 * WIDTH,
)


@torch.library.custom_op("longhaul_test::rms_norm", mutates_args=())
def fused(x_E: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return norm.rms_norm(x_E, weight_E, eps)


@torch.library.custom_op("longhaul_test::rms_norm_input_grad", mutates_args=())
def input_grad(grad_E: Tensor, x_E: Tensor, weight_E: Tensor, rstd_1: Tensor) -> Tensor:
    return norm.rms_norm_backward(grad_E, x_E, weight_E, rstd_1)[0]


@torch.library.custom_op("longhaul_test::rms_norm_weight_grad", mutates_args=())
def weight_grad(grad_E: Tensor, x_E: Tensor, weight_E: Tensor, rstd_1: Tensor) -> Tensor:
    return norm.rms_norm_backward(grad_E, x_E, weight_E, rstd_1)[1].to(weight_E.dtype)


class FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_E: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        out_E: Tensor
        out_E, rstd_1 = fused(x_E, weight_E, eps)
        ctx.save_for_backward(x_E, weight_E, rstd_1)
        return out_E

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        given = grads[0], *ctx.saved_tensors
        return input_grad(*given), weight_grad(*given), None


def passes(policy: RecomputePolicy) -> TouchedElements:
    """Of the forward and the backward pass of one block."""
    model = Transformer(CONFIG).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    apply(model, RecomputeConfig(policy))
    (block,) = model.transformer_blocks()
    x_BSE = torch.randn(1, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    grad_BSE = torch.ones_like(x_BSE)
    boundaries_BD = torch.tensor([[0, TOKENS]], dtype=torch.int32)
    seen = TouchedElements(TOKENS * HALF_HEAD)
    with seen:
        block(x_BSE, torch.randn(2, 1, TOKENS, 1, HALF_HEAD), boundaries_BD).backward(grad_BSE)
    return seen


@pytest.mark.parametrize(
    ("policy", "bytes_per_number", "kernels"), [("none", 272, 33), ("keep_attention", 292, 40)]
)
def test_an_eager_block_moves_as_much_as_documented(
    policy: RecomputePolicy, bytes_per_number: int, kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes per number of the residual stream; docs/performance.md."""
    monkeypatch.setattr(norm, "is_fused", lambda *_: True)
    monkeypatch.setattr(
        F, "rms_norm", lambda x_E, _, weight_E, eps: FusedNorm.apply(x_E, weight_E, eps)
    )
    seen = passes(policy)
    assert (round(seen.bytes / TOKENS / WIDTH), seen.kernels) == (bytes_per_number, kernels)
