"""Rotary frequencies and their scaling for context extension, without torch.

Frequency i is 1 / theta ** (2 i / head_dim), in radians per position. Scaling extends the context
from L to s L tokens: every frequency by s (`linear`, Chen et al., 2023), by wavelength (`llama3`,
Llama 3.1's release), by the number of rotations within L (`yarn`, Peng et al., 2023), or by a
factor per frequency (`longrope`, Ding et al., 2024). The last two also multiply cosine and sine by
the attention factor, and therefore the scores by its square.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from models.config import ModelConfig
from models.rope_config import RopeConfig


def frequencies(config: RopeConfig, head_dim: int, *, seq_len: int) -> list[float]:
    """Radians per position, for sequences of `seq_len` tokens."""
    indices = range(head_dim // 2)
    return scale_frequencies(
        config, [config.theta ** (2 * i / head_dim) for i in indices], indices, seq_len=seq_len
    )


def scale_frequencies(
    config: RopeConfig, powers: Iterable[Any], indices: Iterable[Any], *, seq_len: int
) -> list[Any]:
    """Scaled frequencies from `powers` (theta ** (2 i / head_dim)) and `indices` (i): floats, or
    scalar tensors.

    The order of operations is Hugging Face's, so that float32 tensors give bitwise the same
    result.
    """
    powers = list(powers)
    original_length = config.original_length
    factor = config.factor
    unscaled = [1 / power for power in powers]
    if config.kind == "linear":
        return [frequency / factor for frequency in unscaled]
    if config.kind == "llama3":
        low = config.low_freq_factor
        high = config.high_freq_factor
        # Wavelengths 2 pi / f below L / high stay, those above L / low grow by the factor, and a
        # ramp leads from one to the other.
        smooth = [
            _clamp01((original_length / (2 * math.pi / f) - low) / (high - low)) for f in unscaled
        ]
        return [(1 - g) * f / factor + g * f for g, f in zip(smooth, unscaled, strict=True)]
    if config.kind == "yarn":
        # Frequencies with more than `beta_fast` rotations in the original length stay, those with
        # fewer than `beta_slow` are divided by the factor, with a ramp over indices between.
        start, end = yarn_ramp_bounds(config, 2 * len(powers))
        smooth = [1 - _clamp01((index - start) / (end - start)) for index in indices]
        return [
            1 / (factor * power) * (1 - g) + 1 / power * g
            for g, power in zip(smooth, powers, strict=True)
        ]
    if config.kind == "longrope":
        factors = config.long_factors if seq_len > original_length else config.short_factors
        return [1 / (divisor * power) for divisor, power in zip(factors, powers, strict=True)]
    return unscaled


def yarn_ramp_bounds(config: RopeConfig, head_dim: int) -> tuple[float, float]:
    """`yarn`: the index where scaling starts, and the index from which it is the full factor."""
    # The index i at which a frequency makes n rotations: theta ** (2 i / head_dim) = L / (2 pi n).
    start, end = (
        head_dim
        * math.log(config.original_length / (num_rotations * 2 * math.pi))
        / (2 * math.log(config.theta))
        for num_rotations in (config.beta_fast, config.beta_slow)
    )
    if config.truncate:
        start = math.floor(start)
        end = math.ceil(end)
    start = max(start, 0)
    end = min(end, head_dim - 1)
    # As in transformers: a ramp of length zero would divide by zero.
    return start, end + 0.001 if start == end else end


@lru_cache
def attention_factor(config: RopeConfig) -> float:
    """The multiplier of cosine and sine."""
    if config.kind not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    # The defaults of the papers: yarn's temperature, and longrope's growth of entropy with length.
    if config.kind == "yarn":
        return 0.1 * math.log(config.factor) + 1
    return math.sqrt(1 + math.log(config.factor) / math.log(config.original_length))


def rope_summary(model: ModelConfig, seq_len: int) -> str:
    """One log line that shows a missing context extension: frequencies that complete no rotation
    in `seq_len`.
    """
    rope = model.rope
    freqs = frequencies(rope, model.head_dim, seq_len=seq_len)
    num_partial_rotations = sum(seq_len * frequency < 2 * math.pi for frequency in freqs)
    without = sum(kind.rope == "none" for kind in model.layer_kinds)
    nope_note = f"; no rope in {without} of {model.num_layers} layers" if without else ""
    if model.has_local_rope:
        local = sum(kind.rope == "local" for kind in model.layer_kinds)
        nope_note += f"; local rope {model.local_rope.kind}, theta {model.local_rope.theta:,.0f}, in {local} layers"
    return (
        f"rope {rope.kind}: theta {rope.theta:,.0f}, longest wavelength {2 * math.pi / min(freqs):,.0f} tokens for "
        f"training.seq_len = {seq_len:,}, {num_partial_rotations} of {len(freqs)} frequencies complete no rotation, "
        f"attention factor {attention_factor(rope):.4f}{nope_note}"
    )


def _clamp01(x: Any) -> Any:
    return min(max(x, 0), 1)
