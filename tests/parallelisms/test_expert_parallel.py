"""Places of the rows that other ranks send to a rank's experts."""

from __future__ import annotations

import random

import pytest
import torch

from models.row_groups import RowGroups
from parallelisms.expert_parallel import _places


def drawn(seed: int) -> list[list[int]]:
    """Rows of every source for each expert, none of some."""
    draw = random.Random(seed)
    sources, experts = draw.randint(1, 5), draw.randint(1, 6)
    return [
        [draw.choice((0, 0, 1, 2, 7, 8, 9, 20)) for _ in range(experts)] for _ in range(sources)
    ]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_rows_are_put_by_expert_and_then_by_source(seed: int, *, padded: bool) -> None:
    counts = drawn(seed)
    num_experts = len(counts[0])
    arriving = [
        (expert, source)
        for source, of_source in enumerate(counts)
        for expert, count in enumerate(of_source)
        for _ in range(count)
    ]
    counts_SX = torch.tensor(counts)
    places, groups = _places(counts_SX, torch.device("cpu"), padded=padded)
    by_expert = [sum(of_expert) for of_expert in zip(*counts, strict=True)]
    is_padded = padded and bool(arriving)
    if is_padded:
        lengths = [-(-max(1, count) // 8) * 8 for count in by_expert]
        ends = [sum(lengths[: expert + 1]) for expert in range(num_experts)]
        assert groups.ends is not None
        assert groups.ends.tolist() == ends
    else:
        lengths = by_expert
        assert groups == RowGroups(by_expert)
    starts = [sum(lengths[:expert]) for expert in range(num_experts)]
    # A stable sort is all that the order of rows is.
    order = sorted(range(len(arriving)), key=lambda row: arriving[row])
    seen = [0] * num_experts
    expected = [0] * len(arriving)
    for row in order:
        expert, _ = arriving[row]
        expected[row] = starts[expert] + seen[expert]
        seen[expert] += 1
    assert places.place.tolist() == expected
    assert len(places.source) == sum(lengths)
    assert [places.source[place].item() for place in expected] == [*range(len(arriving))]
