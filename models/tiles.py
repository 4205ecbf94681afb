"""The feed-forward by tiles of tokens, each computed again in the backward pass (ALST, Bekman et al., 2025).

A tile begins with the residual stream, or with what the norm made of it, and that is all that is kept. Backward, its
gate and up are computed again, never its output. Two autograd functions follow each other:

    x, weights --> Remember --> x, standing for the output --> Tiles --> output
                   keeps x and weights                         keeps nothing
                   gradients of both <-- gradient of output <-- the same

so that a checkpoint around the block, which runs it again until all that was kept is there, stops before the tiles.

Shape suffixes: R tokens of all rows, C tokens of a tile, E width of the residual stream, G inner width here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from models.feed_forward import Pointwise, gated_backward
from models.norm import RMSNorm, normalise, normalise_backward


def feed_forward(
    x_E: Tensor, norm: Pointwise, gate_GE: Tensor, up_GE: Tensor, down_EG: Tensor, *, limit: int
) -> Tensor:
    """What `feed_forward.at_once` computes, in tiles whose intermediates take no more than `limit` bytes."""
    weight_E, eps = None, 0.0
    if isinstance(norm, RMSNorm):
        weight_E, eps = norm.view(norm.weight), norm.eps
    else:
        x_E = norm(x_E)
    most = max(1, limit // bytes_of_token(x_E, gate_GE, normed=weight_E is not None))
    inputs = (x_E, weight_E, gate_GE, up_GE, down_EG)
    promised_E = Remember.apply(*inputs, eps, most)
    out_E: Tensor = Tiles.apply(promised_E, *(x if x is None else x.detach() for x in inputs), eps, most)
    return out_E


def bytes_of_token(x_E: Tensor, gate_GE: Tensor, *, normed: bool) -> int:
    """In the backward pass, where most lives at once: gate, up and what becomes the gradients of both, then these
    gradients and two of the input; beside the normalised input.
    """
    inner, width = gate_GE.shape
    return (2 * inner + 2 * max(inner, width) + width * normed) * x_E.element_size()


def tiles(tokens: int, most: int) -> Iterator[slice]:
    """As few as possible, and as equal as possible: no small one at the end, which would waste a device."""
    count = -(-tokens // most)
    size = -(-tokens // count)
    yield from (slice(start, start + size) for start in range(0, tokens, size))


class Remember(torch.autograd.Function):
    """Keeps what tiles begin with, and returns x in the place of their output, whose gradient it then gets."""

    @staticmethod
    def forward(ctx: Any, x_E: Tensor, *inputs: Any) -> Tensor:
        *weights, eps, most = inputs
        ctx.save_for_backward(x_E, *weights)
        ctx.options = (eps, most)
        return x_E.view_as(x_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors  # Once: what is computed again is there once.
        found = iter(_backward(grads[0], *kept, *ctx.options))
        return *(x if x is None else next(found) for x in kept), None, None


class Tiles(torch.autograd.Function):
    """The output, in the place of which `Remember` returned its first input."""

    @staticmethod
    def forward(ctx: Any, promised_E: Tensor, *inputs: Any) -> Tensor:
        del ctx, promised_E
        out_E: Tensor = _forward(*inputs)
        return out_E

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        del ctx
        return grads[0], *(None,) * 7


# ---- operators, so that a compiler does not keep of one pass what the next would compute again


def forward(
    x_E: Tensor, norm_E: Tensor | None, gate_GE: Tensor, up_GE: Tensor, down_EG: Tensor, eps: float, most: int
) -> Tensor:
    x_RE = x_E.reshape(-1, x_E.shape[-1])
    out_RE = torch.empty_like(x_RE, memory_format=torch.contiguous_format)
    for part in tiles(x_RE.shape[0], most):
        x_CE = x_RE[part] if norm_E is None else normalise(x_RE[part], norm_E, eps)[0]
        product_CG = F.silu(x_CE @ gate_GE.T, inplace=True).mul_(x_CE @ up_GE.T)
        torch.mm(product_CG, down_EG.T, out=out_RE[part])
    return out_RE.view(x_E.shape)


def backward(
    grad_E: Tensor,
    x_E: Tensor,
    norm_E: Tensor | None,
    gate_GE: Tensor,
    up_GE: Tensor,
    down_EG: Tensor,
    eps: float,
    most: int,
) -> list[Tensor]:
    """Gradients of x, of the norm's weight if there is one, and of the three matrices, summed over tiles in float32
    (float64 for float64).
    """
    x_RE, grad_RE = (x.reshape(-1, x_E.shape[-1]) for x in (x_E, grad_E))
    weights = [weight for weight in (gate_GE, up_GE, down_EG, norm_E) if weight is not None]
    wide = torch.float64 if x_E.dtype == torch.float64 else torch.float32
    sums = [torch.zeros_like(weight, dtype=wide) for weight in weights]
    grad_x_RE = torch.empty_like(x_RE, memory_format=torch.contiguous_format)
    for part in tiles(x_RE.shape[0], most):
        grad_x_RE[part] = tile_backward(grad_RE[part], x_RE[part], norm_E, gate_GE, up_GE, down_EG, eps, sums)
    grad_gate_GE, grad_up_GE, grad_down_EG, *grad_norm = (sums.pop(0).to(weight.dtype) for weight in weights)
    return [grad_x_RE.view(x_E.shape), *grad_norm, grad_gate_GE, grad_up_GE, grad_down_EG]


def tile_backward(
    grad_CE: Tensor,
    x_CE: Tensor,
    norm_E: Tensor | None,
    gate_GE: Tensor,
    up_GE: Tensor,
    down_EG: Tensor,
    eps: float,
    sums: list[Tensor],
) -> Tensor:
    """The gradient of x; those of gate, up, down and norm are added to the sums."""
    normed_CE, inverse_C1 = (x_CE, None) if norm_E is None else normalise(x_CE, norm_E, eps)
    gate_CG, up_CG = normed_CE @ gate_GE.T, normed_CE @ up_GE.T
    grad_gate_CG, grad_up_CG, grad_down_EG = gated_backward(grad_CE, gate_CG, up_CG, down_EG)
    del gate_CG, up_CG
    sums[2] += grad_down_EG
    sums[0] += grad_gate_CG.T @ normed_CE
    sums[1] += grad_up_CG.T @ normed_CE
    grad_x_CE = torch.addmm(grad_gate_CG @ gate_GE, grad_up_CG, up_GE)
    if norm_E is None or inverse_C1 is None:
        return grad_x_CE
    del grad_gate_CG, grad_up_CG, normed_CE
    grad_x_CE, grad_norm_E = normalise_backward(grad_x_CE, x_CE, norm_E, inverse_C1)
    sums[3] += grad_norm_E
    return grad_x_CE


_forward = torch.library.custom_op("longhaul::feed_forward", forward, mutates_args=())
_backward = torch.library.custom_op("longhaul::feed_forward_backward", backward, mutates_args=())


@_forward.register_fake
def _(x_E: Tensor, *rest: Any) -> Tensor:
    del rest
    return torch.empty_like(x_E, memory_format=torch.contiguous_format)


@_backward.register_fake
def _(grad_E: Tensor, *inputs: Any) -> list[Tensor]:
    del grad_E
    tensors = (x for x in inputs if isinstance(x, Tensor))
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
