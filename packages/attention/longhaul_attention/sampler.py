"""A sampler for trainers that deal batches to ranks in turn, such as those built on accelerate."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any

from torch.utils.data import Sampler


class RepeatSampler(Sampler[int]):
    """Every batch of a sampler `ranks` times, so that all ranks that share a sequence are dealt the same batch.

    The context-parallel ranks are neighbours, and `batch_size` is that of a rank. A last batch that is not full is dropped.
    """

    def __init__(self, sampler: Any, batch_size: int, ranks: int) -> None:
        self.sampler, self.batch_size, self.ranks = sampler, batch_size, ranks

    def __iter__(self) -> Iterator[int]:
        indices = iter(self.sampler)
        while len(batch := [*islice(indices, self.batch_size)]) == self.batch_size:
            yield from batch * self.ranks

    def __len__(self) -> int:
        sampler: Sized = self.sampler
        return len(sampler) // self.batch_size * self.batch_size * self.ranks

    @property
    def generator(self) -> Any:
        """That of the sampler, which trainers give all ranks."""
        return getattr(self.sampler, "generator", None)

    @generator.setter
    def generator(self, generator: Any) -> None:
        self.sampler.generator = generator

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
