"""The experts of a mixture on their rows: a row is a token at one of its experts, and rows are sorted by expert.

Shape suffixes: R rows with their padding, X experts of this rank, E model dim, M feed-forward dim of an expert on this rank, I inputs and
O outputs of a product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from models.dtypes import accumulation_dtype
from models.feed_forward import GATES
from models.row_groups import RowGroups
from models.sublayer import LocalGraph

PRODUCTS, BIASES = ("gate_proj", "up_proj", "down_proj"), ("gate_bias", "up_bias", "down_bias")
ROWS_AT_ONCE = 2048
"""Of a loop over experts, at least."""
SUMMED_COLUMNS = 8
"""Equal columns of a product that sums rows: the kernel takes no fewer than 16 bytes of bfloat16."""


def run_experts(
    x_RE: Tensor,
    weight_R: Tensor | None,
    groups: RowGroups,
    parameters: Mapping[str, Tensor],
    *,
    activation: str,
    bias_scale: float = 1.0,
    needs_output: bool = True,
) -> Tensor:
    """[R, E]: each row's gated feed-forward, times its weight; a partial sum under tensor parallelism.

    `parameters` are those of `PRODUCTS` and `BIASES`. `bias_scale` multiplies the last bias. Without `needs_output` the result only carries gradients, which need no last product, and the products
    before it are computed in the backward pass.
    """
    weights = [parameters[name] for name in PRODUCTS]
    biases = [parameters[name] for name in BIASES if name in parameters]
    out_RE: Tensor = GroupedFeedForward.apply(
        x_RE, weight_R, (groups, activation, bias_scale, needs_output), *weights, *biases
    )
    return out_RE


class GroupedFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RE: Tensor, weight_R: Tensor | None, options: tuple[Any, ...], *weights: Tensor) -> Tensor:
        ctx.options = groups, activation, bias_scale, needs_output = options
        if not needs_output:
            ctx.save_for_backward(x_RE, weight_R, *weights)
            return x_RE.new_zeros(()).expand_as(x_RE)
        kept = list[Tensor]()

        def run(part: Part) -> Tensor:
            products = _gate_and_up(part.x, part.groups, part.parameters)
            kept.extend(products)
            inner_RM = _weigh_(GATES[activation](*products), part.weight)
            out_RE = grouped_product(inner_RM, part.parameters[2], part.groups)
            if len(weights) > len(PRODUCTS):
                out_RE += _weigh_(_by_row(part.parameters[-1], part.groups, len(out_RE)), part.weight) * bias_scale
            return out_RE

        out_RE = _joined(map(run, _parts(groups, x_RE, weight_R, weights)), len(x_RE))
        ctx.save_for_backward(x_RE, weight_R, *weights, *kept)
        return out_RE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        groups, activation, bias_scale, has_products = ctx.options
        x_RE, weight_R, *saved = ctx.saved_tensors
        num_weights = len(ctx.needs_input_grad) - 3
        weights, kept = saved[:num_weights], saved[num_weights:]
        del saved
        parts, others = _parts(groups, x_RE, weight_R, weights), list[list[Tensor]]()

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

    groups: RowGroups
    x: Tensor
    """[R, E]."""
    weight: Tensor | None
    """[R], of each row."""
    parameters: Sequence[Tensor]


def _parts(groups: RowGroups, x_RE: Tensor, weight_R: Tensor | None, weights: Sequence[Tensor]) -> list[Part]:
    """All at once with a kernel for groups. A loop takes few experts at a time: less memory, and most of it in cache."""
    if groups.ends is not None or len(x_RE) <= ROWS_AT_ONCE:
        return [Part(groups, x_RE, weight_R, weights)]
    parts, counts, first, start = list[Part](), groups.counts, 0, 0
    for last in range(1, len(counts) + 1):
        rows = sum(counts[first:last])
        if rows >= ROWS_AT_ONCE or last == len(counts):
            of_part = slice(start, start + rows)
            scale_R = None if weight_R is None else weight_R[of_part]
            experts = [each[first:last] for each in weights]
            parts.append(Part(RowGroups(counts[first:last]), x_RE[of_part], scale_R, experts))
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
    groups, x_RE, weight_R, weights = part
    if products is None:
        products = _gate_and_up(x_RE, groups, weights)
    elif activation == "silu":
        products = [products[0], products[1].clone()]  # SwiGLU overwrites it.
    graph = LocalGraph(lambda inputs, _: [GATES[activation](*inputs)], products, weights={})
    del products
    (inner_RM,) = graph.outputs
    grad_inner_RM, router_grads = grouped_product(grad_RE, weights[2].mT, groups), list[Tensor]()
    has_biases = len(weights) > len(PRODUCTS)
    if weight_R is not None:
        dots_R = _row_dots(inner_RM, grad_inner_RM)
        if has_biases:
            dots_R += bias_scale * _row_dots(_by_row(weights[-1], groups, len(grad_RE)), grad_RE)
        router_grads = [dots_R.to(weight_R.dtype)]
    weight_grads = [grouped_weight_grad(grad_RE, _weigh_(inner_RM, weight_R), groups)]
    bias_grads = [_sum_by_expert(_weigh_(grad_RE * bias_scale, weight_R), groups)] if has_biases else []
    graph.outputs.clear()
    del inner_RM
    product_grads, _ = graph.backward([_weigh_(grad_inner_RM, weight_R)])
    del grad_inner_RM
    weight_grads = [grouped_weight_grad(grad, x_RE, groups) for grad in product_grads] + weight_grads
    if has_biases:
        bias_grads = [_sum_by_expert(grad, groups) for grad in product_grads] + bias_grads
    grad_x_RE = grouped_product(product_grads.pop(0), weights[0].mT, groups)
    grad_x_RE += grouped_product(product_grads.pop(0), weights[1].mT, groups)
    return [grad_x_RE, *router_grads, *weight_grads, *bias_grads]


def _gate_and_up(x_RE: Tensor, groups: RowGroups, weights: Sequence[Tensor]) -> list[Tensor]:
    products = [grouped_product(x_RE, weight_XME, groups) for weight_XME in weights[:2]]
    for product_RM, bias_XM in zip(products, weights[len(PRODUCTS) :], strict=False):
        product_RM += _by_row(bias_XM, groups, len(product_RM))
    return products


def _weigh_(x_RI: Tensor, weight_R: Tensor | None) -> Tensor:
    """In place."""
    return x_RI if weight_R is None else x_RI.mul_(weight_R.to(x_RI.dtype).unsqueeze(-1))


def _row_dots(x_RI: Tensor, y_RI: Tensor) -> Tensor:
    """In the dtype of sums."""
    dots_R: Tensor = (x_RI * y_RI).sum(-1, dtype=accumulation_dtype(x_RI.dtype))
    return dots_R


def _by_row(bias_XI: Tensor, groups: RowGroups, num_rows: int) -> Tensor:
    """The bias of each row's expert; rows after all experts have that of the last."""
    if groups.ends is None:
        counts_X = torch.tensor(groups.counts, device="cpu").to(bias_XI.device, non_blocking=True)
        return bias_XI.repeat_interleave(counts_X, dim=0, output_size=num_rows)
    rows_R = torch.arange(num_rows, device=bias_XI.device, dtype=groups.ends.dtype)
    expert_R = torch.searchsorted(groups.ends[:-1], rows_R, right=True, out_int32=True)
    return bias_XI.index_select(0, expert_R)


def _sum_by_expert(x_RI: Tensor, groups: RowGroups) -> Tensor:
    if groups.ends is not None:
        return grouped_weight_grad(x_RI.new_ones(len(x_RI), SUMMED_COLUMNS), x_RI, groups)[:, 0]
    sums = [x_I.sum(0, dtype=accumulation_dtype(x_RI.dtype)) for x_I in x_RI.split([*groups.counts])]
    return torch.stack(sums).to(x_RI.dtype)


# ---- products of groups of rows


def grouped_product(x_RI: Tensor, weight_XOI: Tensor, groups: RowGroups) -> Tensor:
    """[R, O]: the rows of each expert times its weight, in one kernel or in a loop."""
    if len(weight_XOI) == 1:
        return x_RI @ weight_XOI[0].T
    if groups.ends is not None:
        return F.grouped_mm(x_RI, weight_XOI.mT, offs=groups.ends)
    out_RO = x_RI.new_empty(x_RI.shape[0], weight_XOI.shape[1])
    parts = x_RI.split([*groups.counts]), weight_XOI, out_RO.split([*groups.counts])
    for x, weight_OI, out in zip(*parts, strict=True):
        torch.mm(x, weight_OI.T, out=out)
    return out_RO


def grouped_weight_grad(grad_RO: Tensor, x_RI: Tensor, groups: RowGroups) -> Tensor:
    """[X, O, I]: each expert's weight gradient of `grouped_product`; zero without rows."""
    if groups.ends is not None:
        return F.grouped_mm(grad_RO.mT, x_RI, offs=groups.ends)
    if len(groups.counts) == 1:
        return (grad_RO.T @ x_RI)[None]
    out_XOI = x_RI.new_empty(len(groups.counts), grad_RO.shape[1], x_RI.shape[1])
    parts = grad_RO.split([*groups.counts]), x_RI.split([*groups.counts]), out_XOI
    for grad, x, out_OI in zip(*parts, strict=True):
        torch.mm(grad.T, x, out=out_OI)
    return out_XOI
