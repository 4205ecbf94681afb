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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from models.config import ModelConfig
from models.dispatch import LocalDispatcher, Rows, TokenDispatcher
from models.experts import Options, run_experts
from models.layers import LayerKind
from models.linear import local_parameters
from models.router import (
    SUM_FLOOR,
    AttachLoss,
    RouterStep,
    ScoreRule,
    TileSums,
    best,
    expert_weights,
    tile_sums,
    weights_and_loss,
)
from models.row_groups import RowGroups, has_grouped_product
from models.sublayer import SublayerModule, Weights
from models.tiling import CompilePiece, bytes_per_token, map_each
from models.wide_products import unrounded_linear


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
        self.rule = ScoreRule(config.router, config.normalize_top_k, config.router_scaling)
        self.compile_piece: CompilePiece | None = None
        """Compiles what is between products; None: torch's operators.

        `training.compile` sets it.
        """
        self.statistics: Tensor | None = None
        """Sums over the tokens of the step on this rank, as many as `statistics_length`."""

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
        return unrounded_linear(x_BSE, weights["router.weight"], weights.get("router.bias"))

    def choose(self, logits_NX: Tensor) -> Tensor:
        """The experts of each token [N, K], best first, and equal ones by index."""
        config = self.config
        scores_NX = self.rule.scores(logits_NX)
        if (bias_X := self._buffers.get("correction_bias")) is not None:
            scores_NX = scores_NX + bias_X
        if config.expert_groups > 1:
            # DeepSeek-V3 ranks groups by the sum of their two best scores.
            by_group_NGX = scores_NX.unflatten(-1, (config.expert_groups, -1))
            best_NG = by_group_NGX.topk(min(2, by_group_NGX.shape[-1]), dim=-1).values.sum(-1)
            excluded_NG = best(best_NG, config.expert_groups)[:, config.top_k_groups :]
            # With -inf, experts of excluded groups sort behind all others.
            by_group_NGX = by_group_NGX.scatter(
                1, excluded_NG.unsqueeze(-1).expand(-1, -1, by_group_NGX.shape[-1]), -torch.inf
            )
            scores_NX = by_group_NGX.flatten(1)
        return best(scores_NX, config.top_k)

    @torch.no_grad()
    def route(self, logits_BSX: Sequence[Tensor], dtype: torch.dtype) -> list[TileRouting]:
        """Chooses the experts of every tile of a layer, which compute in `dtype`.

        Collective; the host may wait.
        """
        experts = map_each(lambda logits: self.choose(logits.flatten(0, 1)), logits_BSX)
        rows = self.dispatcher.rows(
            experts,
            self.config.num_experts,
            padded=has_grouped_product(experts[0], dtype),
            compiled=self._compiled,
        )
        is_target = self.step.is_target
        num_targets = self.step.num_targets
        if is_target is None or num_targets is None:
            return [*map(TileRouting, experts, rows)]
        lengths = [logits.shape[1] for logits in logits_BSX]
        # The targets of this rank's tokens, among those that tp ranks share.
        own_BS = is_target.split(sum(lengths), dim=1)[self.dispatcher.tp_rank]
        run = self._compiled(tile_sums)

        def add_up(logits: Tensor, experts: Tensor, is_target: Tensor) -> TileSums:
            sums: TileSums = run(logits.flatten(0, 1), experts, is_target, num_targets, self.rule)
            if self.statistics is not None:
                self.statistics += sums.statistics
            return sums

        sums = map_each(add_up, logits_BSX, experts, own_BS.split(lengths, dim=1))
        loads = self._loads(sums, logits_BSX)
        return [*map(TileRouting, experts, rows, (each.share for each in sums), loads)]

    def _loads(self, sums: Sequence[TileSums], logits_BSX: Sequence[Tensor]) -> list[Tensor]:
        """Loads for each tile, [N, X]."""
        dtype = logits_BSX[0].dtype
        if not self.step.balances_sequences:
            load_X = self.get_buffer("last_load").to(dtype)
            return [load_X.expand(len(each.share), -1) for each in sums]
        counts_BX = torch.stack([each.counts for each in sums]).sum(0)
        counts_BX = self.dispatcher.sum_over_sequence(counts_BX)
        load_BX = counts_BX / counts_BX.mean(-1, keepdim=True).clamp(min=SUM_FLOOR)
        load_BX = load_BX.to(dtype)
        return map_each(
            lambda logits: load_BX.repeat_interleave(logits.shape[1], dim=0), logits_BSX
        )

    def expert_weights(self, logits_NX: Tensor, routing: TileRouting) -> Tensor:
        """[N, K]; losses of the router add their gradients here."""
        step = self.step
        if routing.share is None or routing.load is None or not (step.balance_loss or step.z_loss):
            return cast(
                Tensor, self._compiled(expert_weights)(logits_NX, routing.experts, self.rule)
            )
        weight_NK, loss = self._compiled(weights_and_loss)(
            logits_NX,
            routing.experts,
            self.rule,
            routing.share,
            routing.load,
            step.balance_loss,
            step.z_loss,
        )
        attached_NK: Tensor = AttachLoss.apply(weight_NK, loss)
        return attached_NK

    def _compiled(self, piece: Callable[..., Any]) -> Callable[..., Any]:
        return piece if self.compile_piece is None else self.compile_piece(piece)

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
