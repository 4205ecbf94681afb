"""SwiGLU: values, gradients and saved activations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.feed_forward import FeedForward, swiglu
from tests.models.small_models import SMALL, remember, unchanged

ROWS = 2
TOKENS = 5
X = (ROWS, TOKENS, SMALL.dim)
INNER = (ROWS, TOKENS, SMALL.ffn_dim)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).requires_grad_()


def test_a_second_backward_pass_is_refused() -> None:
    """The first one has overwritten what it saved."""
    out = swiglu(draw(*INNER), draw(*INNER, seed=1)).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_values_and_gradients_equal_the_formula() -> None:
    module = FeedForward(SMALL, SMALL.layer_kinds[0]).double()
    x_E = draw(*X)
    gate, up, down = (
        module.get_parameter(f"{name}_proj.weight") for name in ("gate", "up", "down")
    )
    expected = (F.silu(x_E @ gate.T) * (x_E @ up.T)) @ down.T
    found = module(x_E, None, None)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    grad = draw(*X, seed=1)
    leaves = (x_E, gate, up, down)
    for ours, plain in zip(
        torch.autograd.grad(found, leaves, grad),
        torch.autograd.grad(expected, leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-13)


def test_bfloat16_output_and_gradients_stay_bfloat16() -> None:
    module = FeedForward(SMALL, SMALL.layer_kinds[0]).bfloat16()
    x_E = draw(*X).detach().bfloat16().requires_grad_()
    out = module(x_E, None, None)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    wide = FeedForward(SMALL, SMALL.layer_kinds[0]).double()
    wide.load_state_dict(module.state_dict())
    exact = x_E.detach().double().requires_grad_()
    wide(exact, None, None).sum().backward()
    assert x_E.grad is not None
    assert exact.grad is not None
    assert (x_E.grad - exact.grad).abs().max() < 0.02 * exact.grad.abs().max()


def test_saves_gate_and_up_but_not_their_product() -> None:
    module = FeedForward(SMALL, SMALL.layer_kinds[0]).double()
    x_E = draw(*X)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(remember(kept), unchanged):
        module(x_E, None, None)
    weights = {parameter.data_ptr() for parameter in module.parameters()}
    elements = {
        tensor.data_ptr(): tensor.numel() for tensor in kept if tensor.data_ptr() not in weights
    }
    assert sorted(elements.values()) == sorted([x_E.numel(), *[ROWS * TOKENS * SMALL.ffn_dim] * 2])
    assert x_E.data_ptr() in elements
