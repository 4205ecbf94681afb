"""RMSNorm: values and gradients compared with torch, and saved activations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.norm import RMSNorm, RMSNormFunction
from tests.models.small_models import remember, unchanged

EPS = 1e-2


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_E = torch.randn(2, 5, 12, generator=generator, dtype=torch.float64) / 5
    weight_E = 1 + torch.randn(12, generator=generator, dtype=torch.float64)
    return x_E.to(dtype).requires_grad_(), weight_E.to(dtype).requires_grad_()


def test_gradients_equal_finite_differences() -> None:
    torch.autograd.gradcheck(lambda x_E, weight_E: RMSNormFunction.apply(x_E, weight_E, EPS, None), inputs())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_values_and_gradients_equal_torch(dtype: torch.dtype, tolerance: float) -> None:
    given = inputs(dtype)
    ours, torchs = RMSNormFunction.apply(*given, EPS, None), F.rms_norm(given[0], (12,), given[1], EPS)
    torch.testing.assert_close(ours, torchs, rtol=0, atol=tolerance)
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    for found, expected in zip(
        torch.autograd.grad(ours, given, grad), torch.autograd.grad(torchs, given, grad), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=10 * tolerance)


def test_statistics_of_bfloat16_are_float32() -> None:
    x_E, weight_E = inputs(torch.bfloat16)
    out = RMSNormFunction.apply(x_E, weight_E, EPS, None)
    assert out.dtype == torch.bfloat16
    normed = F.rms_norm(x_E.detach().float(), (12,), eps=EPS).bfloat16()
    assert torch.equal(out, normed * weight_E)
    dx, dweight = torch.autograd.grad(out, (x_E, weight_E), torch.ones_like(out))
    assert dx.dtype == dweight.dtype == torch.bfloat16


def test_all_zero_input_has_finite_gradients() -> None:
    x_E, weight_E = torch.zeros(1, 12, requires_grad=True), torch.ones(12, requires_grad=True)
    dx, dweight = torch.autograd.grad(
        RMSNormFunction.apply(x_E, weight_E, EPS, None), (x_E, weight_E), torch.ones(1, 12)
    )
    torch.testing.assert_close(dx, torch.full((1, 12), EPS**-0.5))
    assert dweight.count_nonzero() == 0


def test_saves_the_input_once_and_not_the_output() -> None:
    x_E, weight_E = inputs()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(remember(kept), unchanged):
        out = RMSNormFunction.apply(x_E, weight_E, EPS, None)
    assert sorted(tuple(tensor.shape) for tensor in kept) == [(2, 5, 1), (2, 5, 12), (12,)]
    assert {tensor.data_ptr() for tensor in kept if tensor.shape != (2, 5, 1)} == {x_E.data_ptr(), weight_E.data_ptr()}
    assert out.data_ptr() not in {tensor.data_ptr() for tensor in kept}


def test_module_uses_its_weight_and_eps() -> None:
    norm = RMSNorm(12, eps=EPS).double()
    x_E, weight_E = inputs()
    norm.weight.data.copy_(weight_E)
    assert torch.equal(norm(x_E), RMSNormFunction.apply(x_E, weight_E, EPS, None))


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_chunked_norm_equals_unchunked(most: int) -> None:
    whole, parts = (RMSNorm(12, eps=EPS).double() for _ in range(2))
    parts.chunk_tokens = most
    x_E = torch.randn(2, 3, 12, dtype=torch.float64)
    found = []
    for norm in (whole, parts):
        torch.nn.init.constant_(norm.weight, 1.5)
        given = x_E.clone().requires_grad_()
        out = norm(given)
        grads = torch.autograd.grad(out, (given, norm.weight), x_E.flip(0))
        found.append((out, *grads))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)
