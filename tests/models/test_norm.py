"""RMSNorm: values and gradients compared with torch, and saved activations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from models import norm as norm_module
from models.linear import identity
from models.norm import RMSNorm, RMSNormFunction, is_fused
from tests.models.small_models import remember, unchanged

EPS = 1e-2


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_E = torch.randn(2, 5, 12, generator=generator, dtype=torch.float64) / 5
    weight_E = 1 + torch.randn(12, generator=generator, dtype=torch.float64)
    return x_E.to(dtype).requires_grad_(), weight_E.to(dtype).requires_grad_()


def test_gradients_equal_finite_differences() -> None:
    torch.autograd.gradcheck(
        lambda x_E, weight_E: RMSNormFunction.apply(x_E, weight_E, EPS, None), inputs()
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_values_and_gradients_equal_torch(dtype: torch.dtype, tolerance: float) -> None:
    given = inputs(dtype)
    ours = RMSNormFunction.apply(*given, EPS, None)
    torchs = F.rms_norm(given[0], (12,), given[1], EPS)
    torch.testing.assert_close(ours, torchs, rtol=0, atol=tolerance)
    grad = torch.randn(
        ours.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).to(dtype)
    for found, expected in zip(
        torch.autograd.grad(ours, given, grad),
        torch.autograd.grad(torchs, given, grad),
        strict=True,
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
    x_E = torch.zeros(1, 12, requires_grad=True)
    weight_E = torch.ones(12, requires_grad=True)
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
    assert {tensor.data_ptr() for tensor in kept if tensor.shape != (2, 5, 1)} == {
        x_E.data_ptr(),
        weight_E.data_ptr(),
    }
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


# ---- torch's fused kernels, which exist on CUDA; on a CPU their formula is made of operators


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Takes torch's function wherever CUDA would; the number of calls."""
    calls = [0]
    torchs = F.rms_norm

    def rms_norm(x_E: Tensor, shape: torch.Size, weight_E: Tensor, eps: float) -> Tensor:
        calls[0] += 1
        return torchs(x_E, shape, weight_E, eps)

    monkeypatch.setattr(norm_module, "is_fused", lambda x_E, weight_E: x_E.dtype == weight_E.dtype)
    monkeypatch.setattr(F, "rms_norm", rms_norm)
    return calls


def results(norm: RMSNorm, given: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Output and both gradients."""
    x_E, weight_E = given
    out_E = norm.normalize(x_E, weight_E)
    grad_E = (
        torch.linspace(-1, 1, out_E.numel(), dtype=torch.float64).view_as(out_E).to(out_E.dtype)
    )
    return [out_E.detach(), *torch.autograd.grad(out_E, given, grad_E)]


def test_fused_norm_is_as_accurate_as_ours(
    fused: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = RMSNorm(12, eps=EPS)
    given = inputs(torch.bfloat16)
    found = results(norm, given)
    assert fused == [1]
    monkeypatch.setattr(norm_module, "is_fused", lambda *_: False)
    x_E, weight_E = (x.detach().double().requires_grad_() for x in given)
    exact = results(norm, (x_E, weight_E))
    errors, today = (
        [(each - right).abs().max() for each, right in zip(some, exact, strict=True)]
        for some in (found, results(norm, given))
    )
    assert all(error <= 1.01 * before for error, before in zip(errors, today, strict=True)), (
        errors,
        today,
    )


def test_only_full_norms_with_a_weight_in_their_dtype_are_fused(fused: list[int]) -> None:
    x_E = torch.ones(2, 12, dtype=torch.bfloat16)
    centered, sharded, chunked = (
        RMSNorm(12, eps=EPS, zero_centered=each).bfloat16() for each in (True, False, False)
    )
    sharded.mean_of = (1, identity)
    chunked.chunk_tokens = 1
    for norm, calls in ((centered, 0), (sharded, 0), (chunked, 1)):
        torch.nn.init.ones_(norm.weight)
        norm(x_E)
        assert fused == [calls]


def test_norms_are_fused_on_cuda_except_in_float64() -> None:
    with FakeTensorMode():
        half, single, double = (
            torch.empty(3, device="cuda", dtype=dtype)
            for dtype in (torch.bfloat16, torch.float32, torch.float64)
        )
        assert is_fused(half, half)
        assert is_fused(single, single)
        assert not is_fused(half, single)
        assert not is_fused(double, double)
    assert not is_fused(torch.ones(3), torch.ones(3))
