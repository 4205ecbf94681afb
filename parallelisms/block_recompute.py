"""Forward and backward of a block, in head groups and token tiles, below the autograd graph of the
model.

    x --> norm, QKV projections, attention, output projection --> + x --> norm, feed-forward --> + --> output
          one head group at a time                                        one tile of tokens at a time

The transient activations of a head group are freed before the next group starts, except the
gradients of Q, K and V. Everything else runs tile by tile: the hidden state between the halves is
recomputed from x and the attention output, and never exists in full. Under tensor parallelism
tokens are gathered and reduced tile by tile too. The exception is the input of attention, which
would be gathered once per head group: it is gathered in full.

Shape suffixes: B sequences, S tokens of this rank, T tokens of all tp ranks, C tokens of a tile, N
query heads of a group, H head width, E width of the residual stream, Q width of all query heads, F
rotary frequencies, D document starts and the sequence end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from models.attention import SINKS, Attention
from models.moe import MixtureOfExperts
from models.sublayer import LocalGraph, Weights, weight_grad
from models.tiling import CompilePiece, TokenTiles, eager
from models.transformer import TransformerBlock
from parallelisms.expert_recompute import ExpertHalf
from parallelisms.sublayer_pass import SublayerPass

AttentionOutputs = list[tuple[Tensor, Tensor]]
"""Output [B, T, N, H] and log-sum-exp of each head group."""


def compiler(**options: Any) -> CompilePiece:
    """Compiles a piece once for all blocks."""
    return lru_cache(partial(torch.compile, fullgraph=True, **options))


@dataclass(frozen=True)
class Tiling:
    """Number of groups of KV heads, bytes of a token tile (None: one tile), and what compiles the
    pieces of a block.
    """

    head_groups: int = 1
    tile_bytes: int | None = None
    compile: CompilePiece = eager


class NormedInput:
    """The normalized input of attention, which all head groups share; under tensor parallelism it
    is gathered once.
    """

    def __init__(
        self, run: SublayerPass, x_BSE: Tensor, compute: BlockCompute, *, with_graphs: bool = False
    ) -> None:
        self._run = run
        self._x_BSE = x_BSE
        self._tiles = compute.token_tiles
        self._graphs: dict[int, LocalGraph] = {}
        self._normed_BTE: Tensor | None = None
        if self._tiles.num_tp_shards > 1:
            (normed_BSE,) = self._tiles.map_tiles(
                lambda tile: [self._normalize(tile, with_graph=with_graphs)]
            )
            self._normed_BTE = compute.tp_comm.gather(normed_BSE)

    def tile(self, tile: slice) -> Tensor:
        """The normed input of a tile of every tp rank."""
        if self._normed_BTE is None:
            return self._normalize(tile)
        return self._tiles.select(self._normed_BTE, tile)

    def tile_with_graph(self, tile: slice) -> tuple[Tensor, LocalGraph]:
        """The graph is that of this rank's tokens; it can be asked for once."""
        normed = (
            self._normalize(tile, with_graph=True) if self._normed_BTE is None else self.tile(tile)
        )
        return normed, self._graphs.pop(tile.start)

    def _normalize(self, tile: slice, *, with_graph: bool = False) -> Tensor:
        x_BCE = self._x_BSE[:, tile]
        if not with_graph:
            return self._run.before(x_BCE)
        self._graphs[tile.start] = graph = self._run.before_graph(x_BCE)
        return graph.outputs.pop()


class BlockCompute:
    """Forward and backward of a block for one batch with a residual stream like `x_BSE`."""

    def __init__(
        self,
        block: TransformerBlock,
        x_BSE: Tensor,
        rotation_2BT1F: Tensor,
        boundaries_BD: Tensor,
        tiling: Tiling,
    ) -> None:
        self.block = block
        self._head_groups = tiling.head_groups
        self._compile = tiling.compile
        self._attention, self._feed_forward = block.sublayers
        self.tp_comm = block.sp_comm
        self._core = cast(Attention, block.attention).core
        self._rotation_2BT1F = rotation_2BT1F
        self._boundaries_BD = boundaries_BD
        max_tile_tokens = None
        if tiling.tile_bytes is not None:
            per_token = block.feed_forward.bytes_per_token(x_BSE.element_size())
            max_tile_tokens = tiling.tile_bytes // per_token // x_BSE.shape[0]
        self.token_tiles = TokenTiles(x_BSE.shape[1], rotation_2BT1F.shape[2], max_tile_tokens)
        has_experts = isinstance(block.feed_forward, MixtureOfExperts)
        self._experts = ExpertHalf(self._feed_forward, self.token_tiles) if has_experts else None

    # FSDP frees and gathers weights between passes, so each pass reads them.

    def attention_weights(self) -> tuple[Tensor, ...]:
        """Weights of the attention half, in the order of `attention_backward`."""
        return tuple(self._attention.weights().values())

    def feed_forward_weights(self) -> tuple[Tensor, ...]:
        """Weights of the feed-forward half, in the order of `feed_forward_backward`."""
        return tuple(self._feed_forward.weights().values())

    # ---- attention

    def attention_forward(self, x_BSE: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Output and log-sum-exp of attention, one head group at a time."""
        run = self._attention_pass()
        sinks = run.sinks(self._head_groups)
        for qkv in self._exchanged_qkv(run, NormedInput(run, x_BSE, self)):
            output = self._core.forward(qkv, self._boundaries_BD, next(sinks))
            del qkv  # Free it before the next group exists.
            yield output

    def output_projection(self, x_BSE: Tensor, attention_outputs: list[Tensor]) -> Tensor:
        """The hidden state between the halves: x plus the projected attention output."""
        run = self._attention_pass()
        (hidden_BSE,) = self.token_tiles.map_tiles(
            lambda tile: [self._hidden(run, x_BSE, attention_outputs, tile)]
        )
        return hidden_BSE

    def attention_backward(
        self,
        grad_BSE: Tensor,
        x_BSE: Tensor,
        attention_outputs: AttentionOutputs,
        *,
        prefetch: Callable[[], None],
    ) -> tuple[Tensor, ...]:
        """Gradients of x and of the weights. Overwrites `grad_BSE` and empties
        `attention_outputs`.

        `prefetch` starts to reload the next block's activations: at once, or after the last of
        several head groups, which indicate that memory is short.
        """
        if self._head_groups == 1:
            prefetch()
        run = self._attention_pass()
        # Head groups write their columns of this one tensor, through the views below.
        grad_o_EQ = torch.empty_like(run.last_weight)
        o_proj_groups = zip(
            *(x.chunk(self._head_groups, dim=1) for x in (run.last_weight, grad_o_EQ)), strict=True
        )
        normed_input = NormedInput(run, x_BSE, self, with_graphs=True)
        grad_BTE = self.tp_comm.gather(
            self._projection_grad(run, grad_BSE, [out for out, _ in attention_outputs])
        )
        grads: list[Sequence[Tensor]] = []
        graphs: list[dict[int, LocalGraph]] = []
        sinks = run.sinks(self._head_groups)
        sink_grads = list[Tensor]()
        # zip would keep a group until the next one exists.
        for qkv in self._exchanged_qkv(run, normed_input, graphs):
            o_EP, grad_o_EP = next(o_proj_groups)
            out_BTNH, lse = attention_outputs.pop(0)
            weight_grad(grad_BTE, out_BTNH.flatten(-2), out_OI=grad_o_EP)
            grad_out_BTNH = (grad_BTE @ o_EP).view_as(out_BTNH)
            inputs = (grad_out_BTNH, qkv, out_BTNH, lse, self._boundaries_BD, next(sinks))
            *group_grads, sink_grad_N = self._core.backward(*inputs)
            grads.append(group_grads)
            sink_grads.append(sink_grad_N)
            del qkv, out_BTNH, lse, grad_out_BTNH, inputs, group_grads
        del grad_BTE
        if self._head_groups > 1:
            prefetch()
        # The gradients of all groups' Q, K and V exist: tile by tile they go back through RoPE,
        # the projections and the norm.
        for (tile,) in self.token_tiles.each():
            normed, before_graph = normed_input.tile_with_graph(tile)
            grad = run.linears_backward(
                self._product_grads(run, normed, tile, grads, graphs), normed
            )
            del normed
            grad = self.tp_comm.reduce(grad)
            grad_BSE[:, tile].add_(run.before_backward(grad, before_graph))
            # Otherwise they would stay while the next tile's are computed.
            del grad, before_graph
        run.grads.add(
            {run.last_name: grad_o_EQ} | ({SINKS: torch.cat(sink_grads)} if run.has_sinks else {})
        )
        return grad_BSE, *run.grads.pop_grads()

    def _projection_grad(
        self, run: SublayerPass, grad_BSE: Tensor, attention_outputs: list[Tensor]
    ) -> Tensor:
        """Gradient of the output projection of this rank's tokens."""
        if not run.has_after:
            return grad_BSE
        (grad_last_BSE,) = self.token_tiles.map_tiles(
            lambda tile: [
                run.last_grad(grad_BSE[:, tile], self._tile_of_outputs(attention_outputs, tile))
            ]
        )
        return grad_last_BSE

    def _attention_pass(self) -> SublayerPass:
        return SublayerPass(
            self._attention, self.tp_comm, self.token_tiles, self._compile, self._rotation_2BT1F
        )

    def _feed_forward_pass(self) -> SublayerPass:
        return SublayerPass(self._feed_forward, self.tp_comm, self.token_tiles, self._compile)

    def _exchanged_qkv(
        self,
        run: SublayerPass,
        normed_input: NormedInput,
        graphs: list[dict[int, LocalGraph]] | None = None,
    ) -> Iterator[Any]:
        """Q, K and V of each head group, whose communication overlaps with the previous group;
        adds their `graphs`.
        """
        next_qkv = None
        # One group ahead: its exchange starts before attention of the one before it runs.
        for group in range(self._head_groups + 1):
            qkv = next_qkv
            if group < self._head_groups:
                group_graphs: dict[int, LocalGraph] = {}
                if graphs is not None:
                    graphs.append(group_graphs)
                weights = run.linear_weights(group, self._head_groups)
                compute = partial(
                    self._qkv, run, normed_input, weights, None if graphs is None else group_graphs
                )
                q, k, v = self.token_tiles.map_tiles(compute, gathered=True)
                next_qkv = self._core.start(q, k, v, self._boundaries_BD)
                del q, k, v
            if qkv is not None:
                yield qkv

    def _qkv(
        self,
        run: SublayerPass,
        normed_input: NormedInput,
        weights: Weights,
        graphs: dict[int, LocalGraph] | None,
        tile: slice,
    ) -> Sequence[Tensor]:
        products = run.products(normed_input.tile(tile), weights)
        if graphs is None:
            return run.inner(products, tile)
        # The graph keeps neither products nor rotation, which would wait for attention's backward
        # pass in full. They are restored tile by tile.
        graphs[tile.start] = graph = run.inner_graph(products, tile, restorable=True)
        outputs = graph.outputs
        # The graph need not hold its outputs: attention's backward pass only brings their
        # gradients.
        graph.outputs = []
        return outputs

    def _product_grads(
        self,
        run: SublayerPass,
        normed: Tensor,
        tile: slice,
        grads: list[Sequence[Tensor]],
        graphs: list[dict[int, LocalGraph]],
    ) -> list[Tensor]:
        """Gradients of the products of a tile, from those of Q, K and V of every head group."""
        by_group = []
        for group, (dqkv, group_graphs) in enumerate(zip(grads, graphs, strict=True)):
            restore = run.restore_inputs(normed, tile, group, self._head_groups)
            selected = [self.token_tiles.select(x, tile) for x in dqkv]
            product_grads, weight_grads = group_graphs.pop(tile.start).backward(selected, restore)
            run.grads.add(weight_grads)
            by_group.append(product_grads)
        return [_cat(of_product, -1) for of_product in zip(*by_group, strict=True)]

    # ---- feed-forward

    def feed_forward(self, hidden_BSE: Tensor) -> Tensor:
        if self._experts is not None:
            return self._experts.forward(hidden_BSE)
        run = self._feed_forward_pass()
        linear_weights = run.linear_weights()

        def compute_tile(tile: slice) -> list[Tensor]:
            x_BCE = hidden_BSE[:, tile]
            # No names for what is not needed any more.
            out = run.last_product(
                *run.inner(
                    run.products(self.tp_comm.gather(run.before(x_BCE)), linear_weights), tile
                )
            )
            return [run.residual(x_BCE, out)]

        (out_BSE,) = self.token_tiles.map_tiles(compute_tile)
        return out_BSE

    def feed_forward_backward(
        self, grad_BSE: Tensor, x_BSE: Tensor, attention_outputs: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Gradients of the hidden state between the halves, and of the weights."""
        attention = self._attention_pass()
        if self._experts is not None:
            return self._experts.backward(
                grad_BSE, partial(self._hidden, attention, x_BSE, attention_outputs)
            )
        run = self._feed_forward_pass()
        linear_weights = run.linear_weights()

        def compute_tile(tile: slice) -> list[Tensor]:
            hidden_BCE = self._hidden(attention, x_BSE, attention_outputs, tile)
            grad_BCE = grad_BSE[:, tile]
            before_graph = run.before_graph(hidden_BCE)
            normed = self.tp_comm.gather(before_graph.outputs.pop())
            # What follows the last product acts on this rank's tokens: its gradient is gathered
            # after.
            grad = self.tp_comm.gather(grad_BCE) if not run.has_after else grad_BCE
            inner_graph = run.inner_graph(run.products(normed, linear_weights), tile)
            (last_input,) = inner_graph.outputs
            if run.has_after:
                grad = self.tp_comm.gather(run.last_grad(grad_BCE, last_input))
            run.grads.add({run.last_name: weight_grad(grad, last_input)})
            inner_graph.outputs.clear()
            # The gradients of the products need its memory.
            del last_input
            product_grads, weight_grads = inner_graph.backward([grad @ run.last_weight])
            del inner_graph
            run.grads.add(weight_grads)
            grad = run.linears_backward(product_grads, normed)
            del normed
            grad = self.tp_comm.reduce(grad)
            # The residual connection adds the gradient of the output.
            return [run.before_backward(grad, before_graph).add_(grad_BCE)]

        (grad_hidden_BSE,) = self.token_tiles.map_tiles(compute_tile)
        return grad_hidden_BSE, *run.grads.pop_grads()

    def _hidden(
        self, attention: SublayerPass, x_BSE: Tensor, attention_outputs: list[Tensor], tile: slice
    ) -> Tensor:
        """A tile of the hidden state between the halves."""
        product_BCE = attention.last_product(self._tile_of_outputs(attention_outputs, tile))
        return attention.residual(x_BSE[:, tile], product_BCE)

    def _tile_of_outputs(self, attention_outputs: list[Tensor], tile: slice) -> Tensor:
        """A tile of the attention output of all head groups: [B, num_tp_shards * C, Q]."""
        return _cat(
            [
                self.token_tiles.select(out_BTNH, tile).flatten(-2)
                for out_BTNH in attention_outputs
            ],
            -1,
        )


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors], dim)
