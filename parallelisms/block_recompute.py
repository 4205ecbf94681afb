"""Forward and manually written backward of a block, in head groups and token tiles; below autograd.

    x --> norm, QKV projections, attention, output projection --> + x --> norm, feed-forward --> + --> output
          one head group at a time                                        one tile of tokens at a time

The transient activations of a head group are freed before the next group starts, except the gradients of Q, K and V.
Everything else runs tile by tile: the hidden state between the halves is recomputed from x and the attention output,
and never exists in full. Under tensor parallelism tokens are gathered and reduced tile by tile too. The exception is
the input of attention, which would be gathered once per head group: it is gathered in full.

Shape suffixes: B sequences, S tokens of this rank, T tokens of all tp ranks, C tokens of a tile, N query heads of a group,
H head width, E width of the residual stream, Q width of all query heads, F rotary frequencies, D document starts and
the sequence end.
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
from models.linear import Linear
from models.norm import RMSNorm
from models.tiling import GradAccumulator, QKVProjections, bytes_per_token
from models.transformer import TransformerBlock

AttentionOutputs = list[tuple[Tensor, Tensor]]
"""Output [B, T, N, H] and log-sum-exp of each head group."""
TileOp = Callable[..., Any]


class TileOps(NamedTuple):
    """The operations on a tile."""

    normalize: TileOp = norm.rms_norm
    normalize_backward: TileOp = norm.rms_norm_backward
    project_qkv: TileOp = tiling.project_qkv
    project_qkv_backward: TileOp = tiling.project_qkv_backward
    feed_forward: TileOp = tiling.feed_forward
    feed_forward_backward: TileOp = tiling.feed_forward_backward


def compile_tile_ops(**options: Any) -> TileOps:
    """Tile operations compiled once for all blocks."""
    return TileOps(*(torch.compile(op, fullgraph=True, **options) for op in TileOps()))


@dataclass(frozen=True)
class Tiling:
    """Number of groups of KV heads, and bytes of a token tile (None: one tile)."""

    head_groups: int = 1
    tile_bytes: int | None = None
    ops: TileOps = field(default_factory=TileOps)


class TokenTiles:
    """Tiles of a rank's S tokens, and their positions among all T tokens, which are ordered by tp rank."""

    def __init__(self, local_tokens: int, total_tokens: int, max_tile_tokens: int | None) -> None:
        self.num_tp_shards, self.total_tokens = total_tokens // local_tokens, total_tokens
        self.tiles = tiling.split_into_tiles(
            local_tokens, None if max_tile_tokens is None else max_tile_tokens // self.num_tp_shards
        )

    def select(self, x_BT: Tensor, tile: slice) -> Tensor:
        """The tokens of a tile of every tp rank: [B, T, ...] -> [B, num_tp_shards * C, ...]."""
        if self.num_tp_shards == 1:
            return x_BT[:, tile]
        tiles: Tensor = x_BT.unflatten(1, (self.num_tp_shards, -1))[:, :, tile]
        return tiles.flatten(1, 2)

    def map_tiles(self, compute: Callable[[slice], Sequence[Tensor]], *, gathered: bool = False) -> list[Tensor]:
        """Runs `compute` on every tile and concatenates its outputs along the tokens."""
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
    """The normalized input of attention."""

    select: Callable[[slice], tuple[Tensor, Tensor]]
    """A tile's normalized tokens of every tp rank, and the inverse RMS of this rank's."""
    residual: Tensor


def attention_modules(block: TransformerBlock) -> list[RMSNorm | Linear]:
    """Norm, Q, K, V, the optional Q and K norms, output projection: in the order of `attention_backward`."""
    attention = block.attention
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    return [block.attention_norm, *projections, *attention.qk_norms(), attention.o_proj]


def feed_forward_modules(block: TransformerBlock) -> list[RMSNorm | Linear]:
    """Norm, gate, up, down: in the order of `feed_forward_backward`."""
    feed_forward = block.feed_forward
    return [block.ffn_norm, feed_forward.gate_proj, feed_forward.up_proj, feed_forward.down_proj]


class BlockCompute:
    """Forward and backward of a block for one batch with a residual stream like `x_BSE`."""

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

    # ---- weights, read on every use: FSDP frees and gathers them between forward and backward

    def attention_weights(self) -> tuple[Tensor, ...]:
        return tuple(module.view(module.weight) for module in attention_modules(self.block))

    def _projections(self) -> QKVProjections:
        attention, norms = self.block.attention, self.block.attention.qk_norms()
        matrices = [projection.local_weight() for projection in (attention.q_proj, attention.k_proj, attention.v_proj)]
        return QKVProjections(matrices, [norm.view(norm.weight) for norm in norms], self.block.attention_norm.eps)

    def feed_forward_weights(self) -> tuple[Tensor, ...]:
        return tuple(module.view(module.weight) for module in feed_forward_modules(self.block))

    # ---- attention half

    def attention_forward(self, x_BSE: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Output and log-sum-exp of attention, one head group at a time."""
        for qkv in self._exchanged_qkv(self._norm_input(x_BSE)):
            output = self._core.forward(qkv, self._boundaries)
            del qkv  # Free it before the next group exists.
            yield output

    def output_projection(self, x_BSE: Tensor, attention_outputs: list[Tensor]) -> Tensor:
        """The hidden state between the halves: x plus the projected attention output."""
        (hidden_BSE,) = self._token_tiles.map_tiles(lambda tile: [self._hidden_tile(x_BSE, attention_outputs, tile)])
        return hidden_BSE

    def attention_backward(
        self, grad_BSE: Tensor, x_BSE: Tensor, attention_outputs: AttentionOutputs, *, prefetch: Callable[[], None]
    ) -> tuple[Tensor, ...]:
        """Gradients of x and of the weights. Overwrites `grad_BSE` and empties `attention_outputs`.

        `prefetch` starts to reload the next block's activations: at once, or after the last of several head groups,
        which indicate that memory is short.
        """
        if self._head_groups == 1:
            prefetch()
        o_EQ = self.attention_weights()[-1]
        grad_o_EQ = torch.empty_like(o_EQ)
        o_proj_groups = zip(*(x.chunk(self._head_groups, dim=1) for x in (o_EQ, grad_o_EQ)), strict=True)
        normed_input, grad_BTE = self._norm_input(x_BSE), self._tp_comm.gather(grad_BSE)
        grads: list[tuple[Tensor, ...]] = []
        for qkv in self._exchanged_qkv(normed_input):  # zip would keep a group alive until the next one exists.
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

        def normalize_tile(tile: slice) -> tuple[Tensor, Tensor]:
            normed: tuple[Tensor, Tensor] = self._ops.normalize(x_BSE[:, tile], norm_E, self.block.attention_norm.eps)
            return normed

        if self._token_tiles.num_tp_shards == 1:
            return NormedInput(normalize_tile, x_BSE)
        # One all-gather for all head groups.
        normed_BSE, inverse_BS1 = self._token_tiles.map_tiles(normalize_tile)
        normed_BTE = self._tp_comm.gather(normed_BSE)
        return NormedInput(lambda tile: (self._token_tiles.select(normed_BTE, tile), inverse_BS1[:, tile]), x_BSE)

    def _exchanged_qkv(self, normed_input: NormedInput) -> Iterator[Any]:
        """Q, K and V of each head group; their communication overlaps with the previous group."""
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
        projections, select = self._projections(), self._token_tiles.select
        weight_grads = GradAccumulator((norm_E, *weights), len(self._token_tiles.tiles))
        for tile in self._token_tiles.tiles:
            normed, inverse = normed_input.select(tile)
            dqkv = [_cat([select(x, tile) for x in groups], 2) for groups in zip(*grads, strict=True)]
            grad, *grad_weights = self._ops.project_qkv_backward(normed, *self._rope_tile(tile), dqkv, projections)
            x_BCE, grad = normed_input.residual[:, tile], self._tp_comm.reduce(grad)
            grad, grad_norm_E = self._ops.normalize_backward(grad, x_BCE, norm_E, inverse)
            grad_BSE[:, tile] += grad
            weight_grads.add((grad_norm_E, *grad_weights))
            del dqkv, grad, grad_weights  # Otherwise they would stay while the next tile's are computed.
        return grad_BSE, *weight_grads.pop_grads()

    # ---- feed-forward half

    def feed_forward(self, hidden_BSE: Tensor) -> Tensor:
        norm_E, *weights = self.feed_forward_weights()

        def compute_tile(tile: slice) -> list[Tensor]:
            x_BCE = hidden_BSE[:, tile]
            normed, _ = self._ops.normalize(x_BCE, norm_E, self.block.ffn_norm.eps)
            output = self._ops.feed_forward(self._tp_comm.gather(normed), *weights, activation=self._activation)
            return [self._tp_comm.reduce(output).add_(x_BCE)]

        (out_BSE,) = self._token_tiles.map_tiles(compute_tile)
        return out_BSE

    def feed_forward_backward(
        self, grad_BSE: Tensor, x_BSE: Tensor, attention_outputs: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Gradients of the hidden state between the halves, and of the weights."""
        norm_E, *weights = self.feed_forward_weights()
        weight_grads = GradAccumulator((norm_E, *weights), len(self._token_tiles.tiles))

        def compute_tile(tile: slice) -> list[Tensor]:
            hidden_BCE, grad_BCE = self._hidden_tile(x_BSE, attention_outputs, tile), grad_BSE[:, tile]
            normed, inverse = self._ops.normalize(hidden_BCE, norm_E, self.block.ffn_norm.eps)
            normed, grad = self._tp_comm.gather(normed), self._tp_comm.gather(grad_BCE)
            grad, *grad_weights = self._ops.feed_forward_backward(grad, normed, *weights, activation=self._activation)
            del normed
            grad, grad_norm_E = self._ops.normalize_backward(self._tp_comm.reduce(grad), hidden_BCE, norm_E, inverse)
            weight_grads.add((grad_norm_E, *grad_weights))
            return [grad.add_(grad_BCE)]

        (grad_hidden_BSE,) = self._token_tiles.map_tiles(compute_tile)
        return grad_hidden_BSE, *weight_grads.pop_grads()

    def _hidden_tile(self, x_BSE: Tensor, attention_outputs: list[Tensor], tile: slice) -> Tensor:
        """A tile of the hidden state between the halves."""
        out = _cat([self._token_tiles.select(out_BTNH, tile).flatten(-2) for out_BTNH in attention_outputs], -1)
        return self._tp_comm.reduce(F.linear(out, self.attention_weights()[-1])).add_(x_BSE[:, tile])

    def _rope_tile(self, tile: slice) -> tuple[Tensor, Tensor]:
        return self._token_tiles.select(self._cos, tile), self._token_tiles.select(self._sin, tile)


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors], dim)
