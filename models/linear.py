"""Matrices as modules use them. `view` is the third seam: what of the weight this rank multiplies by.

Shape suffixes: B rows, S tokens, E width of the residual stream, I inputs, O outputs, V rows of the embedding here.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from models.view import WeightView, identity


class Linear(nn.Linear):
    """`x @ weight.T`."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.view: WeightView = identity

    def local_weight(self) -> Tensor:
        """The weight, or the part of it that is used here: [O, I]."""
        return self.view(self.weight)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        return F.linear(input, self.local_weight())


class Embedding(nn.Embedding):
    """A row of the weight for each token; zeros for a token whose row is not among those that are used here."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.view: WeightView = identity
        self.vocab_start_index: int | None = None
        """The token of the first row that is used here; None where all rows are."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        weight_VE = self.view(self.weight)
        if self.vocab_start_index is None:
            return F.embedding(input, weight_VE)
        index_BS = input - self.vocab_start_index
        is_local_BS = (index_BS >= 0) & (index_BS < weight_VE.shape[0])
        return F.embedding(index_BS.where(is_local_BS, 0), weight_VE) * is_local_BS.unsqueeze(-1)
