"""The batches of a data-parallel group: rows, order and epochs are those of one process.

Ranks that share sequences take the same rows. Of each batch of one process, which has the rows of
all groups, a group takes its part. Where the last batch of an epoch has fewer rows than there are
groups, a group without any repeats a row, and none of its tokens has a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from longhaul_attention.context_parallel import ContextParallel
from models.batch import IGNORE_INDEX

T = TypeVar("T")
NUM_ROWS = "num_rows"
"""Key of the number of rows of a batch that no other group has."""
LABELS = ("labels", "shift_labels")
KEPT_OPTIONS = (
    "generator",
    "in_order",
    "multiprocessing_context",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
)
"""Options of a DataLoader that do not say which rows it reads."""


def share_batches(loader: Any, cp: ContextParallel) -> Any:
    """The loader of this rank: that of one process whose batches have `batch_size` rows for each
    data-parallel group.

    `loader` is torch's `DataLoader`, not yet prepared by accelerate, the same on all ranks; ranks
    that share sequences are neighbours, so the groups are those of `cp`. Its collator makes whole
    batches. Order, epochs, the last batch and resuming are those of one process. Raises ValueError
    for a loader that ranks would read in orders of their own.
    """
    groups, group = group_of(cp)
    if not isinstance(loader, DataLoader) or hasattr(
        getattr(loader, "batch_sampler", None), "num_processes"
    ):
        raise ValueError(
            f"{type(loader).__name__}: give a DataLoader of torch that accelerate has not prepared"
        )
    if isinstance(loader.sampler, RandomSampler) and loader.sampler.generator is None:
        raise ValueError(
            "shuffle=True needs generator=torch.Generator().manual_seed(...), so that all ranks draw one order"
        )
    return regrouped(loader, groups=groups, group=group)


def regrouped(
    loader: DataLoader[Any], *, groups: int, group: int, counts_rows: bool = False
) -> Any:
    """The same loader for one of several groups, whose batches together are those of one process.

    `counts_rows`: batches say how many rows are this group's own, as `num_rows`.
    """
    options: dict[str, Any] = {name: getattr(loader, name) for name in KEPT_OPTIONS}
    if loader.num_workers:
        options |= {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
        }
    options["collate_fn"] = CollatedRows(loader.collate_fn, counts_rows=counts_rows)
    if isinstance(loader.dataset, IterableDataset):
        # Without a batch_size its items are batches, whose rows cannot be dealt to groups.
        if loader.batch_size is None:
            raise ValueError("a streamed dataset needs a batch_size")
        rows = StreamedRows(
            loader.dataset,
            loader.batch_size,
            groups=groups,
            group=group,
            drop_last=loader.drop_last,
        )
        return DataLoader(rows, batch_size=loader.batch_size, **options)
    if loader.batch_size is None or loader.batch_sampler is None:
        raise ValueError(
            "a DataLoader needs a batch_size, not a batch_sampler of its own: batches are dealt to groups"
        )
    sampler = GroupBatchSampler(
        loader.sampler, loader.batch_size, groups=groups, group=group, drop_last=loader.drop_last
    )
    return DataLoader(Rows(loader.dataset), batch_sampler=sampler, **options)


def group_of(cp: ContextParallel) -> tuple[int, int]:
    """Number of groups that share sequences, and the index of this rank's."""
    ranks, rank = (
        (distributed.get_world_size(), distributed.get_rank())
        if distributed.is_initialized()
        else (1, 0)
    )
    if ranks % cp.plan.cp or rank % cp.plan.cp != cp.rank:
        raise ValueError(
            f"ranks that share sequences must be neighbours: rank {rank} of {ranks} is {cp.rank} of {cp.plan.cp}"
        )
    return ranks // cp.plan.cp, rank // cp.plan.cp


class Row(int):
    """The index of a row that another group has, too."""


def part_of(batch: Sequence[T], size: int, *, group: int) -> Sequence[T]:
    """The rows of one group in a batch of one process: `size` of them or, in the last batch of an
    epoch, fewer.
    """
    return batch[group * size : (group + 1) * size]


class GroupBatchSampler(Sampler[list[int]]):
    """Deals one group its indices of each batch of one process."""

    def __init__(
        self, sampler: Any, batch_size: int, *, groups: int, group: int, drop_last: bool
    ) -> None:
        self.sampler = sampler
        self.group = group
        self._size = batch_size
        self.batch_size = groups * batch_size
        self.drop_last = drop_last
        """Whether a last batch with fewer rows is left out. `batch_size` counts the rows of one
        process's batch.
        """

    def _batches(self) -> BatchSampler:
        return BatchSampler(self.sampler, self.batch_size, self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches():
            # A group without rows repeats one, marked, because all groups must take the same
            # steps.
            yield [*part_of(batch, self._size, group=self.group)] or [Row(batch[0])]

    def __len__(self) -> int:
        return len(self._batches())


class Rows(Dataset[tuple[Any, bool]]):
    """Rows of a dataset, and whether each is this group's own."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def total_dataset_length(self) -> int:
        """The number of rows by which accelerate would cut a last batch: no rows are repeated
        here.
        """
        return 0

    def __getitem__(self, index: int) -> tuple[Any, bool]:
        return self.dataset[int(index)], not isinstance(index, Row)

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, bool]]:
        # A dataset may read the rows of a batch together.
        get = getattr(self.dataset, "__getitems__", None)
        rows = (
            [self.dataset[int(index)] for index in indices]
            if get is None
            else get([*map(int, indices)])
        )
        return [
            (row, not isinstance(index, Row)) for row, index in zip(rows, indices, strict=True)
        ]


class StreamedRows(IterableDataset[tuple[Any, bool]]):
    """The rows of one group of a dataset that is read in order, and whether each is its own."""

    def __init__(
        self, dataset: Any, batch_size: int, *, groups: int, group: int, drop_last: bool
    ) -> None:
        self.dataset = dataset
        self.groups = groups
        self.group = group
        self.batch_size = batch_size
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        rows = iter(self.dataset)
        size = self.groups * self.batch_size
        while batch := [*islice(rows, size)]:
            if len(batch) < size and self.drop_last:
                return
            own = part_of(batch, self.batch_size, group=self.group)
            yield from ((row, True) for row in own)
            if not own:
                yield batch[0], False

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


class CollatedRows:
    """A collator of rows: without labels where they are another group's."""

    def __init__(self, collate: Callable[[Any], Any], *, counts_rows: bool) -> None:
        self.collate = collate
        self.counts_rows = counts_rows

    def __call__(self, rows: Sequence[tuple[Any, bool]]) -> Any:
        batch = self.collate([row for row, _ in rows])
        is_own = rows[0][1]
        if self.counts_rows:
            batch[NUM_ROWS] = torch.tensor(len(rows) if is_own else 0)
        for key in () if is_own else LABELS:
            if key in batch:
                batch[key] = torch.full_like(batch[key], IGNORE_INDEX)
        return batch
