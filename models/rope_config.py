"""Configuration of rotary position embeddings. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

ROPE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_length"),
    "yarn": (
        "factor",
        "original_length",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
    ),
    "longrope": ("factor", "original_length", "short_factors", "long_factors", "attention_factor"),
}
"""The fields that each `rope.kind` uses in addition to theta and precision."""
# Formulas need a positive logarithm of the first three.
EXCLUSIVE_MINIMUMS = {"theta": 1, "factor": 1, "original_length": 1} | dict.fromkeys(
    ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"), 0
)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) and its context-extension scaling; see
    `models/rope_scaling.py`.
    """

    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    partial: float = 1.0
    """Fraction of a head's dimensions that is rotated: the first ones (GLM-4.5)."""
    precision: Literal["float64", "float32"] = "float64"

    def rotary_dim(self, head_dim: int) -> int:
        """Dimensions of a head that are rotated."""
        return int(head_dim * self.partial)

    def problems(self, head_dim: int, *, section: str = "model.rope") -> list[str]:
        values = {key: getattr(self, key) for key in ("theta", *ROPE_FIELDS[self.kind])}
        problems = [
            f'{section}.{key} = {values[key]} must be above {minimum} for {section}.kind = "{self.kind}"'
            for key, minimum in EXCLUSIVE_MINIMUMS.items()
            if values.get(key) is not None and not values[key] > minimum
        ]
        problems += [
            f"{section}.{low} = {values[low]} must be below {section}.{high} = {values[high]}"
            for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast"))
            if low in values and not values[low] < values[high]
        ]
        for key in ("short_factors", "long_factors") if self.kind == "longrope" else ():
            count = len(values[key])
            half = self.rotary_dim(head_dim) // 2
            if count != half:
                problems.append(
                    f"{section}.{key} has {count} values, and must have {half}: half of model.head_dim = {head_dim}"
                )
            if any(not factor > 0 for factor in values[key]):
                problems.append(
                    f"{section}.{key} holds {min(values[key])}; every factor must be above 0"
                )
        if (rotated := self.rotary_dim(head_dim)) % 2 or rotated < 2:
            part = "" if self.partial == 1 else f" * {section}.partial = {self.partial}"
            problems.append(
                f"model.head_dim = {head_dim}{part} must be even: rotary embedding rotates pairs"
            )
        return problems

    def unused_keys(self, keys: Iterable[str], *, section: str = "model.rope") -> list[str]:
        """One problem for each key that only other kinds use."""
        problems = []
        for key in keys:
            kinds = " or ".join(f'"{kind}"' for kind, used in ROPE_FIELDS.items() if key in used)
            if kinds and key not in ROPE_FIELDS[self.kind]:
                problems.append(
                    f'{section}.{key} is only used with {section}.kind = {kinds}, not "{self.kind}"'
                )
        return problems
