"""One pass, forward or backward, through the pieces of a sublayer: their weights, products and
gradients.

Matrix products and their gradients are written here, and attention brings its own; `LocalGraph`
differentiates the pieces between them (`models/sublayer.py`). So no product runs again to build a
graph.

Shape suffixes: B sequences, T tokens of all tp ranks, C tokens of a tile, E width of the residual
stream, F rotary frequencies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

from torch import Tensor
from torch.nn import functional as F

from models.attention import SINKS
from models.dtypes import accumulation_dtype
from models.sublayer import (
    LocalGraph,
    Restore,
    Sublayer,
    Weights,
    as_leaves,
    input_grad,
    weight_grad,
)
from models.tiling import CompilePiece, GradAccumulator, TokenTiles
from models.transformer import SequenceParallelComm


class SublayerPass:
    """Forward and backward of a sublayer on one token tile. Valid while its weights are unsharded."""

    def __init__(
        self,
        sublayer: Sublayer,
        tp_comm: SequenceParallelComm,
        tiles: TokenTiles,
        compile_piece: CompilePiece,
        rotation_2BT1F: Tensor | None = None,
    ) -> None:
        self._sublayer = sublayer
        self._module = sublayer.module
        self._tp_comm = tp_comm
        self._tiles = tiles
        self._rotation_2BT1F = rotation_2BT1F
        # Functions of the classes, rather than bound methods: blocks share their compilations.
        before = type(sublayer).before
        self._before: Callable[..., Tensor] = (
            before if sublayer.norm is None else compile_piece(before)
        )
        self._inner = compile_piece(type(sublayer.module).inner)
        self._after = compile_piece(type(sublayer).after)
        self.has_after = sublayer.has_after
        self._weights = sublayer.weights()
        # Leaves apart from the model's graph: a piece's graph ends at them.
        self._piece_weights = as_leaves(
            {name: x for name, x in self._weights.items() if not self._module.is_in_product(name)}
        )
        self.last_name = f"{self._module.last}.weight"
        self.last_weight = self._weights[self.last_name]
        self.grads = GradAccumulator(self._weights)

    # ---- forward

    def before(self, x_BCE: Tensor) -> Tensor:
        normed_BCE: Tensor = self._before(self._sublayer, x_BCE, self._piece_weights)
        return normed_BCE

    def linear_weights(self, group: int = 0, num_groups: int = 1) -> dict[str, Tensor]:
        """Weights of the linear layers before `inner`, for one of `num_groups` groups of heads."""
        names = self._weights.keys() - self._piece_weights.keys() - {self.last_name}
        # Output features are ordered by head, so a group of heads is a chunk of rows.
        return {name: self._weights[name].chunk(num_groups)[group] for name in names}

    @property
    def has_sinks(self) -> bool:
        return SINKS in self._weights

    def sinks(self, num_groups: int) -> Iterator[Tensor | None]:
        """Sinks of each group of heads; None without sinks."""
        yield from (
            self._weights[SINKS].chunk(num_groups) if self.has_sinks else [None] * num_groups
        )

    def products(self, normed_BCE: Tensor, linear_weights: Weights) -> list[Tensor]:
        return self._module.products(normed_BCE, linear_weights)

    def inner(self, products: Sequence[Tensor], tile: slice) -> Sequence[Tensor]:
        results: Sequence[Tensor] = self._inner(
            self._module, products, self.rotation(tile), self._piece_weights
        )
        return results

    def rotation(self, tile: slice) -> Tensor | None:
        return (
            None
            if self._rotation_2BT1F is None
            else self._tiles.select(self._rotation_2BT1F, tile, dim=2)
        )

    def last_product(self, last_input: Tensor) -> Tensor:
        """Product of the last linear layer: a partial sum, under tensor parallelism."""
        return F.linear(last_input, self.last_weight)

    def residual(self, x_BCE: Tensor, product_BCE: Tensor) -> Tensor:
        """The residual stream after the sublayer, from that before it and the last product."""
        out_BCE = self._tp_comm.reduce(product_BCE)
        if self.has_after:
            out_BCE = self._after(self._sublayer, out_BCE, self._piece_weights)
        return out_BCE.add_(x_BCE)

    # ---- backward

    def before_graph(self, x_BCE: Tensor) -> LocalGraph:
        return LocalGraph(
            lambda inputs, weights: [self._before(self._sublayer, *inputs, weights)],
            [x_BCE],
            self._piece_weights,
        )

    def inner_graph(
        self, products: Sequence[Tensor], tile: slice, *, restorable: bool = False
    ) -> LocalGraph:
        """The graph of `inner`. If `restorable`, it keeps neither the products nor the rotation:
        its `backward` takes `restore_inputs`.
        """
        rotation = self.rotation(tile)
        return LocalGraph(
            lambda inputs, weights: self._inner(self._module, inputs, rotation, weights),
            products,
            self._piece_weights,
            restorable=(*products, cast(Tensor, rotation)) if restorable else (),
        )

    def last_grad(self, grad_BCE: Tensor, last_input: Tensor) -> Tensor:
        """Gradient of the last product, from that of the residual stream.

        Where a norm follows, it needs the product.
        """
        if self._sublayer.post_norm is None:
            multiplier = self._sublayer.multiplier
            grad_last_BCE = grad_BCE if multiplier == 1 else grad_BCE * multiplier
            if self._sublayer.bias_name is not None:
                dtype = accumulation_dtype(grad_BCE.dtype)
                self.grads.add(
                    {self._sublayer.bias_name: grad_last_BCE.flatten(0, -2).sum(0, dtype=dtype)}
                )
            return grad_last_BCE
        graph = LocalGraph(
            lambda inputs, weights: [self._after(self._sublayer, *inputs, weights)],
            [self._tp_comm.reduce(self.last_product(last_input))],
            self._piece_weights,
        )
        (grad_last_BCE,), weight_grads = graph.backward([grad_BCE])
        self.grads.add(weight_grads)
        return grad_last_BCE

    def restore_inputs(
        self, normed_BCE: Tensor, tile: slice, group: int, num_groups: int
    ) -> Restore:
        """Gives one product of `linears` of a head group again, or the rotation."""
        linears = self._module.linears

        def restore(index: int) -> Tensor:
            if index == len(linears):
                return cast(Tensor, self.rotation(tile))
            return self._module.product(
                linears[index], normed_BCE, self.linear_weights(group, num_groups)
            )

        return restore

    def linears_backward(self, product_grads: list[Tensor], normed_BCE: Tensor) -> Tensor:
        """Gradient of the linear layers' input, a partial sum under tensor parallelism.

        Empties `product_grads`.
        """
        for index, name in enumerate(self._module.linears):
            self.grads.add({f"{name}.weight": weight_grad(product_grads[index], normed_BCE)})
            if (bias := f"{name}.bias") in self._weights:
                dtype = accumulation_dtype(normed_BCE.dtype)
                self.grads.add({bias: product_grads[index].flatten(0, -2).sum(0, dtype=dtype)})
        grad_BCE = input_grad(
            product_grads, [self._weights[f"{name}.weight"] for name in self._module.linears]
        )
        # The caller's list holds the last references, and the reduce-scatter comes next.
        product_grads.clear()
        return grad_BCE

    def before_backward(self, grad_BCE: Tensor, before_graph: LocalGraph) -> Tensor:
        """Gradient of the sublayer's input but for the residual connection."""
        (grad_x_BCE,), weight_grads = before_graph.backward([grad_BCE])
        self.grads.add(weight_grads)
        return grad_x_BCE
