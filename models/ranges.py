"""Ranges of tokens as int64 tensors on the host: a sequence may have a hundred thousand, too many
for Python.
"""

from __future__ import annotations

import torch
from torch import Tensor


def concatenated_ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """`arange(start, start + length)` of every pair, concatenated."""
    # An arange over all elements, shifted in each range from where it lies to where it starts.
    offsets: Tensor = (starts - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
    return offsets + torch.arange(len(offsets), device=starts.device)


def cut_ranges(starts: Tensor, lengths: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts ranges at `bounds`, which ascend and enclose them: (number of the interval, start,
    length) of each part.

    bounds 0 4 6 10    ranges 2-5, 6-8    parts 2-4, 4-5, 6-8    of intervals 0, 1, 2
    """
    ends = starts + lengths
    # The first interval of each range, and how many intervals it reaches into.
    first = torch.searchsorted(bounds, starts, right=True) - 1
    counts = (torch.searchsorted(bounds, ends) - first).clamp(min=0)
    interval = concatenated_ranges(first, counts)
    number = torch.repeat_interleave(counts)
    start = torch.maximum(starts[number], bounds[interval])
    end = torch.minimum(ends[number], bounds[interval + 1])
    return interval[start < end], start[start < end], (end - start)[start < end]


def is_first_of_run(x: Tensor) -> Tensor:
    """bool: whether an element differs from the one before it."""
    first = x.new_ones(1, dtype=torch.bool)
    others = x[1:] != x[:-1]
    return torch.cat((first, others))[: len(x)]
