"""Linear and Embedding modules whose weight passes through `view`, and the dtype in which every module accumulates.

Shape suffixes: B batch, S tokens of this rank, E model dim, I inputs, O outputs, V vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
            return F.embedding(input, weight_VE)
        index_BS = input - self.vocab_start_index
        is_local_BS = (index_BS >= 0) & (index_BS < weight_VE.shape[0])
        is_token_BS = (input >= 0) & (input < self.num_embeddings)
        scale_BS = is_local_BS.to(weight_VE.dtype).where(is_token_BS, torch.nan)
        return F.embedding(index_BS.where(is_local_BS, 0), weight_VE) * scale_BS.unsqueeze(-1)
