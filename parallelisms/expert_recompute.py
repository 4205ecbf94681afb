"""Forward and backward of a feed-forward half with experts, tile by tile, below the autograd graph
of the model.

The experts of all tiles are chosen first, so that the host waits for their counts once. Each
tile's backward pass is autograd's, over the tile alone; what it computes again ends before the
last product of the experts, whose output no gradient needs.

Shape suffixes: B sequences, S tokens of this rank, C tokens of a tile, E width of the residual
stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor

from models.moe import MixtureOfExperts, TileRouting
from models.sublayer import LocalGraph, Sublayer, Weights, as_leaves
from models.tiling import GradAccumulator, TokenTiles, map_each


class ExpertHalf:
    """The feed-forward half with experts, for one block and batch."""

    def __init__(self, sublayer: Sublayer, tiles: TokenTiles) -> None:
        self._sublayer = sublayer
        self._tiles = tiles
        self._module = cast(MixtureOfExperts, sublayer.module)
        self._routings: list[TileRouting] = []

    def forward(self, hidden_BSE: Tensor) -> Tensor:
        """The first call chooses the experts; later ones use its choice."""
        weights = self._sublayer.weights()
        logits: Sequence[Tensor | None] = [None] * len(self._routings)
        if not self._routings:
            self._agree_on_tiles()
            chosen_by = map_each(
                lambda tile: self._logits(hidden_BSE[:, tile], weights), self._tiles.tiles
            )
            self._routings = self._module.route(chosen_by, hidden_BSE.dtype)
            logits = chosen_by

        def compute_tile(
            tile: slice, routing: TileRouting, logits_BCX: Tensor | None
        ) -> list[Tensor]:
            hidden_BCE = hidden_BSE[:, tile]
            return [self._added(hidden_BCE, routing, weights, logits_BCX).add_(hidden_BCE)]

        (out_BSE,) = self._tiles.map_tiles(compute_tile, self._routings, logits)
        return out_BSE

    def backward(self, grad_BSE: Tensor, hidden: Callable[[slice], Tensor]) -> tuple[Tensor, ...]:
        """Gradients of the hidden state between the halves, whose tiles `hidden` gives, and of the
        weights.
        """
        weights = as_leaves(self._sublayer.weights())
        grads = GradAccumulator(weights)
        # The gradient of a norm after the experts depends on their output.
        needs_output = self._sublayer.post_norm is not None

        def compute_tile(tile: slice, routing: TileRouting) -> list[Tensor]:
            def added(inputs: Sequence[Tensor], given: Weights) -> list[Tensor]:
                return [self._added(inputs[0], routing, given, needs_output=needs_output)]

            graph = LocalGraph(added, [hidden(tile)], weights)
            grad_BCE = grad_BSE[:, tile]
            (grad_hidden_BCE,), weight_grads = graph.backward([grad_BCE])
            grads.add(weight_grads)
            return [grad_hidden_BCE.add_(grad_BCE)]

        (grad_hidden_BSE,) = self._tiles.map_tiles(compute_tile, self._routings)
        return grad_hidden_BSE, *grads.pop_grads()

    def _agree_on_tiles(self) -> None:
        """Gives all ranks equally many tiles: they exchange tokens in every tile, and evaluation
        has sequences of any length.
        """
        tiles = self._tiles.tiles
        end = self._tiles.tiles[-1].stop
        # In training sequences are equally long, so that no rank need ask the others.
        if self._module.step.num_targets is None:
            tiles += [slice(end, end)] * (self._module.dispatcher.agree(len(tiles)) - len(tiles))

    def _logits(self, hidden_BCE: Tensor, weights: Weights) -> Tensor:
        """The router's logits of a tile."""
        return self._module.logits(self._sublayer.before(hidden_BCE, weights), weights)

    def _added(
        self,
        hidden_BCE: Tensor,
        routing: TileRouting,
        weights: Weights,
        logits_BCX: Tensor | None = None,
        *,
        needs_output: bool = True,
    ) -> Tensor:
        """The term that the residual connection adds; without logits it computes them."""
        normed_BCE = self._sublayer.before(hidden_BCE, weights)
        if logits_BCX is None:
            logits_BCX = self._module.logits(normed_BCE, weights)
        out_BCE = self._module.mix(
            normed_BCE, logits_BCX, routing, weights, needs_output=needs_output
        )
        return self._sublayer.after(out_BCE, weights)
