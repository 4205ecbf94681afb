"""Tensors of a feed-forward with experts. Imports no torch.

A row is a token at one of its experts. Without expert parallelism a rank has `top_k` rows for each
of its tokens; with it as many in the mean, and the busiest rank `ASSUMED_LOAD` times as many.

Shapes are those of `block.py`; R rows with their padding, X experts, M feed-forward dim of an
expert on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import partial

from models.expert_config import most_places
from models.layers import LayerKind
from trainer.memory.block import (
    UNTIL_BACKWARD,
    WHILE_RUNNING,
    BlockMemory,
    Moments,
    saved_tensors,
    transient,
)
from trainer.trace.tensors import MemoryTensor, Tensors, total_bytes

EXPERTS = "models/experts.py: GroupedFeedForward"
HALF = "parallelisms/expert_recompute.py: ExpertHalf"
ASSUMED_LOAD = 1.1
"""Rows of the busiest expert-parallel rank over the mean: an assumption of plans.

`expert_load_max` logs it per expert.
"""


class ExpertMemory:
    """Tensors of a feed-forward with experts for `tokens` tokens of all tp ranks."""

    def __init__(self, block: BlockMemory, tokens: int) -> None:
        self.block = block
        self.model = block.model
        self.tokens = tokens
        load = ASSUMED_LOAD if block.ep > 1 else 1.0
        self.num_rows = round(tokens * self.model.top_k * load)
        # Grouped matrix products of a GPU need the rows of each expert padded.
        if block.kernel != "cpu" and block.compute_dtype == "bfloat16":
            self.num_rows = most_places(self.num_rows, self.model.num_experts // block.ep)
        self.local_tokens = tokens // block.sequence_shards
        self.expert_dim = self.model.expert_dim // block.tp
        self.shared_dim = self.model.sizes["Z"] // block.tp if block.kind.shared_expert else 0

    def rows(self, name: str, copies: float = 1) -> MemoryTensor:
        """Rows [R, E]."""
        return self.block.numbers(name, self.num_rows, self.model.dim, copies=copies)

    def inner(self, name: str, copies: float = 1) -> MemoryTensor:
        """Rows inside the experts, [R, M]."""
        return self.block.numbers(name, self.num_rows, self.expert_dim, copies=copies)

    def shared(self, name: str, copies: float = 1) -> MemoryTensor:
        return self.block.numbers(name, self.tokens, self.shared_dim, copies=copies)

    def local(self, name: str, copies: float = 1) -> MemoryTensor:
        """Tokens of this rank, [N, E]."""
        return self.block.numbers(name, self.local_tokens, self.model.dim, copies=copies)

    def weights(self, name: str, copies: float = 1) -> MemoryTensor:
        """One matrix of every expert of a rank, [X, M, E]."""
        experts = self.model.num_experts // self.block.ep
        return self.block.numbers(name, experts, self.expert_dim, self.model.dim, copies=copies)

    def router(self, copies: float = 1) -> Iterator[MemoryTensor]:
        """Tensors that the router saves: its input in the dtype of sums, scores, and the chosen
        experts.
        """
        block = self.block
        experts = self.model.num_experts
        slots = self.local_tokens * self.model.top_k
        # Routers compute in the dtype of sums, because rounded scores choose other experts.
        yield block.sums(
            "the router's input, widened",
            self.local_tokens,
            self.model.dim,
            copies=copies if block.is_mixed else 0,
        )
        yield block.sums("the router's scores", 1, self.local_tokens, experts, copies=copies)
        yield MemoryTensor("experts, slots and rows", (3, slots), "int64", copies=copies)
        yield block.sums("weights of experts, on either side", 3, slots, copies=copies)

    def saved_inputs(self, copies: float = 1) -> Iterator[MemoryTensor]:
        """Saved inputs of the router, the experts and the shared expert."""
        yield from self.router(copies)
        yield self.rows("tokens as rows", copies)
        # Without sequence parallelism it is the normalized input itself.
        is_gathered = self.shared_dim > 0 and self.block.is_gathered
        yield self.block.numbers(
            "gathered tokens of the shared expert",
            self.tokens,
            self.model.dim,
            copies=copies if is_gathered else 0,
        )


class ExpertBlock(BlockMemory):
    """A block whose feed-forward has experts."""

    has_experts = True

    def feed_forward_saved(self, copies: float = 1) -> Tensors:
        experts = ExpertMemory(self, self.tokens)
        *norm, _ = self.norm_saved("feed_forward", copies)
        # The router saves a widened copy instead.
        is_saved = not self.is_mixed or (bool(experts.shared_dim) and not self.is_gathered)
        return saved_tensors(
            EXPERTS,
            UNTIL_BACKWARD,
            *norm,
            self.stream("normalized inputs of the router", copies if is_saved else 0),
            *experts.saved_inputs(copies),
            experts.inner("gate and up of the experts", 2 * copies),
            experts.shared(
                "gate and up of the shared expert", 2 * copies if experts.shared_dim else 0
            ),
        )

    def tile_bytes_per_token(self) -> int:
        dim = self.model.dim
        expert_dim = self.model.expert_dim // self.tp
        rows = self.model.top_k
        return self.compute_bytes * (
            rows * (2 * expert_dim + 2 * max(expert_dim, dim) + 2 * dim) + 2 * dim
        )


def block_of(block: BlockMemory, kind: LayerKind) -> BlockMemory:
    """The block with another kind of layer."""
    values = {each.name: getattr(block, each.name) for each in fields(block)} | {"kind": kind}
    return (ExpertBlock if kind.feed_forward == "moe" else BlockMemory)(**values)


def autograd_moments(block: BlockMemory) -> Moments:
    """Moments of the experts' backward pass under autograd, with everything that the feed-forward
    saved.
    """
    experts = ExpertMemory(block, block.tokens)
    saved = block.feed_forward_saved()
    stream = transient(HALF, WHILE_RUNNING, block.stream("gradient of the output"))
    for name, alive in _backward(experts, has_products=True):
        yield name, saved + stream + alive


def recompute_moments(block: BlockMemory, held: Tensors) -> Moments:
    """Moments of the experts' backward pass on one tile, recomputed from its hidden state. `held`:
    what the block holds meanwhile.
    """
    experts = ExpertMemory(block, block.tile_tokens)
    inputs = transient(
        HALF,
        WHILE_RUNNING,
        experts.local(
            "a tile of the hidden state, and normalized",
            2 if block.is_normed("feed_forward") else 1,
        ),
        *experts.saved_inputs(),
        experts.weights("sums of weight gradients", 3 if block.num_tiles() > 1 else 0),
    )
    for name, alive in _backward(experts, has_products=False):
        yield name, held + inputs + alive


def forward_pass(block: BlockMemory) -> Tensors:
    """Forward pass of the experts on one tile, beside the input of the block and the attention
    output.
    """
    experts = ExpertMemory(block, block.tile_tokens)
    part = partial(transient, EXPERTS, WHILE_RUNNING)
    inner = part(experts.inner("gate, up and their product", 3))
    output = part(experts.inner("the product", 1), experts.rows("outputs of the experts"))
    combined = part(
        experts.rows("outputs of the experts"),
        experts.local("their sum"),
    )
    return part(
        block.stream("hidden state"),
        block.stream("output", 1 if block.num_tiles() > 1 else 0),
        experts.local(
            "a tile of the normalized input", 1 if block.is_normed("feed_forward") else 0
        ),
        *experts.saved_inputs(),
    ) + max(inner, output, combined, key=total_bytes)


def _backward(experts: ExpertMemory, *, has_products: bool) -> Moments:
    """Moments of the experts' backward pass, in the order of `GroupedFeedForward.backward`."""
    part = partial(transient, f"{EXPERTS}.backward", WHILE_RUNNING)
    gradient = experts.rows("gradients of the outputs of experts")
    # A saved gate is not copied.
    products = 1 if has_products else 2
    inner = experts.inner("gate, up, activated gate, product and its gradient", products + 3)
    yield "the experts' feed-forward", part(gradient, inner, experts.inner("the product of both"))
    yield "the experts' feed-forward", part(gradient, inner, experts.weights("weight gradient"))
    yield (
        "the input gradient of the experts' feed-forward",
        part(
            gradient,
            experts.inner("gradient of gate or up"),
            experts.weights("weight gradients", 3),
            experts.rows("input gradients, by matrix", 2),
        ),
    )
    yield (
        "the way back of the experts' feed-forward",
        part(
            experts.rows("input gradients"),
            experts.weights("weight gradients", 3),
            experts.local("their sum"),
        ),
    )
