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
from models.tiling import Projections, Sums
from models.transformer import Block

Attended = list[tuple[Tensor, Tensor]]
"""Output [B, T, N, H] and log-sum-exp of each group of heads."""
Body = Callable[..., Any]


class Bodies(NamedTuple):
    """What is computed of a tile."""

    normalise: Body = norm.normalise
    normalise_backward: Body = norm.normalise_backward
    project: Body = tiling.project
    project_backward: Body = tiling.project_backward
    feed: Body = tiling.feed
    feed_backward: Body = tiling.feed_backward


def compiled_bodies(**options: Any) -> Bodies:
    """The same, compiled once for all blocks."""
    return Bodies(*(torch.compile(body, fullgraph=True, **options) for body in Bodies()))


@dataclass(frozen=True)
class Pieces:
    """What blocks work in: groups of key/value heads, and tiles of so many bytes (None: all tokens are one)."""

    groups: int = 1
    tile: int | None = None
    bodies: Bodies = field(default_factory=Bodies)


class Tokens:
    """Tiles of a rank's S tokens, and where they lie among all T, which are laid out by tp rank."""

    def __init__(self, held: int, all_tokens: int, most: int | None) -> None:
        self.parts, self.all = all_tokens // held, all_tokens
        self.tiles = tiling.tiles(held, None if most is None else most // self.parts)

    def of(self, x_BT: Tensor, tile: slice) -> Tensor:
        """Every tp rank's tokens of a tile: [B, T, ...] -> [B, parts C, ...]."""
        return x_BT[:, tile] if self.parts == 1 else x_BT.unflatten(1, (self.parts, -1))[:, :, tile].flatten(1, 2)

    def by_tiles(self, compute: Callable[[slice], Sequence[Tensor]], *, gathered: bool = False) -> list[Tensor]:
        """What is computed of every tile, together."""
        whole: list[Tensor] = []
        parts = self.parts if gathered else 1
        for tile in self.tiles:
            found = compute(tile)
            if len(self.tiles) == 1:
                return [*found]
            if not whole:
                tokens = self.all * parts // self.parts
                whole = [x.new_empty(x.shape[0], tokens, *x.shape[2:]) for x in found]
            for x, part in zip(whole, found, strict=True):
                x.unflatten(1, (parts, -1))[:, :, tile] = part.unflatten(1, (parts, -1))
        return whole


class Entrance(NamedTuple):
    """What enters attention: x, normalised."""

    of: Callable[[slice], tuple[Tensor, Tensor]]
    """Every tp rank's tokens of a tile, and by what this rank's were multiplied."""
    stream: Tensor


class Halves:
    """A block at work on one batch, whose residual stream is like `x_BSE`."""

    def __init__(
        self, block: Block, x_BSE: Tensor, rotation_2BT1F: Tensor, boundaries_BD: Tensor, pieces: Pieces
    ) -> None:
        self.block, self._groups, self._run = block, pieces.groups, pieces.bodies
        self._exchange, self._core = block.exchange, block.attention.core
        self._activation = block.feed_forward.activation
        self._cos, self._sin = rotation_2BT1F.unbind(0)
        self._boundaries = boundaries_BD
        most = None
        if pieces.tile is not None:
            inner, width = block.feed_forward.gate_proj.matrix().shape
            most = pieces.tile // tiling.bytes_of_token(width, inner, x_BSE.element_size()) // x_BSE.shape[0]
        self._tokens = Tokens(x_BSE.shape[1], rotation_2BT1F.shape[2], most)

    # ---- weights, as they are now: FSDP frees and gathers them between the passes

    def attention_weights(self) -> tuple[Tensor, ...]:
        """Of norm, queries, keys, values and, if there are any, the norms of queries and keys; and of output."""
        norm, through = self.block.attention_norm, self._projections()
        return norm.view(norm.weight), *through.matrices, *through.norms, self.block.attention.o_proj.matrix()

    def _projections(self) -> Projections:
        half, norms = self.block.attention, self.block.attention.norms()
        matrices = [projection.matrix() for projection in (half.q_proj, half.k_proj, half.v_proj)]
        return Projections(matrices, [norm.view(norm.weight) for norm in norms], self.block.attention_norm.eps)

    def feed_weights(self) -> tuple[Tensor, ...]:
        """Of norm, gate, up and down."""
        norm, half = self.block.ffn_norm, self.block.feed_forward
        return norm.view(norm.weight), *(one.matrix() for one in (half.gate_proj, half.up_proj, half.down_proj))

    # ---- the first half: attention

    def attend(self, x_BSE: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What attention gives, group by group."""
        for sent in self._sent(self._enter(x_BSE)):
            found = self._core.forward(sent, self._boundaries)
            del sent  # Before there is another.
            yield found

    def leave(self, x_BSE: Tensor, outs: list[Tensor]) -> Tensor:
        """What lies between the halves: x, and what attention gave, projected."""
        (between_BSE,) = self._tokens.by_tiles(lambda tile: [self._left(x_BSE, outs, tile)])
        return between_BSE

    def attend_backward(
        self, grad_BSE: Tensor, x_BSE: Tensor, found: Attended, *, then: Callable[[], None]
    ) -> tuple[Tensor, ...]:
        """Gradients of x, in the place of the one that is given, and of the weights. What was found is used up.

        `then` lets come back from the host what is needed next: at once, or, where rows are so long that heads go in
        groups and its room counts, when all groups are done.
        """
        if self._groups == 1:
            then()
        o_EQ = self.attention_weights()[-1]
        grad_o_EQ = torch.empty_like(o_EQ)
        columns = zip(o_EQ.chunk(self._groups, dim=1), grad_o_EQ.chunk(self._groups, dim=1), strict=True)
        entrance, grad_BTE = self._enter(x_BSE), self._exchange.gather(grad_BSE)
        grads: list[tuple[Tensor, ...]] = []
        for sent in self._sent(entrance):  # Not zipped, which would hold a group until there is another.
            o_EP, grad_o_EP = next(columns)
            out_BTNH, lse = found.pop(0)
            grad_o_EP.copy_(tiling.weight_grad(grad_BTE, out_BTNH.flatten(-2)))
            grad_out_BTNH = (grad_BTE @ o_EP).view_as(out_BTNH)
            grads.append(self._core.backward(grad_out_BTNH, sent, out_BTNH, lse, self._boundaries))
            del sent, out_BTNH, lse, grad_out_BTNH
        del grad_BTE
        if self._groups > 1:
            then()
        return *self._project_backward(grad_BSE, entrance, grads), grad_o_EQ

    def _enter(self, x_BSE: Tensor) -> Entrance:
        norm_E, *_ = self.attention_weights()

        def of(tile: slice) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = self._run.normalise(x_BSE[:, tile], norm_E, self.block.attention_norm.eps)
            return found

        if self._tokens.parts == 1:
            return Entrance(of, x_BSE)
        # Gathered once, not for each group.
        normed_BSE, inverse_BS1 = self._tokens.by_tiles(of)
        normed_BTE = self._exchange.gather(normed_BSE)
        return Entrance(lambda tile: (self._tokens.of(normed_BTE, tile), inverse_BS1[:, tile]), x_BSE)

    def _sent(self, entrance: Entrance) -> Iterator[Any]:
        """Queries, keys and values of each group, on their way while the one before is at work."""
        through, following = self._projections(), None
        for group in range(self._groups + 1):
            sent = following
            if group < self._groups:
                projected = partial(self._projected, entrance, through.group(group, self._groups))
                following = self._core.start(*self._tokens.by_tiles(projected, gathered=True))
            if sent is not None:
                yield sent

    def _projected(self, entrance: Entrance, through: Projections, tile: slice) -> Sequence[Tensor]:
        found: Sequence[Tensor] = self._run.project(entrance.of(tile)[0], *self._turn(tile), through)
        return found

    def _project_backward(
        self, grad_BSE: Tensor, entrance: Entrance, grads: list[tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        norm_E, *weights, _ = self.attention_weights()
        through, sums = self._projections(), Sums((norm_E, *weights), len(self._tokens.tiles))
        for tile in self._tokens.tiles:
            normed, inverse = entrance.of(tile)
            of_tile = [_joined([self._tokens.of(x, tile) for x in groups], 2) for groups in zip(*grads, strict=True)]
            grad, *grad_weights = self._run.project_backward(normed, *self._turn(tile), of_tile, through)
            grad, grad_norm_E = self._run.normalise_backward(
                self._exchange.reduce(grad), entrance.stream[:, tile], norm_E, inverse
            )
            grad_BSE[:, tile] += grad
            sums.add((grad_norm_E, *grad_weights))
        return grad_BSE, *sums.done()

    # ---- the second half: the feed-forward

    def feed(self, between_BSE: Tensor) -> Tensor:
        """The block's output."""
        norm_E, *weights = self.feed_weights()

        def of(tile: slice) -> list[Tensor]:
            x_BCE = between_BSE[:, tile]
            normed, _ = self._run.normalise(x_BCE, norm_E, self.block.ffn_norm.eps)
            fed = self._run.feed(self._exchange.gather(normed), *weights, activation=self._activation)
            return [self._exchange.reduce(fed).add_(x_BCE)]

        (out_BSE,) = self._tokens.by_tiles(of)
        return out_BSE

    def feed_backward(self, grad_BSE: Tensor, x_BSE: Tensor, outs: list[Tensor]) -> tuple[Tensor, ...]:
        """Gradients of what lies between the halves, and of the weights."""
        norm_E, *weights = self.feed_weights()
        sums = Sums((norm_E, *weights), len(self._tokens.tiles))

        def of(tile: slice) -> list[Tensor]:
            between_BCE, grad_BCE = self._left(x_BSE, outs, tile), grad_BSE[:, tile]
            normed, inverse = self._run.normalise(between_BCE, norm_E, self.block.ffn_norm.eps)
            normed, grad = self._exchange.gather(normed), self._exchange.gather(grad_BCE)
            grad, *grad_weights = self._run.feed_backward(grad, normed, *weights, activation=self._activation)
            del normed
            grad, grad_norm_E = self._run.normalise_backward(self._exchange.reduce(grad), between_BCE, norm_E, inverse)
            sums.add((grad_norm_E, *grad_weights))
            return [grad.add_(grad_BCE)]

        (grad_between_BSE,) = self._tokens.by_tiles(of)
        return grad_between_BSE, *sums.done()

    def _left(self, x_BSE: Tensor, outs: list[Tensor], tile: slice) -> Tensor:
        """A tile of what lies between the halves."""
        out = _joined([self._tokens.of(out_BTNH, tile).flatten(-2) for out_BTNH in outs], -1)
        return self._exchange.reduce(F.linear(out, self.attention_weights()[-1])).add_(x_BSE[:, tile])

    def _turn(self, tile: slice) -> tuple[Tensor, Tensor]:
        return self._tokens.of(self._cos, tile), self._tokens.of(self._sin, tile)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim)
