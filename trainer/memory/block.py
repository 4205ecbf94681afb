"""Activations of one transformer block: saved for its backward pass, and transient while it runs.
Imports no torch.

Shapes: S tokens of this rank, T tokens of all tp ranks, C tokens of a tile of all tp ranks, E
model dim, N query heads and K KV heads of this rank, H head dim, G feed-forward dim of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from math import lcm, prod
from typing import ClassVar

from models.config import ModelConfig
from models.kernel_choice import kernel_for
from models.layers import NORMS, LayerKind
from parallelisms.mesh.context_plan import ContextPlan
from parallelisms.mesh.shard_layout import SeqLayout, TokenSpan, halo_fits, halo_traffic
from trainer.trace.tensors import (
    DTYPE_BYTES,
    SAVED_ACTIVATIONS,
    TRANSIENT_ACTIVATIONS,
    MemoryTensor,
    Tensors,
    tensors,
    total_bytes,
)

ATTENTION = "models/attention.py: Attention.forward"
FEED_FORWARD = "models/sublayer.py: SublayerModule.forward"
GELU = "GELU of the gate, and its gradient"
TITLES = {"attention": "attention", "feed_forward": "the feed-forward"}
"""Names of the sublayers in reports, by module."""
VARLEN_KERNELS = ("flash", "fa3", "fa4")
UNTIL_BACKWARD = "until the block's backward pass"
WHILE_RUNNING = "while it runs"
saved_tensors = partial(tensors, SAVED_ACTIVATIONS)
transient = partial(tensors, TRANSIENT_ACTIVATIONS)
Moments = Iterator[tuple[str, Tensors]]
"""(name, live tensors) of each part of a block's backward pass. Weights and their gradients are
counted elsewhere.
"""


@dataclass(frozen=True)
class BlockMemory:
    """Activations of one block for `tokens` tokens, counted over all tp ranks; sizes are those of
    one rank.
    """

    model: ModelConfig
    kind: LayerKind
    tokens: int
    compute_dtype: str = "bfloat16"
    stats_dtype: str = "float32"
    """Dtype of softmax and norm statistics, and of sums."""
    tp: int = 1
    sequence_parallel: bool = True
    compiled: bool = False
    context_plan: ContextPlan | None = None
    head_groups: int = 1
    mlp_tile_bytes: int | None = None
    """Size of an MLP tile, with recomputation."""
    sequences: int = 1
    """Sequences of a micro-batch."""
    attention: str = "cpu"
    """The choice of attention kernels."""
    deterministic: bool = False
    is_padded: bool = False
    """Whether sequences are padded for cp and tp ranks. Attention to the padding is a call by
    itself.
    """
    layout: SeqLayout | None = None
    """Layout of a sequence over the ranks of the ring."""
    ep: int = 1
    """Ranks among which experts are distributed."""

    has_experts: ClassVar[bool] = False

    @property
    def compute_bytes(self) -> int:
        return DTYPE_BYTES[self.compute_dtype]

    @property
    def sequence_tokens(self) -> float:
        """Tokens of a sequence that are queries in a rank's attention."""
        return self.tokens * self.ulysses_degree / self.sequences

    @property
    def kernel(self) -> str:
        """Kernel of attention to all tokens of a sequence on a rank."""
        return kernel_for(self.attention, tokens=self.sequence_tokens, window=self.kind.window)

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
    def is_mixed(self) -> bool:
        return self.compute_dtype != self.stats_dtype

    @property
    def is_gelu(self) -> bool:
        """Whether autograd differentiates the gate (GELU), which saves and computes more at once
        than SwiGLU.
        """
        return self.kind.activation == "gelu_tanh"

    def is_normed(self, module: str, *, output: bool = False) -> bool:
        """Whether the input of a sublayer is normed; with `output`, whether its output is."""
        return any(
            name.endswith("_post_norm.weight") == output for name in NORMS[self.kind.norms][module]
        )

    def has_after(self, module: str) -> bool:
        """Whether a norm or a multiplier follows the last product of a sublayer, so that its
        gradient is a tensor by itself.
        """
        return self.is_normed(module, output=True) or self.model.residual_multiplier != 1

    @property
    def num_norms(self) -> int:
        """Norms of the residual stream, before or after sublayers."""
        return sum(map(len, NORMS[self.kind.norms].values()))

    @property
    def norms_heads(self) -> bool:
        """Whether queries and keys are normed."""
        return self.kind.qk_norm or self.kind.full_qk_norm

    @cached_property
    def _halos(self) -> list[tuple[int, int]]:
        """Tokens (sent, received) by each ring rank; empty where they exchange all KV."""
        layout = self.layout
        window = self.kind.window
        if window is None or layout is None or self.ring_degree == 1 or self.context_plan is None:
            return []
        # `halo_tokens` counts by receiver, then by sender: rows sum to what a rank receives,
        # columns to what it sends.
        by_receiver = layout.halo_tokens(window)
        tokens = layout.num_tokens // layout.ring_degree
        sent = map(sum, zip(*by_receiver, strict=True))
        received = [*map(sum, by_receiver)]
        # Every rank must decide alike, so the rank that receives most decides: see `sends_halo` in
        # parallelisms/context/ring.py.
        fits = halo_fits(
            self.sequences * max(received),
            self.sequences * tokens,
            str(self.context_plan.rotate_method),
        )
        return [*zip(sent, received, strict=True)] if fits else []

    @cached_property
    def halo(self) -> tuple[float, float] | None:
        """(sent, received) KV of the rank with the largest halo, relative to its own KV; None if
        ranks exchange all KV.
        """
        if self.layout is None or not self._halos:
            return None
        sent, received = max(self._halos, key=halo_traffic)
        tokens = self.layout.num_tokens // self.ring_degree
        return sent / tokens, received / tokens

    @cached_property
    def spans(self) -> list[tuple[TokenSpan, ...]]:
        """Token spans of the rank with the largest halo; of all ranks if there is no halo."""
        if self.layout is None:
            return []
        busiest = (
            [self._halos.index(max(self._halos, key=halo_traffic))]
            if self._halos
            else range(self.ring_degree)
        )
        return [self.layout.spans(rank) for rank in busiest]

    @cached_property
    def window_parts(self) -> tuple[float, float] | None:
        """The longest (causal, flipped) part that a window cuts attention to own keys into,
        relative to a sequence's tokens on this rank. Results of parts are added up. None if the
        results of a call are final.
        """
        window = self.kind.window
        takes_windows = self.kernel in VARLEN_KERNELS
        if window is None or self.layout is None:
            return None
        # Two spans of one document that are closer than the window attend to each other, which
        # takes a flipped part even where kernels know windows.
        is_near = any(
            before.document_start == span.document_start and span.start - before.end < window - 1
            for spans in self.spans
            for before, span in pairwise(spans)
        )
        if not is_near and (takes_windows or self.longest_span <= window):
            return None
        longest = min(window, self.longest_span)
        flipped = longest if is_near else min(longest, self.longest_span - window)
        tokens = self.layout.num_tokens / self.ring_degree
        return (1, 1) if takes_windows else (longest / tokens, flipped / tokens)

    @property
    def longest_span(self) -> int:
        """Consecutive tokens of a document on a rank."""
        return max(span.length for spans in self.spans for span in spans)

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
    def kv_shape(self) -> tuple[int, ...]:
        """Shape of keys and values. The heads of a group are repeated until the Ulysses degree
        divides them.
        """
        # Each group exchanges its heads by itself, so they are repeated within the group.
        heads = self.head_groups * lcm(self.kv_heads // self.head_groups, self.ulysses_degree)
        return 2, self.tokens, heads, self.model.head_dim

    @property
    def kv_numel(self) -> int:
        return prod(self.kv_shape)

    @property
    def attention_output_bytes(self) -> float:
        """Attention output and log-sum-exp."""
        return total_bytes(self.attention_output())

    @property
    def calls(self) -> int:
        """Calls of the attention kernel per micro-batch: one, or one for each sequence."""
        return 1 if self.kernel in VARLEN_KERNELS else self.sequences

    @property
    def joins_calls(self) -> bool:
        """Whether several calls write into one result."""
        in_pieces = self.is_padded or (
            self.kind.window is not None and max(map(len, self.spans), default=1) > 1
        )
        return self.calls > 1 or (in_pieces and self.kernel not in VARLEN_KERNELS)

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
        """Tensor in the compute dtype."""
        return MemoryTensor(name, shape, self.compute_dtype, copies=copies)

    def sums(self, name: str, *shape: int, copies: float = 1) -> MemoryTensor:
        """Tensor in the dtype of statistics and sums."""
        return MemoryTensor(name, shape, self.stats_dtype, copies=copies)

    def stream(self, name: str, copies: float = 1) -> MemoryTensor:
        """Residual stream of this rank, [S, E]."""
        return self.numbers(name, self.local_tokens, self.model.dim, copies=copies)

    def gathered(self, name: str, copies: float = 1) -> MemoryTensor:
        """Gathered tokens [T, E] with tensor and sequence parallelism; nothing otherwise."""
        return self.numbers(
            name, self.tokens, self.model.dim, copies=copies if self.is_gathered else 0
        )

    def by_rank(self, name: str, tokens: int) -> MemoryTensor:
        """Copy [tokens, E] that puts several sequences in order for tp ranks; nothing otherwise."""
        return self.numbers(
            name,
            tokens,
            self.model.dim,
            copies=1 if self.is_gathered and self.sequences > 1 else 0,
        )

    def normalized_tile(self) -> MemoryTensor:
        """Tile of attention's input. A tile of gathered tokens is a copy only if there are
        several.
        """
        if not self.is_gathered:
            copies = 1 if self.is_normed("attention") else 0
            return self.numbers(
                "a tile of the normalized input", self.tile_tokens, self.model.dim, copies=copies
            )
        copies = 1 if self.num_tiles() > 1 else 0
        return self.numbers(
            "a tile of the gathered input", self.tile_tokens, self.model.dim, copies=copies
        )

    def queries(self, name: str, share: float = 1, copies: float = 1) -> MemoryTensor:
        """Queries [T, N, H], or a share of their heads."""
        return self.numbers(
            name, self.tokens, self.heads, self.model.head_dim, copies=copies * share
        )

    def kv(self, name: str, share: float = 1, copies: float = 1) -> MemoryTensor:
        """Keys and values [2, T, K, H] with the heads that Ulysses repeats, or a share of them."""
        return self.numbers(name, *self.kv_shape, copies=copies * share)

    def own_kv(self, name: str, share: float = 1) -> MemoryTensor:
        """Keys and values [2, T, K, H] without repeated heads, or a share of them."""
        return self.numbers(name, 2, self.tokens, self.kv_heads, self.model.head_dim, copies=share)

    def widened(self, given: MemoryTensor) -> MemoryTensor:
        """Products of a rotation with cosines, in the dtype of the angles."""
        copies = given.copies if self.is_mixed else 0
        return given._replace(
            name=f"{given.name}, times cosines", dtype=self.stats_dtype, copies=copies
        )

    # ---- saved

    def block_input(self, *, copies: float = 1, on_host: bool = False) -> Tensors:
        source = "parallelisms/activation_checkpoint.py: BlockActivations.attention_forward"
        return saved_tensors(
            source, UNTIL_BACKWARD, self.stream("block inputs", copies), on_host=on_host
        )

    def attention_output(self, *, copies: float = 1, on_host: bool = False) -> Tensors:
        source = "parallelisms/activation_checkpoint.py: BlockActivations.attention_forward"
        return saved_tensors(
            source, UNTIL_BACKWARD, *self._attention_results(copies), on_host=on_host
        )

    def _attention_results(self, copies: float) -> tuple[MemoryTensor, ...]:
        return (
            self.queries("attention outputs", copies=copies),
            self.sums("log-sum-exps", self.heads, self.tokens, copies=copies),
        )

    def saved(self, policy: str) -> Tensors:
        """Tensors on the device between the block's forward and backward pass, under a recompute
        policy.
        """
        if policy == "none":
            return self.all_saved()
        return self.block_input() + (self.attention_output() if policy == "keep_attention" else ())

    def all_saved(self, copies: float = 1) -> Tensors:
        saved = self.attention_saved(copies) + self.feed_forward_saved(copies)
        return saved + self.output_norm_saved("feed_forward", copies)

    def output_norm_saved(self, module: str, copies: float = 1) -> Tensors:
        """Tensors that the norm of a sublayer's output saves."""
        copies = copies if self.is_normed(module, output=True) else 0
        return saved_tensors(
            "models/norm.py: RMSNormFunction.forward",
            UNTIL_BACKWARD,
            self.stream(f"outputs of {TITLES[module]}, before their norm", copies),
            self.sums(
                f"inverse RMS of outputs of {TITLES[module]}", self.local_tokens, copies=copies
            ),
        )

    def width(self, letters: str) -> int:
        """Total width on this rank of activations with these letters of `ModelConfig.sizes`."""
        return sum(self.model.sizes[letter] for letter in letters) // self.tp

    def attention_saved(self, copies: float = 1) -> Tensors:
        """Tensors that autograd saves of the attention sublayer, without recomputation."""
        mixer = self.kind.sublayers["attention"]
        if not mixer.attends:
            activations = self.numbers(
                "activations of the mixer", self.tokens, self.width(mixer.saved), copies=copies
            )
            return saved_tensors(
                ATTENTION, UNTIL_BACKWARD, *self.norm_saved("attention", copies), activations
            )
        # Ulysses brings outputs back by an all-to-all, whose result the output projection saves.
        exchanged = self.queries(
            "attention outputs, back at their tokens",
            copies=copies if self.ulysses_degree > 1 else 0,
        )
        after = saved_tensors(ATTENTION, UNTIL_BACKWARD, exchanged) + self.output_norm_saved(
            "attention", copies
        )
        return self.attention_operator_saved(copies) + after

    def attention_operator_saved(self, copies: float = 1) -> Tensors:
        """Tensors that the backward passes of attention and of the projections before it need."""
        results = saved_tensors(ATTENTION, UNTIL_BACKWARD, *self._attention_results(copies))
        return self.attention_inputs_saved(copies) + results

    def attention_inputs_saved(self, copies: float = 1) -> Tensors:
        queries = self.queries("queries", copies=copies)
        kv = self.kv("keys and values", copies=copies)
        return self.projections_saved(copies) + saved_tensors(
            ATTENTION, UNTIL_BACKWARD, queries, kv
        )

    def projections_saved(self, copies: float = 1) -> Tensors:
        """Tensors that the backward pass of the projections and of the norms of heads needs."""
        heads = self.heads + self.kv_heads
        copies_of_heads = copies if self.norms_heads else 0
        return saved_tensors(
            ATTENTION,
            UNTIL_BACKWARD,
            *self.norm_saved("attention", copies),
            self.numbers(
                "heads before their norms",
                self.tokens,
                heads,
                self.model.head_dim,
                copies=copies_of_heads,
            ),
            self.sums(
                "inverse RMS of heads",
                self.tokens,
                2 if self.kind.full_qk_norm else heads,
                copies=copies_of_heads,
            ),
        )

    def feed_forward_saved(self, copies: float = 1) -> Tensors:
        activations = self.kind.sublayers["feed_forward"].saved
        return saved_tensors(
            FEED_FORWARD,
            UNTIL_BACKWARD,
            *self.norm_saved("feed_forward", copies),
            self.numbers(
                "activations of the feed-forward",
                self.tokens,
                self.width(activations),
                copies=copies,
            ),
            self.numbers(
                "their product, which the compiler saves",
                self.tokens,
                self.ffn_dim,
                copies=copies if self.compiled else 0,
            ),
        )

    def norm_saved(self, module: str, copies: float) -> tuple[MemoryTensor, ...]:
        title = TITLES[module]
        of_norm = copies if self.is_normed(module) else 0
        return (
            self.stream(f"residual streams before {title}", of_norm),
            self.sums(f"inverse RMS before {title}", self.local_tokens, copies=of_norm),
            self.normalized_input(title, copies),
        )

    def normalized_input(self, of: str, copies: float = 1) -> MemoryTensor:
        return self.numbers(
            f"normalized inputs of {of}", self.tokens, self.model.dim, copies=copies
        )

    # ---- tiles

    def num_tiles(self, sequences: int = 1) -> int:
        """Tiles of a micro-batch. A tile holds equally many tokens of each of its `sequences`."""
        if self.mlp_tile_bytes is None:
            return 1
        shards = self.sequence_shards * sequences
        # The tile size is rounded down to whole tokens of every shard and sequence, and the number
        # of tiles up.
        return -(
            -(self.tokens // shards)
            // max(1, self.mlp_tile_bytes // self.tile_bytes_per_token() // shards)
        )

    @property
    def tile_tokens(self) -> int:
        """Tokens of the largest tile, over all tp ranks."""
        shards = self.sequence_shards
        return -(-(self.tokens // shards) // self.num_tiles()) * shards

    def tile_bytes_per_token(self) -> int:
        dim = self.model.dim
        ffn_dim = self.model.ffn_dim // self.tp
        return self.compute_bytes * (2 * ffn_dim + 2 * max(ffn_dim, dim) + dim)
