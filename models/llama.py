"""Llama presets (Meta's published configurations), and small ones of the same shape for tests and first runs."""

from __future__ import annotations

from dataclasses import replace

from models.config import ModelConfig, RopeConfig

LLAMA2_ROPE = RopeConfig(theta=10_000.0)
LLAMA3_ROPE = RopeConfig(theta=500_000.0)
LLAMA31_ROPE = replace(LLAMA3_ROPE, kind="llama3", factor=8.0)
LLAMA32_ROPE = replace(LLAMA3_ROPE, kind="llama3", factor=32.0)


def _llama2(dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=32_000,
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        ffn_dim=ffn_dim,
        rope=LLAMA2_ROPE,
    )


def _llama3(dim: int, layers: int, heads: int, ffn_dim: int, head_dim: int = 128) -> ModelConfig:
    return ModelConfig(
        vocab_size=128_256,
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        ffn_dim=ffn_dim,
        rope=LLAMA3_ROPE,
    )


LLAMA2 = {
    "7b": _llama2(4096, 32, 32, 32, 11_008),
    "13b": _llama2(5120, 40, 40, 40, 13_824),
    "70b": _llama2(8192, 80, 64, 8, 28_672),
}

LLAMA3 = {
    "debug": ModelConfig(
        vocab_size=264,
        dim=256,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        ffn_dim=704,
        rope=LLAMA3_ROPE,
    ),
    "8b": _llama3(4096, 32, 32, 14_336),
    "70b": _llama3(8192, 80, 64, 28_672),
}

LLAMA31 = {
    "8b": replace(LLAMA3["8b"], rope=LLAMA31_ROPE),
    "70b": replace(LLAMA3["70b"], rope=LLAMA31_ROPE),
    "405b": replace(_llama3(16_384, 126, 128, 53_248), rope=LLAMA31_ROPE),
}

LLAMA32 = {
    "1b": replace(_llama3(2048, 16, 32, 8192, head_dim=64), tie_embeddings=True, rope=LLAMA32_ROPE),
    "3b": replace(_llama3(3072, 28, 24, 8192), tie_embeddings=True, rope=LLAMA32_ROPE),
}
