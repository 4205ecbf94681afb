"""MXFP4 weights (OCP Microscaling 1.0), as gpt-oss is published: 4-bit floats with an 8-bit
exponent for each 32.

Two tensors stand for a weight [experts, outputs, inputs]: `_blocks` [experts, outputs, inputs /
32, 16], two numbers in a byte, the lower half first; and `_scales` [experts, outputs, inputs /
32].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS = "_blocks"
SCALES = "_scales"
BLOCK_SIZE = 32
EXPONENT_BIAS = 127
NAN_SCALE = 255
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three bits; the fourth is the sign."""


def can_store(shape: Sequence[int]) -> bool:
    """Whether a tensor [experts, inputs, outputs] can be stored so."""
    return len(shape) == 3 and shape[1] % BLOCK_SIZE == 0


def stored_shapes(shape: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
    """Shapes of both tensors by suffix, for a weight [experts, outputs, inputs]."""
    experts, outputs, inputs = shape
    scales = (experts, outputs, inputs // BLOCK_SIZE)
    return {BLOCKS: (*scales, BLOCK_SIZE // 2), SCALES: scales}


def block_range(inputs: range) -> range:
    """The blocks that hold these inputs."""
    return range(inputs.start // BLOCK_SIZE, -(-inputs.stop // BLOCK_SIZE))


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """float32 [experts, outputs, inputs]; exact, infinite where float32 is, and NaN for a scale of
    255.
    """
    import torch

    values = torch.tensor([*VALUES, *(-value for value in VALUES)], device=blocks.device)
    halves = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2).int()
    # A scale byte e means 2 ** (e - 127). `ldexp` multiplies by it exactly.
    numbers = torch.ldexp(values[halves], scales.int().unsqueeze(-1) - EXPONENT_BIAS)
    return numbers.masked_fill_((scales == NAN_SCALE).unsqueeze(-1), torch.nan).flatten(-2)
