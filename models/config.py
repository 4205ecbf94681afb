"""Model configuration, with parameter and FLOP counts.

Imports no torch, so that a configuration is validated quickly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple

from models.expert_config import ExpertConfig
from models.layers import EMBEDDING, HEAD, Activation, LayerKind, Parameter, Sizes
from models.rope_config import RopeConfig
from models.score_pairs import FULL_ATTENTION, Windows, causal_pairs, mean_pairs

# Bounds what a configuration from elsewhere can allocate: each layer gets a `LayerKind`.
MAX_LAYERS = 10_000


@dataclass(frozen=True)
class StageSpec:
    """The layers of one pipeline stage, and whether it has the embedding and the loss head."""

    layers: range
    has_embedding: bool = True
    has_head: bool = True


class BlockProducts(NamedTuple):
    """Weights in a block's matrix products by what multiplies with them; of experts, those that
    one token uses.
    """

    every: int
    recomputed: int
    """Weights that a recomputing backward pass multiplies with again: all but the last product.
    Norms of heads and of a sublayer's output add the product that is their input.
    """
    attention_inputs: int
    """Weights of the QKV projections, which produce what attention reads.

    All others produce the block's output from that of attention.
    """


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ExpertConfig):
    """A decoder-only Transformer."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    activation: Activation = "silu"
    norm_eps: float = 1e-5
    norms: Literal["pre", "post", "sandwich"] = "pre"
    zero_centered_norms: bool = False
    """Whether norms multiply by 1 + weight (Gemma)."""
    tie_embeddings: bool = False
    qk_norm: bool = False
    full_qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    window: int | None = None
    sink: bool = False
    softcap: float | None = None
    nope_every: int | None = None
    mixer: str = "attention"
    feed_forward: str = "gated"
    router_bias: bool = False
    expert_bias: bool = False
    shared_expert: bool = False
    correction_bias: bool = False
    layers: tuple[LayerKind, ...] = ()
    """Kinds of layers, which repeat in this order; without it layers differ by `nope_every`
    only.
    """
    rope: RopeConfig = field(default_factory=RopeConfig)
    local_rope: RopeConfig = field(default_factory=RopeConfig)
    """RoPE of the layers whose `rope` is "local"."""
    attention_scale: float | None = None
    """Multiplies scores; None: head_dim ** -0.5."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Factor of what each sublayer adds to the residual stream (Granite)."""
    logits_scaling: float = 1.0
    """Divides the logits (Granite)."""
    logit_softcap: float | None = None
    """c of the logits c tanh(logit / c) (Gemma 2)."""
    model_type: str = ""
    """The one in transformers that a conversion prefers (`models/hf_config.py`)."""

    def problems(self) -> list[str]:
        """Every broken rule, with its values; empty for a valid model."""
        problems = self.rope.problems(self.head_dim)
        if self.num_heads % self.num_kv_heads:
            heads = self.num_heads
            kv_heads = self.num_kv_heads
            problems.append(
                f"model.num_heads = {heads} must be a multiple of model.num_kv_heads = {kv_heads}"
            )
        if self.has_local_rope:
            problems += self.local_rope.problems(self.head_dim, section="model.local_rope")
        problems += self.expert_problems(self.kinds)
        positive = (
            *(
                "attention_scale",
                "embedding_multiplier",
                "residual_multiplier",
                "logits_scaling",
                "logit_softcap",
            ),
        )
        values = {name: getattr(self, name) for name in positive}
        problems += [
            f"model.{name} = {value} must be above 0"
            for name, value in values.items()
            if value is not None and not value > 0
        ]
        if not self.layers:
            problems += [f"model.{each}" for each in self.layer_kinds[0].problems()]
        else:
            kinds = enumerate(self.layers, start=1)
            problems += [
                f"model.layers {number}: {each}"
                for number, kind in kinds
                for each in kind.problems()
            ]
            # A pattern states these options per kind: stated for all layers, they would contradict
            # it.
            alike = [
                name
                for name in (*ALIKE_OPTIONS, "nope_every")
                if getattr(self, name) != getattr(ModelConfig, name)
            ]
            problems += [
                f"model.{name} must be set in each kind of model.layers instead" for name in alike
            ]
        return problems or [
            f'the width "{letter}" is {width} in one kind of layer and {self.sizes[letter]} in another'
            for kind in self.kinds
            for part in kind.sublayers.values()
            for letter, width in part.widths.items()
            if width != self.sizes[letter]
        ]

    @property
    def has_experts(self) -> bool:
        return any(kind.feed_forward == "moe" for kind in self.kinds)

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Each layer's kind. All else that depends on what a layer is follows from it."""
        pattern = self.layers
        if not pattern:
            alike = LayerKind(**{name: getattr(self, name) for name in ALIKE_OPTIONS})
            # The last layer of each `nope_every` has no RoPE (SmolLM3).
            last = alike if self.nope_every is None else replace(alike, rope="none")
            pattern = (*(alike,) * ((self.nope_every or 1) - 1), last)
        return tuple(pattern[layer % len(pattern)] for layer in range(self.num_layers))

    @property
    def common_options(self) -> dict[str, Any]:
        """The options of `LayerKind` that all layers share, but for `rope`."""
        return {
            each.name: getattr(self.kinds[0], each.name)
            for each in fields(LayerKind)
            if each.name != "rope" and len({getattr(kind, each.name) for kind in self.kinds}) == 1
        }

    @cached_property
    def unrotated_layers(self) -> tuple[LayerKind, ...]:
        """Each layer's kind as far as weights, FLOPs and memory go: rotations are made equal."""
        unrotated = {kind: replace(kind, rope="global") for kind in self.kinds}
        distinct = {kind: kind for kind in unrotated.values()}
        return tuple(distinct[unrotated[kind]] for kind in self.layer_kinds)

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of its layers, each once, in order."""
        return tuple(dict.fromkeys(self.layer_kinds))

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The windows of its layers, each once."""
        return tuple(dict.fromkeys(kind.window for kind in self.kinds if kind.window is not None))

    @cached_property
    def layers_by_window(self) -> Windows:
        """Number of attention layers by window; None: without a window."""
        return Counter(kind.window for kind in self.layer_kinds if kind.attends) or FULL_ATTENTION

    def mean_pairs(self, tokens: int) -> float:
        """(query, key) pairs of a document of `tokens`, as `flops` takes them."""
        return mean_pairs(self.layers_by_window, lambda window: causal_pairs(tokens, window))

    @property
    def score_softcap(self) -> float | None:
        """The soft cap of attention scores, if a layer has one."""
        return next((kind.softcap for kind in self.kinds if kind.softcap is not None), None)

    @property
    def has_local_rope(self) -> bool:
        return any(kind.rope == "local" for kind in self.kinds)

    @property
    def query_multiplier(self) -> float:
        """Factor of the queries, because kernels multiply scores by head_dim ** -0.5."""
        return 1.0 if self.attention_scale is None else self.attention_scale * self.head_dim**0.5

    @cached_property
    def sizes(self) -> Sizes:
        sizes = {
            "V": self.vocab_size,
            "E": self.dim,
            "G": self.ffn_dim,
            "Q": self.num_heads * self.head_dim,
            "K": self.num_kv_heads * self.head_dim,
            "H": self.head_dim,
            "N": self.num_heads,
            "X": self.num_experts,
            "M": self.expert_dim,
            "Z": self.shared_expert_dim or self.expert_dim,
        }
        for kind in self.kinds:
            sizes.update(kind.widths)
        return sizes

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Declarations of the parameters by name, in model order; a tied head is the embedding."""
        blocks = {
            f"blocks.{layer}.{name}": each._replace(hf_name=f"model.layers.{layer}.{each.hf_name}")
            for layer, kind in enumerate(self.layer_kinds)
            for name, each in kind.parameters.items()
        }
        head = {
            name: each
            for name, each in HEAD.items()
            if not (self.tie_embeddings and each.is_matrix)
        }
        return {name: self._centered(each) for name, each in (EMBEDDING | blocks | head).items()}

    @cached_property
    def buffers(self) -> dict[str, Parameter]:
        """Declarations of the buffers by name: vectors that no gradient changes."""
        return {
            f"blocks.{layer}.{name}": each._replace(
                hf_name=each.hf_name and f"model.layers.{layer}.{each.hf_name}"
            )
            for layer, kind in enumerate(self.layer_kinds)
            for name, each in kind.buffers.items()
        }

    def _centered(self, parameter: Parameter) -> Parameter:
        """Zero-centered norms start at 0."""
        is_centered = self.zero_centered_norms and parameter.initial == "ones"
        return parameter._replace(initial="zeros") if is_centered else parameter

    def declared(self, name: str) -> Parameter:
        """The declaration of a parameter or buffer, by its name in the model or a pipeline stage.

        Raises ValueError if it is not declared.
        """
        # With tied embeddings `parameters` has no head, but the head's module asks for its weight.
        if (
            found := self.parameters.get(name) or self.buffers.get(name) or HEAD.get(name)
        ) is None:
            raise ValueError(f"parameter {name} is not declared in models/layers.py")
        return found

    def parameter_problems(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Every difference between the parameters of a model, or of a stage of it, and the
        declarations.
        """
        problems = []
        layers = {int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")}
        declared = HEAD | self.parameters
        for name, shape in shapes.items():
            if name not in declared:
                problems.append(
                    f"parameter {name} {list(shape)} is not declared {self._declared_by(name)}"
                )
            elif (expected := declared[name].shape_of(self.sizes)) != shape:
                problems.append(
                    f"parameter {name} has shape {list(shape)}, declared as {list(expected)}"
                )
        missing = {
            f"blocks.{layer}.{name}"
            for layer in layers
            for name in self.layer_kinds[layer].parameters
        } - shapes.keys()
        return problems + [
            f"parameter {name} is declared {self._declared_by(name)} and not in the model"
            for name in sorted(missing)
        ]

    def _declared_by(self, name: str) -> str:
        """Where a parameter of this name should be declared."""
        _, layer, module, *_ = f"{name}...".split(".")
        if not layer.isdecimal() or module not in ("attention", "feed_forward"):
            return "in models/layers.py"
        kind = self.layer_kinds[int(layer)]
        field = "mixer" if module == "attention" else module
        return f'by {field} "{getattr(kind, field)}"'

    def products_of(self, kind: LayerKind, tp: int = 1) -> BlockProducts:
        """Weights in the products of one block on one of `tp` ranks.

        With fewer KV heads than ranks, each multiplies by the part of one head.
        """
        sizes = {**self.sizes, "K": max(self.sizes["K"], tp * self.head_dim)}
        declared = kind.parameters
        weights = {
            name: self._active(each, prod(each.local_shape(sizes, tp)))
            for name, each in declared.items()
            if each.is_matrix
        }
        every = sum(weights.values())
        if not kind.in_pieces:
            return BlockProducts(every, every, 0)
        # "residual" marks the last product of a sublayer: the one that writes to the residual
        # stream.
        inputs = {name for name in weights if declared[name].initial != "residual"}
        last = Counter[str]()
        for name in weights.keys() - inputs:
            last[name.split(".")[0]] += weights[name]
        read = sum(weights[name] for name in inputs if name.startswith("attention."))
        # Norms need their input again: of heads the projection, of a sublayer's output its last
        # product.
        normed = sum(
            weights.get(name.replace("_norm.", "_proj."), 0)
            for name in declared
            if "_norm." in name
        )
        normed += sum(size for module, size in last.items() if kind.has_post_norm(module))
        return BlockProducts(every, every - last["feed_forward"] + normed, read)

    @cached_property
    def products(self) -> dict[LayerKind, BlockProducts]:
        """Weights in the products of each kind of block, without tensor parallelism."""
        return {kind: self.products_of(kind) for kind in self.kinds}

    @cached_property
    def matrix_parameters(self) -> int:
        """Weights in matrix products: every block's and the head's (also when tied), without the
        embedding.
        """
        return (
            sum(self.products[kind].every for kind in self.layer_kinds)
            + self.vocab_size * self.dim
        )

    @cached_property
    def num_parameters(self) -> int:
        """All parameters; tied embeddings count once."""
        return sum(prod(each.shape_of(self.sizes)) for each in self.parameters.values())

    @cached_property
    def num_active_parameters(self) -> int:
        """Parameters that compute with a token: all, but of the experts only `top_k`."""
        return sum(
            self._active(each, prod(each.shape_of(self.sizes)))
            for each in self.parameters.values()
        )

    @property
    def parameter_summary(self) -> str:
        active = self.num_active_parameters
        return f"{self.num_parameters:,} parameters" + (
            f", {active:,} of them active for a token" if active < self.num_parameters else ""
        )

    def _active(self, parameter: Parameter, count: int) -> int:
        """Elements active per token: all `count`, or top_k / num_experts of them."""
        return count * self.top_k // self.num_experts if parameter.per_expert else count

    def attention_flops(self, kinds: Iterable[LayerKind], pairs: float) -> float:
        """FLOPs of the forward pass of attention in these layers: two products per pair of tokens;
        `pairs` is the mean over the layers.
        """
        # Per pair and element of the query heads: a multiply-add of QK^T and one of PV, 4 FLOPs.
        return 4 * sum(kind.attends for kind in kinds) * self.sizes["Q"] * pairs

    def flops(self, *, tokens: float, pairs: float) -> float:
        """Model FLOPs of training on these tokens, as MFU counts them: forward and backward,
        without recomputation.

        `tokens` excludes padding; `pairs` are the (query, key) pairs that the mask allows,
        diagonal included: the sum of L (L + 1) / 2 over documents, and with windows the mean over
        layers (`mean_pairs`). A multiply-add is 2 FLOPs. Each matrix product runs three times
        (forward, input gradient, weight gradient), and attention has two per pair: 6 N tokens + 12
        layers (heads head_dim) pairs.
        """
        return 6 * self.matrix_parameters * tokens + 3 * self.attention_flops(
            self.layer_kinds, pairs
        )

    def hardware_flops(
        self,
        *,
        tokens: float,
        pairs: float,
        recompute: str = "none",
        blocks_per_checkpoint: int = 1,
    ) -> float:
        """FLOPs executed in one step, as HFU counts them.

        Flash backward recomputes the scores. `keep_attention` repeats every matrix product of a
        block but the down projection; `full` also repeats attention, and the QKV projections once
        more. All but one of the `blocks_per_checkpoint` blocks also repeat what produces their
        output. QK norms repeat the query and key projections in their backward pass. A block that
        does not run in pieces is repeated whole.
        """
        # Flash attention's backward pass recomputes QK^T: half of the forward pass's two products.
        executed = (
            self.flops(tokens=tokens, pairs=pairs)
            + self.attention_flops(self.layer_kinds, pairs) / 2
        )
        if recompute == "none":
            return executed
        recomputed = 0
        is_full = recompute == "full"
        for index, kind in enumerate(self.layer_kinds):
            products = self.products[kind]
            recomputed += products.recomputed
            if is_full:
                recomputed += products.attention_inputs
            next_kind = self.layer_kinds[index + 1 : index + 2]
            # The blocks of a checkpoint but its last recompute their output as well: the input of
            # the next.
            if (
                (index + 1) % blocks_per_checkpoint
                and next_kind
                and kind.in_pieces
                and next_kind[0].in_pieces
            ):
                recomputed += products.every - products.attention_inputs
        repeated = [kind for kind in self.layer_kinds if is_full or not kind.in_pieces]
        return executed + self.attention_flops(repeated, pairs) + 2 * recomputed * tokens


# `rope` means two things: a `LayerKind` names one of the configurations that the model holds.
ALIKE_OPTIONS = tuple(
    each.name
    for each in fields(LayerKind)
    if each.name in ModelConfig.__dataclass_fields__ and each.name != "rope"
)
"""The fields of `LayerKind` that `ModelConfig` has too: those of all layers, where there is no
pattern.
"""
