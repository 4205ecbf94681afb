"""What a model is, in numbers: widths, depth, rotary frequencies; and what follows from them: parameters and FLOPs.

Nothing here imports torch, so that a configuration is checked in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

ROPE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_length", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_length", "beta_fast", "beta_slow", "truncate", "attention_factor"),
    "longrope": ("factor", "original_length", "short_factors", "long_factors", "attention_factor"),
}
"""What each kind of rotary embedding reads beside theta and precision."""
EXCLUSIVE_MINIMUMS = {"theta": 1, "factor": 1, "original_length": 1} | dict.fromkeys(
    ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"), 0
)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) and how its frequencies are stretched."""

    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    precision: Literal["float64", "float32"] = "float64"

    def problems(self, head_dim: int) -> list[str]:
        required_keys = ("theta", *ROPE_FIELDS[self.kind])
        values = {key: getattr(self, key) for key in required_keys}
        problems = [
            f'model.rope.{key} = {values[key]} must be above {minimum} for model.rope.kind = "{self.kind}"'
            for key, minimum in EXCLUSIVE_MINIMUMS.items()
            if key in required_keys and values[key] is not None and not values[key] > minimum
        ]
        problems += [
            f"model.rope.{low} = {values[low]} must be below model.rope.{high} = {values[high]}"
            for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast"))
            if low in required_keys and not values[low] < values[high]
        ]
        for key in [key for key in ("short_factors", "long_factors") if key in required_keys]:
            if len(values[key]) != head_dim // 2:
                count, half = len(values[key]), head_dim // 2
                problems.append(
                    f"model.rope.{key} are {count}, and must be {half}: half of model.head_dim = {head_dim}"
                )
            if any(not factor > 0 for factor in values[key]):
                problems.append(f"model.rope.{key} must be above 0, not {min(values[key])}")
        return problems

    def unused_keys(self, keys: Iterable[str]) -> list[str]:
        """Which of these keys the kind does not read, and which kinds do."""
        problems = []
        for key in keys:
            kinds = " or ".join(f'"{kind}"' for kind, used in ROPE_FIELDS.items() if key in used)
            if kinds and key not in ROPE_FIELDS[self.kind]:
                problems.append(
                    f'model.rope.{key} has no use with model.rope.kind = "{self.kind}"; it belongs to {kinds}'
                )
        return problems


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only Transformer of the Llama kind."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    activation: Literal["silu"] = "silu"
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qk_norm: bool = False
    nope_every: int | None = None
    rope: RopeConfig = field(default_factory=RopeConfig)

    def problems(self) -> list[str]:
        """The rules that the numbers break, each with its values; empty for a model that can be built."""
        problems = self.rope.problems(self.head_dim)
        if self.num_heads % self.num_kv_heads:
            heads, kv_heads = self.num_heads, self.num_kv_heads
            problems.append(f"model.num_heads = {heads} must be a multiple of model.num_kv_heads = {kv_heads}")
        if self.head_dim % 2:
            problems.append(f"model.head_dim = {self.head_dim} must be even: rotary embedding turns pairs")
        return problems

    def uses_rope(self, layer: int) -> bool:
        """Whether attention of this layer, counted from 0, is told positions (Kazemnejad et al., 2023, on those not)."""
        return self.nope_every is None or (layer + 1) % self.nope_every > 0

    @property
    def block_matrix_parameters(self) -> int:
        """Weights of one block that multiply: the four projections of attention and the three of the feed-forward."""
        attention = self.dim * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.dim * self.ffn_dim

    @property
    def matrix_parameters(self) -> int:
        """Weights that multiply each token: every block's and the head's (also when tied), not the embedding's."""
        return self.num_layers * self.block_matrix_parameters + self.vocab_size * self.dim

    @property
    def num_parameters(self) -> int:
        """Every parameter; a tied head is counted once."""
        embedding = 0 if self.tie_embeddings else self.vocab_size * self.dim
        norms = (2 * self.num_layers + 1) * self.dim + 2 * self.num_layers * self.head_dim * self.qk_norm
        return self.matrix_parameters + embedding + norms

    def flops(self, *, tokens: float, pairs: float) -> float:
        """Model FLOPs of one update: forward and backward, nothing counted twice.

        `tokens` excludes padding; `pairs` are the (query, key) pairs that the mask allows, the diagonal included
        (the sum of L (L + 1) / 2 over documents). Two FLOPs per multiply-add, three passes (forward, gradient of
        the input, gradient of the weight), two matrix products per pair: 6 N T + 12 layers h_q A.
        """
        return 6 * self.matrix_parameters * tokens + 12 * self.num_layers * self.num_heads * self.head_dim * pairs

    def hardware_flops(
        self, *, tokens: float, pairs: float, recompute: str = "none", blocks_per_checkpoint: int = 1
    ) -> float:
        """FLOPs really carried out: flash backward repeats its scores, and recomputation every product but the last.
        Where all is computed again, projections are twice; and of `blocks_per_checkpoint` blocks but one, what makes its output too.
        Gradients of norms of queries and keys need what entered these once more.
        """
        forward_attention = 4 * self.num_layers * self.num_heads * self.head_dim * pairs
        executed = self.flops(tokens=tokens, pairs=pairs) + forward_attention / 2
        if recompute == "none":
            return executed
        ffn_matrix = self.dim * self.ffn_dim
        output_projection = self.dim * self.num_heads * self.head_dim
        qkv_projections = self.block_matrix_parameters - 3 * ffn_matrix - output_projection
        recomputed = self.num_layers * (self.block_matrix_parameters - ffn_matrix)
        recomputed += (self.num_layers - -(-self.num_layers // blocks_per_checkpoint)) * (
            output_projection + 3 * ffn_matrix
        )
        if self.qk_norm:
            recomputed += self.num_layers * self.dim * self.head_dim * (self.num_heads + self.num_kv_heads)
        if recompute == "full":
            recomputed += self.num_layers * qkv_projections
            executed += forward_attention
        executed += 2 * recomputed * tokens
        return executed
