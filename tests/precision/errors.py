"""Errors of an accumulator's results over N parts, against float64 sums of the same inputs.

Every gradient has a constant sign. The sums then grow with each part, and a bfloat16 sum stops
growing after 256 equal parts: the next one is less than half of its last digit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

LAW = 1.5
"""The error over N parts is at most this many times the error of one part."""
FLOOR = 1e-5
"""Smaller errors are equal: float32 sums of thousands of parts, a hundredth of one rounding to
bfloat16.
"""
Results = dict[str, tuple[Tensor, Tensor]]
"""By name: what the product computes, and the same in float64."""


@dataclass(frozen=True)
class Accumulator:
    """A sum of the product, over any number of parts."""

    name: str
    compute: Callable[[int], Results]
    """Empty for one part, if the sum then returns it unchanged."""
    parts: tuple[int, ...]
    slow_parts: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    """In which a part is rounded: that of the results, or of what ranks send."""
    float32: tuple[str, ...] = ()
    """Results in float32 among others in bfloat16."""

    def rounding_error(self, name: str, exact: Tensor) -> float:
        """The error of rounding a result once, or `FLOOR` if that is larger."""
        dtype = torch.float32 if name in self.float32 else self.dtype
        return max(FLOOR, rms_error(exact.to(dtype), exact))


@dataclass(frozen=True)
class Factor:
    """One row of the table of factors."""

    accumulator: str
    parts: int
    result: str
    """The result whose error grows most."""
    error_at_one: float
    error: float

    @property
    def factor(self) -> float:
        return self.error / self.error_at_one


def rms_error(found: Tensor, reference: Tensor) -> float:
    """Root mean square of the differences, relative to that of the reference; infinite for NaN, 0
    if both are zero.
    """
    scale = reference.norm().clamp(min=torch.finfo(torch.float64).tiny)
    return float(((found.double() - reference).norm() / scale).nan_to_num(nan=torch.inf))


@cache
def errors(accumulator: Accumulator, parts: int) -> dict[str, tuple[float, float]]:
    """Error and rounding error by result."""
    results = accumulator.compute(parts)
    return {
        name: (rms_error(found, exact), accumulator.rounding_error(name, exact))
        for name, (found, exact) in results.items()
    }


def factor(accumulator: Accumulator, parts: int) -> Factor:
    """The result with the largest factor. One part costs at least one rounding."""
    at_one = errors(accumulator, 1)
    rows = []
    for name, (error, rounding) in errors(accumulator, parts).items():
        error_at_one = max(rounding, at_one.get(name, (0.0, 0.0))[0])
        rows.append(Factor(accumulator.name, parts, name, error_at_one, error))
    return max(rows, key=lambda row: row.factor)


def positive(*shape: int, seed: int = 0, low: float = 0.5, high: float = 1.5) -> Tensor:
    """Uniform random numbers that bfloat16 represents."""
    values = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (low + (high - low) * values).bfloat16()


def float64(*tensors: Tensor) -> list[Tensor]:
    """Leaves of the reference."""
    return [x.detach().double().requires_grad_(x.requires_grad) for x in tensors]
