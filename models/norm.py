"""Root mean square normalisation (Zhang & Sennrich, 2019).

Shape suffixes, after any leading dimensions: E normalised dim, 1 one number per token. C marks a
chunk of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.config import ModelConfig
from models.device_paths import runs_as_on_gpu
from models.dtypes import accumulation_dtype
from models.linear import identity, local_parameter
from models.tiling import each_chunk

AllReduce = Callable[[Tensor], Tensor]


def is_fused(x_E: Tensor, weight_E: Tensor) -> bool:
    """Whether torch normalizes by kernels that read x once, keep one number per token, and compute
    in float32.

    They exist on CUDA. They multiply by the weight before they round, unlike `rms_norm`, which
    rounds as Hugging Face does.
    """
    is_wide = accumulation_dtype(x_E.dtype) == torch.float64
    return (
        runs_as_on_gpu(x_E)
        and x_E.dtype == weight_E.dtype
        and not is_wide
        and not torch.compiler.is_compiling()
    )


def rms_norm(x_E: Tensor, weight_E: Tensor, eps: float, *mean_of: Any) -> tuple[Tensor, Tensor]:
    """Output in x's dtype, and the reciprocal standard deviation that the backward pass needs."""
    rstd_1 = rstd(x_E, eps, *mean_of)
    out_E: Tensor = (x_E * rstd_1).to(x_E.dtype)
    if not torch.compiler.is_compiling():
        return out_E.mul_(weight_E), rstd_1
    # Dynamo of torch 2.11 loses the gradient of an autograd function that writes in place, or
    # whose last operator is a cast that casts nothing.
    scaled_E = out_E * weight_E
    return (scaled_E if scaled_E.dtype == x_E.dtype else scaled_E.to(x_E.dtype)), rstd_1


def rstd(x_E: Tensor, eps: float, num_shards: int = 1, all_reduce: AllReduce = identity) -> Tensor:
    """Reciprocal root mean square of each token, in `accumulation_dtype`; over the shards, if
    ranks have one each.
    """
    # The norm in a wide dtype reads x once; squaring a widened copy would allocate it.
    norm_1 = torch.linalg.vector_norm(
        x_E, dim=-1, keepdim=True, dtype=accumulation_dtype(x_E.dtype)
    )
    rstd_1: Tensor = (all_reduce(norm_1.square()) / (x_E.shape[-1] * num_shards) + eps).rsqrt()
    return rstd_1


def rms_norm_backward(
    grad_E: Tensor,
    x_E: Tensor,
    weight_E: Tensor,
    rstd_1: Tensor,
    num_shards: int = 1,
    all_reduce: AllReduce = identity,
) -> tuple[Tensor, Tensor]:
    """Gradients of x, in its dtype, and of the weight, in the dtype of `rstd_1`."""
    # With n = x rstd and g = grad weight: dx = rstd (g - n mean(g n)), dweight = sum(grad n).
    normed_E = x_E * rstd_1
    grad_weight_E = (grad_E * normed_E).flatten(0, -2).sum(0)
    grad_normed_E = grad_E * weight_E
    # Shards are of equal size, so the mean of their means is the mean.
    mean_dot_1 = all_reduce((grad_normed_E * normed_E).mean(-1, keepdim=True)) / num_shards
    grad_x_E = (grad_normed_E - normed_E * mean_dot_1) * rstd_1
    return grad_x_E.to(x_E.dtype), grad_weight_E


class RMSNormFunction(torch.autograd.Function):
    """Saves one number per token in addition to its input, which the residual stream saves
    anyway.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_E: Tensor,
        weight_E: Tensor,
        eps: float,
        chunk_tokens: int | None,
        *mean_of: Any,
    ) -> Tensor:
        ctx.chunk_tokens = chunk_tokens
        ctx.mean_of = mean_of
        if chunk_tokens is None:
            out_E, rstd_1 = rms_norm(x_E, weight_E, eps, *mean_of)
        else:
            out_E = torch.empty_like(x_E, memory_format=torch.contiguous_format)
            rstd_1 = x_E.new_empty(*x_E.shape[:-1], 1, dtype=accumulation_dtype(x_E.dtype))
            for x_C, out_C, rstd_C in _chunks(chunk_tokens, x_E, out_E, rstd_1):
                out_C[:], rstd_C[:] = rms_norm(x_C, weight_E, eps)
        ctx.save_for_backward(x_E, weight_E, rstd_1)
        return out_E

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_E,) = grads
        x_E, weight_E, rstd_1 = ctx.saved_tensors
        if ctx.chunk_tokens is None:
            grad_x_E, grad_weight_E = rms_norm_backward(
                grad_E, x_E, weight_E, rstd_1, *ctx.mean_of
            )
        else:
            grad_x_E = torch.empty_like(x_E, memory_format=torch.contiguous_format)
            grad_weight_E = torch.zeros_like(weight_E, dtype=rstd_1.dtype)
            for grad_x_C, grad_C, x_C, rstd_C in _chunks(
                ctx.chunk_tokens, grad_x_E, grad_E, x_E, rstd_1
            ):
                grad_x_C[:], grad_weight_of_chunk_E = rms_norm_backward(
                    grad_C, x_C, weight_E, rstd_C
                )
                grad_weight_E += grad_weight_of_chunk_E
        return grad_x_E, grad_weight_E.to(weight_E.dtype), *[None] * (2 + len(ctx.mean_of))


def _chunks(chunk_tokens: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    rows = [x.flatten(0, -2) for x in tensors]
    for chunk in each_chunk(len(rows[0]), chunk_tokens):
        yield tuple(x[chunk] for x in rows)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, *, eps: float, zero_centered: bool = False) -> None:
        """`zero_centered`: multiplies by 1 + weight."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.zero_centered = zero_centered
        self.mean_of: tuple[int, AllReduce] | tuple[()] = ()
        """Number of shards of the normalised dim, and the sum over them.

        Tensor parallelism sets it.
        """
        self.chunk_tokens: int | None = None
        """Tokens per chunk, which bounds float32 temporaries; None: all tokens at once. The loss
        head sets it. Fused kernels have no temporaries.
        """

    def forward(self, x_E: Tensor) -> Tensor:
        """[..., E] in x's dtype; statistics in `accumulation_dtype`."""
        return self.normalize(x_E, local_parameter(self))

    def normalize(self, x_E: Tensor, weight_E: Tensor) -> Tensor:
        # In float32 at least: 1 + weight would lose the digits of a small weight.
        if self.zero_centered:
            weight_E = weight_E.to(accumulation_dtype(weight_E.dtype)) + 1
        if not self.mean_of and is_fused(x_E, weight_E):
            return F.rms_norm(x_E, weight_E.shape, weight_E, self.eps)
        if self.chunk_tokens is None and not torch.is_grad_enabled():
            return rms_norm(x_E, weight_E, self.eps, *self.mean_of)[0]
        out: Tensor = RMSNormFunction.apply(
            x_E, weight_E, self.eps, self.chunk_tokens, *self.mean_of
        )
        return out


def config_norm(config: ModelConfig, dim: int) -> RMSNorm:
    return RMSNorm(dim, eps=config.norm_eps, zero_centered=config.zero_centered_norms)
