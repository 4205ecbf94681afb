"""Named tensors, and the moments of a step at which they are alive. Imports no torch.

A moment is a sum of tensors: nothing is ever subtracted, so no line of it can be negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

DTYPE_BYTES = {
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}
LINES = (
    "parameters",
    "gradients",
    "optimizer state",
    "gathered weights",
    "unreduced gradients",
    "saved activations",
    "transient activations",
    "loss head",
    "pipeline messages",
    "matmul workspaces",
    "async-checkpoint staging",
    "in-memory checkpoints",
    "batch",
)
CUBLAS_HANDLES = 2
"""One for each thread that multiplies: the main thread, and autograd's."""
CUBLAS_WORKSPACE = 32 << 20
"""Bytes of a handle: torch's default from compute capability 9.0 on."""
SAVED_ACTIVATIONS = "saved activations"
TRANSIENT_ACTIVATIONS = "transient activations"


class MemoryTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str
    line: str = TRANSIENT_ACTIVATIONS
    """The line of a plan's table that it belongs to."""
    source: str = ""
    """`file: name` of the code that allocates it."""
    lifetime: str = ""
    copies: float = 1
    """How many there are; a fraction where a budget cuts some off."""
    on_host: bool = False

    @property
    def bytes(self) -> float:
        return self.copies * prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class MemoryItem:
    """One line of a moment."""

    name: str
    device_bytes: float = 0
    host_bytes: float = 0


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of a rank at one moment of a step."""

    phase: str
    pp_rank: int
    pp: int
    tensors: tuple[MemoryTensor, ...]

    @cached_property
    def device_bytes(self) -> float:
        return sum(each.bytes for each in self.tensors if not each.on_host)

    @cached_property
    def host_bytes(self) -> float:
        return sum(each.bytes for each in self.tensors if each.on_host)

    @cached_property
    def items(self) -> tuple[MemoryItem, ...]:
        return tuple(self.item(line) for line in LINES)

    def item(self, name: str) -> MemoryItem:
        of_line = [each for each in self.tensors if each.line == name]
        device, host = (
            sum(each.bytes for each in of_line if each.on_host == on_host)
            for on_host in (False, True)
        )
        return MemoryItem(name, device, host)

    @property
    def largest_items(self) -> list[MemoryItem]:
        """The three that need most of the device."""
        return sorted(self.items, key=lambda item: -item.device_bytes)[:3]
