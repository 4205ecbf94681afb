"""Embedding and linear layers."""

from __future__ import annotations

import pytest
import torch

from models import layers
from models.linear import EmbeddingFunction


@pytest.mark.parametrize("parts", [1, 3])
def test_gradient_of_the_embedding_is_the_sum_over_equal_tokens_however_it_is_cut(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows = 10
    num_tokens = 50
    dim = 192
    monkeypatch.setattr(layers, "EMBEDDING_GRAD_BYTES", 4 * (num_rows + num_tokens) * dim // parts)
    assert layers.embedding_grad_columns(num_rows, num_tokens, dim) == dim // parts
    index = torch.arange(num_tokens).view(5, 10) * 7 % num_rows
    weight = torch.randn(num_rows, dim, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(5, 10, dim, dtype=torch.bfloat16)
    EmbeddingFunction.apply(index, weight).backward(grad)
    expected = torch.zeros(num_rows, dim).index_add_(
        0, index.flatten(), grad.float().flatten(0, 1)
    )
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.float(), expected, rtol=2**-8, atol=0)
