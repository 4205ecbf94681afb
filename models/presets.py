"""Model presets by family and size: the published configurations, and a small "debug" size for tests and first runs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from models.config import ModelConfig, RopeConfig

COLUMNS = ("dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_dim")
QWEN2_5: dict[str, Any] = {"qkv_bias": True, "rope": RopeConfig(theta=1_000_000.0)}


def _family(
    sizes: dict[str, tuple[int, ...]], *, vocab_size: int, tied: Collection[str] = (), **common: Any
) -> dict[str, ModelConfig]:
    return {
        size: ModelConfig(
            vocab_size=264 if size == "debug" else vocab_size,  # The byte tokenizer's.
            tie_embeddings=size in tied,
            **dict(zip(COLUMNS, row, strict=True)) | common,
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
    ),
    "llama3": _family(
        {
            "debug": (256, 4, 8, 4, 32, 704),
            "8b": (4096, 32, 32, 8, 128, 14_336),
            "70b": (8192, 80, 64, 8, 128, 28_672),
        },
        vocab_size=128_256,
        rope=RopeConfig(theta=500_000.0),
    ),
    "llama3.1": _family(
        {
            "8b": (4096, 32, 32, 8, 128, 14_336),
            "70b": (8192, 80, 64, 8, 128, 28_672),
            "405b": (16_384, 126, 128, 8, 128, 53_248),
        },
        vocab_size=128_256,
        rope=RopeConfig(theta=500_000.0, kind="llama3", factor=8.0),
    ),
    "llama3.2": _family(
        {"1b": (2048, 16, 32, 8, 64, 8192), "3b": (3072, 28, 24, 8, 128, 8192)},
        vocab_size=128_256,
        tied=("1b", "3b"),
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
    | _family(  # The instruction-tuned models of these sizes have norm_eps = 1e-6.
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
        qk_norm=True,
        rope=RopeConfig(theta=1_000_000.0),
    ),
}
