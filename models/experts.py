"""The experts of a mixture on their rows: a row is a token at one of its experts, and rows are sorted by expert.

Shape suffixes: R rows, X experts of this rank, E model dim, M feed-forward dim of an expert on this rank, I inputs and
O outputs of a product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from models.device_paths import runs_as_on_gpu
from models.dtypes import accumulation_dtype
from models.feed_forward import GATES
from models.sublayer import LocalGraph

PRODUCTS, BIASES = ("gate_proj", "up_proj", "down_proj"), ("gate_bias", "up_bias", "down_bias")
ROWS_AT_ONCE = 2048
"""Of a loop over experts, at least."""
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
        kept = list[Tensor]()

        def run(part: Part) -> Tensor:
            products = _gate_and_up(part.x, part.counts, part.parameters)
            kept.extend(products)
            inner_RM = _weigh_(GATES[activation](*products), part.weight)
            out_RE = grouped_product(inner_RM, part.parameters[2], part.counts)
            if len(weights) > len(PRODUCTS):
                out_RE += _weigh_(_by_row(part.parameters[-1], part.counts), part.weight) * bias_scale
            return out_RE

        out_RE = _joined(map(run, _parts(counts, x_RE, weight_R, weights)), len(x_RE))
        ctx.save_for_backward(x_RE, weight_R, *weights, *kept)
        return out_RE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        counts, activation, bias_scale, has_products = ctx.options
        x_RE, weight_R, *saved = ctx.saved_tensors
        num_weights = len(ctx.needs_input_grad) - 3
        weights, kept = saved[:num_weights], saved[num_weights:]
        del saved
        parts, others = _parts(counts, x_RE, weight_R, weights), list[list[Tensor]]()

        def run(part: Part, grad_RE: Tensor) -> Tensor:
            products = [kept.pop(0), kept.pop(0)] if has_products else None
            grad_x_RE, *rest = _part_backward(part, grad_RE, products, activation, bias_scale)
            others.append(rest)
            return grad_x_RE

        grads_RE = grads[0].split([len(part.x) for part in parts])
        grad_x_RE = _joined(map(run, parts, grads_RE), len(x_RE))
        joined = [_joined(each, sum(map(len, each))) for each in zip(*others, strict=True)]
        return grad_x_RE, None if weight_R is None else joined.pop(0), None, *joined


class Part(NamedTuple):
    """Rows that are computed together, and their experts."""

    counts: Sequence[int]
    x: Tensor
    """[R, E]."""
    weight: Tensor | None
    """[R], of each row."""
    parameters: Sequence[Tensor]


def _parts(counts: Sequence[int], x_RE: Tensor, weight_R: Tensor | None, weights: Sequence[Tensor]) -> list[Part]:
    """All at once with a kernel for groups. A loop takes few experts at a time: less memory, and most of it in cache."""
    if _has_kernel(x_RE) or len(x_RE) <= ROWS_AT_ONCE:
        return [Part(counts, x_RE, weight_R, weights)]
    parts, first, start = list[Part](), 0, 0
    for last in range(1, len(counts) + 1):
        rows = sum(counts[first:last])
        if rows >= ROWS_AT_ONCE or last == len(counts):
            of_part = slice(start, start + rows)
            scale_R = None if weight_R is None else weight_R[of_part]
            parts.append(Part(counts[first:last], x_RE[of_part], scale_R, [each[first:last] for each in weights]))
            first, start = last, start + rows
    return parts


def _joined(pieces: Iterable[Tensor], num_rows: int) -> Tensor:
    """One after the other; what has all rows is not copied."""
    joined, start = torch.empty(0), 0
    for number, piece in enumerate(pieces):
        if number == 0:
            joined = piece if len(piece) == num_rows else piece.new_empty(num_rows, *piece.shape[1:])
        if joined is not piece:
            joined[start : start + len(piece)] = piece
        start += len(piece)
    return joined


def _part_backward(
    part: Part, grad_RE: Tensor, products: list[Tensor] | None, activation: str, bias_scale: float
) -> list[Tensor]:
    """Gradients of the rows, of their weights if there are, and of the experts. `products`: gate and up, if saved."""
    counts, x_RE, weight_R, weights = part
    if products is None:
        products = _gate_and_up(x_RE, counts, weights)
    elif activation == "silu":
        products = [products[0], products[1].clone()]  # SwiGLU overwrites it.
    graph = LocalGraph(lambda inputs, _: [GATES[activation](*inputs)], products, weights={})
    del products
    (inner_RM,) = graph.outputs
    grad_inner_RM, router_grads = grouped_product(grad_RE, weights[2].mT, counts), list[Tensor]()
    has_biases = len(weights) > len(PRODUCTS)
    if weight_R is not None:
        dots_R = _row_dots(inner_RM, grad_inner_RM)
        if has_biases:
            dots_R += bias_scale * _row_dots(_by_row(weights[-1], counts), grad_RE)
        router_grads = [dots_R.to(weight_R.dtype)]
    weight_grads = [grouped_weight_grad(grad_RE, _weigh_(inner_RM, weight_R), counts)]
    bias_grads = [_sum_by_expert(_weigh_(grad_RE * bias_scale, weight_R), counts)] if has_biases else []
    graph.outputs.clear()
    del inner_RM
    product_grads, _ = graph.backward([_weigh_(grad_inner_RM, weight_R)])
    del grad_inner_RM
    weight_grads = [grouped_weight_grad(grad, x_RE, counts) for grad in product_grads] + weight_grads
    if has_biases:
        bias_grads = [_sum_by_expert(grad, counts) for grad in product_grads] + bias_grads
    grad_x_RE = grouped_product(product_grads.pop(0), weights[0].mT, counts)
    grad_x_RE += grouped_product(product_grads.pop(0), weights[1].mT, counts)
    return [grad_x_RE, *router_grads, *weight_grads, *bias_grads]


def _gate_and_up(x_RE: Tensor, counts: Sequence[int], weights: Sequence[Tensor]) -> list[Tensor]:
    products = [grouped_product(x_RE, weight_XME, counts) for weight_XME in weights[:2]]
    for product_RM, bias_XM in zip(products, weights[len(PRODUCTS) :], strict=False):
        product_RM += _by_row(bias_XM, counts)
    return products


def _weigh_(x_RI: Tensor, weight_R: Tensor | None) -> Tensor:
    """In place."""
    return x_RI if weight_R is None else x_RI.mul_(weight_R.to(x_RI.dtype).unsqueeze(-1))


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
    return runs_as_on_gpu(x) and x.dtype == torch.bfloat16


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
