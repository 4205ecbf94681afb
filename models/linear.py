"""Linear and Embedding modules, and the part of a parameter that a rank computes with.

Shape suffixes: B batch, S tokens of this rank, E model dim, I inputs, O outputs, V vocabulary rows
of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.dtypes import accumulation_dtype
from models.layers import embedding_grad_columns
from models.tiling import each_chunk

LocalView = Callable[[Tensor], Tensor]
"""Maps a parameter to the tensor that this rank computes with: the identity, or what tensor
parallelism sets.
"""


def identity(x: Tensor) -> Tensor:
    return x


def set_local_view(module: nn.Module, name: str, view: LocalView) -> None:
    """From now on, this rank computes with `view(parameter)`."""
    module.__dict__.setdefault("local_views", {})[name] = view


def local_parameter(module: nn.Module, name: str = "weight") -> Tensor:
    """A parameter as this rank computes with it."""
    view: LocalView = module.__dict__.get("local_views", {}).get(name, identity)
    return view(getattr(module, name))


def local_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter of a module and of those inside it, by name, as this rank computes with
    it.
    """
    return {
        f"{prefix}.{name}".lstrip("."): local_parameter(each, name)
        for prefix, each in module.named_modules()
        for name, parameter in each._parameters.items()
        if parameter is not None
    }


class Linear(nn.Linear):
    """`x @ weight.T`, and `+ bias` if it has one."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        return F.linear(input, **local_parameters(self))


class EmbeddingFunction(torch.autograd.Function):
    """`F.embedding` whose backward sums in `accumulation_dtype`; torch's loses most of 2,000 equal
    tokens in bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, index_BS: Tensor, weight_VE: Tensor) -> Tensor:
        ctx.save_for_backward(index_BS)
        ctx.num_rows = weight_VE.shape[0]
        return F.embedding(index_BS, weight_VE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (grad_BSE,) = grads
        (index_BS,) = ctx.saved_tensors
        dtype = accumulation_dtype(grad_BSE.dtype)
        sum_by_row = partial(
            torch.ops.aten.embedding_dense_backward, padding_idx=-1, scale_grad_by_freq=False
        )
        if dtype == grad_BSE.dtype:
            return None, sum_by_row(grad_BSE, index_BS, ctx.num_rows)
        # In parts of columns, which bounds the float32 copies of the gradient.
        grad_weight_VE = grad_BSE.new_empty(ctx.num_rows, grad_BSE.shape[-1])
        num_columns = embedding_grad_columns(ctx.num_rows, index_BS.numel(), grad_BSE.shape[-1])
        for columns in each_chunk(grad_BSE.shape[-1], num_columns):
            grad_weight_VE[:, columns] = sum_by_row(
                grad_BSE[..., columns].to(dtype), index_BS, ctx.num_rows
            )
        return None, grad_weight_VE


class Embedding(nn.Embedding):
    """Token embedding; a vocabulary shard gives zeros for the tokens of other shards, and NaN for
    those of none.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.vocab_start_index: int | None = None
        """Token id of the shard's first row; None if the rank holds the full vocabulary."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        weight_VE = local_parameter(self)
        if self.vocab_start_index is None:
            out_BSE: Tensor = EmbeddingFunction.apply(input, weight_VE)
            return out_BSE
        # Tokens of other shards give zeros, which the sum over ranks fills in. An id outside of
        # the vocabulary gives NaN on every rank, rather than zeros on all.
        index_BS = input - self.vocab_start_index
        is_local_BS = (index_BS >= 0) & (index_BS < weight_VE.shape[0])
        is_token_BS = (input >= 0) & (input < self.num_embeddings)
        scale_BS = is_local_BS.to(weight_VE.dtype).where(is_token_BS, torch.nan)
        local_BSE: Tensor = EmbeddingFunction.apply(index_BS.where(is_local_BS, 0), weight_VE)
        return local_BSE * scale_BS.unsqueeze(-1)
