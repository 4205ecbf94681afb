"""The only door to communication of tensors.

Sums and maxima here are of numbers about a step, not part of the graph that autograd differentiates.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

T = TypeVar("T")


def sum_over(group: distributed.ProcessGroup, x: Tensor) -> Tensor:
    """The sum of every rank's `x`, on every rank; `x` itself is overwritten with it."""
    distributed.all_reduce(x, group=group)
    return x


def max_over(group: distributed.ProcessGroup | None, values: list[float]) -> list[float]:
    """The largest of every rank's values, one by one; waits for the slowest rank, through the host."""
    numbers = torch.tensor(values, dtype=torch.float64)
    distributed.all_reduce(numbers, distributed.ReduceOp.MAX, group=group)
    return numbers.tolist()


def gather_over(value: T) -> list[T]:
    """Every rank's value, by rank; for what is compared once, at the start."""
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def whole(x: Tensor) -> Tensor:
    """A sharded or partial tensor (DTensor) as a plain one with its global value; a plain one as it is."""
    full = getattr(x, "full_tensor", None)
    return x if full is None else full()
