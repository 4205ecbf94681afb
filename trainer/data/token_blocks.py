"""Blocks of a shard of prepared tokens, each compared with its hash before a token in it is used."""

from __future__ import annotations

import hashlib
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from models.ranges import concatenated_ranges
from trainer.storage.artifact import DamageError

DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class BlockLayout:
    """How the tokens of a shard are cut into blocks, and the sha256 of each."""

    num_bytes: int
    block_bytes: int
    digests: bytes
    dtype: torch.dtype

    @property
    def num_blocks(self) -> int:
        return -(-self.num_bytes // self.block_bytes)

    def of_tokens(self, starts: Tensor, lengths: Tensor) -> list[int]:
        """The blocks that hold ranges of tokens, in ascending order."""
        first = starts * self.dtype.itemsize // self.block_bytes
        last = ((starts + lengths) * self.dtype.itemsize - 1) // self.block_bytes
        blocks: list[int] = concatenated_ranges(first, last - first + 1).unique().tolist()
        return blocks

    def size(self, block: int) -> int:
        return min(self.block_bytes, self.num_bytes - block * self.block_bytes)

    def is_intact(self, block: int, content: bytes | memoryview) -> bool:
        digest = self.digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
        return len(content) == self.size(block) and hashlib.sha256(content).digest() == digest

    def require_intact(self, block: int, content: bytes | memoryview) -> None:
        """Raises `DamageError` with the bytes of the shard that differ."""
        if not self.is_intact(block, content):
            start = block * self.block_bytes
            raise DamageError(
                f"checksum mismatch in bytes {start:,} to {start + self.size(block):,}"
            )


class MappedShard:
    """Tokens of a shard, mapped into memory, and which of its blocks were found intact."""

    def __init__(self, content: mmap.mmap, layout: BlockLayout) -> None:
        self._tokens = torch.frombuffer(content, dtype=layout.dtype)
        self._bytes = memoryview(content)
        self._layout = layout
        self._is_intact = torch.zeros(layout.num_blocks, dtype=torch.bool)

    def read(self, starts: Tensor, lengths: Tensor) -> Tensor:
        """Ranges of tokens, concatenated; each block is hashed when it is first read.

        Raises `DamageError`.
        """
        # Each process hashes a block once, however many tokens of it are read.
        for block in self._layout.of_tokens(starts, lengths):
            if not self._is_intact[block]:
                at = block * self._layout.block_bytes
                self._layout.require_intact(block, self._bytes[at : at + self._layout.size(block)])
                self._is_intact[block] = True
        return self._tokens[concatenated_ranges(starts, lengths)]
