"""Activation checkpointing (Chen et al., 2016), optionally without re-running attention.

With policy "keep_attention" blocks save the output and log-sum-exp of attention, which cost most
to recompute (DISTFLASHATTN, Li et al., 2024), and recompute the rest in the backward pass; "full"
recomputes these too. A block is two autograd functions around `block_recompute.BlockCompute`:

    x --> attention half --> x + attention --> feed-forward half --> output
              saves x and the attention output         saves nothing

The autograd graph is that of the forward pass, so saved tensors may be on the device or on the
host. With `blocks_per_checkpoint` = n only every n-th block saves its input; the others recompute
theirs from it. A block that is not attention and feed-forward in pieces runs under torch's own
checkpointing, which recomputes all of it.

Shape suffixes: B sequences, S tokens of this rank, T tokens of all tp ranks, E width of the
residual stream, F rotary frequencies, D document starts and the sequence end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models.attention import Attention
from models.sublayer import SublayerModule
from models.transformer import Transformer, TransformerBlock, default_block_forward
from parallelisms import fsdp
from parallelisms.activation_offload import HostActivationPool, SavedTensor
from parallelisms.block_recompute import AttentionOutputs, BlockCompute, Tiling
from parallelisms.mesh.parallel_dims import head_groups_problem

RecomputePolicy = Literal["none", "full", "keep_attention"]
HalfBackward = Callable[[Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class RecomputeConfig:
    """Activations that blocks save for the backward pass, and where they are."""

    policy: RecomputePolicy = "none"
    host_pool: HostActivationPool | None = None
    """Host memory for block inputs; None keeps them on the device."""
    offload_attention: bool = False
    blocks_per_checkpoint: int = 1
    """One in this many blocks saves its input."""
    tiling: Tiling = field(default_factory=Tiling)
    reshard_after_forward: bool = True
    """Whether FSDP reshards the weights of a block after its forward."""


def apply(model: Transformer, config: RecomputeConfig) -> None:
    """Sets `forward_fn` of every block.

    Each batch allows one backward; batches may run backward in any order.
    """
    if config.policy == "none":
        return
    if problem := head_groups_problem(model.config, config.tiling.head_groups):
        raise ValueError(problem)
    runner: BlockRunner | None = None
    blocks = model.transformer_blocks()
    last = max(
        (index for index, block in enumerate(blocks) if consists_of_pieces(block)), default=None
    )
    for index, block in enumerate(blocks):
        if not consists_of_pieces(block):
            block.forward_fn = checkpointed_block_forward
            runner = None
            continue
        # Without a predecessor in pieces there is no block to recompute the input from.
        saves_input = runner is None or index % config.blocks_per_checkpoint == 0
        block.forward_fn = runner = BlockRunner(
            config, runner, saves_input=saves_input, is_last=index == last
        )


def consists_of_pieces(block: TransformerBlock) -> bool:
    """Whether `BlockCompute` knows how to run the block: attention, then a feed-forward."""
    attention, feed_forward = (sublayer.module for sublayer in block.sublayers)
    return (
        block.kind.in_pieces
        and isinstance(attention, Attention)
        and isinstance(feed_forward, SublayerModule)
    )


def checkpointed_block_forward(
    block: TransformerBlock, x_BSE: Tensor, rotation_2BT1F: Tensor, boundaries_BD: Tensor
) -> Tensor:
    """Saves the input, and runs the block again in its backward pass."""
    inputs = (block, x_BSE, rotation_2BT1F, boundaries_BD)
    # No operation draws random numbers, so their state need not be saved.
    out_BSE: Tensor = checkpoint(
        default_block_forward, *inputs, use_reentrant=False, preserve_rng_state=False
    )
    return out_BSE


class BlockRunner:
    """The `forward_fn` of a block under recomputation.

    `previous` is that of the block before it.
    """

    def __init__(
        self,
        config: RecomputeConfig,
        previous: BlockRunner | None,
        *,
        saves_input: bool,
        is_last: bool,
    ) -> None:
        self._config = config
        self._previous = previous
        self._saves_input = saves_input
        self._is_last = is_last
        self._latest: Callable[[], BlockActivations | None] = lambda: None
        """A weak reference to the activations of the latest batch: only the autograd graph keeps
        them alive.
        """

    def __call__(
        self, block: TransformerBlock, x_BSE: Tensor, rotation_2BT1F: Tensor, boundaries_BD: Tensor
    ) -> Tensor:
        compute = BlockCompute(block, x_BSE, rotation_2BT1F, boundaries_BD, self._config.tiling)
        # Without gradients nothing is saved.
        if not torch.is_grad_enabled():
            outputs = [out for out, _ in compute.attention_forward(x_BSE)]
            hidden_BSE = compute.output_projection(x_BSE, outputs)
            return block.feed_forward.gathered(compute.feed_forward, hidden_BSE)
        previous = self._previous._latest() if self._previous is not None else None
        activations = BlockActivations(
            compute, self._config, previous, saves_input=self._saves_input
        )
        self._latest = ref(activations)
        hidden_BSE = BlockHalf.apply(
            x_BSE,
            activations.attention_forward,
            activations.attention_backward,
            *compute.attention_weights(),
        )

        # The weights are read inside of `gathered`: before it, FSDP holds those of experts as
        # shards.
        def feed_forward(hidden_BSE: Tensor) -> Tensor:
            weights = compute.feed_forward_weights()
            out_BSE: Tensor = BlockHalf.apply(
                hidden_BSE, compute.feed_forward, activations.feed_forward_backward, *weights
            )
            return out_BSE

        out_BSE = block.feed_forward.gathered(feed_forward, hidden_BSE)
        if self._is_last and self._config.host_pool is not None:
            self._config.host_pool.release_offloaded()  # The loss head needs the memory.
        return out_BSE


class BlockHalf(torch.autograd.Function):
    """One half of a block: `forward` maps x to the output, `backward` its gradient to those of x
    and of the weights.

    The weights only mark what needs a gradient: both directions read them from the block, since
    FSDP frees and gathers them in between.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BSE: Tensor,
        forward: Callable[[Tensor], Tensor],
        backward: HalfBackward,
        *weights: Tensor,
    ) -> Tensor:
        del weights
        ctx.compute_grads = backward
        return forward(x_BSE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_BSE, *weight_grads = ctx.compute_grads(grads[0])
        return grad_x_BSE, None, None, *weight_grads


class BlockActivations:
    """The saved activations of one batch in one block, and the recomputation of the others."""

    def __init__(
        self,
        compute: BlockCompute,
        config: RecomputeConfig,
        previous: BlockActivations | None,
        *,
        saves_input: bool,
    ) -> None:
        self.compute = compute
        self._config = config
        self._next_in_backward = previous
        self._attention_pool = config.host_pool if config.offload_attention else None
        self._input_source = None if saves_input else previous
        self._saved_input: SavedTensor | None = None
        """None if recomputed from the previous block."""
        self._saved_attention: list[tuple[SavedTensor, SavedTensor]] = []
        """Output and log-sum-exp of each head group."""
        self._restored_input_BSE: Tensor | None = None
        self._attention_outputs: AttentionOutputs = []

    # ---- forward

    def attention_forward(self, x_BSE: Tensor) -> Tensor:
        host_pool = self._config.host_pool
        if self._input_source is None:
            self._saved_input = (
                SavedTensor(x_BSE) if host_pool is None else host_pool.save_input(x_BSE)
            )
        outputs = []
        for head_group in self.compute.attention_forward(x_BSE):
            if self._saves_attention(head_group, x_BSE):
                out, lse = (SavedTensor(x, self._attention_pool, "attention") for x in head_group)
                self._saved_attention.append((out, lse))
            outputs.append(head_group[0])
        return self.compute.output_projection(x_BSE, outputs)

    def _saves_attention(self, head_group: tuple[Tensor, ...], x_BSE: Tensor) -> bool:
        """Whether to save the attention output: of all head groups or of none."""
        if self._config.policy != "keep_attention":
            return False
        if self._saved_attention or self._attention_pool is None:
            return True
        # All cp and tp ranks decide alike, as their tensors have equal sizes: recomputing
        # attention communicates.
        return self._attention_pool.has_headroom(
            head_group, head_groups=self._config.tiling.head_groups, x=x_BSE
        )

    # ---- backward

    def feed_forward_backward(self, grad_BSE: Tensor) -> tuple[Tensor, ...]:
        x_BSE = self._restore_input()
        if self._saved_attention:
            self._attention_outputs = [
                (out.pop(), lse.pop()) for out, lse in self._saved_attention
            ]
        # Recomputed outputs are kept for the other half of the block, whose backward pass is next.
        self._attention_outputs = self._attention_outputs or [
            *self.compute.attention_forward(x_BSE)
        ]
        return self.compute.feed_forward_backward(
            grad_BSE, x_BSE, [out for out, _ in self._attention_outputs]
        )

    def attention_backward(self, grad_BSE: Tensor) -> tuple[Tensor, ...]:
        x_BSE = self._restore_input()
        self._restored_input_BSE = None
        return self.compute.attention_backward(
            grad_BSE, x_BSE, self._attention_outputs, prefetch=self._prefetch_next
        )

    def prefetch(self) -> None:
        """Starts to copy the saved activations from the host to the device."""
        self.prefetch_input()
        # With several head groups, copies are cheap next to the compute, but the memory counts.
        if self._config.tiling.head_groups == 1:
            for saved in chain.from_iterable(self._saved_attention):
                saved.prefetch()

    def prefetch_input(self) -> None:
        if self._input_source is not None:
            self._input_source.prefetch_input()
        if self._saved_input is not None:
            self._saved_input.prefetch()

    def recompute_output(self) -> Tensor:
        """Recomputes the block output, which is the input of the next block."""
        x_BSE = self._restore_input()
        with _unsharded(
            self.compute.block, reshard_after_forward=self._config.reshard_after_forward
        ):
            if self._saved_attention:
                outputs = [out.read() for out, _ in self._saved_attention]
            else:  # Kept for the backward of this block.
                self._attention_outputs = [*self.compute.attention_forward(x_BSE)]
                outputs = [out for out, _ in self._attention_outputs]
            return self.compute.feed_forward(self.compute.output_projection(x_BSE, outputs))

    def _restore_input(self) -> Tensor:
        if self._restored_input_BSE is None and self._input_source is not None:
            self._restored_input_BSE = self._input_source.recompute_output()
            self._input_source = None
        if self._restored_input_BSE is None and self._saved_input is not None:
            self._restored_input_BSE = self._saved_input.pop()
            self._saved_input = None
        if self._restored_input_BSE is None:
            raise RuntimeError(
                "the saved activations of this block were already used by a backward pass"
            )
        return self._restored_input_BSE

    def _prefetch_next(self) -> None:
        next_block = self._next_in_backward
        self._next_in_backward = None
        if next_block is not None:
            next_block.prefetch()


@contextmanager
def _unsharded(block: TransformerBlock, *, reshard_after_forward: bool) -> Iterator[None]:
    """Gathers the weights of a block outside its own forward and backward, where FSDP does not."""
    # FSDP that does not reshard after the forward pass holds the weights already.
    if not reshard_after_forward:
        yield
        return
    fsdp.unshard(block)
    yield
    fsdp.reshard(block)
