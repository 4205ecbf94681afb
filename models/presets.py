"""Model presets by family and size: the published configurations, and a small "debug" size for
tests and first runs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from models.config import ModelConfig
from models.hf_families import FAMILIES as MODEL_TYPES
from models.layers import LayerKind
from models.rope_config import RopeConfig

COLUMNS = ("dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_dim")
QWEN2_5: dict[str, Any] = {
    "model_type": "qwen2",
    "rope": RopeConfig(theta=1_000_000.0),
}
MISTRAL: dict[str, Any] = {"model_type": "mistral", "norm_eps": 1e-5}
EXPERT_COLUMNS = (*COLUMNS, "num_experts", "top_k", "expert_dim")
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "norm_eps": 1e-5,
    "rope": RopeConfig(theta=1_000_000.0),
}
GPT_OSS = LayerKind(**MODEL_TYPES["gpt_oss"].options)
GLM = LayerKind(feed_forward="moe", shared_expert=True, correction_bias=True, qkv_bias=True)
OLMO3 = LayerKind(**MODEL_TYPES["olmo3"].options)
GEMMA = LayerKind(norms="sandwich", qk_norm=True, activation="gelu_tanh")


def _gemma3(
    sizes: dict[str, tuple[int, ...]],
    *,
    window: int,
    vocab_size: int = 262_208,
    factor: float = 8.0,
    **common: Any,
) -> dict[str, ModelConfig]:
    """Gemma 3: five layers with a window and a rotary embedding of their own, then one without."""
    local = replace(GEMMA, window=window, rope="local")
    rope = (
        RopeConfig(theta=1_000_000.0, kind="linear", factor=factor)
        if factor > 1
        else RopeConfig(theta=1_000_000.0)
    )
    return {
        name: replace(model, embedding_multiplier=model.dim**0.5)
        for name, model in _family(
            sizes,
            vocab_size=vocab_size,
            tied=(*sizes,),
            model_type="gemma3_text",
            norm_eps=1e-6,
            zero_centered_norms=True,
            layers=(*(local,) * 5, GEMMA),
            rope=rope,
            local_rope=RopeConfig(theta=10_000.0),
            **common,
        ).items()
    }


def _glm4_moe(
    name: str, sizes: tuple[int, ...], *, dense: int, qk_norm: bool, scaling: float
) -> dict[str, ModelConfig]:
    """GLM-4.5: the first layers have no experts."""
    sparse = replace(GLM, qk_norm=qk_norm)
    without = LayerKind(qkv_bias=True, qk_norm=qk_norm)
    return _family(
        {name: sizes},
        vocab_size=151_552,
        model_type="glm4_moe",
        norm_eps=1e-5,
        router="sigmoid",
        router_scaling=scaling,
        shared_expert_dim=sizes[-1],
        layers=(*(without,) * dense, *(sparse,) * (sizes[1] - dense)),
        rope=RopeConfig(theta=1_000_000.0, partial=0.5),
    )


def _family(
    sizes: dict[str, tuple[int, ...]],
    *,
    vocab_size: int,
    model_type: str,
    tied: Collection[str] = (),
    **common: Any,
) -> dict[str, ModelConfig]:
    if "layers" not in common:
        common = {**MODEL_TYPES[model_type].options, **common}
    return {
        size: ModelConfig(
            vocab_size=264 if size == "debug" else vocab_size,  # The byte tokenizer's.
            model_type=model_type,
            tie_embeddings=size in tied,
            **dict(zip(EXPERT_COLUMNS, row, strict=False)) | common,
        )
        for size, row in sizes.items()
    }


FAMILIES: dict[str, dict[str, ModelConfig]] = {
    "llama2": _family(
        {
            "7b": (4096, 32, 32, 32, 128, 11_008),
            "13b": (5120, 40, 40, 40, 128, 13_824),
            "70b": (8192, 80, 64, 8, 128, 28_672),
        },
        vocab_size=32_000,
        model_type="llama",
    ),
    "llama3": _family(
        {
            "debug": (256, 4, 8, 4, 32, 704),
            "8b": (4096, 32, 32, 8, 128, 14_336),
            "70b": (8192, 80, 64, 8, 128, 28_672),
        },
        vocab_size=128_256,
        model_type="llama",
        rope=RopeConfig(theta=500_000.0),
    ),
    "llama3.1": _family(
        {
            "8b": (4096, 32, 32, 8, 128, 14_336),
            "70b": (8192, 80, 64, 8, 128, 28_672),
            "405b": (16_384, 126, 128, 8, 128, 53_248),
        },
        vocab_size=128_256,
        model_type="llama",
        rope=RopeConfig(theta=500_000.0, kind="llama3", factor=8.0),
    ),
    "llama3.2": _family(
        {"1b": (2048, 16, 32, 8, 64, 8192), "3b": (3072, 28, 24, 8, 128, 8192)},
        vocab_size=128_256,
        tied=("1b", "3b"),
        model_type="llama",
        rope=RopeConfig(theta=500_000.0, kind="llama3", factor=32.0),
    ),
    "qwen2.5": _family(
        {
            "debug": (256, 4, 8, 4, 32, 704),
            "0.5b": (896, 24, 14, 2, 64, 4864),
            "1.5b": (1536, 28, 12, 2, 128, 8960),
            "3b": (2048, 36, 16, 2, 128, 11_008),
        },
        vocab_size=151_936,
        tied=("debug", "0.5b", "1.5b", "3b"),
        norm_eps=1e-6,
        **QWEN2_5,
    )
    | _family({"7b": (3584, 28, 28, 4, 128, 18_944)}, vocab_size=152_064, norm_eps=1e-6, **QWEN2_5)
    # The instruction-tuned models of these sizes have norm_eps = 1e-6.
    | _family(
        {
            "14b": (5120, 48, 40, 8, 128, 13_824),
            "32b": (5120, 64, 40, 8, 128, 27_648),
            "72b": (8192, 80, 64, 8, 128, 29_568),
        },
        vocab_size=152_064,
        norm_eps=1e-5,
        **QWEN2_5,
    ),
    "qwen3": _family(
        {
            "debug": (256, 4, 8, 4, 64, 704),
            "0.6b": (1024, 28, 16, 8, 128, 3072),
            "1.7b": (2048, 28, 16, 8, 128, 6144),
            "4b": (2560, 36, 32, 8, 128, 9728),
            "8b": (4096, 36, 32, 8, 128, 12_288),
            "14b": (5120, 40, 40, 8, 128, 17_408),
            "32b": (5120, 64, 64, 8, 128, 25_600),
        },
        vocab_size=151_936,
        tied=("debug", "0.6b", "1.7b", "4b"),
        norm_eps=1e-6,
        model_type="qwen3",
        rope=RopeConfig(theta=1_000_000.0),
    ),
    "mistral": _family(
        {"7b-v0.1": (4096, 32, 32, 8, 128, 14_336)}, vocab_size=32_000, window=4096, **MISTRAL
    )
    | _family(
        {"7b": (4096, 32, 32, 8, 128, 14_336), "small-22b": (6144, 56, 48, 8, 128, 16_384)},
        vocab_size=32_768,
        rope=RopeConfig(theta=1_000_000.0),
        **MISTRAL,
    )
    | _family(
        {"nemo-12b": (5120, 40, 32, 8, 128, 14_336)},
        vocab_size=131_072,
        rope=RopeConfig(theta=1_000_000.0),
        **MISTRAL,
    )
    | _family(
        {"small-24b": (5120, 40, 32, 8, 128, 32_768)},
        vocab_size=131_072,
        rope=RopeConfig(theta=100_000_000.0),
        **MISTRAL,
    ),
    "olmo2": _family(
        {
            "1b": (2048, 16, 16, 16, 128, 8192),
            "7b": (4096, 32, 32, 32, 128, 11_008),
            "13b": (5120, 40, 40, 40, 128, 13_824),
            "32b": (5120, 64, 40, 8, 128, 27_648),
        },
        vocab_size=100_352,
        norm_eps=1e-6,
        model_type="olmo2",
        rope=RopeConfig(theta=500_000.0),
    ),
    "olmo3": _family(
        {"7b": (4096, 32, 32, 32, 128, 11_008), "32b": (5120, 64, 40, 8, 128, 27_648)},
        vocab_size=100_278,
        norm_eps=1e-6,
        model_type="olmo3",
        # Three layers with a window of 4096 and an unscaled rotary embedding, then one without.
        layers=(*(replace(OLMO3, window=4096, rope="local"),) * 3, OLMO3),
        rope=RopeConfig(theta=500_000.0, kind="yarn", factor=8.0, original_length=8192),
        local_rope=RopeConfig(theta=500_000.0),
    ),
    "smollm3": _family(
        {"3b": (2048, 36, 16, 4, 128, 11_008)},
        vocab_size=128_256,
        tied=("3b",),
        norm_eps=1e-6,
        model_type="smollm3",
        nope_every=4,
        rope=RopeConfig(theta=5_000_000.0),
    ),
    "gemma3": _gemma3({"debug": (256, 6, 8, 4, 32, 704)}, window=256, factor=1.0)
    | _gemma3({"1b": (1152, 26, 4, 1, 256, 6912)}, window=512, vocab_size=262_144, factor=1.0)
    | _gemma3(
        {"4b": (2560, 34, 8, 4, 256, 10_240), "12b": (3840, 48, 16, 8, 256, 15_360)}, window=1024
    )
    | _gemma3({"27b": (5376, 62, 32, 16, 128, 21_504)}, window=1024, attention_scale=168**-0.5),
    "qwen3_moe": _family(
        {
            "debug": (256, 4, 8, 4, 64, 704, 8, 2, 176),
            "30b-a3b": (2048, 48, 32, 4, 128, 6144, 128, 8, 768),
            "235b-a22b": (4096, 94, 64, 4, 128, 12_288, 128, 8, 1536),
        },
        vocab_size=151_936,
        norm_eps=1e-6,
        model_type="qwen3_moe",
        rope=RopeConfig(theta=1_000_000.0),
    ),
    "mixtral": _family(
        {"8x7b": (4096, 32, 32, 8, 128, 14_336, 8, 2, 14_336)}, vocab_size=32_000, **MIXTRAL
    )
    | _family(
        {"8x22b": (6144, 56, 48, 8, 128, 16_384, 8, 2, 16_384)}, vocab_size=32_768, **MIXTRAL
    ),
    "olmoe": _family(
        {"1b-7b": (2048, 16, 16, 16, 128, 1024, 64, 8, 1024)},
        vocab_size=50_304,
        norm_eps=1e-5,
        model_type="olmoe",
        normalize_top_k=False,
    ),
    "gpt_oss": _family(
        {
            "20b": (2880, 24, 64, 8, 64, 2880, 32, 4, 2880),
            "120b": (2880, 36, 64, 8, 64, 2880, 128, 4, 2880),
        },
        vocab_size=201_088,
        norm_eps=1e-5,
        model_type="gpt_oss",
        # Layers with a window of 128 and without one take turns.
        layers=(replace(GPT_OSS, window=128), GPT_OSS),
        rope=RopeConfig(
            theta=150_000.0, kind="yarn", factor=32.0, original_length=4096, truncate=False
        ),
    ),
    "glm4_moe": _glm4_moe(
        "4.5", (5120, 92, 96, 8, 128, 12_288, 160, 8, 1536), dense=3, qk_norm=True, scaling=2.5
    )
    | _glm4_moe(
        "4.5-air",
        (4096, 46, 96, 8, 128, 10_944, 128, 8, 1408),
        dense=1,
        qk_norm=False,
        scaling=1.0,
    ),
}
