"""A block's computation on one tile of tokens: QKV projections and feed-forward, forward and backward, below autograd.

Tiling bounds the transient memory of recomputation (ALST, Bekman et al., 2025). Tokens interact only in attention, so
every tile length gives exact results.

Shape suffixes: B batch, C tokens of a tile, E model dim, G feed-forward dim of this rank, Q and K dims of all query and
of all KV heads, H head dim, F rotary frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from models import norm, rope
from models.feed_forward import gated_linear, gated_linear_backward
from models.linear import accumulation_dtype


def split_into_tiles(num_tokens: int, max_tokens: int | None = None) -> list[slice]:
    """The fewest tiles of at most `max_tokens`, as equal as possible: a small last tile would waste the device."""
    count = 1 if max_tokens is None else -(-num_tokens // max(1, max_tokens))
    starts = [-(-num_tokens * index // count) for index in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(starts)]


def bytes_per_token(dim: int, ffn_dim: int, itemsize: int) -> int:
    """Peak bytes per token in the feed-forward's backward pass, at `itemsize` bytes per number.

    Gate, up and the buffers of their gradients; then these gradients and two input gradients; plus the normed input.
    """
    return (2 * ffn_dim + 2 * max(ffn_dim, dim) + dim) * itemsize


class QKVProjections(NamedTuple):
    """Weights that map the normed residual stream to queries, keys and values."""

    weights: Sequence[Tensor]
    """Query [Q, E], key [K, E] and value [K, E] projections."""
    norm_weights: Sequence[Tensor]
    """Query and key norms [H], or empty."""
    eps: float

    def head_group(self, index: int, num_groups: int) -> QKVProjections:
        """The projections of one of `num_groups` head groups."""
        return self._replace(weights=[weight.chunk(num_groups)[index] for weight in self.weights])


def project_qkv(
    normed_BCE: Tensor, cos_BC1F: Tensor, sin_BC1F: Tensor, projections: QKVProjections
) -> tuple[Tensor, Tensor, Tensor]:
    """Normed and rotated queries and keys, and values: [B, C, heads, H]."""
    q, k, v = (_project_heads(normed_BCE, weight, cos_BC1F) for weight in projections.weights)
    for weight_H, x in zip(projections.norm_weights, (q, k), strict=False):
        x.copy_(norm.rms_norm(x, weight_H, projections.eps)[0])
    return rope.apply_rotary(q, cos_BC1F, sin_BC1F), rope.apply_rotary(k, cos_BC1F, sin_BC1F), v


def project_qkv_backward(
    normed_BCE: Tensor, cos_BC1F: Tensor, sin_BC1F: Tensor, grads: Sequence[Tensor], projections: QKVProjections
) -> tuple[Tensor, ...]:
    """Gradients of the input, the three projections and the norms, whose inputs are recomputed."""
    dq, dk, dv = grads
    grad_heads = [rope.apply_rotary(dq, cos_BC1F, -sin_BC1F), rope.apply_rotary(dk, cos_BC1F, -sin_BC1F), dv]
    grad_norms = []
    for index, weight_H in enumerate(projections.norm_weights):
        x = _project_heads(normed_BCE, projections.weights[index], cos_BC1F)
        rstd = norm.rstd(x, projections.eps)
        grad_heads[index], grad_H = norm.rms_norm_backward(grad_heads[index], x, weight_H, rstd)
        grad_norms.append(grad_H)
    grad_flat = [x.flatten(-2) for x in grad_heads]
    grad_BCE = input_grad(grad_flat, projections.weights)
    return grad_BCE, *(weight_grad(grad, normed_BCE) for grad in grad_flat), *grad_norms


def _project_heads(normed_BCE: Tensor, weight: Tensor, cos_BC1F: Tensor) -> Tensor:
    heads: Tensor = F.linear(normed_BCE, weight).unflatten(-1, (-1, 2 * cos_BC1F.shape[-1]))
    return heads


def feed_forward(normed_BCE: Tensor, gate_GE: Tensor, up_GE: Tensor, down_EG: Tensor, *, activation: str) -> Tensor:
    return gated_linear(F.linear(normed_BCE, gate_GE), F.linear(normed_BCE, up_GE), down_EG, activation=activation)


def feed_forward_backward(
    grad_BCE: Tensor, normed_BCE: Tensor, gate_GE: Tensor, up_GE: Tensor, down_EG: Tensor, *, activation: str
) -> tuple[Tensor, ...]:
    """Gradients of the input and of the gate, up and down projections."""
    gate, up = F.linear(normed_BCE, gate_GE), F.linear(normed_BCE, up_GE)
    grad_gate, grad_up, grad_down_EG = gated_linear_backward(grad_BCE, gate, up, down_EG, activation=activation)
    del gate, up
    grad_gate_up = [weight_grad(grad, normed_BCE) for grad in (grad_gate, grad_up)]
    return input_grad([grad_gate, grad_up], (gate_GE, up_GE)), *grad_gate_up, grad_down_EG


def weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """Weight gradient of `x @ weight.T`, from the gradient of the product."""
    return grad.flatten(0, -2).T @ x.flatten(0, -2)


def input_grad(grads: list[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Gradient of an input that several weights multiply: sum of `grad @ weight`."""
    total = grads[0].flatten(0, -2) @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total.addmm_(grad.flatten(0, -2), weight)
    return total.view(*grads[0].shape[:-1], -1)


class GradAccumulator:
    """Sums weight gradients over tiles, in `accumulation_dtype`; a single tile's are kept as they are."""

    def __init__(self, weights: Sequence[Tensor], num_tiles: int) -> None:
        self._dtypes = [weight.dtype for weight in weights]
        self._accumulators: list[Tensor] = []
        if num_tiles > 1:
            dtype = accumulation_dtype(weights[0].dtype)
            self._accumulators = [torch.zeros_like(weight, dtype=dtype) for weight in weights]

    def add(self, grads: Sequence[Tensor]) -> None:
        if not self._accumulators:
            self._accumulators = [*grads]
            return
        for total, grad in zip(self._accumulators, grads, strict=True):
            total += grad

    def pop_grads(self) -> Iterator[Tensor]:
        """Yields each gradient in its weight's dtype and releases its accumulator."""
        for dtype in self._dtypes:
            yield self._accumulators.pop(0).to(dtype)
