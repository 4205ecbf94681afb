"""Which models transformers' `model_type`s describe, as data: keys of config.json, their defaults, kinds of layers.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from models.rope_config import ROPE_FIELDS

Values = Mapping[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
COMMON_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
"""Of every family: its key in config.json and ours."""
ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"}
UNUSED_KEYS = {
    *(
        "_name_or_path",
        "architectures",
        "model_type",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "max_position_embeddings",
    ),
    *("initializer_range", "use_cache", "cache_implementation", "tokenizer_class", "torchscript", "return_dict"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "prefix"),
    *("output_attentions", "output_hidden_states", "use_return_dict", "chunk_size_feed_forward", "use_bfloat16"),
    *(
        "id2label",
        "label2id",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "_attn_implementation_autoset",
    ),
    *("forced_bos_token_id", "forced_eos_token_id", "max_length", "min_length", "do_sample", "temperature", "top_p"),
    *("router_aux_loss_coef", "_attn_implementation", "attn_implementation"),
}
"""What does not change the numbers that a model computes."""
OFF: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "resid_pdrop": (0, None),
    "embd_pdrop": (0, None),
    "partial_rotary_factor": (1, None),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
    "quantization_config": (None,),
    "auto_map": (None,),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "tie_encoder_decoder": (False, None),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "is_decoder": (False, True, None),
    "use_mrope": (False, None),
    "use_bidirectional_attention": (False, None),
    "pretraining_tp": (1, None),
    "attn_logit_softcapping": (None,),  # Of scores. Gemma 3's configuration has it, and no layer reads it.
}
"""Features that our model does not have: the values that switch them off."""


class Key(NamedTuple):
    """A key of config.json that one of our options follows from."""

    option: str
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value


def every(interval: int) -> Callable[[Values, int], bool]:
    """Whether a layer has a window: all but each `interval`-th."""
    return lambda _, layer: (layer + 1) % interval != 0


def every_stated(values: Values, layer: int) -> bool:
    return bool((layer + 1) % values["sliding_window_pattern"])


def from_layer_on(values: Values, layer: int) -> bool:
    return bool(values["use_sliding_window"] and layer >= values["max_window_layers"])


def without_rope(values: Values, layer: int) -> bool:
    return bool(values["use_sliding_window"] and not values["no_rope_layers"][layer])


@dataclass(frozen=True, kw_only=True)
class Family:
    """A `model_type` of transformers."""

    architecture: str
    options: Values = field(default_factory=dict)
    """What its models always are, as options of `ModelConfig`."""
    keys: Mapping[str, Key] = field(default_factory=dict)
    """In addition to COMMON_KEYS."""
    activation_keys: tuple[str, ...] = ("hidden_act",)
    defaults: Values = field(default_factory=dict)
    """transformers' values of absent keys, where they are not those of BASE_DEFAULTS."""
    has_window: Callable[[Values, int], bool] | None = None
    """Whether a layer has a window where `layer_types` does not say. None: no layer has one."""
    window_keys: frozenset[str] = frozenset()
    """Keys that `has_window` reads."""
    has_layer_types: bool = False
    has_local_rope: bool = False
    """Whether windowed layers have a rotary embedding of their own."""
    local_theta_key: str = "rope_theta"
    derives_head_dim: bool = False
    """Whether head_dim is always dim / num_heads."""
    needs_even_heads: bool = False
    """Whether num_heads must divide dim, though head_dim is stated."""
    scales_embeddings: bool = False
    """Whether embeddings are multiplied by sqrt(dim)."""
    bias_keys: tuple[str, ...] = ("attention_bias",)
    """Keys that say that linear layers have no bias."""
    rope_kinds: tuple[str, ...] = (*ROPE_FIELDS,)
    states_longrope_by_length: bool = False
    """Whether transformers 4 takes longrope's factor from the longest length, and no other key."""

    @property
    def known_keys(self) -> set[str]:
        keys = {*COMMON_KEYS, *ROPE_KEYS, *UNUSED_KEYS, *OFF, *self.keys, *self.activation_keys, *self.window_keys}
        keys |= {"layer_types"} if self.has_layer_types else set()
        return keys | {self.local_theta_key} | ({"sliding_window"} if self.has_window else set())


BASE_DEFAULTS: Values = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10_000.0}
QWEN: dict[str, Any] = {
    "has_window": from_layer_on,
    "window_keys": frozenset({"use_sliding_window", "max_window_layers"}),
    "has_layer_types": True,
}
QWEN_DEFAULTS = {"use_sliding_window": False, "max_window_layers": 28, "sliding_window": 4096}
MISTRAL: dict[str, Any] = {"has_window": lambda *_: True, "bias_keys": ()}
MISTRAL_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8}
OLMO: dict[str, Any] = {
    "options": {"norms": "post", "full_qk_norm": True},
    "derives_head_dim": True,
}
GEMMA: dict[str, Any] = {
    "options": {"norms": "sandwich", "zero_centered_norms": True, "activation": "gelu_tanh"},
    "keys": {
        "query_pre_attn_scalar": Key("attention_scale", lambda scalar: scalar**-0.5, lambda scale: round(scale**-2)),
        "final_logit_softcapping": Key("logit_softcap"),
    },
    "activation_keys": ("hidden_activation", "hidden_act"),
    "has_layer_types": True,
    "needs_even_heads": True,
    "scales_embeddings": True,
}
GEMMA_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", needs_even_heads=True, bias_keys=("attention_bias", "mlp_bias")),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        options={"qkv_bias": True},
        defaults=QWEN_DEFAULTS | {"num_key_value_heads": 32},
        derives_head_dim=True,
        bias_keys=(),
        **QWEN,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        options={"qk_norm": True},
        defaults=QWEN_DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128},
        **QWEN,
    ),
    "mistral": Family(architecture="MistralForCausalLM", defaults=MISTRAL_DEFAULTS, **MISTRAL),
    "ministral": Family(
        architecture="MinistralForCausalLM", defaults=MISTRAL_DEFAULTS, has_layer_types=True, **MISTRAL
    ),
    "olmo2": Family(architecture="Olmo2ForCausalLM", defaults={"rms_norm_eps": 1e-5}, **OLMO),
    "olmo3": Family(
        architecture="Olmo3ForCausalLM",
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500_000.0},
        has_window=every(4),
        has_layer_types=True,
        has_local_rope=True,
        **OLMO,
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        defaults={
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
        has_window=without_rope,
        bias_keys=("attention_bias", "mlp_bias"),
        window_keys=frozenset({"use_sliding_window", "no_rope_layers", "no_rope_layer_interval"}),
        has_layer_types=True,
        derives_head_dim=True,
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        keys={
            "attention_multiplier": Key("attention_scale"),
            "embedding_multiplier": Key("embedding_multiplier"),
            "residual_multiplier": Key("residual_multiplier"),
            "logits_scaling": Key("logits_scaling"),
        },
        defaults=dict.fromkeys(
            ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0
        ),
        derives_head_dim=True,
        bias_keys=("attention_bias", "mlp_bias"),
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        has_window=lambda *_: True,
        derives_head_dim=True,
        bias_keys=(),
        rope_kinds=("default", "longrope"),
        states_longrope_by_length=True,
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        defaults=GEMMA_DEFAULTS
        | {"vocab_size": 256_000, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        has_window=every(2),
        **GEMMA | {"keys": {**GEMMA["keys"], "attn_logit_softcapping": Key("softcap")}},
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        defaults=GEMMA_DEFAULTS
        | {
            "vocab_size": 262_208,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": 6,
        },
        has_window=every_stated,
        window_keys=frozenset({"sliding_window_pattern", "_sliding_window_pattern"}),
        has_local_rope=True,
        local_theta_key="rope_local_base_freq",
        **GEMMA | {"options": {**GEMMA["options"], "qk_norm": True}},
    ),
}
"""In the order in which an export tries them."""
