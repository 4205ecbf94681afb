"""A stateless shuffle: a Feistel network with cycle walking."""

from __future__ import annotations

MASK64 = (1 << 64) - 1
ROUNDS = 4


def shuffled_index(index: int, *, size: int, seed: int, epoch: int) -> int:
    """Image of `index` under the permutation of range(size) that `seed` and `epoch` select."""
    if not 0 <= index < size:
        raise ValueError(f"index = {index} is not in range({size})")
    bits = ((size - 1).bit_length() + 1) // 2  # of each half; the network permutes fewer than 4 * size numbers
    key = splitmix64(splitmix64(seed) ^ epoch)
    while True:
        left, right = index >> bits, index & ((1 << bits) - 1)
        for number in range(ROUNDS):
            left, right = right, left ^ (splitmix64(key + (number << 32) ^ right) & ((1 << bits) - 1))
        index = left << bits | right
        if index < size:
            return index


def splitmix64(value: int) -> int:
    """64-bit hash: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK64
    return value ^ value >> 31
