"""Shuffles that are pure functions of a seed: the same on every machine and with every version of
torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Four rounds of a Feistel network with a random round function make a strong pseudorandom
# permutation (Luby and Rackoff, 1988). The hexadecimal numbers are SplitMix64's.
MASK64 = (1 << 64) - 1
ROUNDS = 4
INCREMENT = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB


def shuffled_index(index: int, *, size: int, seed: int, epoch: int) -> int:
    """Image of `index` under the permutation of range(size) that `seed` and `epoch` select."""
    if not 0 <= index < size:
        raise ValueError(f"index = {index} is not in range({size})")
    # Bits of each half. The network permutes a power of 4 below 4 * size; images outside the range
    # are permuted again (cycle walking), which keeps it a permutation of the range.
    bits = ((size - 1).bit_length() + 1) // 2
    key = splitmix64(splitmix64(seed) ^ epoch)
    while True:
        left = index >> bits
        right = index & ((1 << bits) - 1)
        for number in range(ROUNDS):
            left, right = (
                right,
                left ^ (splitmix64(key + (number << 32) ^ right) & ((1 << bits) - 1)),
            )
        index = left << bits | right
        if index < size:
            return index


def shuffled_order(size: int, *, seed: int) -> Tensor:
    """int64 [size]: a permutation of range(size), all of it at once."""
    return splitmix64s(torch.arange(size) ^ _signed(splitmix64(seed))).argsort(stable=True)


def splitmix64(value: int) -> int:
    """64-bit hash: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value + INCREMENT) & MASK64
    value = (value ^ value >> 30) * FIRST & MASK64
    value = (value ^ value >> 27) * SECOND & MASK64
    return value ^ value >> 31


def splitmix64s(values: Tensor) -> Tensor:
    """`splitmix64` of int64 numbers, as signed numbers with the same bits."""
    # int64 wraps around as uint64 does, for which torch has few operations.
    values = values + _signed(INCREMENT)
    values = (values ^ _shifted(values, 30)) * _signed(FIRST)
    values = (values ^ _shifted(values, 27)) * _signed(SECOND)
    return values ^ _shifted(values, 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shifted(values: Tensor, bits: int) -> Tensor:
    """The values shifted to the right logically: zeros move in, not the sign."""
    return values >> bits & ((1 << 64 - bits) - 1)
