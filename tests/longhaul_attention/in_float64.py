"""transformers computes norms, rotations, routers and losses in float32, whatever the model's
dtype: here in float64, so that an error of one token among thousands is seen.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from parallelisms.context.ring import core_of


@contextmanager
def float64_throughout() -> Iterator[None]:
    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
    core_of.cache_clear()  # Some of these would send float64 in every later call.
