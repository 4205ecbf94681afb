"""Whether code runs as on a GPU. A trace of it does, on fake tensors that are on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_traced_as_gpu = [False]


def runs_as_on_gpu(x: Tensor) -> bool:
    """Whether x is on a device other than the CPU, or traced as if it were."""
    return x.device.type != "cpu" or _traced_as_gpu[0]


@contextmanager
def traced_as_gpu() -> Iterator[None]:
    """Until the end of the context, code runs as on a GPU.

    For fake tensors only: other kernels would be missing.
    """
    _traced_as_gpu[0] = True
    try:
        yield
    finally:
        _traced_as_gpu[0] = False
