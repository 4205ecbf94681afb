"""Qwen3 presets (Yang et al., 2025, and the published configurations of its dense models), and a small one of the same shape.

Queries and keys are normalised head by head; the small models tie their embeddings.
"""

from __future__ import annotations

from dataclasses import replace

from models.config import ModelConfig, RopeConfig


def _qwen3(dim: int, layers: int, heads: int, ffn_dim: int, *, tied: bool = False) -> ModelConfig:
    return ModelConfig(
        vocab_size=151_936,
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        ffn_dim=ffn_dim,
        norm_eps=1e-6,
        tie_embeddings=tied,
        qk_norm=True,
        rope=RopeConfig(theta=1_000_000.0),
    )


QWEN3 = {
    "debug": replace(_qwen3(256, 4, 8, 704, tied=True), vocab_size=264, num_kv_heads=4, head_dim=64),
    "0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "8b": _qwen3(4096, 36, 32, 12_288),
    "14b": _qwen3(5120, 40, 40, 17_408),
    "32b": _qwen3(5120, 64, 64, 25_600),
}
