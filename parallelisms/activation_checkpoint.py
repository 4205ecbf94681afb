"""Blocks that keep little of their forward pass and compute the rest again in their backward pass.

Activation checkpointing (Chen et al., 2016) that keeps attention's output and log-sum-exp, which take longest to compute
(DISTFLASHATTN, Li et al., 2024). A block is two autograd functions that find their gradients by hand (`halves.py`):

    x --> AttentionHalf --> x + attention --> FeedForwardHalf --> the block's output
               keeps x and what attention gave                keeps nothing of its own

Their graph is that of the forward pass, so what is kept may lie anywhere, and nothing runs again but what is needed.
With `every` above 1 only one of so many blocks keeps its input; those of the others are made again from it, without
attention.

Shape suffixes: B rows, S tokens of this rank, T tokens of all tp ranks, E width of the residual stream, F rotary
frequencies, D document starts and the row's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from weakref import ref

import torch
from torch import Tensor

from models.transformer import Block, Transformer
from parallelisms.activation_offload import HostMemory, Kept
from parallelisms.block_recompute import Attended, Halves, Pieces

Policy = Literal["none", "full", "keep_attention"]


@dataclass(frozen=True)
class Recompute:
    """What blocks keep between their passes, and where."""

    policy: Policy = "none"
    host: HostMemory | None = None
    """For inputs; None: they stay on their device."""
    attention_on_host: bool = False
    every: int = 1
    """Blocks of which one keeps its input."""
    pieces: Pieces = field(default_factory=Pieces)
    reshards: bool = True
    """Whether FSDP frees a block's weights between its passes."""


def apply(model: Transformer, recompute: Recompute) -> None:
    """Lets every block run so. Each batch that went forward may go back once, in any order."""
    if recompute.policy == "none":
        return
    line = Line()
    for index, block in enumerate(model.layers()):
        block.run = Run(recompute, line, index, is_last=index == len(model.blocks) - 1)


class Line:
    """Where a block finds the pass through the one before it."""

    last: Callable[[], Pass | None] = staticmethod(lambda: None)
    """A reference that does not hold it: its graph does, as long as it is to go back."""


class Run:
    """How a block runs."""

    def __init__(self, recompute: Recompute, line: Line, index: int, *, is_last: bool) -> None:
        self._recompute, self._line, self._index, self._is_last = recompute, line, index, is_last

    def __call__(self, block: Block, x_BSE: Tensor, rotation_2BT1F: Tensor, boundaries_BD: Tensor) -> Tensor:
        halves = Halves(block, x_BSE, rotation_2BT1F, boundaries_BD, self._recompute.pieces)
        if not torch.is_grad_enabled():
            return halves.feed(halves.leave(x_BSE, [out for out, _ in halves.attend(x_BSE)]))
        before = self._line.last() if self._index > 0 else None
        this = Pass(halves, self._recompute, before, keeps_input=self._index % self._recompute.every == 0)
        self._line.last = ref(this)
        between_BSE = AttentionHalf.apply(x_BSE, this, *halves.attention_weights())
        out_BSE: Tensor = FeedForwardHalf.apply(between_BSE, this, *halves.feed_weights())
        if self._is_last and self._recompute.host is not None:
            self._recompute.host.settle()  # The head needs the room.
        return out_BSE


class AttentionHalf(torch.autograd.Function):
    """x + attention(norm(x)). Weights are read from the block in either pass: FSDP frees and gathers them between."""

    @staticmethod
    def forward(ctx: Any, x_BSE: Tensor, this: Pass, *weights: Tensor) -> Tensor:
        del weights
        ctx.this = this
        return this.attend(x_BSE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_BSE, *others = ctx.this.attend_backward(grads[0])
        return grad_x_BSE, None, *others


class FeedForwardHalf(torch.autograd.Function):
    """x + feed_forward(norm(x))."""

    @staticmethod
    def forward(ctx: Any, between_BSE: Tensor, this: Pass, *weights: Tensor) -> Tensor:
        del weights
        ctx.this = this
        return this.halves.feed(between_BSE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_between_BSE, *others = ctx.this.feed_backward(grads[0])
        return grad_between_BSE, None, *others


class Pass:
    """One batch's pass through a block: what is kept of it, and how the rest is found again."""

    def __init__(self, halves: Halves, recompute: Recompute, before: Pass | None, *, keeps_input: bool) -> None:
        self.halves = halves
        self._recompute, self._before = recompute, before
        self._previous = None if keeps_input else before
        self._input: Kept | None = None
        """Unless it is made again from the previous one."""
        self._attended: list[tuple[Kept, ...]] = []
        """Of each group of heads."""
        self._x_BSE: Tensor | None = None
        self._found: Attended = []

    # ---- forward

    def attend(self, x_BSE: Tensor) -> Tensor:
        host = self._recompute.host
        if self._previous is None:
            self._input = Kept(x_BSE) if host is None else host.keep_input(x_BSE)
        outs = []
        for group in self.halves.attend(x_BSE):
            if self._keeps(group, x_BSE):
                self._attended.append(tuple(Kept(x, self._host_of_attention(), "attention") for x in group))
            outs.append(group[0])
        return self.halves.leave(x_BSE, outs)

    def _keeps(self, group: tuple[Tensor, ...], x_BSE: Tensor) -> bool:
        """What attention gave, of all groups or of none."""
        if self._recompute.policy != "keep_attention":
            return False
        host = self._host_of_attention()
        return (
            bool(self._attended) or host is None or host.has_room(group, times=self._recompute.pieces.groups, x=x_BSE)
        )

    def _host_of_attention(self) -> HostMemory | None:
        return self._recompute.host if self._recompute.attention_on_host else None

    # ---- backward

    def feed_backward(self, grad_BSE: Tensor) -> tuple[Tensor, ...]:
        x_BSE = self._entering()
        if self._attended:
            self._found = [cast(Any, tuple(kept.take() for kept in group)) for group in self._attended]
        self._found = self._found or [*self.halves.attend(x_BSE)]
        return self.halves.feed_backward(grad_BSE, x_BSE, [out for out, _ in self._found])

    def attend_backward(self, grad_BSE: Tensor) -> tuple[Tensor, ...]:
        x_BSE, self._x_BSE = self._entering(), None
        return self.halves.attend_backward(grad_BSE, x_BSE, self._found, then=self._fetch_the_next)

    def start(self) -> None:
        """Lets what is on the host begin its way back."""
        self.start_input()
        if self._recompute.pieces.groups == 1:  # Else rows are so long that copies take no time, but much room.
            for kept in (kept for group in self._attended for kept in group):
                kept.start()

    def start_input(self) -> None:
        if self._previous is not None:
            self._previous.start_input()
        if self._input is not None:
            self._input.start()

    def again(self) -> Tensor:
        """The output, made again without what is not needed for it."""
        x_BSE = self._entering()
        with _gathered(self.halves.block, reshards=self._recompute.reshards):
            if not self._attended:
                self._found = [*self.halves.attend(x_BSE)]  # Once again is enough.
            outs = [group[0].read() for group in self._attended] or [out for out, _ in self._found]
            return self.halves.feed(self.halves.leave(x_BSE, outs))

    def _entering(self) -> Tensor:
        """The input, from now on at hand."""
        if self._x_BSE is None and self._previous is not None:
            self._x_BSE, self._previous = self._previous.again(), None
        if self._x_BSE is None and self._input is not None:
            self._x_BSE, self._input = self._input.take(), None
        if self._x_BSE is None:
            raise RuntimeError("what a block kept for its backward pass has been taken already")
        return self._x_BSE

    def _fetch_the_next(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.start()


@contextmanager
def _gathered(block: Block, *, reshards: bool) -> Iterator[None]:
    """The block's weights, which FSDP gathers for the block at work only."""
    unit = cast(Any, block)
    if not reshards or not hasattr(unit, "unshard"):
        yield
        return
    unit.unshard()
    yield
    unit.reshard()
