"""What a block holds for its backward pass, and while it runs: bytes, as plain numbers, without torch.

Counted against real tensors in tests/memory/test_estimator.py and tests/memory/test_block.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from models.config import ModelConfig
from parallelisms.parallel_dims import ContextPlan


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
    groups: int = 1
    """Of key/value heads."""
    tile: int | None = None
    """Bytes of a tile, where blocks compute again."""

    @property
    def stream(self) -> int:
        return self.bytes * self.model.dim * self.tokens // (self.tp if self.shares_tokens else 1)

    @property
    def queries(self) -> int:
        """Elements: of queries, of outputs, of the gradients of either."""
        return self.model.num_heads * self.model.head_dim * self.tokens // self.tp

    @property
    def keys(self) -> int:
        """Elements of keys and values; a group's heads are repeated until they divide among those that exchange them."""
        heads = max(1, self.model.num_kv_heads // self.tp) // self.groups
        each = lcm(heads, self.context.ulysses if self.context else 1)
        return 2 * self.groups * each * self.model.head_dim * self.tokens

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
        return self._normed() + self.bytes * (self.queries + self.keys) + output + exchanged + self._normed_heads()

    def kept_by_feed_forward(self) -> int:
        return self._normed() + (3 if self.compiled else 2) * self.inner

    def _normed_heads(self) -> int:
        """What enters the norms of queries and keys, and a number for each head."""
        heads = self.model.num_heads // self.tp + max(1, self.model.num_kv_heads // self.tp)
        return heads * (self.bytes * self.model.head_dim + self.wide) * self.tokens * self.model.qk_norm

    def _normed(self) -> int:
        """What enters a norm, a number per token, and what leaves it for all tp ranks' tokens."""
        numbers = self.wide * self.stream // (self.bytes * self.model.dim)
        return self.stream + numbers + self.bytes * self.model.dim * self.tokens

    @property
    def gathered(self) -> int:
        """The tokens of all tp ranks, where they are shared between them."""
        return self.bytes * self.model.dim * self.tokens * (self.tp > 1 and self.shares_tokens)

    def in_feed_forward(self) -> int:
        """Its backward pass, where all is kept: the gradient of its output, whole under tp; of gate and up."""
        return self.stream + self.gathered + 2 * self.inner

    def in_attention(self, travels: int) -> int:
        """Its backward pass, where all is kept: the gradient of the stream, and what the operator holds. When it is done,
        so is what it kept.
        """
        return self.stream + max(self._attending(travels), self._norming_heads(self.bytes) - self.attended)

    def _norming_heads(self, narrow: int) -> int:
        """In the backward pass of the norm of queries: so many bytes of each number, and three of the type of statistics."""
        return (narrow + 3 * self.wide) * self.queries * self.model.qk_norm

    def _attending(self, travels: int) -> int:
        """Gradients of attention's output, queries, keys and values; and what other ranks send.

        `travels` are the bytes in which gradients of keys and values are sent.
        """
        own = self.bytes * 2 * self.queries
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

    # ---- backward passes that compute again: everything but what is kept of other blocks

    def tiles(self) -> tuple[int, int]:
        """How many, and the tokens of the largest, of all tp ranks."""
        if self.tile is None:
            return 1, self.tokens
        parts = self.tp if self.shares_tokens else 1
        held = self.tokens // parts
        most = max(1, self.tile // self._token() // parts)
        count = -(-held // most)
        return count, -(-held // count) * parts

    def _token(self) -> int:
        width, inner = self.model.dim, self.model.ffn_dim // self.tp
        return self.bytes * (2 * inner + 2 * max(inner, width) + width)

    def feed_forward_again(self) -> int:
        """Of x and what attention gave, the gradient that came and the one that goes; and a tile, in the feed-forward or in
        its norm, with the gradients of all matrices.
        """
        count, tokens = self.tiles()
        width, inner = self.model.dim, self.model.ffn_dim // self.tp
        own = self.bytes * width * tokens // (self.tp if self.shares_tokens else 1)
        gathered = self.bytes * width * tokens * (self.tp > 1 and self.shares_tokens)
        gates = self.bytes * inner * tokens
        weights = self.bytes * width * inner
        feeding = max(4 * gates + weights, 2 * gates + 3 * weights + own)
        norming = 3 * weights + own + 3 * self.wide * own // self.bytes
        sums = self.wide * 3 * width * inner * (count > 1)
        tile = own + max(own + gathered, 2 * gathered) + max(feeding, norming - own)
        return (2 + (count > 1)) * self.stream + self.attended + sums + tile

    def attention_again(self, travels: int) -> int:
        """Of x and its gradient, whole under tp too; of groups that are done, the gradients of queries, in the place of
        attention's output, and of keys and values; queries, keys and values of one at work and of one on its way.
        """
        groups = self.groups
        done = max(0, groups - 2) * self.bytes * self.keys // groups
        at_work = self._at_work() + self._on_its_way() * (groups > 1) + self._attending(travels)
        return 2 * self.stream + 2 * self.gathered + self.attended + done + at_work // groups

    def _at_work(self) -> int:
        """Of all heads: queries, keys and values. Ranks that exchange heads hold these twice in the end, before and after
        the exchange, and attention's output and its gradient too.
        """
        own = self.bytes * (self.queries + self.keys)
        return own + (self.bytes * 2 * self.queries) * (self.context is not None and self.context.ulysses > 1)

    def _on_its_way(self) -> int:
        """Of all heads: queries, keys and values, with what is sent and received of them."""
        own = self.bytes * (self.queries + self.keys)
        if self.context is None or self.context.cp == 1:
            return own
        if self.context.ulysses > 1:
            return 2 * own
        received = self.context.ring if self.context.rotation == "allgather" else 1
        return own + self.bytes * self.keys * (1 + received)

    def projections_again(self) -> int:
        """Of x and its gradient, the gradients of queries, keys and values; and a tile of them, turned back, and its norm."""
        count, tokens = self.tiles()
        width = self.model.dim
        heads = self.bytes * (self.queries + self.keys)
        own = self.bytes * width * tokens // (self.tp if self.shares_tokens else 1)
        weights = width * heads // self.tokens
        tile = heads * tokens // self.tokens
        passing = max(2 * self.wide * self.queries, self._norming_heads(2 * self.bytes))
        turning = tile * (self.groups > 1) + tile + passing * tokens // self.tokens
        norming = weights + own + 3 * self.wide * own // self.bytes
        sums = (self.wide * weights // self.bytes) * (count > 1)
        return 2 * self.stream + self.gathered + heads + own + sums + max(turning, norming)
