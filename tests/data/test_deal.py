"""Dealing sequences by work: every sequence once, equal counts, and nearly the least waiting that
any deal has.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest

from trainer.data.deal import Cost, busiest_and_means, deal_sequences

SIZES = [
    (dp_size, micro_batch_size, micro_batches)
    for dp_size in (1, 2, 3, 4)
    for micro_batch_size in (1, 2, 3)
    for micro_batches in (1, 2, 3)
    if dp_size * micro_batch_size * micro_batches <= 9
]


def drawn(count: int, seed: int) -> list[float]:
    """Tokens, which all sequences have, and pairs of a heavy tail."""
    rng = random.Random(f"{count} {seed}")
    draw = rng.choice(
        [rng.random, lambda: rng.paretovariate(1.1), lambda: rng.lognormvariate(0, 2)]
    )
    tokens = rng.choice([0.0, 0.5, 3.0])
    return [tokens + draw() for _ in range(count)]


def waits(work: Sequence[float], dp_size: int, micro_batch_size: int) -> float:
    dealt = deal_sequences(work, dp_size=dp_size, micro_batch_size=micro_batch_size)
    return sum(busiest for busiest, _ in busiest_and_means(work, dealt))


def groupings(places: Sequence[int], size: int) -> Iterator[list[tuple[int, ...]]]:
    """Every way to form groups of `size`."""
    if not places:
        yield []
    for others in combinations(places[1:], size - 1) if places else ():
        group = (places[0], *others)
        for rest in groupings([place for place in places if place not in group], size):
            yield [group, *rest]


def least_waits(work: Sequence[float], dp_size: int, micro_batch_size: int) -> float:
    """By exhaustive search. Of given groups, those of most work share a micro-batch."""
    return min(
        sum(
            sorted((sum(work[place] for place in group) for group in groups), reverse=True)[
                ::dp_size
            ]
        )
        for groups in groupings(range(len(work)), micro_batch_size)
    )


@pytest.mark.parametrize(("dp_size", "micro_batch_size", "micro_batches"), SIZES)
def test_every_sequence_is_dealt_once_and_nearly_optimally(
    dp_size: int, micro_batch_size: int, micro_batches: int
) -> None:
    for seed in range(20):
        work = drawn(dp_size * micro_batch_size * micro_batches, seed)
        dealt = deal_sequences(work, dp_size=dp_size, micro_batch_size=micro_batch_size)
        assert len(dealt) == micro_batches
        assert {len(ranks) for ranks in dealt} == {dp_size}
        assert {len(places) for ranks in dealt for places in ranks} == {micro_batch_size}
        assert sorted(place for ranks in dealt for places in ranks for place in places) == [
            *range(len(work))
        ]
        found = waits(work, dp_size, micro_batch_size)
        least = least_waits(work, dp_size, micro_batch_size)
        assert (
            least * (1 - 1e-12) <= found <= least * (1 + 1e-12 if micro_batch_size == 1 else 1.05)
        )


def test_a_step_with_many_micro_batches_waits_for_hardly_more_than_the_mean() -> None:
    work = drawn(512, 3)
    for micro_batch_size in (1, 2, 4):
        dealt = deal_sequences(work, dp_size=8, micro_batch_size=micro_batch_size)
        busiest, mean = (sum(each) for each in zip(*busiest_and_means(work, dealt), strict=True))
        first = [sum(work[place] for place in places) for places in dealt[0]]
        assert busiest <= 1.05 * max(mean, mean + max(first) - sum(first) / 8)


def test_ranks_have_similar_work_over_a_step() -> None:
    work = [float(place % 7) for place in range(64)]
    totals = [0.0] * 4
    for ranks in deal_sequences(work, dp_size=4, micro_batch_size=1):
        for rank, places in enumerate(ranks):
            totals[rank] += sum(work[place] for place in places)
    assert max(totals) <= 1.05 * min(totals)


def test_equal_work_is_dealt_by_number() -> None:
    assert deal_sequences([2.0] * 8, dp_size=2, micro_batch_size=2) == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
    ]


def test_a_number_of_sequences_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(ValueError, match="7 sequences are not a multiple of 2 ranks times 2"):
        deal_sequences([1.0] * 7, dp_size=2, micro_batch_size=2)


def test_imbalance_counts_tokens_and_pairs() -> None:
    cost = Cost(of_token=2.0, of_pair=0.5)
    assert cost.imbalance(busiest_pairs=100, mean_pairs=60, tokens=10) == (50 + 20) / (30 + 20)
    assert cost.imbalance(busiest_pairs=0, mean_pairs=0, tokens=10) == 1
