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

from models.transformer import Transformer, TransformerBlock
from parallelisms.activation_offload import HostActivationPool, SavedTensor
from parallelisms.block_recompute import AttentionOutputs, BlockCompute, Tiling

RecomputePolicy = Literal["none", "full", "keep_attention"]


@dataclass(frozen=True)
class RecomputeConfig:
    """What blocks keep between their passes, and where."""

    policy: RecomputePolicy = "none"
    host_pool: HostActivationPool | None = None
    """For inputs; None: they stay on their device."""
    offload_attention: bool = False
    blocks_per_checkpoint: int = 1
    """Blocks of which one keeps its input."""
    tiling: Tiling = field(default_factory=Tiling)
    reshard_after_forward: bool = True
    """Whether FSDP frees a block's weights between its passes."""


def apply(model: Transformer, config: RecomputeConfig) -> None:
    """Lets every block run so. Each batch that went forward may go back once, in any order."""
    if config.policy == "none":
        return
    chain = BlockChain()
    for index, block in enumerate(model.layers()):
        block.forward_fn = BlockRunner(config, chain, index, is_last=index == len(model.blocks) - 1)


class BlockChain:
    """Where a block finds the pass through the one before it."""

    latest: Callable[[], BlockActivations | None] = staticmethod(lambda: None)
    """A reference that does not hold it: its graph does, as long as it is to go back."""


class BlockRunner:
    """How a block runs."""

    def __init__(self, config: RecomputeConfig, chain: BlockChain, index: int, *, is_last: bool) -> None:
        self._config, self._chain, self._index, self._is_last = config, chain, index, is_last

    def __call__(self, block: TransformerBlock, x_BSE: Tensor, rotation_2BT1F: Tensor, boundaries_BD: Tensor) -> Tensor:
        compute = BlockCompute(block, x_BSE, rotation_2BT1F, boundaries_BD, self._config.tiling)
        if not torch.is_grad_enabled():
            return compute.feed_forward(
                compute.output_projection(x_BSE, [out for out, _ in compute.attention_forward(x_BSE)])
            )
        previous = self._chain.latest() if self._index > 0 else None
        activations = BlockActivations(
            compute, self._config, previous, saves_input=self._index % self._config.blocks_per_checkpoint == 0
        )
        self._chain.latest = ref(activations)
        hidden_BSE = AttentionFunction.apply(x_BSE, activations, *compute.attention_weights())
        out_BSE: Tensor = FeedForwardFunction.apply(hidden_BSE, activations, *compute.feed_forward_weights())
        if self._is_last and self._config.host_pool is not None:
            self._config.host_pool.release_offloaded()  # The head needs the room.
        return out_BSE


class AttentionFunction(torch.autograd.Function):
    """x + attention(norm(x)). Weights are read from the block in either pass: FSDP frees and gathers them between."""

    @staticmethod
    def forward(ctx: Any, x_BSE: Tensor, activations: BlockActivations, *weights: Tensor) -> Tensor:
        del weights
        ctx.this = activations
        return activations.attention_forward(x_BSE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_BSE, *weight_grads = ctx.this.attention_backward(grads[0])
        return grad_x_BSE, None, *weight_grads


class FeedForwardFunction(torch.autograd.Function):
    """x + feed_forward(norm(x))."""

    @staticmethod
    def forward(ctx: Any, hidden_BSE: Tensor, activations: BlockActivations, *weights: Tensor) -> Tensor:
        del weights
        ctx.this = activations
        return activations.compute.feed_forward(hidden_BSE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_BSE, *weight_grads = ctx.this.feed_forward_backward(grads[0])
        return grad_hidden_BSE, None, *weight_grads


class BlockActivations:
    """One batch's pass through a block: what is kept of it, and how the rest is found again."""

    def __init__(
        self, compute: BlockCompute, config: RecomputeConfig, previous: BlockActivations | None, *, saves_input: bool
    ) -> None:
        self.compute = compute
        self._config, self._next_in_backward = config, previous
        self._input_source = None if saves_input else previous
        self._saved_input: SavedTensor | None = None
        """Unless it is made again from the previous one."""
        self._saved_attention: list[tuple[SavedTensor, ...]] = []
        """Of each group of heads."""
        self._restored_input_BSE: Tensor | None = None
        self._attention_outputs: AttentionOutputs = []

    # ---- forward

    def attention_forward(self, x_BSE: Tensor) -> Tensor:
        host_pool = self._config.host_pool
        if self._input_source is None:
            self._saved_input = SavedTensor(x_BSE) if host_pool is None else host_pool.save_input(x_BSE)
        outputs = []
        for head_group in self.compute.attention_forward(x_BSE):
            if self._saves_attention(head_group, x_BSE):
                self._saved_attention.append(
                    tuple(SavedTensor(x, self._attention_host_pool(), "attention") for x in head_group)
                )
            outputs.append(head_group[0])
        return self.compute.output_projection(x_BSE, outputs)

    def _saves_attention(self, head_group: tuple[Tensor, ...], x_BSE: Tensor) -> bool:
        """What attention gave, of all groups or of none."""
        if self._config.policy != "keep_attention":
            return False
        host_pool = self._attention_host_pool()
        return (
            bool(self._saved_attention)
            or host_pool is None
            or host_pool.has_room(head_group, head_groups=self._config.tiling.head_groups, x=x_BSE)
        )

    def _attention_host_pool(self) -> HostActivationPool | None:
        return self._config.host_pool if self._config.offload_attention else None

    # ---- backward

    def feed_forward_backward(self, grad_BSE: Tensor) -> tuple[Tensor, ...]:
        x_BSE = self._restore_input()
        if self._saved_attention:
            self._attention_outputs = [
                cast(Any, tuple(saved.pop() for saved in group)) for group in self._saved_attention
            ]
        self._attention_outputs = self._attention_outputs or [*self.compute.attention_forward(x_BSE)]
        return self.compute.feed_forward_backward(grad_BSE, x_BSE, [out for out, _ in self._attention_outputs])

    def attention_backward(self, grad_BSE: Tensor) -> tuple[Tensor, ...]:
        x_BSE, self._restored_input_BSE = self._restore_input(), None
        return self.compute.attention_backward(grad_BSE, x_BSE, self._attention_outputs, prefetch=self._prefetch_next)

    def prefetch(self) -> None:
        """Lets what is on the host begin its way back."""
        self.prefetch_input()
        if self._config.tiling.head_groups == 1:  # Else rows are so long that copies take no time, but much room.
            for saved in (kept for group in self._saved_attention for kept in group):
                saved.prefetch()

    def prefetch_input(self) -> None:
        if self._input_source is not None:
            self._input_source.prefetch_input()
        if self._saved_input is not None:
            self._saved_input.prefetch()

    def recompute_output(self) -> Tensor:
        """The output, made again without what is not needed for it."""
        x_BSE = self._restore_input()
        with _unsharded(self.compute.block, reshard_after_forward=self._config.reshard_after_forward):
            if not self._saved_attention:
                self._attention_outputs = [*self.compute.attention_forward(x_BSE)]  # Once again is enough.
            outputs = [group[0].read() for group in self._saved_attention] or [
                out for out, _ in self._attention_outputs
            ]
            return self.compute.feed_forward(self.compute.output_projection(x_BSE, outputs))

    def _restore_input(self) -> Tensor:
        """The input, from now on at hand."""
        if self._restored_input_BSE is None and self._input_source is not None:
            self._restored_input_BSE, self._input_source = self._input_source.recompute_output(), None
        if self._restored_input_BSE is None and self._saved_input is not None:
            self._restored_input_BSE, self._saved_input = self._saved_input.pop(), None
        if self._restored_input_BSE is None:
            raise RuntimeError("what a block kept for its backward pass has been taken already")
        return self._restored_input_BSE

    def _prefetch_next(self) -> None:
        next_block, self._next_in_backward = self._next_in_backward, None
        if next_block is not None:
            next_block.prefetch()


@contextmanager
def _unsharded(block: TransformerBlock, *, reshard_after_forward: bool) -> Iterator[None]:
    """The block's weights, which FSDP gathers for the block at work only."""
    fsdp_module = cast(Any, block)
    if not reshard_after_forward or not hasattr(fsdp_module, "unshard"):
        yield
        return
    fsdp_module.unshard()
    yield
    fsdp_module.reshard()
