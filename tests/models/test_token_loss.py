"""A loss of an extension is the mean that autograd differentiates, a chunk of logits at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.batch import IGNORE_INDEX
from models.loss_head import (
    LinearCrossEntropy,
    LinearTokenLoss,
    LogitTransform,
    TokenLoss,
    VocabShard,
)
from tests.models.other_kinds import smoothed

TOKENS = 11
DIM = 6
VOCAB = 17


def cross_entropy(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    return F.cross_entropy(logits_CV, targets_C, reduction="none")


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x_BSE = torch.randn(1, TOKENS, DIM, generator=draw, dtype=torch.float64, requires_grad=True)
    weight_VE = torch.randn(VOCAB, DIM, generator=draw, dtype=torch.float64, requires_grad=True)
    labels_BS = torch.randint(VOCAB, (1, TOKENS), generator=draw)
    labels_BS[0, 3] = IGNORE_INDEX
    return x_BSE, weight_VE, labels_BS


def grads_of(loss: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [*torch.autograd.grad(loss, tensors)]


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(2.0, 1.5)])
@pytest.mark.parametrize("loss", [smoothed, cross_entropy])
def test_loss_and_gradients_are_those_of_all_logits_at_once(
    loss: TokenLoss, transform: LogitTransform, chunk_tokens: int
) -> None:
    x_BSE, weight_VE, labels_BS = inputs()
    found_BS = LinearTokenLoss.apply(
        x_BSE, weight_VE, labels_BS, chunk_tokens, VocabShard(), None, transform, loss
    )
    logits_RV = (x_BSE @ weight_VE.T).flatten(0, 1) / transform.scaling
    if transform.softcap is not None:
        logits_RV = transform.softcap * torch.tanh(logits_RV / transform.softcap)
    is_target_BS = labels_BS != IGNORE_INDEX
    expected_BS = loss(logits_RV, labels_BS.flatten().clamp(min=0)).view_as(labels_BS)
    expected_BS = expected_BS * is_target_BS
    torch.testing.assert_close(found_BS, expected_BS)
    assert found_BS[0, 3] == 0
    found = grads_of(found_BS.sum() / 7, x_BSE, weight_VE)
    for one, other in zip(found, grads_of(expected_BS.sum() / 7, x_BSE, weight_VE), strict=True):
        torch.testing.assert_close(one, other)


def test_cross_entropy_as_an_extension_is_the_built_in_one() -> None:
    x_BSE, weight_VE, labels_BS = inputs()
    shared = (x_BSE, weight_VE, labels_BS, 4, VocabShard(), None, LogitTransform())
    ours = LinearCrossEntropy.apply(*shared, None)
    theirs = LinearTokenLoss.apply(*shared, cross_entropy)
    torch.testing.assert_close(ours, theirs)
    for one, other in zip(
        grads_of(ours.sum(), x_BSE, weight_VE),
        grads_of(theirs.sum(), x_BSE, weight_VE),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_a_label_outside_the_vocabulary_has_no_loss() -> None:
    x_BSE, weight_VE, labels_BS = inputs()
    labels_BS[0, 5] = VOCAB
    kept = labels_BS.clone()

    def bounded(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
        return cross_entropy(logits_CV, targets_C.clamp(max=VOCAB - 1))

    losses_BS = LinearTokenLoss.apply(
        x_BSE, weight_VE, labels_BS, 4, VocabShard(), None, LogitTransform(), bounded
    )
    assert losses_BS.isnan().flatten().tolist() == (kept == VOCAB).flatten().tolist()


def test_a_mean_in_place_of_a_loss_per_token_is_refused() -> None:
    x_BSE, weight_VE, labels_BS = inputs()
    with pytest.raises(ValueError, match=r"must return a loss per token, \[4\], not \[\]"):
        LinearTokenLoss.apply(
            x_BSE, weight_VE, labels_BS, 4, VocabShard(), None, LogitTransform(), F.cross_entropy
        )
    with pytest.raises(ValueError, match="needs the whole vocabulary"):
        LinearTokenLoss.apply(
            x_BSE, weight_VE, labels_BS, 4, VocabShard(0, 2), None, LogitTransform(), smoothed
        )
