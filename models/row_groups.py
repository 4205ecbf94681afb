"""Groups of rows, one for each expert, where torch's grouped product can take them.

The product needs groups that begin at multiples of 8 rows. Rows of padding make them so: copies of
some token, whose weight is zero, so that they add nothing to any sum.

Shape suffixes: R rows without and P rows with padding, X experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.device_paths import runs_as_on_gpu
from models.expert_config import GROUP_ALIGNMENT


def has_grouped_product(device: Tensor, dtype: torch.dtype) -> bool:
    """Whether one kernel computes the products of all groups; `device` is any tensor there."""
    return runs_as_on_gpu(device) and dtype == torch.bfloat16


class RowGroups(NamedTuple):
    """The rows of experts, one expert after the other."""

    counts: Sequence[int]
    """Rows of each expert, for a loop over them; empty where one kernel takes all."""
    ends: Tensor | None = None
    """[X] int32, for that kernel: the row after the last of each expert, on the device.

    Rows after all belong to none.
    """


class RowPlaces(NamedTuple):
    """Permutation of rows to their places among those of experts, and back."""

    source: Tensor
    """[P], the row that is at each place; 0 where there is only padding."""
    place: Tensor
    """[R], the place of each row."""

    @classmethod
    def sorted(cls, source_R: Tensor, place_R: Tensor, num_places: int) -> RowPlaces:
        """Places of rows that are ordered by expert, and the way back."""
        # Distinct targets: each row has a place of its own, so the scatters are deterministic.
        source_P = source_R.new_zeros(num_places).scatter_(0, place_R, source_R)
        return cls(source_P, torch.empty_like(source_R).scatter_(0, source_R, place_R))


def padded_ends(counts_X: Tensor) -> Tensor:
    """[X]: a group without rows has padding too, because the kernel would leave its weight
    gradient as it was.
    """
    padded_X = (counts_X.clamp(min=1) + (GROUP_ALIGNMENT - 1)) // GROUP_ALIGNMENT * GROUP_ALIGNMENT
    return padded_X.cumsum(0)


def padded_shifts(counts_X: Tensor, ends_X: Tensor) -> Tensor:
    """[X], padding before the rows of each expert: zero before those of the first."""
    return torch.cat((ends_X.new_zeros(1), (ends_X - counts_X.cumsum(0))[:-1]))
