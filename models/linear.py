"""Linear and Embedding modules whose weight passes through `view`, and the dtype in which every module accumulates.

Shape suffixes: B batch, S tokens of this rank, E model dim, I inputs, O outputs, V vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EMBEDDING_GRAD_COLUMNS = 64  # in `accumulation_dtype` at once: 32 MiB for a vocabulary of 128K
WeightView = Callable[[Tensor], Tensor]
"""Maps a parameter to the tensor that this rank computes with: the identity, or what FSDP and tensor parallelism set."""


def identity(x: Tensor) -> Tensor:
    return x


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for statistics, sums and log-sum-exps over tensors of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Linear(nn.Linear):
    """`x @ weight.T`, without bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.view: WeightView = identity

    def local_weight(self) -> Tensor:
        """[O, I] as this rank uses it."""
        return self.view(self.weight)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        return F.linear(input, self.local_weight())


class EmbeddingFunction(torch.autograd.Function):
    """`F.embedding` whose backward sums in `accumulation_dtype`; torch's loses most of 2,000 equal tokens in bfloat16."""

    @staticmethod
    def forward(ctx: Any, index_BS: Tensor, weight_VE: Tensor) -> Tensor:
        ctx.save_for_backward(index_BS)
        ctx.num_rows = weight_VE.shape[0]
        return F.embedding(index_BS, weight_VE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (grad_BSE,), (index_BS,) = grads, ctx.saved_tensors
        dtype, dim = accumulation_dtype(grad_BSE.dtype), grad_BSE.shape[-1]
        grad_weight_VE = grad_BSE.new_empty(ctx.num_rows, dim)
        columns = dim if dtype == grad_BSE.dtype else EMBEDDING_GRAD_COLUMNS
        sum_by_row = partial(torch.ops.aten.embedding_dense_backward, padding_idx=-1, scale_grad_by_freq=False)
        for grad_VC, grad_BSC in zip(grad_weight_VE.split(columns, -1), grad_BSE.split(columns, -1), strict=True):
            grad_VC.copy_(sum_by_row(grad_BSC.to(dtype), index_BS, ctx.num_rows))
        return None, grad_weight_VE


class Embedding(nn.Embedding):
    """Token embedding; a vocabulary shard gives zeros for the tokens of other shards, and NaN for those of none."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.view: WeightView = identity
        self.vocab_start_index: int | None = None
        """Token id of the shard's first row; None if the rank holds the full vocabulary."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        weight_VE = self.view(self.weight)
        if self.vocab_start_index is None:
            out_BSE: Tensor = EmbeddingFunction.apply(input, weight_VE)
            return out_BSE
        index_BS = input - self.vocab_start_index
        is_local_BS = (index_BS >= 0) & (index_BS < weight_VE.shape[0])
        is_token_BS = (input >= 0) & (input < self.num_embeddings)
        scale_BS = is_local_BS.to(weight_VE.dtype).where(is_token_BS, torch.nan)
        local_BSE: Tensor = EmbeddingFunction.apply(index_BS.where(is_local_BS, 0), weight_VE)
        return local_BSE * scale_BS.unsqueeze(-1)
