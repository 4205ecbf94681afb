"""Models that transformers' `model_type`s describe, as data: keys of config.json, their defaults,
kinds of layers.

Imports no torch.
"""

from __future__ import annotations

from typing import Any

from models.hf_family import (
    Family,
    Key,
    Values,
    count,
    every,
    every_stated,
    flag,
    from_layer_on,
    has_layer_after_dense,
    is_sparse,
    without_rope,
)

BASE_DEFAULTS: Values = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}
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
        # Gemma states the number whose root divides the scores, instead of the head dim.
        "query_pre_attn_scalar": Key(
            "attention_scale", lambda scalar: scalar**-0.5, lambda scale: round(scale**-2)
        ),
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
EXPERTS: dict[str, Any] = {"feed_forward": "moe"}
EXPERT_KEYS = {
    "intermediate_size": count("expert_dim"),
    "num_local_experts": count("num_experts"),
    "num_experts_per_tok": count("top_k"),
}
FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        needs_even_heads=True,
        bias_keys=("attention_bias", "mlp_bias"),
    ),
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
        architecture="MinistralForCausalLM",
        defaults=MISTRAL_DEFAULTS,
        has_layer_types=True,
        **MISTRAL,
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
            (
                "attention_multiplier",
                "embedding_multiplier",
                "residual_multiplier",
                "logits_scaling",
            ),
            1.0,
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
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        options={**EXPERTS, "qk_norm": True},
        keys={
            "num_experts": count("num_experts"),
            "num_experts_per_tok": count("top_k"),
            "moe_intermediate_size": count("expert_dim"),
            "norm_topk_prob": flag("normalize_top_k"),
        },
        aliases={"num_local_experts": "num_experts"},
        defaults={
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        allowed={"use_sliding_window": (False, None)},
        has_experts=is_sparse,
        expert_keys=frozenset({"decoder_sparse_step", "mlp_only_layers", "max_window_layers"}),
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        options=EXPERTS,
        keys=EXPERT_KEYS,
        aliases={"num_experts": "num_local_experts"},
        defaults={
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_theta": 1_000_000.0,
        },
        allowed={"router_jitter_noise": (0.0, None)},
        has_experts=lambda *_: True,
        bias_keys=(),
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        options={**EXPERTS, "full_qk_norm": True},
        keys={
            "intermediate_size": count("expert_dim"),
            "num_experts": count("num_experts"),
            "num_experts_per_tok": count("top_k"),
            "norm_topk_prob": flag("normalize_top_k"),
        },
        aliases={"num_local_experts": "num_experts"},
        defaults={
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        allowed={"clip_qkv": (None,)},
        has_experts=lambda *_: True,
        derives_head_dim=True,
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        options={
            **EXPERTS,
            "qkv_bias": True,
            "o_bias": True,
            "sink": True,
            "router_bias": True,
            "expert_bias": True,
            "activation": "clamped_swiglu",
        },
        keys=EXPERT_KEYS,
        aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        defaults={
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        allowed={
            "attention_bias": (True,),
            "swiglu_limit": (7.0, None),
            "swiglu_alpha": (1.702, None),
        },
        has_window=every(2),
        has_layer_types=True,
        has_experts=lambda *_: True,
        bias_keys=(),
    ),
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM",
        options={**EXPERTS, "router": "sigmoid", "shared_expert": True, "correction_bias": True},
        keys={
            "attention_bias": flag("qkv_bias"),
            "use_qk_norm": flag("qk_norm"),
            "n_routed_experts": count("num_experts"),
            "num_experts_per_tok": count("top_k"),
            "moe_intermediate_size": count("expert_dim"),
            "norm_topk_prob": flag("normalize_top_k"),
            "routed_scaling_factor": Key("router_scaling"),
            "n_group": count("expert_groups"),
            "topk_group": count("top_k_groups"),
        },
        aliases={"num_local_experts": "n_routed_experts"},
        defaults={
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "attention_bias": False,
            "use_qk_norm": False,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "partial_rotary_factor": 0.5,
        },
        has_experts=has_layer_after_dense,
        expert_keys=frozenset(
            {"first_k_dense_replace", "n_shared_experts", "partial_rotary_factor"}
        ),
        has_partial_rotary=True,
        bias_keys=(),
    ),
}
"""Families by `model_type`, in the order in which an export tries them."""
