"""Model configuration, with parameter and FLOP counts. Imports no torch, so that a configuration is validated quickly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

from models.layers import EMBEDDING, HEAD, LETTERS, LayerKind, Parameter, Sizes

ROPE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_length"),
    "yarn": ("factor", "original_length", "beta_fast", "beta_slow", "truncate", "attention_factor"),
    "longrope": ("factor", "original_length", "short_factors", "long_factors", "attention_factor"),
}
"""The fields that each `rope.kind` uses in addition to theta and precision."""
EXCLUSIVE_MINIMUMS = {"theta": 1, "factor": 1, "original_length": 1} | dict.fromkeys(
    ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"), 0
)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) and its context-extension scaling; see `models/rope_scaling.py`."""

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
        values = {key: getattr(self, key) for key in ("theta", *ROPE_FIELDS[self.kind])}
        problems = [
            f'model.rope.{key} = {values[key]} must be above {minimum} for model.rope.kind = "{self.kind}"'
            for key, minimum in EXCLUSIVE_MINIMUMS.items()
            if values.get(key) is not None and not values[key] > minimum
        ]
        problems += [
            f"model.rope.{low} = {values[low]} must be below model.rope.{high} = {values[high]}"
            for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast"))
            if low in values and not values[low] < values[high]
        ]
        for key in ("short_factors", "long_factors") if self.kind == "longrope" else ():
            count, half = len(values[key]), head_dim // 2
            if count != half:
                problems.append(
                    f"model.rope.{key} has {count} values, and must have {half}: half of model.head_dim = {head_dim}"
                )
            if any(not factor > 0 for factor in values[key]):
                problems.append(f"model.rope.{key} holds {min(values[key])}; every factor must be above 0")
        return problems

    def unused_keys(self, keys: Iterable[str]) -> list[str]:
        """One problem for each key that only other kinds use."""
        problems = []
        for key in keys:
            kinds = " or ".join(f'"{kind}"' for kind, used in ROPE_FIELDS.items() if key in used)
            if kinds and key not in ROPE_FIELDS[self.kind]:
                problems.append(f'model.rope.{key} is only used with model.rope.kind = {kinds}, not "{self.kind}"')
        return problems


ALIKE_OPTIONS = ("activation", "qk_norm", "qkv_bias", "nope_every")
"""The fields of `ModelConfig` that say what all layers are, where there is no pattern."""


@dataclass(frozen=True)
class StageSpec:
    """The layers of one pipeline stage, and whether it has the embedding and the loss head."""

    layers: range
    has_embedding: bool = True
    has_head: bool = True


class BlockProducts(NamedTuple):
    """Weights in the matrix products of a block, by what runs them."""

    every: int
    recomputed: int
    """Of all but the last product; norms of heads and of a sublayer's output need their input again."""
    attention_inputs: int
    """Of what attention reads: the QKV projections. All others produce the block's output from that of attention."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only Transformer of the Llama architecture."""

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
    qkv_bias: bool = False
    nope_every: int | None = None
    layer_pattern: tuple[LayerKind, ...] = ()
    """Kinds of layers, which repeat in this order; without it layers differ by `nope_every` only."""
    rope: RopeConfig = field(default_factory=RopeConfig)

    def problems(self) -> list[str]:
        """Every broken rule, with its values; empty for a valid model."""
        problems = self.rope.problems(self.head_dim)
        if self.num_heads % self.num_kv_heads:
            heads, kv_heads = self.num_heads, self.num_kv_heads
            problems.append(f"model.num_heads = {heads} must be a multiple of model.num_kv_heads = {kv_heads}")
        if self.head_dim % 2:
            problems.append(f"model.head_dim = {self.head_dim} must be even: rotary embedding rotates pairs")
        if self.layer_pattern:
            kinds = enumerate(self.layer_pattern)
            problems += [f"model.layer_pattern[{index}].{each}" for index, kind in kinds for each in kind.problems()]
            alike = [name for name in ALIKE_OPTIONS if getattr(self, name) != getattr(ModelConfig, name)]
            problems += [f"model.{name} must be set in each kind of model.layer_pattern instead" for name in alike]
        return problems

    @cached_property
    def layers(self) -> tuple[LayerKind, ...]:
        """Each layer's kind. All else that depends on what a layer is follows from it."""
        pattern = self.layer_pattern
        if not pattern:
            alike = LayerKind(qk_norm=self.qk_norm, qkv_bias=self.qkv_bias, activation=self.activation)
            pattern = (*(alike,) * ((self.nope_every or 1) - 1), replace(alike, rope=self.nope_every is None))
        return tuple(pattern[layer % len(pattern)] for layer in range(self.num_layers))

    @cached_property
    def unrotated_layers(self) -> tuple[LayerKind, ...]:
        """Each layer's kind as far as weights, work and memory go."""
        unrotated = {kind: replace(kind, rope=True) for kind in self.kinds}
        distinct = {kind: kind for kind in unrotated.values()}
        return tuple(distinct[unrotated[kind]] for kind in self.layers)

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Of its layers, each once, in order."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def sizes(self) -> Sizes:
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return dict(
            zip(LETTERS, (self.vocab_size, self.dim, self.ffn_dim, heads, kv_heads, self.head_dim), strict=True)
        )

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """By name, in model order; a tied head is the embedding."""
        blocks = {
            f"blocks.{layer}.{name}": each._replace(hf_name=f"model.layers.{layer}.{each.hf_name}")
            for layer, kind in enumerate(self.layers)
            for name, each in kind.parameters.items()
        }
        head = {name: each for name, each in HEAD.items() if not (self.tie_embeddings and each.is_matrix)}
        return EMBEDDING | blocks | head

    def declared(self, name: str) -> Parameter:
        """By its name in the model or a pipeline stage. Raises ValueError if it is not declared."""
        if (found := self.parameters.get(name) or HEAD.get(name)) is None:
            raise ValueError(f"parameter {name} is not declared in models/layers.py")
        return found

    def parameter_problems(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Every difference between the parameters of a model, or of a stage of it, and the declarations."""
        problems, layers = [], {int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")}
        declared = HEAD | self.parameters
        for name, shape in shapes.items():
            if name not in declared:
                problems.append(f"parameter {name} {list(shape)} is not declared in models/layers.py")
            elif (expected := declared[name].shape_of(self.sizes)) != shape:
                problems.append(f"parameter {name} has shape {list(shape)}, declared as {list(expected)}")
        missing = {
            f"blocks.{layer}.{name}" for layer in layers for name in self.layers[layer].parameters
        } - shapes.keys()
        return problems + [f"parameter {name} is declared and not in the model" for name in sorted(missing)]

    def products_of(self, kind: LayerKind, tp: int = 1) -> BlockProducts:
        """Of one of `tp` ranks. With fewer KV heads than ranks, each multiplies by the part of one head."""
        sizes, declared = {**self.sizes, "K": max(self.sizes["K"], tp * self.head_dim)}, kind.parameters
        weights = {name: prod(each.local_shape(sizes, tp)) for name, each in declared.items() if each.is_matrix}
        every = sum(weights.values())
        if not kind.in_pieces:
            return BlockProducts(every, every, 0)
        inputs = {name for name in weights if declared[name].initial != "residual"}
        last = {name.split(".")[0]: weights[name] for name in weights.keys() - inputs}
        read = sum(weights[name] for name in inputs if name.startswith("attention."))
        # Norms need their input again: of heads the projection, of a sublayer's output its last product.
        normed = sum(weights.get(name.replace("_norm.", "_proj."), 0) for name in declared if "_norm." in name)
        normed += sum(size for module, size in last.items() if kind.has_post_norm(module))
        return BlockProducts(every, every - last["feed_forward"] + normed, read)

    @cached_property
    def products(self) -> dict[LayerKind, BlockProducts]:
        """Of blocks that are not sharded."""
        return {kind: self.products_of(kind) for kind in self.kinds}

    @cached_property
    def matrix_parameters(self) -> int:
        """Weights in matrix products: every block's and the head's (also when tied), without the embedding."""
        return sum(self.products[kind].every for kind in self.layers) + self.vocab_size * self.dim

    @cached_property
    def num_parameters(self) -> int:
        """All parameters; tied embeddings count once."""
        return sum(prod(each.shape_of(self.sizes)) for each in self.parameters.values())

    def saved_width(self, kind: LayerKind) -> int:
        """Numbers that autograd saves of a token in such a block, besides those of norms."""
        return sum(self.sizes[letter] for each in kind.sublayers.values() for letter in each.saved)

    def attention_flops(self, kinds: Iterable[LayerKind], pairs: float) -> float:
        """Of the forward pass of these layers: two products per pair of tokens."""
        num_attending = sum(each.attends for kind in kinds for each in kind.sublayers.values())
        return 4 * num_attending * self.sizes["Q"] * pairs

    def flops(self, *, tokens: float, pairs: float) -> float:
        """Model FLOPs of training on these tokens, as MFU counts them: forward and backward, without recomputation.

        `tokens` excludes padding; `pairs` are the (query, key) pairs that the mask allows, diagonal included: the sum
        of L (L + 1) / 2 over documents. A multiply-add is 2 FLOPs. Each matrix product runs three times (forward,
        input gradient, weight gradient), and attention has two per pair: 6 N tokens + 12 layers (heads head_dim) pairs.
        """
        return 6 * self.matrix_parameters * tokens + 3 * self.attention_flops(self.layers, pairs)

    def hardware_flops(
        self, *, tokens: float, pairs: float, recompute: str = "none", blocks_per_checkpoint: int = 1
    ) -> float:
        """FLOPs executed in one step, as HFU counts them.

        Flash backward recomputes the scores. `keep_attention` repeats every matrix product of a block but the down
        projection; `full` also repeats attention, and the QKV projections once more. All but one of the
        `blocks_per_checkpoint` blocks also repeat what produces their output. QK norms repeat the query and key
        projections in their backward pass. A block that does not run in pieces is repeated whole.
        """
        executed = self.flops(tokens=tokens, pairs=pairs) + self.attention_flops(self.layers, pairs) / 2
        if recompute == "none":
            return executed
        recomputed, is_full = 0, recompute == "full"
        for index, kind in enumerate(self.layers):
            products = self.products[kind]
            recomputed += products.recomputed + is_full * products.attention_inputs
            next_kind = self.layers[index + 1 : index + 2]
            if (index + 1) % blocks_per_checkpoint and next_kind and kind.in_pieces and next_kind[0].in_pieces:
                recomputed += products.every - products.attention_inputs
        repeated = [kind for kind in self.layers if is_full or not kind.in_pieces]
        return executed + self.attention_flops(repeated, pairs) + 2 * recomputed * tokens
