"""The activations that one transformer block saves for its backward pass, and needs while it runs. Imports no torch.

Shapes: S tokens of this rank, T tokens of all tp ranks, C tokens of a tile of all tp ranks, E model dim, N query heads and
K KV heads of this rank, H head dim, G feed-forward dim of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import lcm

from models.config import ModelConfig
from parallelisms.parallel_dims import ContextPlan
from trainer.memory.tensors import DTYPE_BYTES, SAVED_ACTIVATIONS, TRANSIENT_ACTIVATIONS, MemoryTensor, Tensors, tensors

ATTENTION, FEED_FORWARD = "models/attention.py: Attention.forward", "models/feed_forward.py: FeedForward.forward"
UNTIL_BACKWARD, WHILE_RUNNING = "until the block's backward pass", "while this part of the block runs"
saved_tensors = partial(tensors, SAVED_ACTIVATIONS)
transient = partial(tensors, TRANSIENT_ACTIVATIONS)
Moments = Iterator[tuple[str, Tensors]]
"""Parts of a block's backward pass: what is alive of this block, beside its weights and their gradients."""


@dataclass(frozen=True)
class BlockMemory:
    """Activations of one block for `tokens` tokens, counted over all tp ranks; sizes are per rank."""

    model: ModelConfig
    tokens: int
    compute_dtype: str = "bfloat16"
    stats_dtype: str = "float32"
    """Of softmax and norm statistics, and of sums."""
    tp: int = 1
    sequence_parallel: bool = True
    compiled: bool = False
    context_plan: ContextPlan | None = None
    head_groups: int = 1
    mlp_tile_bytes: int | None = None
    """Size of an MLP tile, with recomputation."""
    sequences: int = 1
    """Of a micro-batch."""

    @property
    def compute_bytes(self) -> int:
        return DTYPE_BYTES[self.compute_dtype]

    @property
    def stats_bytes(self) -> int:
        return DTYPE_BYTES[self.stats_dtype]

    @property
    def sequence_shards(self) -> int:
        """Tp ranks that share the tokens of the residual stream."""
        return self.tp if self.sequence_parallel else 1

    @property
    def ulysses_degree(self) -> int:
        return 1 if self.context_plan is None else self.context_plan.ulysses_degree

    @property
    def ring_degree(self) -> int:
        return 1 if self.context_plan is None else self.context_plan.ring_degree

    @property
    def gathers_kv(self) -> bool:
        """Whether KV is all-gathered over the ring, rather than sent from rank to rank."""
        return self.context_plan is not None and self.context_plan.rotate_method == "allgather"

    @property
    def residual_bytes(self) -> int:
        return self.compute_bytes * self.model.dim * self.tokens // self.sequence_shards

    @property
    def q_numel(self) -> int:
        """Elements of the queries; also of the attention output and of the gradients of either."""
        return self.model.num_heads * self.model.head_dim * self.tokens // self.tp

    @property
    def kv_heads(self) -> int:
        """KV heads that a rank computes."""
        return max(1, self.model.num_kv_heads // self.tp)

    @property
    def kv_numel(self) -> int:
        """Elements of keys and values; the heads of a group are repeated until the Ulysses degree divides them."""
        heads = self.kv_heads // self.head_groups
        return 2 * self.head_groups * lcm(heads, self.ulysses_degree) * self.model.head_dim * self.tokens

    @property
    def qkv_bytes(self) -> int:
        return self.compute_bytes * (self.q_numel + self.kv_numel)

    @property
    def ffn_bytes(self) -> int:
        return self.compute_bytes * self.model.ffn_dim * self.tokens // self.tp

    @property
    def attention_output_bytes(self) -> int:
        """Attention output and log-sum-exp."""
        return self.compute_bytes * self.q_numel + self.stats_bytes * self.model.num_heads * self.tokens // self.tp

    @property
    def two_sequences(self) -> float:
        """The share of two sequences in a micro-batch of several."""
        return 2 / self.sequences if self.sequences > 1 else 0

    # ---- shapes

    @property
    def heads(self) -> int:
        """Query heads of a rank."""
        return self.model.num_heads // self.tp

    @property
    def ffn_dim(self) -> int:
        return self.model.ffn_dim // self.tp

    @property
    def local_tokens(self) -> int:
        return self.tokens // self.sequence_shards

    @property
    def is_gathered(self) -> bool:
        """Whether tokens are gathered over the tp ranks before the matrix products."""
        return self.tp > 1 and self.sequence_parallel

    def numbers(self, name: str, *shape: int, copies: float = 1) -> MemoryTensor:
        """In the compute dtype."""
        return MemoryTensor(name, shape, self.compute_dtype, copies=copies)

    def sums(self, name: str, *shape: int, copies: float = 1) -> MemoryTensor:
        """In the dtype of statistics and sums."""
        return MemoryTensor(name, shape, self.stats_dtype, copies=copies)

    def stream(self, name: str, copies: float = 1) -> MemoryTensor:
        """[S, E]."""
        return self.numbers(name, self.local_tokens, self.model.dim, copies=copies)

    def gathered(self, name: str, copies: float = 1) -> MemoryTensor:
        """[T, E] with tensor and sequence parallelism; else nothing."""
        return self.numbers(name, self.tokens, self.model.dim, copies=copies * self.is_gathered)

    def queries(self, name: str, share: float = 1, copies: float = 1) -> MemoryTensor:
        """[T, N, H], or a share of the heads."""
        return self.numbers(name, self.q_numel, copies=copies * share)

    def kv(self, name: str, share: float = 1, copies: float = 1) -> MemoryTensor:
        """[2, T, K, H], with the heads that Ulysses repeats, or a share of them."""
        return self.numbers(name, self.kv_numel, copies=copies * share)

    # ---- saved

    def block_input(self, *, copies: float = 1, on_host: bool = False) -> Tensors:
        source = "parallelisms/activation_checkpoint.py: BlockActivations.attention_forward"
        return saved_tensors(source, UNTIL_BACKWARD, self.stream("block inputs", copies), on_host=on_host)

    def attention_output(self, *, copies: float = 1, on_host: bool = False) -> Tensors:
        source = "parallelisms/activation_checkpoint.py: BlockActivations.attention_forward"
        return saved_tensors(
            source,
            UNTIL_BACKWARD,
            self.queries("attention outputs", copies=copies),
            self.sums("log-sum-exps", self.heads, self.tokens, copies=copies),
            on_host=on_host,
        )

    def saved(self, policy: str) -> Tensors:
        """Between the block's forward and its backward pass, under a recompute policy, on the device."""
        if policy == "none":
            return self.attention_saved() + self.feed_forward_saved()
        return self.block_input() + (self.attention_output() if policy == "keep_attention" else ())

    def attention_saved(self, copies: float = 1) -> Tensors:
        """By autograd, without recomputation."""
        return self._attention_inputs_saved(copies) + self._attention_results_saved(copies)

    def _attention_inputs_saved(self, copies: float = 1) -> Tensors:
        heads = self.heads + self.kv_heads
        return saved_tensors(
            ATTENTION,
            UNTIL_BACKWARD,
            *self._norm_saved("attention", copies),
            self.queries("queries", copies=copies),
            self.kv("keys and values", copies=copies),
            self.numbers(
                "heads before their norms", self.tokens, heads, self.model.head_dim, copies=copies * self.model.qk_norm
            ),
            self.sums("inverse RMS of heads", self.tokens, heads, copies=copies * self.model.qk_norm),
        )

    def _attention_results_saved(self, copies: float = 1) -> Tensors:
        return saved_tensors(
            ATTENTION,
            UNTIL_BACKWARD,
            self.queries("attention outputs", copies=copies),
            self.sums("log-sum-exps", self.heads, self.tokens, copies=copies),
            self.queries("attention outputs, back at their tokens", copies=copies * (self.ulysses_degree > 1)),
        )

    def feed_forward_saved(self, copies: float = 1) -> Tensors:
        return saved_tensors(
            FEED_FORWARD,
            UNTIL_BACKWARD,
            *self._norm_saved("the feed-forward", copies),
            self.numbers("gate and up", 2, self.tokens, self.ffn_dim, copies=copies),
            self.numbers(
                "their product, which the compiler saves", self.tokens, self.ffn_dim, copies=copies * self.compiled
            ),
        )

    def left_for_weight_gradients(self, copies: float = 1) -> Tensors:
        """Inputs and output gradients of the matrices whose gradients are computed later."""
        return self._attention_left(copies) + self._feed_forward_left(copies)

    def _attention_left(self, copies: float = 1) -> Tensors:
        return self._left(
            self.numbers("normalized inputs of attention", self.tokens, self.model.dim, copies=copies),
            self.queries("gradients of queries", copies=copies),
            self.kv("gradients of KV", copies=copies),
        ) + self._output_left(copies)

    def _output_left(self, copies: float = 1) -> Tensors:
        return self._left(
            self.queries("attention outputs", copies=copies),
            self.numbers("gradients of attention's outputs", self.tokens, self.model.dim, copies=copies),
        )

    def _feed_forward_left(self, copies: float = 1) -> Tensors:
        return self._left(
            self.numbers("normalized inputs of the feed-forward", self.tokens, self.model.dim, copies=copies),
            self.numbers("gradients of the feed-forward's outputs", self.tokens, self.model.dim, copies=copies),
            self.numbers("gate and up, with gradients", 4, self.tokens, self.ffn_dim, copies=copies),
        )

    def _left(self, *entries: MemoryTensor) -> Tensors:
        return saved_tensors(
            "models/linear.py: LinearWithLaterGrad", "until the weight gradients are computed", *entries
        )

    def _norm_saved(self, before: str, copies: float) -> tuple[MemoryTensor, ...]:
        return (
            self.stream(f"residual streams before {before}", copies),
            self.sums(f"inverse RMS before {before}", self.local_tokens, copies=copies),
            self.numbers(f"normalized inputs of {before}", self.tokens, self.model.dim, copies=copies),
        )

    # ---- backward without recomputation

    def autograd_moments(self, grad_dtype: str, *, leaves_weights: bool) -> Moments:
        """`grad_dtype` is that of KV gradients on the wire; `leaves_weights` for later, with what their gradients need."""
        attention = self.attention_saved()
        yield (
            "feed-forward",
            attention
            + self.feed_forward_saved()
            + transient(
                FEED_FORWARD,
                WHILE_RUNNING,
                self.stream("gradient of the output"),
                self.gathered("gathered gradient of the output"),
                self.numbers("gradients of gate and up", 2, self.tokens, self.ffn_dim),
            ),
        )
        yield (
            "the input gradient of the feed-forward",
            attention
            + (self._feed_forward_left() if leaves_weights else ())
            + saved_tensors(FEED_FORWARD, UNTIL_BACKWARD, self.stream("residual stream before the feed-forward"))
            + transient(
                FEED_FORWARD,
                WHILE_RUNNING,
                self.stream("gradient of the output", not leaves_weights),
                self.numbers("gradients of gate and up", 2, self.tokens, self.ffn_dim, copies=not leaves_weights),
                self.numbers("gradients of the normalized input, by matrix, and a sum", 3, self.tokens, self.model.dim),
            ),
        )
        after = self._feed_forward_left() if leaves_weights else ()
        yield (
            "the norm before the feed-forward",
            attention
            + after
            + self._norm_backward("the feed-forward", has_gradient=leaves_weights and not self.is_gathered),
        )
        after += (
            self._left(self.numbers("gradient of attention's output", self.tokens, self.model.dim))
            if leaves_weights
            else ()
        )
        stream = transient(ATTENTION, WHILE_RUNNING, self.stream("gradient of the residual stream"))
        for name, operator in self.operator_moments(grad_dtype):
            yield name, attention + after + stream + operator
        after += self._left(self.queries("attention output")) if leaves_weights else ()
        if self.model.qk_norm:
            yield "norms of heads", self._attention_inputs_saved() + after + stream + self._query_norm_backward(1)
        after = self.left_for_weight_gradients() if leaves_weights else self._attention_left()[:3]
        summed = transient(
            ATTENTION,
            WHILE_RUNNING,
            self.stream("gradient of the residual stream"),
            self.numbers("gradients of the normalized input, by matrix, and a sum", 3, self.tokens, self.model.dim),
        )
        residual = saved_tensors(ATTENTION, UNTIL_BACKWARD, self.stream("residual stream before attention"))
        yield "the input gradients of queries, keys and values", after + residual + summed
        after = after if leaves_weights else ()
        yield "the norm before attention", after + self._norm_backward("attention", has_gradient=False)

    def _norm_backward(self, before: str, *, has_gradient: bool) -> Tensors:
        """`has_gradient`: the gradient of the residual stream is counted elsewhere."""
        return saved_tensors(ATTENTION, UNTIL_BACKWARD, self.stream(f"residual stream before {before}")) + transient(
            "models/norm.py: rms_norm_backward",
            WHILE_RUNNING,
            self.stream("gradient of the residual stream", not has_gradient),
            self.stream("gradients of the norm's output, also by its weight", 2),
            self.sums("products of the norm's backward pass", 3, self.local_tokens, self.model.dim),
        )

    def _query_norm_backward(self, num_gradients: int) -> Tensors:
        return transient(
            "models/norm.py: rms_norm_backward",
            WHILE_RUNNING,
            self.queries("gradients of queries", copies=num_gradients),
            self.sums("products of the norm's backward pass", 3, self.q_numel),
        )

    def operator_moments(self, grad_dtype: str, share: float = 1) -> Moments:
        """The backward pass of attention: gradients and receive buffers, for a share of the heads."""
        source = "parallelisms/context/ring.py: backward"
        grad_output = self.queries("gradient of the output", share)
        ring, kv = self.ring_degree, self.kv_numel
        if ring == 1:
            yield (
                "attention",
                transient(
                    "models/attention_op.py: backward",
                    WHILE_RUNNING,
                    grad_output,
                    self.queries("gradient of queries", share),
                    self.kv("gradients of KV", share),
                    # One sequence after the other; the last one's gradients are alive while the next are computed.
                    self.queries("gradients of queries, of two sequences", share * self.two_sequences),
                    self.kv("gradients of KV, of two sequences", share * self.two_sequences),
                ),
            )
            return
        local = (
            grad_output,
            self.queries("gradient of queries, of one piece", share),
            self.sums("sum of the gradient of queries", self.q_numel, copies=share),
            self.sums("sum of the gradients of own KV", kv, copies=share),
        )
        on_wire = MemoryTensor("gradients of KV on the wire", (kv,), grad_dtype)
        if self.gathers_kv:
            pieces = share * (ring - 1)
            remote = (
                self.kv("KV of other ranks", copies=pieces),
                self.kv("gradients of the KV of other ranks, of one piece", copies=pieces),
                self.sums("sum of the gradients of the KV of other ranks", kv, copies=pieces),
            )
            yield "attention", transient(source, WHILE_RUNNING, *local, *remote)
            yield (
                "the reduce-scatter of KV gradients",
                transient(source, WHILE_RUNNING, *local, remote[-1], on_wire._replace(copies=share * ring)),
            )
            return
        in_transit = share * (ring > 2)
        yield (
            "attention",
            transient(
                source,
                WHILE_RUNNING,
                *local,
                self.kv("KV of another rank", share),
                self.kv("gradients of its KV, of one piece", share),
                self.sums("sum of the gradients of its KV", kv, copies=share),
                self.kv("KV in transit", copies=in_transit),
                on_wire._replace(copies=2 * in_transit),
            ),
        )

    # ---- backward with recomputation

    def num_tiles(self, sequences: int = 1) -> int:
        """A tile holds equally many tokens of each of the micro-batch's `sequences`."""
        if self.mlp_tile_bytes is None:
            return 1
        shards = self.sequence_shards * sequences
        return -(-(self.tokens // shards) // max(1, self.mlp_tile_bytes // self._tile_bytes_per_token() // shards))

    @property
    def tile_tokens(self) -> int:
        """Tokens of the largest tile, over all tp ranks."""
        shards = self.sequence_shards
        return -(-(self.tokens // shards) // self.num_tiles()) * shards

    def _tile_bytes_per_token(self) -> int:
        dim, ffn_dim = self.model.dim, self.model.ffn_dim // self.tp
        return self.compute_bytes * (2 * ffn_dim + 2 * max(ffn_dim, dim) + dim)
