"""The experts of a mixture on their rows: a row is a token at one of its experts, and rows are sorted by expert.

Shape suffixes: R rows, X experts of this rank, E model dim, M feed-forward dim of an expert on this rank, I inputs and
O outputs of a product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from models.feed_forward import GATES
from models.linear import accumulation_dtype
from models.sublayer import LocalGraph

PRODUCTS, BIASES = ("gate_proj", "up_proj", "down_proj"), ("gate_bias", "up_bias", "down_bias")
GROUP_ALIGNMENT = 8
"""Rows that torch's grouped product needs a multiple of: 16 bytes of bfloat16."""


def run_experts(
    x_RE: Tensor,
    weight_R: Tensor | None,
    counts: Sequence[int],
    parameters: Mapping[str, Tensor],
    *,
    activation: str,
    bias_scale: float = 1.0,
    needs_output: bool = True,
) -> Tensor:
    """[R, E]: each row's gated feed-forward, times its weight; a partial sum under tensor parallelism.

    `counts` are the rows of each expert, and `parameters` those of `PRODUCTS` and `BIASES`. `bias_scale` multiplies the
    last bias. Without `needs_output` the result only carries gradients, which need no last product, and the products
    before it are computed in the backward pass.
    """
    weights = [parameters[name] for name in PRODUCTS]
    biases = [parameters[name] for name in BIASES if name in parameters]
    out_RE: Tensor = GroupedFeedForward.apply(
        x_RE, weight_R, (counts, activation, bias_scale, needs_output), *weights, *biases
    )
    return out_RE


class GroupedFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RE: Tensor, weight_R: Tensor | None, options: tuple[Any, ...], *weights: Tensor) -> Tensor:
        ctx.options = counts, activation, bias_scale, needs_output = options
        if not needs_output:
            ctx.save_for_backward(x_RE, weight_R, *weights)
            return x_RE.new_zeros(()).expand_as(x_RE)
        products = _gate_and_up(x_RE, counts, weights)
        ctx.save_for_backward(x_RE, weight_R, *weights, *products)
        out_RE = grouped_product(_times(GATES[activation](*products), weight_R), weights[2], counts)
        if len(weights) > len(PRODUCTS):
            out_RE += _times(_by_row(weights[-1], counts), weight_R) * bias_scale
        return out_RE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_RE,), (x_RE, weight_R, *weights) = grads, ctx.saved_tensors
        counts, activation, bias_scale, has_products = ctx.options
        if has_products:
            *weights, gate_RM, up_RM = weights
            products = [gate_RM, up_RM.clone() if activation == "silu" else up_RM]  # SwiGLU overwrites it.
            del gate_RM, up_RM
        else:
            products = _gate_and_up(x_RE, counts, weights)
        graph = LocalGraph(lambda inputs, _: [GATES[activation](*inputs)], products, weights={})
        del products
        (inner_RM,) = graph.outputs
        weight_grads = [grouped_weight_grad(grad_RE, _times(inner_RM, weight_R), counts)]
        grad_inner_RM, grad_weight_R = grouped_product(grad_RE, weights[2].mT, counts), None
        has_biases = len(weights) > len(PRODUCTS)
        if weight_R is not None:
            grad_weight_R = _row_dots(inner_RM, grad_inner_RM)
            if has_biases:
                grad_weight_R += bias_scale * _row_dots(_by_row(weights[-1], counts), grad_RE)
            grad_weight_R = grad_weight_R.to(weight_R.dtype)
        bias_grads = [_sum_by_expert(_times(grad_RE, weight_R) * bias_scale, counts)] if has_biases else []
        graph.outputs.clear()
        del inner_RM
        product_grads, _ = graph.backward([_times(grad_inner_RM, weight_R)])
        del grad_inner_RM
        weight_grads = [grouped_weight_grad(grad, x_RE, counts) for grad in product_grads] + weight_grads
        if has_biases:
            bias_grads = [_sum_by_expert(grad, counts) for grad in product_grads] + bias_grads
        grad_x_RE = grouped_product(product_grads.pop(0), weights[0].mT, counts)
        grad_x_RE += grouped_product(product_grads.pop(0), weights[1].mT, counts)
        return grad_x_RE, grad_weight_R, None, *weight_grads, *bias_grads


def _gate_and_up(x_RE: Tensor, counts: Sequence[int], weights: Sequence[Tensor]) -> list[Tensor]:
    products = [grouped_product(x_RE, weight_XME, counts) for weight_XME in weights[:2]]
    for product_RM, bias_XM in zip(products, weights[len(PRODUCTS) :], strict=False):
        product_RM += _by_row(bias_XM, counts)
    return products


def _times(x_RI: Tensor, weight_R: Tensor | None) -> Tensor:
    return x_RI if weight_R is None else x_RI * weight_R.to(x_RI.dtype).unsqueeze(-1)


def _row_dots(x_RI: Tensor, y_RI: Tensor) -> Tensor:
    """In the dtype of sums."""
    dots_R: Tensor = (x_RI * y_RI).sum(-1, dtype=accumulation_dtype(x_RI.dtype))
    return dots_R


def _by_row(bias_XI: Tensor, counts: Sequence[int]) -> Tensor:
    rows_X = torch.tensor(counts, device="cpu").to(bias_XI.device, non_blocking=True)
    return bias_XI.repeat_interleave(rows_X, dim=0, output_size=sum(counts))


def _sum_by_expert(x_RI: Tensor, counts: Sequence[int]) -> Tensor:
    sums = [x_I.sum(0, dtype=accumulation_dtype(x_RI.dtype)) for x_I in x_RI.split([*counts])]
    return torch.stack(sums).to(x_RI.dtype)


# ---- products of groups of rows


def grouped_product(x_RI: Tensor, weight_XOI: Tensor, counts: Sequence[int]) -> Tensor:
    """[R, O]: the rows of each expert times its weight: one kernel for bfloat16 on CUDA, else a loop."""
    if _has_kernel(x_RI):
        padded = GroupPadding(counts, x_RI.device)
        return padded.remove(F.grouped_mm(padded.add(x_RI), weight_XOI.mT, offs=padded.ends_X))
    out_RO = x_RI.new_empty(x_RI.shape[0], weight_XOI.shape[1])
    for x, weight_OI, out in zip(x_RI.split([*counts]), weight_XOI, out_RO.split([*counts]), strict=True):
        torch.mm(x, weight_OI.T, out=out)
    return out_RO


def grouped_weight_grad(grad_RO: Tensor, x_RI: Tensor, counts: Sequence[int]) -> Tensor:
    """[X, O, I]: each expert's weight gradient of `grouped_product`; zero without rows."""
    if _has_kernel(x_RI):
        padded = GroupPadding(counts, x_RI.device)
        return F.grouped_mm(padded.add(grad_RO).mT, padded.add(x_RI), offs=padded.ends_X)
    out_XOI = x_RI.new_empty(len(counts), grad_RO.shape[1], x_RI.shape[1])
    for grad, x, out_OI in zip(grad_RO.split([*counts]), x_RI.split([*counts]), out_XOI, strict=True):
        torch.mm(grad.T, x, out=out_OI)
    return out_XOI


def _has_kernel(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype == torch.bfloat16


class GroupPadding:
    """Rows of zeros after each expert's, so that every group begins where torch's grouped product needs it."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        counts_X = torch.tensor(counts, device="cpu")
        # Of a group without rows the kernel would leave the weight gradient as it was.
        padded_X = -(-counts_X.clamp(min=1) // GROUP_ALIGNMENT) * GROUP_ALIGNMENT
        self._num_rows, self._num_padded = sum(counts), int(padded_X.sum())
        shifts_X = (padded_X.cumsum(0) - padded_X) - (counts_X.cumsum(0) - counts_X)
        self.ends_X = padded_X.cumsum(0).int().to(device, non_blocking=True)
        """Row after the last of each group."""
        self._is_aligned = self._num_rows == self._num_padded
        shift_R = shifts_X.to(device, non_blocking=True).repeat_interleave(
            counts_X.to(device, non_blocking=True), output_size=self._num_rows
        )
        self._position_R = torch.arange(self._num_rows, device=device) + shift_R

    def add(self, x_RI: Tensor) -> Tensor:
        if self._is_aligned:
            return x_RI
        return x_RI.new_zeros(self._num_padded, x_RI.shape[1]).index_copy_(0, self._position_R, x_RI)

    def remove(self, x_PI: Tensor) -> Tensor:
        return x_PI if self._is_aligned else x_PI.index_select(0, self._position_R)
