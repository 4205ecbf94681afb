"""What a block holds for its backward pass, and while it runs: bytes, as plain numbers, without torch.

Counted against real tensors in tests/trainer/test_ledger.py and tests/test_benchmarks_arithmetic.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from models.config import ModelConfig
from parallelisms.rules import ContextPlan


@dataclass(frozen=True)
class Block:
    """What a block holds of `tokens`, those of all tp ranks together. `wide` is the type of statistics, in bytes."""

    model: ModelConfig
    tokens: int
    bytes: int = 2
    wide: int = 4
    tp: int = 1
    shares_tokens: bool = True
    compiled: bool = False
    context: ContextPlan | None = None
    tile: int | None = None
    """Bytes of a tile of the feed-forward, where it runs by tiles."""

    @property
    def stream(self) -> int:
        return self.bytes * self.model.dim * self.tokens // (self.tp if self.shares_tokens else 1)

    @property
    def queries(self) -> int:
        """Elements: of queries, of outputs, of the gradients of either."""
        return self.model.num_heads * self.model.head_dim * self.tokens // self.tp

    @property
    def keys(self) -> int:
        """Elements of keys and values; heads are repeated until they divide among those that exchange them."""
        heads = max(1, self.model.num_kv_heads // self.tp)
        return 2 * lcm(heads, self.context.ulysses if self.context else 1) * self.model.head_dim * self.tokens

    @property
    def inner(self) -> int:
        return self.bytes * self.model.ffn_dim * self.tokens // self.tp

    def kept(self, policy: str) -> int:
        """For the backward pass: by attention, then by the feed-forward."""
        return self.kept_by_attention(policy) + (self.kept_by_feed_forward() if policy == "none" else 0)

    @property
    def attended(self) -> int:
        """What attention gave: its output and log-sum-exp."""
        return self.bytes * self.queries + self.wide * self.model.num_heads * self.tokens // self.tp

    def kept_by_attention(self, policy: str) -> int:
        output = self.attended
        if policy != "none":
            return self.stream + output * (policy == "keep_attention")
        exchanged = self.bytes * self.queries * (self.context is not None and self.context.ulysses > 1)
        return self._normed() + self.bytes * (self.queries + self.keys) + output + exchanged

    def kept_by_feed_forward(self) -> int:
        if self.tile is not None:  # It begins with the stream, or under tp with what the norm made of it.
            return self._normed() if self.tp > 1 else self.stream
        return self._normed() + (3 if self.compiled else 2) * self.inner

    def _normed(self) -> int:
        """What enters a norm, a number per token, and what leaves it for all tp ranks' tokens."""
        numbers = self.wide * self.stream // (self.bytes * self.model.dim)
        return self.stream + numbers + self.bytes * self.model.dim * self.tokens

    def in_feed_forward(self) -> int:
        """Its backward pass: the gradient of its output, whole under tp; of gate and up."""
        gathered = self.bytes * self.model.dim * self.tokens * (self.tp > 1 and self.shares_tokens)
        if self.tile is None:
            return self.stream + gathered + 2 * self.inner
        width, inner = self.model.dim, self.model.ffn_dim // self.tp
        token = self.bytes * (2 * inner + 2 * max(inner, width) + width * (self.tp == 1))
        # The gradients of its matrices are summed over tiles in the wide type.
        tiles = min(self.tile, self.tokens * token)
        return 2 * self.stream + gathered + tiles + self.wide * 3 * width * inner

    def in_attention(self, travels: int) -> int:
        """Its backward pass: gradients of the stream, output, queries, keys and values; and what other ranks send.

        `travels` are the bytes in which gradients of keys and values are sent.
        """
        own = self.stream + self.bytes * 2 * self.queries
        if self.context is None or self.context.ring == 1:
            return own + self.bytes * self.keys
        # Gradients are summed in the wide type, beside those of the part that was just computed.
        own += self.wide * (self.queries + self.keys)
        ring = self.context.ring
        if self.context.rotation == "allgather":
            others = ring - 1
            apart = others * (2 * self.bytes + self.wide)
            together = others * (self.bytes + self.wide) + ring * travels
            return own + self.keys * max(apart, together)
        again = 2 * travels + self.bytes if ring > 2 else 0  # Keys and gradients that are on their way.
        return own + self.keys * (2 * self.bytes + self.wide + again)
