"""Mixture of experts (Shazeer et al., 2017): a router gives each token to `top_k` experts, and
none is dropped.

    x --> router ------> chosen experts, their weights
      --> dispatch ----> rows, sorted by expert --> experts, times the weight --> combine --> + shared expert

The router computes in `accumulation_dtype`. Equal scores are ordered by index. Experts are chosen
for all tiles of a layer at once, so that ranks exchange their counts, and the host waits for them,
once per layer and only in the forward pass: the backward pass uses the same choice. The host waits
for nothing where rows stay on a rank and one kernel takes the groups of all experts
(`models/row_groups.py`).

Shape suffixes, of a tile: B batch, S tokens of this rank, N all of them, E model dim, X experts, K
experts of a token, P places of rows of this rank's experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from models.batch import IGNORE_INDEX
from models.config import ModelConfig
from models.dispatch import LocalDispatcher, Rows, TokenDispatcher
from models.dtypes import accumulation_dtype
from models.experts import Options, run_experts
from models.layers import LayerKind
from models.linear import local_parameters
from models.row_groups import RowGroups, has_grouped_product
from models.sublayer import SublayerModule, Weights
from models.tiling import CompilePiece, bytes_per_token

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


class TileRouting(NamedTuple):
    """The experts of a tile's tokens, for its forward and its backward pass."""

    experts: Tensor
    """[N, K]."""
    rows: Rows
    share: Tensor | None = None
    """[N], of each token in the means of a step: 1 / number of targets, or 0; None outside of
    training.
    """
    load: Tensor | None = None
    """[N, X], load of each expert, as the balance loss takes it: 1 is the mean."""


class MixtureOfExperts(SublayerModule):
    """Feed-forward of experts. `dispatcher` and `step` are set from outside."""

    def __init__(self, config: ModelConfig, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.config = config
        self.activation = kind.activation
        self.dispatcher: TokenDispatcher = LocalDispatcher()
        self.step = RouterStep()
        self.compile_piece: CompilePiece | None = None
        """Compiles what experts compute between their products; None: torch's operators.

        `training.compile` sets it.
        """
        self.statistics: Tensor | None = None
        """Sums over the tokens of the step on this rank; see `router_statistics`."""

    # The host may wait for the counts of experts, which a compiled graph cannot.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x_BSE: Tensor, rotation_2BS1F: Tensor, boundaries_BD: Tensor) -> Tensor:
        del rotation_2BS1F, boundaries_BD
        return self.gathered(self._forward, x_BSE)

    def _forward(self, x_BSE: Tensor) -> Tensor:
        weights = local_parameters(self)
        logits_BSX = self.logits(x_BSE, weights)
        (routing,) = self.route([logits_BSX], x_BSE.dtype)
        return self.mix(x_BSE, logits_BSX, routing, weights)

    def bytes_per_token(self, itemsize: int) -> int:
        # Between passes, FSDP may hold a part of each expert.
        config = self.config
        return bytes_per_token(
            config.dim, config.expert_dim // self.dispatcher.tp_degree, itemsize, rows=config.top_k
        )

    # ---- the router

    def logits(self, x_BSE: Tensor, weights: Weights) -> Tensor:
        dtype = accumulation_dtype(x_BSE.dtype)
        bias_X = weights.get("router.bias")
        return F.linear(
            x_BSE.to(dtype),
            weights["router.weight"].to(dtype),
            None if bias_X is None else bias_X.to(dtype),
        )

    def scores(self, logits_NX: Tensor) -> Tensor:
        return logits_NX.sigmoid() if self.config.router == "sigmoid" else logits_NX.softmax(-1)

    def choose(self, logits_NX: Tensor) -> Tensor:
        """The experts of each token [N, K], best first, and equal ones by index."""
        scores_NX = self.scores(logits_NX)
        config = self.config
        if (bias_X := self._buffers.get("correction_bias")) is not None:
            scores_NX = scores_NX + bias_X
        if config.expert_groups > 1:
            # DeepSeek-V3 ranks groups by the sum of their two best scores.
            by_group_NGX = scores_NX.unflatten(-1, (config.expert_groups, -1))
            best_NG = by_group_NGX.topk(min(2, by_group_NGX.shape[-1]), dim=-1).values.sum(-1)
            excluded_NG = _first(best_NG, config.expert_groups)[:, config.top_k_groups :]
            # With -inf, experts of excluded groups sort behind all others.
            by_group_NGX = by_group_NGX.scatter(
                1, excluded_NG.unsqueeze(-1).expand(-1, -1, by_group_NGX.shape[-1]), -torch.inf
            )
            scores_NX = by_group_NGX.flatten(1)
        return _first(scores_NX, config.top_k)

    @torch.no_grad()
    def route(self, logits_BSX: Sequence[Tensor], dtype: torch.dtype) -> list[TileRouting]:
        """Chooses the experts of every tile of a layer, which compute in `dtype`.

        Collective; the host may wait.
        """
        experts = [self.choose(logits.flatten(0, 1)) for logits in logits_BSX]
        rows = self.dispatcher.rows(
            experts, self.config.num_experts, padded=has_grouped_product(experts[0], dtype)
        )
        is_target = self.step.is_target
        num_targets = self.step.num_targets
        if is_target is None or num_targets is None:
            return [*map(TileRouting, experts, rows)]
        lengths = [logits.shape[1] for logits in logits_BSX]
        sum_dtype = logits_BSX[0].dtype
        # The targets of this rank's tokens, among those that tp ranks share. In float64, because
        # float32 cannot count beyond 2 ** 24.
        own_BS = is_target.split(sum(lengths), dim=1)[self.dispatcher.tp_rank].double()
        targets_BS = own_BS.split(lengths, dim=1)
        by_sequence = [*map(self._counts, experts, targets_BS)]
        counts_BX = torch.stack(by_sequence).sum(0)
        self._add_statistics(counts_BX.sum(0), logits_BSX, targets_BS)
        loads = self._loads(counts_BX, lengths)
        shares = [(each / num_targets).to(sum_dtype).flatten() for each in targets_BS]
        return [*map(TileRouting, experts, rows, shares, (each.to(sum_dtype) for each in loads))]

    def _counts(self, experts_NK: Tensor, target_BS: Tensor) -> Tensor:
        """[B, X], tokens with a target of each expert."""
        is_target_NK = target_BS.flatten()[:, None].expand_as(experts_NK)
        counts_NX = is_target_NK.new_zeros(len(experts_NK), self.config.num_experts)
        return counts_NX.scatter_(1, experts_NK, is_target_NK).view(*target_BS.shape, -1).sum(1)

    def _loads(self, counts_BX: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Loads for each tile of these lengths, [N, X]."""
        if not self.step.balances_sequences:
            return [
                self.get_buffer("last_load").expand(len(counts_BX) * length, -1)
                for length in lengths
            ]
        counts_BX = self.dispatcher.sum_over_sequence(counts_BX.clone())
        load_BX = counts_BX / counts_BX.mean(-1, keepdim=True).clamp(min=SUM_FLOOR)
        return [load_BX.repeat_interleave(length, dim=0) for length in lengths]

    def expert_weights(self, logits_NX: Tensor, routing: TileRouting) -> Tensor:
        """[N, K]; losses of the router add their gradients here."""
        scores_NX = self.scores(logits_NX)
        config = self.config
        weight_NK = scores_NX.gather(1, routing.experts)
        # A softmax over experts cannot sum to zero over the best ones; sigmoids can.
        if config.normalize_top_k:
            floor = SUM_FLOOR if config.router == "sigmoid" else 0
            weight_NK = weight_NK / (weight_NK.sum(-1, keepdim=True) + floor)
        if config.router_scaling != 1:
            weight_NK = weight_NK * config.router_scaling
        step = self.step
        if routing.share is None or routing.load is None or not (step.balance_loss or step.z_loss):
            return weight_NK
        # num_experts * sum(f P), f the share of tokens and P the mean probability of an expert
        # (Switch Transformer, Fedus et al., 2021): `load` is num_experts f.
        balance = (routing.share * (routing.load * probabilities(scores_NX)).sum(-1)).sum()
        z = (routing.share * logits_NX.logsumexp(-1).square()).sum()
        attached_NK: Tensor = AttachLoss.apply(
            weight_NK, step.balance_loss * balance + step.z_loss * z
        )
        return attached_NK

    # ---- statistics of a step

    def reset_statistics(self) -> None:
        """Starts the sums of a step at zero."""
        load_X = self.get_buffer("last_load")
        self.statistics = load_X.new_zeros(router_statistics(len(load_X)), dtype=torch.float64)

    def _add_statistics(
        self, counts_X: Tensor, logits_BSX: Sequence[Tensor], targets_BS: Sequence[Tensor]
    ) -> None:
        if self.statistics is None:
            return
        self.statistics[: len(counts_X)] += counts_X
        for logits, target in zip(logits_BSX, targets_BS, strict=True):
            logits_NX = logits.flatten(0, 1)
            target_N = target.flatten()
            share_NX = probabilities(self.scores(logits_NX)).double()
            entropy_N = -share_NX.xlogy(share_NX).sum(-1)
            z_N = logits_NX.double().logsumexp(-1).square()
            sums = (target_N @ share_NX, (target_N @ entropy_N)[None], (target_N @ z_N)[None])
            self.statistics[len(counts_X) :] += torch.cat(sums)

    # ---- the experts

    def mix(
        self,
        x_BSE: Tensor,
        logits_BSX: Tensor,
        routing: TileRouting,
        weights: Weights,
        *,
        needs_output: bool = True,
    ) -> Tensor:
        """[B, S, E]. Without `needs_output` it only carries gradients. Collective."""
        x_NE = x_BSE.flatten(0, 1)
        dispatcher = self.dispatcher
        rows = routing.rows
        weight_NK = self.expert_weights(logits_BSX.flatten(0, 1), routing)
        pending = dispatcher.dispatch(x_NE, weight_NK, rows)
        # While the tokens travel.
        shared_NE = self._shared(x_NE, weights, needs_output=needs_output)
        row_PE, weight_P = dispatcher.wait(pending, rows)
        del pending
        parameters = {name.removeprefix("experts."): each for name, each in weights.items()}
        # Each tp rank adds its share of the last bias, so that the sum over ranks has it once.
        options = Options(
            self.activation, 1 / dispatcher.tp_degree, needs_output, self.compile_piece
        )
        out_PE = run_experts(row_PE, weight_P, rows.groups, parameters, options)
        out_NE = dispatcher.combine(out_PE, rows, is_needed=needs_output)
        out_NE = out_NE if shared_NE is None else out_NE + shared_NE
        # Not a view: FSDP2 warns if a wrapped module returns one.
        out_BSE: Tensor = torch.ops.aten._unsafe_view(out_NE, x_BSE.shape)
        return out_BSE

    def _shared(self, x_NE: Tensor, weights: Weights, *, needs_output: bool) -> Tensor | None:
        """Output of the shared expert, if there is one."""
        prefix = "shared_"
        suffix = ".weight"
        # As a group of one expert.
        parameters = {
            name.removeprefix(prefix).removesuffix(suffix): each[None]
            for name, each in weights.items()
            if name.startswith(prefix)
        }
        if not parameters:
            return None

        def run(x_TE: Tensor) -> Tensor:
            options = Options(
                self.activation, needs_output=needs_output, compile_piece=self.compile_piece
            )
            return run_experts(x_TE, None, RowGroups([len(x_TE)]), parameters, options)

        return self.dispatcher.shared(x_NE, run, is_needed=needs_output)


def router_statistics(num_experts: int) -> int:
    """Number of sums: tokens of each expert, probability of each, then entropy and squared
    log-sum-exp.
    """
    return 2 * num_experts + 2


def probabilities(scores_NX: Tensor) -> Tensor:
    """Scores relative to their sum, which is 1 for a softmax already."""
    return scores_NX / scores_NX.sum(-1, keepdim=True)


def _first(scores_NX: Tensor, count: int) -> Tensor:
    """Indices of the best scores, and of equal ones the first."""
    # A copy: a view would keep the places of all experts alive until the backward pass.
    return scores_NX.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


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
