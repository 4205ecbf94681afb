"""Rotary frequencies and their scaling for context extension, without torch.

Frequency i is 1 / theta ** (2 i / head_dim), in radians per position. Scaling extends the context from L to s L tokens:
every frequency by s (`linear`, Chen et al., 2023), by wavelength (`llama3`, Llama 3.1's release), by the number of
rotations within L (`yarn`, Peng et al., 2023), or by a factor per frequency (`longrope`, Ding et al., 2024). The last two
also multiply cosine and sine by the attention factor, and therefore the scores by its square.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from models.config import ModelConfig, RopeConfig


def frequencies(config: RopeConfig, head_dim: int, *, seq_len: int) -> list[float]:
    """Radians per position, for sequences of `seq_len` tokens."""
    indices = range(head_dim // 2)
    return scale_frequencies(config, [config.theta ** (2 * i / head_dim) for i in indices], indices, seq_len=seq_len)


def scale_frequencies(config: RopeConfig, powers: Iterable[Any], indices: Iterable[Any], *, seq_len: int) -> list[Any]:
    """Scaled frequencies from `powers` (theta ** (2 i / head_dim)) and `indices` (i): floats, or scalar tensors.

    The order of operations is Hugging Face's, so that float32 tensors give bitwise the same result.
    """
    pairs = list(zip(powers, indices, strict=True))
    original_length, factor = config.original_length, config.factor
    if config.kind == "linear":
        return [1 / power / factor for power, _ in pairs]
    if config.kind == "llama3":
        low, high = config.low_freq_factor, config.high_freq_factor
        smooth_factors = [
            _clamp01((original_length / (2 * math.pi / (1 / power)) - low) / (high - low)) for power, _ in pairs
        ]
        return [
            (1 - smooth) * (1 / power) / factor + smooth * (1 / power)
            for smooth, (power, _) in zip(smooth_factors, pairs, strict=True)
        ]
    if config.kind == "yarn":
        ramp_start, ramp_end = yarn_ramp_bounds(config, 2 * len(pairs))
        smooth_factors = [1 - _clamp01((index - ramp_start) / (ramp_end - ramp_start)) for _, index in pairs]
        return [
            1 / (factor * power) * (1 - g) + 1 / power * g for g, (power, _) in zip(smooth_factors, pairs, strict=True)
        ]
    if config.kind == "longrope":
        factors = config.long_factors if seq_len > original_length else config.short_factors
        return [1 / (long_factor * power) for long_factor, (power, _) in zip(factors, pairs, strict=True)]
    return [1 / power for power, _ in pairs]


def yarn_ramp_bounds(config: RopeConfig, head_dim: int) -> tuple[float, float]:
    """`yarn`: the index where scaling starts, and the index from which it is the full factor."""

    def correction_dim(num_rotations: float) -> float:
        return (
            head_dim * math.log(config.original_length / (num_rotations * 2 * math.pi)) / (2 * math.log(config.theta))
        )

    ramp_start, ramp_end = correction_dim(config.beta_fast), correction_dim(config.beta_slow)
    if config.truncate:
        ramp_start, ramp_end = math.floor(ramp_start), math.ceil(ramp_end)
    ramp_start, ramp_end = max(ramp_start, 0), min(ramp_end, head_dim - 1)
    return ramp_start, ramp_end + 0.001 * (ramp_start == ramp_end)


def attention_factor(config: RopeConfig) -> float:
    """The multiplier of cosine and sine."""
    if config.kind not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.kind == "yarn":
        return 0.1 * math.log(config.factor) + 1
    return math.sqrt(1 + math.log(config.factor) / math.log(config.original_length))


def rope_summary(model: ModelConfig, seq_len: int) -> str:
    """One log line that shows a missing context extension: frequencies that complete no rotation in `seq_len`."""
    rope = model.rope
    freqs = frequencies(rope, model.head_dim, seq_len=seq_len)
    num_partial_rotations = sum(seq_len * frequency < 2 * math.pi for frequency in freqs)
    nope_note = "" if model.nope_every is None else f"; no rope in every {model.nope_every}th layer"
    return (
        f"rope {rope.kind}: theta {rope.theta:,.0f}, longest wavelength {2 * math.pi / min(freqs):,.0f} tokens for "
        f"training.seq_len = {seq_len:,}, {num_partial_rotations} of {len(freqs)} frequencies complete no rotation, "
        f"attention factor {attention_factor(rope):.4f}{nope_note}"
    )


def _clamp01(x: Any) -> Any:
    return min(max(x, 0), 1)
