"""A `model_type` of transformers as data: keys of config.json, kinds of layers.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from models.rope_config import ROPE_FIELDS

Values = Mapping[str, Any]
FULL = "full_attention"
SLIDING = "sliding_attention"
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
"""Keys of config.json that every family has, and our names of them."""
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
    *(
        "initializer_range",
        "use_cache",
        "cache_implementation",
        "tokenizer_class",
        "torchscript",
        "return_dict",
    ),
    *(
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "prefix",
    ),
    *(
        "output_attentions",
        "output_hidden_states",
        "use_return_dict",
        "chunk_size_feed_forward",
        "use_bfloat16",
    ),
    *(
        "id2label",
        "label2id",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "_attn_implementation_autoset",
    ),
    *(
        "router_aux_loss_coef",
        "output_router_logits",
        "num_nextn_predict_layers",
        "initial_context_length",
    ),
    *("_attn_implementation", "attn_implementation"),
}
"""Keys that transformers writes into any config.json; no number that a model computes depends on
them.
"""
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
    "is_causal": (True,),  # transformers takes null for false.
    "use_mrope": (False, None),
    "use_bidirectional_attention": (False, None),
    "pretraining_tp": (1, None),
    # Of scores. Gemma 3's configuration has it, and no layer reads it.
    "attn_logit_softcapping": (None,),
}
"""Features that our model does not have: the values that switch them off."""


class Key(NamedTuple):
    """A key of config.json that one of our options follows from."""

    option: str
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value
    rule: Literal["a number above 0", "an integer above 0", "true or false"] = "a number above 0"


def count(option: str) -> Key:
    return Key(option, rule="an integer above 0")


def flag(option: str) -> Key:
    return Key(option, rule="true or false")


def every(interval: int) -> Callable[[Values, int], bool]:
    """Whether a layer has a window: all but each `interval`-th."""
    return lambda _, layer: (layer + 1) % interval != 0


def every_stated(values: Values, layer: int) -> bool:
    return bool((layer + 1) % values["sliding_window_pattern"])


def from_layer_on(values: Values, layer: int) -> bool:
    return bool(values["use_sliding_window"] and layer >= values["max_window_layers"])


def without_rope(values: Values, layer: int) -> bool:
    return bool(values["use_sliding_window"] and not values["no_rope_layers"][layer])


def is_sparse(values: Values, layer: int) -> bool:
    """Whether a layer has experts (Qwen3)."""
    return (
        layer not in values["mlp_only_layers"] and (layer + 1) % values["decoder_sparse_step"] == 0
    )


def has_layer_after_dense(values: Values, layer: int) -> bool:
    """Whether a layer has experts (GLM-4.5)."""
    return bool(layer >= values["first_k_dense_replace"])


@dataclass(frozen=True, kw_only=True)
class Family:
    """A `model_type` of transformers."""

    architecture: str
    options: Values = field(default_factory=dict)
    """Options of `ModelConfig` that its models always have."""
    keys: Mapping[str, Key] = field(default_factory=dict)
    """Keys in addition to COMMON_KEYS."""
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
    has_partial_rotary: bool = False
    """Whether a part of a head's dimensions may be rotated."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys, and the usual one of each."""
    allowed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Keys that may only have these values: the model supports no others."""
    has_experts: Callable[[Values, int], bool] = lambda *_: False
    """Whether a layer has experts."""
    expert_keys: frozenset[str] = frozenset()
    """Keys that `has_experts` reads."""
    states_longrope_by_length: bool = False
    """Whether transformers 4 takes longrope's factor from the longest length, and no other key."""

    @property
    def known_keys(self) -> set[str]:
        keys = {
            *COMMON_KEYS,
            *ROPE_KEYS,
            *UNUSED_KEYS,
            *OFF,
            *self.keys,
            *self.activation_keys,
            *self.window_keys,
        }
        keys |= {*self.allowed, *self.expert_keys}
        keys |= {"layer_types"} if self.has_layer_types else set()
        return keys | {self.local_theta_key} | ({"sliding_window"} if self.has_window else set())
