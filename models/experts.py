"""The experts of a mixture on their rows: a row is a token at one of its experts, and rows are
sorted by expert.

Shape suffixes: R rows with their padding, X experts of this rank, E model dim, M feed-forward dim
of an expert on this rank, I inputs and O outputs of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from models.dtypes import accumulation_dtype
from models.feed_forward import GATES
from models.row_groups import RowGroups
from models.sublayer import LocalGraph
from models.tiling import CompilePiece

PRODUCTS = ("gate_proj", "up_proj", "down_proj")
BIASES = ("gate_bias", "up_bias", "down_bias")
ROWS_AT_ONCE = 2048
"""Rows that a loop over experts computes at once, at least."""
SUMMED_COLUMNS = 8
"""Equal columns of a product that sums rows: the kernel takes no fewer than 16 bytes of
bfloat16.
"""


class Options(NamedTuple):
    """Options of the experts' computation, and what is needed of its result."""

    activation: str
    bias_scale: float = 1.0
    """Multiplies the last bias."""
    needs_output: bool = True
    """Otherwise the result only carries gradients: they need no last product, and those before it
    can wait for them.
    """
    compile_piece: CompilePiece | None = None
    """Compiles what is between the products, where a kernel takes all groups; None: torch's
    operators.
    """


def run_experts(
    x_RE: Tensor,
    weight_R: Tensor | None,
    groups: RowGroups,
    parameters: Mapping[str, Tensor],
    options: Options,
) -> Tensor:
    """[R, E]: each row's gated feed-forward, times its weight; a partial sum under tensor
    parallelism.

    `parameters` are those of `PRODUCTS` and `BIASES`.
    """
    weights = [parameters[name] for name in PRODUCTS]
    biases = [parameters[name] for name in BIASES if name in parameters]
    out_RE: Tensor = GroupedFeedForward.apply(x_RE, weight_R, groups, options, *weights, *biases)
    return out_RE


class GroupedFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RE: Tensor,
        weight_R: Tensor | None,
        groups: RowGroups,
        options: Options,
        *weights: Tensor,
    ) -> Tensor:
        ctx.groups = groups
        ctx.options = options
        if not options.needs_output:
            ctx.save_for_backward(x_RE, weight_R, *weights)
            # The result only carries the graph; `backward` computes the products that it needs.
            return x_RE.new_empty(()).expand_as(x_RE)
        kept = list[Tensor]()

        def run(part: Part) -> Tensor:
            products = part.products()
            between = part.between(options)
            kept.extend(products)
            out_RE = grouped_product(between.inner(products), part.parameters[2], part.groups)
            return between.with_last_bias(out_RE) if part.biases else out_RE

        out_RE = _joined(map(run, _parts(groups, x_RE, weight_R, weights)), len(x_RE))
        ctx.save_for_backward(x_RE, weight_R, *weights, *kept)
        return out_RE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        options: Options = ctx.options
        x_RE, weight_R, *saved = ctx.saved_tensors
        # The other four inputs are x, the weights of rows, the groups and the options.
        num_weights = len(ctx.needs_input_grad) - 4
        weights = saved[:num_weights]
        kept = saved[num_weights:]
        # This list would keep every part's products alive until the end.
        del saved
        parts = _parts(ctx.groups, x_RE, weight_R, weights)
        others = list[list[Tensor]]()

        def run(part: Part, grad_RE: Tensor) -> Tensor:
            products = [kept.pop(0), kept.pop(0)] if options.needs_output else None
            grad_x_RE, *rest = _part_backward(part, grad_RE, products, options)
            others.append(rest)
            return grad_x_RE

        grads_RE = grads[0].split([len(part.x) for part in parts])
        grad_x_RE = _joined(map(run, parts, grads_RE), len(x_RE))
        joined = [_joined(each, sum(map(len, each))) for each in zip(*others, strict=True)]
        return grad_x_RE, None if weight_R is None else joined.pop(0), None, None, *joined


class Part(NamedTuple):
    """Rows that are computed together, and their experts."""

    groups: RowGroups
    x: Tensor
    """[R, E]."""
    weight: Tensor | None
    """[R], the weight of each row."""
    parameters: Sequence[Tensor]

    @property
    def biases(self) -> Sequence[Tensor]:
        return self.parameters[len(PRODUCTS) :]

    def products(self) -> list[Tensor]:
        """Products of gate and up, without their biases."""
        return [
            grouped_product(self.x, weight_XME, self.groups) for weight_XME in self.parameters[:2]
        ]

    def between(self, options: Options) -> Between:
        """The computation between the products, for one pass."""
        # The compiler specializes on lengths 0 and 1: each would be a compilation of its own.
        at_once = self.groups.ends is not None or 1 < len(self.x) <= ROWS_AT_ONCE
        # Each further number of rows costs a compilation.
        if options.compile_piece is None or not at_once:
            return EagerBetween(self, options)
        return CompiledBetween(self, options)


def _parts(
    groups: RowGroups, x_RE: Tensor, weight_R: Tensor | None, weights: Sequence[Tensor]
) -> list[Part]:
    """Splits rows into parts; with a kernel for groups they are one part.

    A loop takes few experts at a time: less memory, and most of it in cache.
    """
    if groups.ends is not None or len(x_RE) <= ROWS_AT_ONCE:
        return [Part(groups, x_RE, weight_R, weights)]
    parts = list[Part]()
    counts = groups.counts
    first = 0
    start = 0
    for last in range(1, len(counts) + 1):
        rows = sum(counts[first:last])
        if rows >= ROWS_AT_ONCE or last == len(counts):
            of_part = slice(start, start + rows)
            scale_R = None if weight_R is None else weight_R[of_part]
            experts = [each[first:last] for each in weights]
            parts.append(Part(RowGroups(counts[first:last]), x_RE[of_part], scale_R, experts))
            first = last
            start = start + rows
    return parts


def _joined(pieces: Iterable[Tensor], num_rows: int) -> Tensor:
    """Concatenates pieces; one that has all rows is not copied."""
    joined = torch.empty(0)
    start = 0
    # `torch.cat` would hold all pieces beside the result; here each is freed once it is copied.
    for number, piece in enumerate(pieces):
        if number == 0:
            joined = (
                piece if len(piece) == num_rows else piece.new_empty(num_rows, *piece.shape[1:])
            )
        if joined is not piece:
            joined[start : start + len(piece)] = piece
        start += len(piece)
    return joined


def _part_backward(
    part: Part, grad_RE: Tensor, products: list[Tensor] | None, options: Options
) -> list[Tensor]:
    """Gradients of the rows, of their weights if there are, and of the experts.

    `products`: gate and up, if saved.
    """
    groups, x_RE, weight_R, weights = part
    between = part.between(options)
    between.begin_backward(
        part.products() if products is None else products, are_kept=products is not None
    )
    del products
    # Tensors of [R, M] set the peak memory of the layer: each is freed at its last use.
    grad_inner_RM = grouped_product(grad_RE, weights[2].mT, groups)
    inner_RM = between.weighted(grad_inner_RM)
    router_grads = list[Tensor]()
    weight_grads = [grouped_weight_grad(grad_RE, inner_RM, groups)]
    del inner_RM
    # After `weighted`, which takes the graph's output: `backward` frees the graph.
    product_grads, dots_R = between.backward(grad_inner_RM)
    del grad_inner_RM
    # The loss depends on a row's weight by the dot product of its result and that gradient.
    if weight_R is not None:
        if part.biases:
            dots_R += between.last_bias_dots(grad_RE)
        router_grads = [dots_R.to(weight_R.dtype)]
    bias_grads = list[Tensor]()
    if part.biases:
        bias_grads = [_sum_by_expert(grad, groups) for grad in product_grads]
        bias_grads.append(_sum_by_expert(grad_RE, groups, weight_R, options.bias_scale))
    weight_grads = [
        grouped_weight_grad(grad, x_RE, groups) for grad in product_grads
    ] + weight_grads
    grad_x_RE = grouped_product(product_grads.pop(0), weights[0].mT, groups)
    grad_x_RE += grouped_product(product_grads.pop(0), weights[1].mT, groups)
    return [grad_x_RE, *router_grads, *weight_grads, *bias_grads]


# ---- between the products, and the bias after the last


class Between(Protocol):
    """The computation from the products of gate and up to the input of the last: biases, the gate,
    and the weight of each row; and the last bias, which has that weight as well.
    """

    def inner(self, products: list[Tensor]) -> Tensor:
        """[R, M]; may overwrite the products if nothing keeps them."""

    def begin_backward(self, products: list[Tensor], *, are_kept: bool) -> None:
        """`are_kept`: from the forward pass, so they have their biases if `inner` added them in
        place.
        """

    def weighted(self, grad_inner_RM: Tensor) -> Tensor:
        """The input of the last product once more; `grad_inner_RM` is its gradient, which
        `backward` gets too.
        """

    def backward(self, grad_inner_RM: Tensor) -> tuple[list[Tensor], Tensor]:
        """Gradients of gate and up, and [R] that of the weights in the dtype of sums, if there are
        weights.
        """

    def with_last_bias(self, out_RE: Tensor) -> Tensor:
        """Adds the last bias to the last product; may overwrite it."""

    def last_bias_dots(self, grad_RE: Tensor) -> Tensor:
        """[R]: the gradient of the weights by the last bias, in the dtype of sums."""


class EagerBetween:
    """`Between` with torch's operators, within few tensors of this size: most of them in place."""

    def __init__(self, part: Part, options: Options) -> None:
        self._part = part
        self._activation = options.activation
        self._bias_scale = options.bias_scale
        self._expert_R = _expert_of_row(part)
        self._graph: LocalGraph | None = None
        self._dots_R = torch.empty(0)

    def inner(self, products: list[Tensor]) -> Tensor:
        return _weigh_(GATES[self._activation](*self._with_biases_(products)), self._part.weight)

    def begin_backward(self, products: list[Tensor], *, are_kept: bool) -> None:
        if not are_kept:
            self._with_biases_(products)
        elif self._activation == "silu":
            products[1] = products[1].clone()  # SwiGLU overwrites it.
        self._graph = LocalGraph(
            lambda inputs, _: [GATES[self._activation](*inputs)], products, weights={}
        )

    def weighted(self, grad_inner_RM: Tensor) -> Tensor:
        inner_RM = cast(LocalGraph, self._graph).outputs.pop()
        if self._part.weight is not None:
            self._dots_R = _row_dots(inner_RM, grad_inner_RM)
        return _weigh_(inner_RM, self._part.weight)

    def backward(self, grad_inner_RM: Tensor) -> tuple[list[Tensor], Tensor]:
        product_grads, _ = cast(LocalGraph, self._graph).backward(
            [_weigh_(grad_inner_RM, self._part.weight)]
        )
        return product_grads, self._dots_R

    def with_last_bias(self, out_RE: Tensor) -> Tensor:
        bias_RE = self._by_row(self._part.biases[-1])
        out_RE += _weigh_(bias_RE, self._part.weight) * self._bias_scale
        return out_RE

    def last_bias_dots(self, grad_RE: Tensor) -> Tensor:
        return self._bias_scale * _row_dots(self._by_row(self._part.biases[-1]), grad_RE)

    def _with_biases_(self, products: list[Tensor]) -> list[Tensor]:
        """Adds the biases in place."""
        for product_RM, bias_XM in zip(products, self._part.biases, strict=False):
            product_RM += self._by_row(bias_XM)
        return products

    def _by_row(self, bias_XI: Tensor) -> Tensor:
        """The bias of each row's expert."""
        return bias_XI.index_select(0, cast(Tensor, self._expert_R))


class CompiledBetween:
    """`Between` with compiled functions, which read the products once each way."""

    def __init__(self, part: Part, options: Options) -> None:
        self._part = part
        self._activation = options.activation
        self._bias_scale = options.bias_scale
        self._expert_R = _expert_of_row(part)
        self._compiled = cast(
            Callable[[Callable[..., Tensor]], Callable[..., Tensor]], options.compile_piece
        )
        self._graph: LocalGraph | None = None

    def inner(self, products: list[Tensor]) -> Tensor:
        return self._run(products, self._part.weight)

    def begin_backward(self, products: list[Tensor], *, are_kept: bool) -> None:
        del are_kept
        given = products if self._part.weight is None else [*products, self._part.weight]
        self._graph = LocalGraph(
            lambda inputs, _: [self._run(inputs[:2], *inputs[2:])], given, weights={}
        )

    def weighted(self, grad_inner_RM: Tensor) -> Tensor:
        del grad_inner_RM
        return cast(LocalGraph, self._graph).outputs.pop()

    def backward(self, grad_inner_RM: Tensor) -> tuple[list[Tensor], Tensor]:
        found, _ = cast(LocalGraph, self._graph).backward([grad_inner_RM])
        # Without weights the second value is a placeholder, which the caller does not read.
        return found[:2], found[-1]

    def with_last_bias(self, out_RE: Tensor) -> Tensor:
        return self._compiled(with_bias)(
            out_RE, self._last_bias(), self._expert_R, self._part.weight, self._bias_scale
        )

    def last_bias_dots(self, grad_RE: Tensor) -> Tensor:
        return self._compiled(bias_dots)(
            grad_RE, self._last_bias(), self._expert_R, self._bias_scale
        )

    def _last_bias(self) -> Tensor:
        # Detached: `_part_backward` sums the gradients of biases by expert, outside of this graph.
        return self._part.biases[-1].detach()

    def _run(self, products: Sequence[Tensor], weight_R: Tensor | None = None) -> Tensor:
        biases = self._part.biases[:2]
        return self._compiled(weighted_gate)(
            *products, weight_R, biases, self._expert_R, self._activation
        )


def weighted_gate(
    gate_RM: Tensor,
    up_RM: Tensor,
    weight_R: Tensor | None,
    biases: Sequence[Tensor],
    expert_R: Tensor | None,
    activation: str,
) -> Tensor:
    """[R, M], of products without their biases [X, M], which have no gradients here."""
    dtype = gate_RM.dtype
    if biases and expert_R is not None:
        gate_bias_XM, up_bias_XM = (each.detach() for each in biases)
        gate_RM = gate_RM + gate_bias_XM[expert_R]
        up_RM = up_RM + up_bias_XM[expert_R]
    inner_RM = GATES[activation](gate_RM, up_RM)
    return inner_RM if weight_R is None else (inner_RM * weight_R.unsqueeze(-1)).to(dtype)


def with_bias(
    out_RE: Tensor, bias_XE: Tensor, expert_R: Tensor, weight_R: Tensor | None, scale: float
) -> Tensor:
    bias_RE = scale * bias_XE[expert_R]
    weighted_RE = bias_RE if weight_R is None else bias_RE * weight_R.unsqueeze(-1)
    return (out_RE + weighted_RE).to(out_RE.dtype)


def bias_dots(grad_RE: Tensor, bias_XE: Tensor, expert_R: Tensor, scale: float) -> Tensor:
    """Dot products of the rows of a gradient with their biases: [R], in the dtype of sums."""
    return scale * _row_dots(bias_XE[expert_R], grad_RE)


def _weigh_(x_RI: Tensor, weight_R: Tensor | None) -> Tensor:
    """Multiplies rows by their weights, in place."""
    return x_RI if weight_R is None else x_RI.mul_(weight_R.to(x_RI.dtype).unsqueeze(-1))


def _row_dots(x_RI: Tensor, y_RI: Tensor) -> Tensor:
    """Dot product of each row, in the dtype of sums."""
    dots_R: Tensor = (x_RI * y_RI).sum(-1, dtype=accumulation_dtype(x_RI.dtype))
    return dots_R


def _expert_of_row(part: Part) -> Tensor | None:
    """Index of each row's expert, [R]; rows after all experts get the last. None without biases."""
    if not part.biases:
        return None
    groups = part.groups
    num_rows = len(part.x)
    device = part.x.device
    if groups.ends is not None:
        # int32 as the ends are: `searchsorted` takes one dtype.
        rows_R = torch.arange(num_rows, dtype=torch.int32, device=device)
        return torch.searchsorted(groups.ends[:-1], rows_R, right=True)
    counts_X = torch.tensor(groups.counts, device="cpu").to(device, non_blocking=True)
    # With `output_size` the host need not wait for the sum of the counts.
    return torch.arange(len(counts_X), device=device).repeat_interleave(
        counts_X, output_size=num_rows
    )


def _sum_by_expert(
    x_RI: Tensor, groups: RowGroups, weight_R: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """Sums of rows by expert, [X, I], each row times its weight times `scale`."""
    if groups.ends is not None:
        # A sum over rows is a product with a column of ones: the kernel for groups sums each
        # group, and the host need not know its length.
        columns_R8 = x_RI.new_full((len(x_RI), SUMMED_COLUMNS), scale)
        if weight_R is not None:
            torch.mul(weight_R.unsqueeze(-1).expand_as(columns_R8), scale, out=columns_R8)
        return grouped_weight_grad(columns_R8, x_RI, groups)[:, 0]
    if weight_R is not None or scale != 1:
        x_RI = _weigh_(x_RI * scale, weight_R)
    sums = [
        x_I.sum(0, dtype=accumulation_dtype(x_RI.dtype)) for x_I in x_RI.split([*groups.counts])
    ]
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
