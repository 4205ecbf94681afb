"""Which attention kernels `training.attention` stands for on a device, given how fast they are
there. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from math import log

from models.kernel_choice import FLASH_VERSIONS, auto_choices
from trainer.config.job_config import Config

Rates = Mapping[str, Mapping[int, tuple[float, float]]]
"""(forward, backward) by kernel and head dimension."""
PACKAGES = {"fa3": "flash-attn-3", "fa4": "flash-attn-4"}


@cache
def is_installed(kernel: str) -> bool:
    """Whether a version of FlashAttention that torch does not contain is there."""
    try:
        return bool(version(PACKAGES[kernel]))
    except PackageNotFoundError:
        return False


def nearest_rates(rates: Rates, kernel: str, head_dim: int) -> tuple[float, float]:
    """(forward, backward) rates at the nearest measured head dimension."""
    # Nearest by ratio: tiles and work grow in proportion, so 96 resembles 128 more than 64.
    by_width = rates[kernel]
    return by_width[min(by_width, key=lambda measured: abs(log(measured / head_dim)))]


def fastest_first(rates: Rates, head_dim: int) -> list[str]:
    """Kernels ordered by the time of forward and backward pass together."""

    def seconds(kernel: str) -> float:
        forward, backward = nearest_rates(rates, kernel, head_dim)
        # Rates are FLOP/s. Forward has two products (scores, output), backward five (scores once
        # more, and the gradients of values, probabilities, queries and keys).
        return 2 / forward + 5 / backward

    return sorted(rates, key=seconds)


def attention_choices(config: Config, generation: str | None, rates: Rates | None) -> list[str]:
    """Kernels to try, best first; one if the configuration names it.

    `rates`: None if nobody has measured the device.
    """
    if config.training.attention != "auto":
        return [config.training.attention]
    needs = config.attention_needs(generation)
    order = None
    if rates is not None:
        order = [
            each
            for each in fastest_first(rates, needs.head_dim)
            if each not in FLASH_VERSIONS or is_installed(each)
        ]
    return auto_choices(needs, order)
