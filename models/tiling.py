"""What a block computes of a tile of tokens, forward and backward, below autograd.

A tile is what lives at once where a block is computed again in its backward pass (ALST, Bekman et al., 2025). Tokens
meet in attention only, so tiles are exact, of whatever length.

Shape suffixes: B rows, C tokens of a tile, E width of the residual stream, G inner width here, Q and K widths of all
query and of all key heads, H width of a head, F rotary frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from models import norm, rope
from models.feed_forward import gated, gated_backward


def tiles(tokens: int, most: int | None = None) -> list[slice]:
    """As few as possible, and as equal as possible: no small one at the end, which would waste a device."""
    count = 1 if most is None else -(-tokens // max(1, most))
    starts = [-(-tokens * index // count) for index in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(starts)]


def bytes_of_token(width: int, inner: int, size: int) -> int:
    """In a feed-forward's backward pass, where most lives at once: gate, up and what becomes the gradients of both, then
    these gradients and two of the input; beside the normalised input. A number takes `size`.
    """
    return (2 * inner + 2 * max(inner, width) + width) * size


class Projections(NamedTuple):
    """What makes queries, keys and values of the normalised stream."""

    matrices: Sequence[Tensor]
    """Of queries [Q, E], keys [K, E] and values [K, E]."""
    norms: Sequence[Tensor]
    """Of each head of queries and of keys, [H]; or none."""
    eps: float

    def group(self, number: int, groups: int) -> Projections:
        """Those of some of the heads."""
        return self._replace(matrices=[weight.chunk(groups)[number] for weight in self.matrices])


def project(
    normed_BCE: Tensor, cos_BC1F: Tensor, sin_BC1F: Tensor, through: Projections
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, normalised and rotated, and values: [B, C, heads, H]."""
    q, k, v = (_heads(normed_BCE, weight, cos_BC1F) for weight in through.matrices)
    for weight_H, x in zip(through.norms, (q, k), strict=False):
        x.copy_(norm.normalise(x, weight_H, through.eps)[0])
    return rope.turn(q, cos_BC1F, sin_BC1F), rope.turn(k, cos_BC1F, sin_BC1F), v


def project_backward(
    normed_BCE: Tensor, cos_BC1F: Tensor, sin_BC1F: Tensor, grads: Sequence[Tensor], through: Projections
) -> tuple[Tensor, ...]:
    """Gradients of the input, of the three matrices, and of the norms, which need what entered them once more."""
    dq, dk, dv = grads
    back = [rope.turn(dq, cos_BC1F, -sin_BC1F), rope.turn(dk, cos_BC1F, -sin_BC1F), dv]
    grad_norms = []
    for index, weight_H in enumerate(through.norms):
        x = _heads(normed_BCE, through.matrices[index], cos_BC1F)
        inverse = norm.inverse(x, through.eps)
        back[index], grad_H = norm.normalise_backward(back[index], x, weight_H, inverse)
        grad_norms.append(grad_H)
    flat = [x.flatten(-2) for x in back]
    grad_BCE = sum_of_products(flat, through.matrices)
    return grad_BCE, *(weight_grad(grad, normed_BCE) for grad in flat), *grad_norms


def _heads(normed_BCE: Tensor, weight: Tensor, cos_BC1F: Tensor) -> Tensor:
    heads: Tensor = F.linear(normed_BCE, weight).unflatten(-1, (-1, 2 * cos_BC1F.shape[-1]))
    return heads


def feed(normed_BCE: Tensor, gate_GE: Tensor, up_GE: Tensor, down_EG: Tensor, *, activation: str) -> Tensor:
    return gated(F.linear(normed_BCE, gate_GE), F.linear(normed_BCE, up_GE), down_EG, activation=activation)


def feed_backward(
    grad_BCE: Tensor, normed_BCE: Tensor, gate_GE: Tensor, up_GE: Tensor, down_EG: Tensor, *, activation: str
) -> tuple[Tensor, ...]:
    """Gradients of the input, and of the three matrices."""
    gate, up = F.linear(normed_BCE, gate_GE), F.linear(normed_BCE, up_GE)
    grad_gate, grad_up, grad_down_EG = gated_backward(grad_BCE, gate, up, down_EG, activation=activation)
    del gate, up
    both = [weight_grad(grad, normed_BCE) for grad in (grad_gate, grad_up)]
    return sum_of_products([grad_gate, grad_up], (gate_GE, up_GE)), *both, grad_down_EG


def weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """Of the weight that made of `x` what has this gradient."""
    return grad.flatten(0, -2).T @ x.flatten(0, -2)


def sum_of_products(grads: list[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The gradient of what several weights multiply."""
    total = grads[0].flatten(0, -2) @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total.addmm_(grad.flatten(0, -2), weight)
    return total.view(*grads[0].shape[:-1], -1)


class Sums:
    """Gradients of weights, summed over so many tiles in float32 (float64 for float64)."""

    def __init__(self, weights: Sequence[Tensor], tiles: int) -> None:
        self._dtypes = [weight.dtype for weight in weights]
        self._sums: list[Tensor] = []
        if tiles > 1:
            wide = torch.promote_types(weights[0].dtype, torch.float32)
            self._sums = [torch.zeros_like(weight, dtype=wide) for weight in weights]

    def add(self, grads: Sequence[Tensor]) -> None:
        if not self._sums:
            self._sums = [*grads]
            return
        for total, grad in zip(self._sums, grads, strict=True):
            total += grad

    def done(self) -> Iterator[Tensor]:
        """Each in its weight's type, and no longer held here."""
        for dtype in self._dtypes:
            yield self._sums.pop(0).to(dtype)
