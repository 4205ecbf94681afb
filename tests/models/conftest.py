"""Products of 16-bit tensors that are returned in float32, as on CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models import wide_products

aten = torch.ops.aten


def wide_mm(
    x: Tensor, y: Tensor, *, out_dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """`torch.mm`, with CUDA's `out_dtype` on the CPU."""
    return (
        aten.mm(x, y)
        if out is None and out_dtype is None
        else _wide(x, y, out_dtype or x.dtype, out)
    )


def _wide(x: Tensor, y: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    product = aten.mm(x.double(), y.double()).to(dtype)
    return product if out is None else out.copy_(product)


def wide_addmm(
    total: Tensor, x: Tensor, y: Tensor, *, out_dtype: torch.dtype, out: Tensor
) -> Tensor:
    assert total.dtype == out.dtype == out_dtype == torch.float32
    assert total is out
    return out.addmm_(x.float(), y.float())


@pytest.fixture
def products_as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_products, "products_are_wide", lambda x: x.dtype == torch.bfloat16)
    monkeypatch.setattr(torch, "mm", wide_mm)
    monkeypatch.setattr(torch, "addmm", wide_addmm)
