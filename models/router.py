"""A router's arithmetic: scores, the weights of the experts that they choose, losses, statistics.

Its functions take tensors and constants alone, so each can be compiled as one piece.

Shape suffixes, of a tile: B sequences, S tokens of this rank, N all of them, X experts, K experts
of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.batch import IGNORE_INDEX

SUM_FLOOR = 1e-20
"""Added to the sum of a token's sigmoid scores, as in DeepSeek-V3."""


@dataclass
class RouterStep:
    """State of the step under way that all routers of a model share."""

    balance_loss: float = 0.0
    """Weight of the load-balance loss."""
    balances_sequences: bool = False
    """Whether that is the mean over sequences, each by its own load; else by the load of the whole
    step before.
    """
    z_loss: float = 0.0
    """Weight of the mean squared log-sum-exp of the router's logits (ST-MoE, Zoph et al.,
    2022).
    """
    num_targets: Tensor | None = None
    """Tokens of the step that have a target.

    None outside of training: nothing is counted, and there are no losses.
    """
    is_target: Tensor | None = None
    """[B, T], whether each token of the micro-batch whose forward pass runs has a target."""

    def begin(self, labels_BT: Tensor) -> None:
        """Begins the next micro-batch."""
        self.is_target = None if self.num_targets is None else labels_BT != IGNORE_INDEX


@dataclass(frozen=True)
class ScoreRule:
    """How logits become scores of experts, and scores the weights of those that are chosen."""

    kind: str
    """ "softmax" or "sigmoid"."""
    is_normalized: bool
    """Whether the weights of a token sum to 1 before they are scaled."""
    scaling: float

    def scores(self, logits_NX: Tensor) -> Tensor:
        return logits_NX.sigmoid() if self.kind == "sigmoid" else logits_NX.softmax(-1)

    def weights(self, scores_NX: Tensor, experts_NK: Tensor) -> Tensor:
        """Weights of the chosen experts, [N, K]."""
        weight_NK = scores_NX.gather(1, experts_NK)
        # A softmax over experts cannot sum to zero over the best ones; sigmoids can.
        if self.is_normalized:
            floor = SUM_FLOOR if self.kind == "sigmoid" else 0
            weight_NK = weight_NK / (weight_NK.sum(-1, keepdim=True) + floor)
        return weight_NK if self.scaling == 1 else weight_NK * self.scaling


def probabilities(scores_NX: Tensor) -> Tensor:
    """Scores relative to their sum, which is 1 for a softmax already."""
    return scores_NX / scores_NX.sum(-1, keepdim=True)


def best(scores_NX: Tensor, count: int) -> Tensor:
    """Indices of the best scores, and of equal ones the first."""
    # A copy: a view would keep the places of all experts alive until the backward pass.
    return scores_NX.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def expert_weights(logits_NX: Tensor, experts_NK: Tensor, rule: ScoreRule) -> Tensor:
    """Weights of the chosen experts, [N, K]."""
    return rule.weights(rule.scores(logits_NX), experts_NK)


def weights_and_loss(
    logits_NX: Tensor,
    experts_NK: Tensor,
    rule: ScoreRule,
    share_N: Tensor,
    load_NX: Tensor,
    balance_loss: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """Weights of the chosen experts, [N, K], and the sum of the router's losses.

    `share_N`: 1 / number of targets, or 0. `load_NX`: load of each expert, 1 in the mean.
    """
    scores_NX = rule.scores(logits_NX)
    # num_experts * sum(f P), f the share of tokens and P the mean probability of an expert
    # (Switch Transformer, Fedus et al., 2021): `load` is num_experts f.
    balance = (share_N * (load_NX * probabilities(scores_NX)).sum(-1)).sum()
    z = (share_N * logits_NX.logsumexp(-1).square()).sum()
    return rule.weights(scores_NX, experts_NK), balance_loss * balance + z_loss * z


class AttachLoss(torch.autograd.Function):
    """Returns `x`; its backward pass also starts that of `loss`, with a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.loss
        return grads[0], torch.ones((), dtype=dtype, device=device)


# ---- statistics of a step


def statistics_length(num_experts: int) -> int:
    """Number of sums: tokens of each expert, probability of each, then entropy and squared
    log-sum-exp.
    """
    return 2 * num_experts + 2


class TileSums(NamedTuple):
    """Sums over the tokens of a tile that have a target, and each token's share in the step."""

    statistics: Tensor
    """[2 X + 2] float64, in the order of `statistics_length`."""
    counts: Tensor
    """[B, X] float64, tokens of each expert in each sequence."""
    share: Tensor
    """[N], 1 / number of targets of the step, or 0."""


def tile_sums(
    logits_NX: Tensor,
    experts_NK: Tensor,
    is_target_BS: Tensor,
    num_targets: Tensor,
    rule: ScoreRule,
) -> TileSums:
    # In float64, because float32 cannot count beyond 2 ** 24.
    target_BS = is_target_BS.double()
    target_N = target_BS.flatten()
    target_NX = torch.zeros_like(logits_NX, dtype=target_N.dtype).scatter_(
        1, experts_NK, target_N[:, None].expand_as(experts_NK)
    )
    counts_BX = target_NX.view(*target_BS.shape, -1).sum(1)
    share_NX = probabilities(rule.scores(logits_NX)).double()
    entropy_N = -share_NX.xlogy(share_NX).sum(-1)
    z_N = logits_NX.double().logsumexp(-1).square()
    statistics = torch.cat(
        (
            counts_BX.sum(0),
            (target_N[:, None] * share_NX).sum(0),
            (target_N * entropy_N).sum()[None],
            (target_N * z_N).sum()[None],
        )
    )
    return TileSums(statistics, counts_BX, (target_N / num_targets).to(logits_NX.dtype))
