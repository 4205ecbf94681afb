"""The batches of data-parallel groups are those of one process: rows, order, epochs, the last
batch, resuming.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from longhaul_attention import ContextParallel, share_batches
from longhaul_attention.group_loader import KEPT_OPTIONS, NUM_ROWS, regrouped

ROWS = (1, 2, 3, 5, 6, 7, 12)
BATCHES = (1, 2, 3)
GROUPS = (1, 2, 3)


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def dataset_of(rows: int) -> Any:
    """Their numbers."""
    return range(rows)


def collate(rows: list[int]) -> dict[str, Any]:
    return {"input_ids": torch.tensor(rows), "labels": torch.tensor(rows)}


def loader(
    rows: int, batch: int, *, shuffled: bool, streamed: bool, drop_last: bool
) -> DataLoader[Any]:
    options: dict[str, Any] = (
        {} if streamed else {"shuffle": shuffled, "generator": torch.Generator().manual_seed(3)}
    )
    dataset: Any = Stream(rows) if streamed else dataset_of(rows)
    return DataLoader(
        dataset, batch_size=batch, collate_fn=collate, drop_last=drop_last, **options
    )


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", ["in order", "shuffled", "streamed"])
def test_the_groups_batches_together_are_those_of_one_process(
    kind: str, *, drop_last: bool
) -> None:
    given: dict[str, Any] = {
        "shuffled": kind == "shuffled",
        "streamed": kind == "streamed",
        "drop_last": drop_last,
    }
    for rows, batch, groups in product(ROWS, BATCHES, GROUPS):
        one = loader(rows, groups * batch, **given)
        each = [
            regrouped(loader(rows, batch, **given), groups=groups, group=group, counts_rows=True)
            for group in range(groups)
        ]
        for _ in range(2):  # Epochs.
            expected = [whole["input_ids"].tolist() for whole in one]
            parts = [*zip(*each, strict=True)]
            assert [
                [
                    row
                    for part in batches
                    for row in part["input_ids"].tolist()[: int(part[NUM_ROWS])]
                ]
                for batches in parts
            ] == expected
            for part in (part for batches in parts for part in batches):
                is_own = int(part[NUM_ROWS]) > 0
                assert len(part["input_ids"]) == max(1, int(part[NUM_ROWS])) <= batch
                assert part["labels"].tolist() == (
                    part["input_ids"].tolist() if is_own else [-100]
                )
        if kind != "streamed":
            assert {len(own) for own in each} == {len(one)}


def test_workers_read_the_rows_of_one_process() -> None:
    one: DataLoader[Any] = DataLoader(
        dataset_of(9), batch_size=4, collate_fn=collate, num_workers=1
    )
    own = regrouped(
        DataLoader(dataset_of(9), batch_size=2, collate_fn=collate, num_workers=1),
        groups=2,
        group=1,
    )
    assert [batch["input_ids"].tolist() for batch in own] == [[2, 3], [6, 7], [8]]
    assert [batch["labels"].tolist() for batch in own][-1] == [-100]
    assert [len(batch["input_ids"]) for batch in one] == [4, 4, 1]


def test_options_that_say_nothing_of_rows_are_kept() -> None:
    given = DataLoader(
        dataset_of(4), batch_size=2, num_workers=1, in_order=False, timeout=7, prefetch_factor=3
    )
    own = regrouped(given, groups=2, group=0)
    for name in (*KEPT_OPTIONS, "prefetch_factor", "persistent_workers"):
        assert getattr(own, name) == getattr(given, name), name


def test_loaders_that_ranks_would_read_otherwise_are_refused() -> None:
    cp = ContextParallel(None, method="ring")
    with pytest.raises(
        ValueError, match=r"shuffle=True needs generator=torch.Generator\(\).manual_seed"
    ):
        share_batches(DataLoader(dataset_of(4), batch_size=2, shuffle=True), cp)
    with pytest.raises(ValueError, match="needs a batch_size, not a batch_sampler of its own"):
        share_batches(
            DataLoader(
                dataset_of(4),
                batch_sampler=BatchSampler(SequentialSampler(dataset_of(4)), 2, drop_last=False),
            ),
            cp,
        )
    with pytest.raises(
        ValueError, match="list: give a DataLoader of torch that accelerate has not prepared"
    ):
        share_batches([1], cp)
    with pytest.raises(ValueError, match="a streamed dataset needs a batch_size"):
        share_batches(DataLoader(Stream(3), batch_size=None), cp)
    assert [
        batch["input_ids"].tolist()
        for batch in share_batches(DataLoader(dataset_of(3), batch_size=2, collate_fn=collate), cp)
    ] == [[0, 1], [2]]
