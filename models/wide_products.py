"""Products of 16-bit tensors that are summed and returned in float32, where torch has them.

Shape suffixes: R rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from models.device_paths import runs_as_on_gpu
from models.dtypes import accumulation_dtype


def products_are_wide(x: Tensor) -> bool:
    """Whether a product of two tensors like `x` can be returned in float32, without rounding to
    their dtype.

    torch (2.8 or later) has the argument `out_dtype` on CUDA only.
    """
    return runs_as_on_gpu(x) and x.dtype in (torch.bfloat16, torch.float16)


def wide_product(x_RI: Tensor, weight_OI: Tensor) -> Tensor:
    """`x @ weight.T` in `accumulation_dtype`, [R, O], rounded to the dtype of x first where torch
    cannot do without.
    """
    dtype = accumulation_dtype(x_RI.dtype)
    if products_are_wide(x_RI):
        return torch.mm(x_RI, weight_OI.T, out_dtype=dtype)
    return (x_RI @ weight_OI.T).to(dtype)


def add_weight_grad(total_OI: Tensor, grad_RO: Tensor, x_RI: Tensor) -> None:
    """Adds `grad.T @ x` to `total_OI`, which is in `accumulation_dtype`."""
    if total_OI.dtype == x_RI.dtype:
        total_OI.addmm_(grad_RO.T, x_RI)
    elif products_are_wide(x_RI):
        torch.addmm(total_OI, grad_RO.T, x_RI, out_dtype=total_OI.dtype, out=total_OI)
    else:
        total_OI += grad_RO.T @ x_RI


def unrounded_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` in `accumulation_dtype`. Neither it nor its gradient is rounded to the
    dtype of x.
    """
    dtype = accumulation_dtype(x.dtype)
    bias_O = None if bias_O is None else bias_O.to(dtype)
    if not products_are_wide(x):
        return F.linear(x.to(dtype), weight_OI.to(dtype), bias_O)
    product_RO: Tensor = WideLinear.apply(x.flatten(0, -2), weight_OI)
    product: Tensor = product_RO.unflatten(0, x.shape[:-1])
    return product if bias_O is None else product + bias_O


class WideLinear(torch.autograd.Function):
    """`wide_product`, which reads x as it is: a copy in float32 would be twice as large."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_RI, weight_OI)
        return wide_product(x_RI, weight_OI)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x_RI, weight_OI = ctx.saved_tensors
        (grad_RO,) = grads
        dtype = grad_RO.dtype
        grad_x_RI = (grad_RO @ weight_OI.to(dtype)).to(x_RI.dtype)
        return grad_x_RI, (grad_RO.T @ x_RI.to(dtype)).to(weight_OI.dtype)
