"""The dtype of every sum."""

from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for statistics, sums and log-sum-exps over tensors of `dtype`: float64 for
    float64, else float32.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32
