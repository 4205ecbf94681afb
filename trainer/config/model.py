"""The section of the model: a preset, its overrides, and kinds of layers. Imports no torch."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import Field

from models.config import ALIKE_OPTIONS, MAX_LAYERS, ModelConfig
from models.expert_config import EXPERT_FIELDS
from models.hf_families import FAMILIES as MODEL_TYPES
from models.layers import LayerKind
from models.presets import FAMILIES
from trainer.config.sections import MAX_SEQ_LEN, AsTokens, PositiveFloat, PositiveInt, Section

ROPES = ("rope", "local_rope")
LayerCount = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
Window = Annotated[int, Field(ge=1, le=MAX_SEQ_LEN), AsTokens]


class RopeSection(Section):
    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] | None = None
    """How rotary frequencies are scaled: `default` (not at all; for ABF raise `theta`), `linear`
    (all by one factor), `llama3` (by wavelength, as in Llama 3.1), `yarn` (by number of rotations,
    with an attention factor), `longrope` (one factor per frequency).
    """
    theta: Annotated[float, Field(gt=1)] | None = None
    """Base of the rotary frequencies."""
    factor: Annotated[float, Field(ge=1)] | None = None
    """Context extension relative to `original_length`. Required by every kind except `default`."""
    low_freq_factor: PositiveFloat | None = None
    """`llama3`: wavelengths above `original_length / low_freq_factor` are scaled by the whole
    factor.
    """
    high_freq_factor: PositiveFloat | None = None
    """`llama3`: wavelengths below `original_length / high_freq_factor` are unchanged."""
    original_length: Annotated[int, Field(ge=1), AsTokens] | None = None
    """Context length in tokens that the frequencies were first trained for."""
    beta_fast: PositiveFloat | None = None
    """`yarn`: frequencies with more rotations than this over `original_length` are unchanged."""
    beta_slow: PositiveFloat | None = None
    """`yarn`: frequencies with fewer rotations than this over `original_length` are scaled by the
    whole factor.
    """
    truncate: bool | None = None
    """`yarn`: whether to round the bounds of the ramp between the two to whole frequencies."""
    attention_factor: PositiveFloat | None = None
    """`yarn` and `longrope`: multiplies cosine and sine.

    Left out: 0.1 ln(factor) + 1 for `yarn`, sqrt(1 + ln(factor) / ln(original_length)) for
    `longrope`.
    """
    short_factors: tuple[float, ...] | None = None
    """`longrope`: divisor of each frequency when training.seq_len is at most `original_length`;
    head_dim / 2 values.
    """
    long_factors: tuple[float, ...] | None = None
    """`longrope`: divisor of each frequency for longer sequences; head_dim / 2 values."""
    partial: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of a head's dimensions that is rotated, the first ones; 0.5 in GLM-4.5."""
    precision: Literal["float64", "float32"] | None = None
    """Type of the angles.

    `float32` is off by 0.05 rad at position 1M and matches Hugging Face bit by bit.
    """


class LayerSection(Section):
    """Layers of one kind. Keys that are left out are as in [model], except `window` and `rope`."""

    repeat: LayerCount = 1
    """Consecutive layers of this kind."""
    window: Window | None = None
    """Tokens that a query attends to at most, its own included.

    Left out: all before it in the document.
    """
    rope: Literal["global", "local", "none"] = "global"
    """Which rotary embedding: [model.rope], [model.local_rope], or none."""
    sink: bool | None = None
    """Whether each query head has an attention sink."""
    softcap: PositiveFloat | None = None
    """Soft cap of attention scores."""
    norms: str | None = None
    """Placement of norms: on inputs of attention and feed-forward, on their outputs, or on both.
    """
    qk_norm: bool | None = None
    """Whether queries and keys are normalized per head."""
    full_qk_norm: bool | None = None
    """Whether queries and keys are normalized over all heads."""
    qkv_bias: bool | None = None
    """Whether the query, key and value projections have biases."""
    o_bias: bool | None = None
    """Whether attention's output projection has a bias."""
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] | None = None
    """Activation of the feed-forward's gate."""

    mixer: str | None = None
    """How tokens see each other: `attention`, or what an extension adds."""
    feed_forward: str | None = None
    """`gated`, of every token; `moe`, of the experts that a router chooses; or what an extension
    adds.
    """
    router_bias: bool | None = None
    """Whether the router's logits have a bias."""
    expert_bias: bool | None = None
    """Whether the products of experts have biases."""
    shared_expert: bool | None = None
    """Whether an expert sees every token."""
    correction_bias: bool | None = None
    """Whether a bias that no gradient changes is added to scores where experts are chosen."""

    def kinds(self, defaults: dict[str, Any]) -> list[LayerKind]:
        given = {key: value for key, value in self if value is not None and key != "repeat"}
        named = {
            key: value
            for key, value in (defaults | given).items()
            if key in ("mixer", "feed_forward", "norms")
        }
        kind = LayerKind(**named)
        # An option of [model] is for the layers that have it.
        if not kind.problems():
            defaults = {key: value for key, value in defaults.items() if key in kind.readable}
        # The window is not inherited: a layer of a pattern without one attends to the whole
        # document.
        return [LayerKind(**defaults | {"window": None} | given)] * self.repeat


class ModelSection(Section):
    """A preset and its overrides: keys that are left out keep the values of the preset."""

    family: str = "llama3"
    """Family of presets."""
    size: str = "debug"
    """Preset of the family."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding and output matrices; at least the tokenizer's vocabulary size."""
    dim: PositiveInt | None = None
    """Width of the residual stream."""
    num_layers: LayerCount | None = None
    """Transformer blocks."""
    num_heads: PositiveInt | None = None
    """Query heads."""
    num_kv_heads: PositiveInt | None = None
    """KV heads; `num_heads` must be a multiple."""
    head_dim: PositiveInt | None = None
    """Dimension of a head."""
    ffn_dim: PositiveInt | None = None
    """Hidden dimension of the feed-forward network."""
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] | None = None
    """Activation of the feed-forward's gate: SwiGLU; GeGLU with tanh's approximation, as in Gemma;
    or gpt-oss's SwiGLU with limits.
    """
    norm_eps: PositiveFloat | None = None
    """Epsilon of every RMSNorm."""
    norms: str | None = None
    """Placement of norms: on inputs of attention and feed-forward (`pre`), on their outputs
    (`post`, OLMo 2), or on both (`sandwich`, Gemma).
    """
    zero_centered_norms: bool | None = None
    """Whether norms multiply by 1 + weight, as in Gemma."""
    tie_embeddings: bool | None = None
    """Whether the output projection shares the embedding weight."""
    qk_norm: bool | None = None
    """Whether queries and keys are normalized per head before rotation, as in Qwen3."""
    full_qk_norm: bool | None = None
    """Whether queries and keys are normalized over all heads at once, as in OLMo 2."""
    qkv_bias: bool | None = None
    """Whether the query, key and value projections have biases, as in Qwen2.5."""
    o_bias: bool | None = None
    """Whether attention's output projection has a bias, as in gpt-oss."""
    window: Window | None = None
    """Sliding window of all layers: tokens that a query attends to at most, its own included.

    Left out: as in the preset. `layers` gives some layers a window.
    """
    sink: bool | None = None
    """Whether each query head has an attention sink, a learned logit without a key, as in
    gpt-oss.
    """
    softcap: PositiveFloat | None = None
    """Soft cap c of attention scores, c tanh(score / c), as in Gemma 2.

    On CUDA only the `plain` kernel has it.
    """
    attention_scale: PositiveFloat | None = None
    """Multiplies attention scores. Left out: as in the preset, or head_dim ** -0.5."""
    embedding_multiplier: PositiveFloat | None = None
    """Multiplies embeddings: sqrt(dim) in Gemma."""
    residual_multiplier: PositiveFloat | None = None
    """Multiplies what attention and feed-forward add to the residual stream, as in Granite."""
    logits_scaling: PositiveFloat | None = None
    """Divides the logits, as in Granite."""
    logit_softcap: PositiveFloat | None = None
    """Soft cap c of the logits, c tanh(logit / c), as in Gemma 2."""
    mixer: str | None = None
    """How tokens see each other: `attention`, or what an extension adds."""
    feed_forward: str | None = None
    """Feed-forward: `gated`, of every token; `moe`, a mixture of experts; or what an extension
    adds.
    """
    num_experts: PositiveInt | None = None
    """Experts of a layer."""
    top_k: PositiveInt | None = None
    """Experts of a token."""
    expert_dim: PositiveInt | None = None
    """Hidden dimension of an expert."""
    shared_expert: bool | None = None
    """Whether an expert sees every token, beside those that the router chooses."""
    shared_expert_dim: PositiveInt | None = None
    """Hidden dimension of the shared expert. Left out: `expert_dim`."""
    router: Literal["softmax", "sigmoid"] | None = None
    """How the router's logits become scores; `sigmoid` as in DeepSeek-V3."""
    normalize_top_k: bool | None = None
    """Whether the scores of a token's experts are divided by their sum."""
    router_scaling: PositiveFloat | None = None
    """Multiplies the weights of a token's experts."""
    expert_groups: PositiveInt | None = None
    """Groups of experts, as in DeepSeek-V3."""
    top_k_groups: PositiveInt | None = None
    """Groups in which a token's experts are."""
    router_bias: bool | None = None
    """Whether the router's logits have a bias, as in gpt-oss."""
    expert_bias: bool | None = None
    """Whether the products of experts have biases, as in gpt-oss."""
    correction_bias: bool | None = None
    """Whether a bias that no gradient changes is added to scores where experts are chosen, as in
    DeepSeek-V3; `training.correction_bias_rate` adjusts it.
    """
    nope_every: PositiveInt | None = None
    """Every layer whose 1-based number is a multiple of this has no rotary embedding; 4 in
    SmolLM3. Left out: as in the preset.
    """
    layers: tuple[LayerSection, ...] = ()
    """Kinds of layers, in order; the pattern repeats over `num_layers`.

    Left out: as in the preset.
    """
    model_type: str | None = None
    """transformers' `model_type` that `hf export` writes, if it can express the model.

    Left out: as in the preset.
    """
    rope: RopeSection = RopeSection()
    """Rotary position embedding: overrides of the preset."""
    local_rope: RopeSection = RopeSection()
    """Rotary position embedding of the layers with `rope = "local"`: overrides of the preset."""

    def build(self) -> ModelConfig:
        """The preset with this section's overrides. Family and size must exist."""
        return _build_model_config(self)

    def problems(self) -> list[str]:
        if self.family not in FAMILIES:
            return [f'model.family = "{self.family}" is unknown; there are {", ".join(FAMILIES)}']
        sizes = FAMILIES[self.family]
        if self.size not in sizes:
            return [
                f'model.size = "{self.size}" is unknown; family "{self.family}" has {", ".join(sizes)}'
            ]
        model = self.build()
        problems = list[str]()
        for name in ROPES:
            keys = [key for key, value in getattr(self, name) if value is not None]
            problems += getattr(model, name).unused_keys(keys, section=f"model.{name}")
            if keys and name == "local_rope" and not model.has_local_rope:
                problems.append(
                    '[model.local_rope] is only used by layers with rope = "local", and there are none'
                )
        if self.layers:
            ignored = [key for key in ("window", "nope_every") if getattr(self, key) is not None]
            problems += [
                f"model.{key} is not used beside model.layers: set it there" for key in ignored
            ]
        if self.layers:
            # False asks for nothing that a layer without the option lacks, so only true values are
            # reported.
            readable = set[str]().union(
                *(kind.readable for kind in model.kinds if not kind.problems())
            )
            unread = [
                key
                for key in ALIKE_OPTIONS
                if getattr(self, key) not in (None, False) and key not in readable
            ]
            problems += [f"model.{key} is read by none of model.layers" for key in unread]
        if self.model_type is not None and self.model_type not in MODEL_TYPES:
            known = ", ".join(MODEL_TYPES)
            problems.append(
                f'model.model_type = "{self.model_type}" is unknown; there are {known}'
            )
        return [*problems, *model.problems()]


@lru_cache(maxsize=64)
def _build_model_config(section: ModelSection) -> ModelConfig:
    # Plans ask for it a hundred times.
    preset = FAMILIES[section.family][section.size]
    given: dict[str, Any] = {
        key: value
        for key, value in section
        if value is not None and key not in ("family", "size", "layers", *ROPES)
    }
    for name in ROPES:
        overrides = {key: value for key, value in getattr(section, name) if value is not None}
        given[name] = dataclasses.replace(getattr(preset, name), **overrides)
    # Options that all layers share stand in the model. Once layers are listed, each has its own
    # copy, and the model's fields return to their defaults: no option exists twice.
    of_layers = {key: given[key] for key in ALIKE_OPTIONS if key in given}
    if section.layers:
        defaults = preset.common_options | of_layers
        kinds = (kind for each in section.layers for kind in each.kinds(defaults))
        given["layers"] = tuple(islice(kinds, given.get("num_layers", preset.num_layers)))
        given |= {key: getattr(ModelConfig, key) for key in (*ALIKE_OPTIONS, "nope_every")}
    elif preset.layers:
        given["layers"] = tuple(dataclasses.replace(kind, **of_layers) for kind in preset.layers)
        given |= {key: getattr(ModelConfig, key) for key in of_layers}
    model = dataclasses.replace(preset, **given)
    # A preset's, if its layers are overridden.
    if not model.has_experts:
        unused = {key: getattr(ModelConfig, key) for key in EXPERT_FIELDS if key not in given}
        model = dataclasses.replace(model, **unused)
    return model
