"""The two halves of a block, forward and backward by hand, in groups of heads and tiles of tokens; below autograd.

    x --> norm, project, attend, project back --> + x --> norm, feed-forward --> + --> the block's output
          group by group of heads                         tile by tile of tokens

What a group's backward pass holds is gone before the next one's begins, but for the gradients of its queries, keys and
values. All else is done tile by tile: what lies between the halves is made again from x and what attention gave, and
never lies there whole. Under tensor parallelism tokens are gathered and summed tile by tile too, but for the entrance to
attention, where that would be done for each group: there all tokens lie gathered.

Shape suffixes: B rows, S tokens of this rank, T tokens of all tp ranks, C tokens of a tile, N query heads of a group,
H head width, E width of the residual stream, Q width of all query heads, F rotary frequencies, D document starts and
the row's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from models import norm, tiling
from models.tiling import GradAccumulator, QKVProjections, bytes_per_token
from models.transformer import TransformerBlock

AttentionOutputs = list[tuple[Tensor, Tensor]]
"""Output [B, T, N, H] and log-sum-exp of each group of heads."""
TileOp = Callable[..., Any]


class TileOps(NamedTuple):
    """What is computed of a tile."""

    normalise: TileOp = norm.rms_norm
    normalise_backward: TileOp = norm.rms_norm_backward
    project_qkv: TileOp = tiling.project_qkv
    project_qkv_backward: TileOp = tiling.project_qkv_backward
    feed_forward: TileOp = tiling.feed_forward
    feed_forward_backward: TileOp = tiling.feed_forward_backward


def compile_tile_ops(**options: Any) -> TileOps:
    """The same, compiled once for all blocks."""
    return TileOps(*(torch.compile(op, fullgraph=True, **options) for op in TileOps()))


@dataclass(frozen=True)
class Tiling:
    """What blocks work in: groups of key/value heads, and tiles of so many bytes (None: all tokens are one)."""

    head_groups: int = 1
    tile_bytes: int | None = None
    ops: TileOps = field(default_factory=TileOps)


class TokenTiles:
    """Tiles of a rank's S tokens, and where they lie among all T, which are laid out by tp rank."""

    def __init__(self, local_tokens: int, total_tokens: int, max_tile_tokens: int | None) -> None:
        self.num_tp_shards, self.total_tokens = total_tokens // local_tokens, total_tokens
        self.tiles = tiling.split_into_tiles(
            local_tokens, None if max_tile_tokens is None else max_tile_tokens // self.num_tp_shards
        )

    def select(self, x_BT: Tensor, tile: slice) -> Tensor:
        """Every tp rank's tokens of a tile: [B, T, ...] -> [B, parts C, ...]."""
        return (
            x_BT[:, tile]
            if self.num_tp_shards == 1
            else x_BT.unflatten(1, (self.num_tp_shards, -1))[:, :, tile].flatten(1, 2)
        )

    def map_tiles(self, compute: Callable[[slice], Sequence[Tensor]], *, gathered: bool = False) -> list[Tensor]:
        """What is computed of every tile, together."""
        outputs: list[Tensor] = []
        num_shards = self.num_tp_shards if gathered else 1
        for tile in self.tiles:
            results = compute(tile)
            if len(self.tiles) == 1:
                return [*results]
            if not outputs:
                num_tokens = self.total_tokens * num_shards // self.num_tp_shards
                outputs = [x.new_empty(x.shape[0], num_tokens, *x.shape[2:]) for x in results]
            for x, result in zip(outputs, results, strict=True):
                x.unflatten(1, (num_shards, -1))[:, :, tile] = result.unflatten(1, (num_shards, -1))
        return outputs


class NormedInput(NamedTuple):
    """What enters attention: x, normalised."""

    select: Callable[[slice], tuple[Tensor, Tensor]]
    """Every tp rank's tokens of a tile, and by what this rank's were multiplied."""
    residual: Tensor


class BlockCompute:
    """A block at work on one batch, whose residual stream is like `x_BSE`."""

    def __init__(
        self, block: TransformerBlock, x_BSE: Tensor, rotation_2BT1F: Tensor, boundaries_BD: Tensor, tiling: Tiling
    ) -> None:
        self.block, self._head_groups, self._ops = block, tiling.head_groups, tiling.ops
        self._tp_comm, self._core = block.sp_comm, block.attention.core
        self._activation = block.feed_forward.activation
        self._cos, self._sin = rotation_2BT1F.unbind(0)
        self._boundaries = boundaries_BD
        max_tile_tokens = None
        if tiling.tile_bytes is not None:
            ffn_dim, dim = block.feed_forward.gate_proj.local_weight().shape
            max_tile_tokens = tiling.tile_bytes // bytes_per_token(dim, ffn_dim, x_BSE.element_size()) // x_BSE.shape[0]
        self._token_tiles = TokenTiles(x_BSE.shape[1], rotation_2BT1F.shape[2], max_tile_tokens)

    # ---- weights, as they are now: FSDP frees and gathers them between the passes

    def attention_weights(self) -> tuple[Tensor, ...]:
        """Of norm, queries, keys, values and, if there are any, the norms of queries and keys; and of output."""
        norm, projections = self.block.attention_norm, self._projections()
        return (
            norm.view(norm.weight),
            *projections.weights,
            *projections.norm_weights,
            self.block.attention.o_proj.local_weight(),
        )

    def _projections(self) -> QKVProjections:
        attention, norms = self.block.attention, self.block.attention.qk_norms()
        matrices = [projection.local_weight() for projection in (attention.q_proj, attention.k_proj, attention.v_proj)]
        return QKVProjections(matrices, [norm.view(norm.weight) for norm in norms], self.block.attention_norm.eps)

    def feed_forward_weights(self) -> tuple[Tensor, ...]:
        """Of norm, gate, up and down."""
        norm, feed_forward = self.block.ffn_norm, self.block.feed_forward
        return norm.view(norm.weight), *(
            linear.local_weight() for linear in (feed_forward.gate_proj, feed_forward.up_proj, feed_forward.down_proj)
        )

    # ---- the first half: attention

    def attention_forward(self, x_BSE: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What attention gives, group by group."""
        for qkv in self._exchanged_qkv(self._norm_input(x_BSE)):
            output = self._core.forward(qkv, self._boundaries)
            del qkv  # Before there is another.
            yield output

    def output_projection(self, x_BSE: Tensor, attention_outputs: list[Tensor]) -> Tensor:
        """What lies between the halves: x, and what attention gave, projected."""
        (hidden_BSE,) = self._token_tiles.map_tiles(lambda tile: [self._hidden_tile(x_BSE, attention_outputs, tile)])
        return hidden_BSE

    def attention_backward(
        self, grad_BSE: Tensor, x_BSE: Tensor, attention_outputs: AttentionOutputs, *, prefetch: Callable[[], None]
    ) -> tuple[Tensor, ...]:
        """Gradients of x, in the place of the one that is given, and of the weights. What was found is used up.

        `then` lets come back from the host what is needed next: at once, or, where rows are so long that heads go in
        groups and its room counts, when all groups are done.
        """
        if self._head_groups == 1:
            prefetch()
        o_EQ = self.attention_weights()[-1]
        grad_o_EQ = torch.empty_like(o_EQ)
        o_proj_groups = zip(
            o_EQ.chunk(self._head_groups, dim=1), grad_o_EQ.chunk(self._head_groups, dim=1), strict=True
        )
        normed_input, grad_BTE = self._norm_input(x_BSE), self._tp_comm.gather(grad_BSE)
        grads: list[tuple[Tensor, ...]] = []
        for qkv in self._exchanged_qkv(normed_input):  # Not zipped, which would hold a group until there is another.
            o_EP, grad_o_EP = next(o_proj_groups)
            out_BTNH, lse = attention_outputs.pop(0)
            grad_o_EP.copy_(tiling.weight_grad(grad_BTE, out_BTNH.flatten(-2)))
            grad_out_BTNH = (grad_BTE @ o_EP).view_as(out_BTNH)
            grads.append(self._core.backward(grad_out_BTNH, qkv, out_BTNH, lse, self._boundaries))
            del qkv, out_BTNH, lse, grad_out_BTNH
        del grad_BTE
        if self._head_groups > 1:
            prefetch()
        return *self._project_qkv_backward(grad_BSE, normed_input, grads), grad_o_EQ

    def _norm_input(self, x_BSE: Tensor) -> NormedInput:
        norm_E, *_ = self.attention_weights()

        def normalise_tile(tile: slice) -> tuple[Tensor, Tensor]:
            normed: tuple[Tensor, Tensor] = self._ops.normalise(x_BSE[:, tile], norm_E, self.block.attention_norm.eps)
            return normed

        if self._token_tiles.num_tp_shards == 1:
            return NormedInput(normalise_tile, x_BSE)
        # Gathered once, not for each group.
        normed_BSE, inverse_BS1 = self._token_tiles.map_tiles(normalise_tile)
        normed_BTE = self._tp_comm.gather(normed_BSE)
        return NormedInput(lambda tile: (self._token_tiles.select(normed_BTE, tile), inverse_BS1[:, tile]), x_BSE)

    def _exchanged_qkv(self, normed_input: NormedInput) -> Iterator[Any]:
        """Queries, keys and values of each group, on their way while the one before is at work."""
        projections, next_qkv = self._projections(), None
        for group in range(self._head_groups + 1):
            qkv = next_qkv
            if group < self._head_groups:
                project = partial(self._project_qkv, normed_input, projections.head_group(group, self._head_groups))
                next_qkv = self._core.start(*self._token_tiles.map_tiles(project, gathered=True))
            if qkv is not None:
                yield qkv

    def _project_qkv(self, normed_input: NormedInput, projections: QKVProjections, tile: slice) -> Sequence[Tensor]:
        qkv: Sequence[Tensor] = self._ops.project_qkv(normed_input.select(tile)[0], *self._rope_tile(tile), projections)
        return qkv

    def _project_qkv_backward(
        self, grad_BSE: Tensor, normed_input: NormedInput, grads: list[tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        norm_E, *weights, _ = self.attention_weights()
        projections, weight_grads = (
            self._projections(),
            GradAccumulator((norm_E, *weights), len(self._token_tiles.tiles)),
        )
        for tile in self._token_tiles.tiles:
            normed, inverse = normed_input.select(tile)
            tile_grads = [
                _cat([self._token_tiles.select(x, tile) for x in groups], 2) for groups in zip(*grads, strict=True)
            ]
            grad, *grad_weights = self._ops.project_qkv_backward(
                normed, *self._rope_tile(tile), tile_grads, projections
            )
            grad, grad_norm_E = self._ops.normalise_backward(
                self._tp_comm.reduce(grad), normed_input.residual[:, tile], norm_E, inverse
            )
            grad_BSE[:, tile] += grad
            weight_grads.add((grad_norm_E, *grad_weights))
        return grad_BSE, *weight_grads.pop_grads()

    # ---- the second half: the feed-forward

    def feed_forward(self, hidden_BSE: Tensor) -> Tensor:
        """The block's output."""
        norm_E, *weights = self.feed_forward_weights()

        def compute_tile(tile: slice) -> list[Tensor]:
            x_BCE = hidden_BSE[:, tile]
            normed, _ = self._ops.normalise(x_BCE, norm_E, self.block.ffn_norm.eps)
            output = self._ops.feed_forward(self._tp_comm.gather(normed), *weights, activation=self._activation)
            return [self._tp_comm.reduce(output).add_(x_BCE)]

        (out_BSE,) = self._token_tiles.map_tiles(compute_tile)
        return out_BSE

    def feed_forward_backward(
        self, grad_BSE: Tensor, x_BSE: Tensor, attention_outputs: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Gradients of what lies between the halves, and of the weights."""
        norm_E, *weights = self.feed_forward_weights()
        weight_grads = GradAccumulator((norm_E, *weights), len(self._token_tiles.tiles))

        def compute_tile(tile: slice) -> list[Tensor]:
            hidden_BCE, grad_BCE = self._hidden_tile(x_BSE, attention_outputs, tile), grad_BSE[:, tile]
            normed, inverse = self._ops.normalise(hidden_BCE, norm_E, self.block.ffn_norm.eps)
            normed, grad = self._tp_comm.gather(normed), self._tp_comm.gather(grad_BCE)
            grad, *grad_weights = self._ops.feed_forward_backward(grad, normed, *weights, activation=self._activation)
            del normed
            grad, grad_norm_E = self._ops.normalise_backward(self._tp_comm.reduce(grad), hidden_BCE, norm_E, inverse)
            weight_grads.add((grad_norm_E, *grad_weights))
            return [grad.add_(grad_BCE)]

        (grad_hidden_BSE,) = self._token_tiles.map_tiles(compute_tile)
        return grad_hidden_BSE, *weight_grads.pop_grads()

    def _hidden_tile(self, x_BSE: Tensor, attention_outputs: list[Tensor], tile: slice) -> Tensor:
        """A tile of what lies between the halves."""
        out = _cat([self._token_tiles.select(out_BTNH, tile).flatten(-2) for out_BTNH in attention_outputs], -1)
        return self._tp_comm.reduce(F.linear(out, self.attention_weights()[-1])).add_(x_BSE[:, tile])

    def _rope_tile(self, tile: slice) -> tuple[Tensor, Tensor]:
        return self._token_tiles.select(self._cos, tile), self._token_tiles.select(self._sin, tile)


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors], dim)
