"""Deals the sequences of a step to data-parallel ranks and micro-batches, so that ranks have equal
work.

In every micro-batch all ranks wait for the busiest. Sequences of similar work therefore share a
micro-batch:

    work                7 2 6 1      dp_size 2    by number    7 2 | 6 1    waits for 7 + 6
                                                  dealt        7 6 | 2 1    waits for 7 + 2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations, product
from typing import NamedTuple

Deal = list[list[list[int]]]
"""[micro-batch][rank]: the places, in the step, of the sequences that the rank takes."""
Groups = list[list[int]]
"""Groups of sequences; each is what one rank takes in one micro-batch."""

MAX_SWAPPED = 48
"""Sequences of a step up to which all swaps are tried; with more, those dealt last are small
enough.
"""


def deal_sequences(work: Sequence[float], *, dp_size: int, micro_batch_size: int) -> Deal:
    """A pure function of the work of a step's sequences. Raises ValueError if their number is not
    divisible.

    The busiest rank of each micro-batch, summed over micro-batches, has the least work if a rank
    takes one sequence at a time; otherwise, nearly the least. Over a step, too, ranks have similar
    work.
    """
    if len(work) % (dp_size * micro_batch_size):
        raise ValueError(
            f"{len(work)} sequences are not a multiple of {dp_size} ranks times {micro_batch_size}"
        )
    groups = min(
        _candidates(work, dp_size, micro_batch_size),
        key=lambda groups: _waits(work, groups, dp_size),
    )
    if micro_batch_size > 1 and len(work) <= MAX_SWAPPED:
        _swap(work, groups, dp_size)
    totals = [sum(work[place] for place in places) for places in groups]
    # Ties are broken by number, because every rank deals by itself and must find the same.
    heaviest_first = sorted(range(len(groups)), key=lambda group: (-totals[group], groups[group]))
    dealt = list[list[list[int]]]()
    rank_totals = [0.0] * dp_size
    for first in range(0, len(groups), dp_size):
        micro_batch: list[list[int]] = [[] for _ in range(dp_size)]
        # The heaviest group goes to the rank with the least work so far: no wait of this
        # micro-batch changes, and the work of a step evens out.
        lightest_first = sorted(range(dp_size), key=lambda rank: (rank_totals[rank], rank))
        for group, rank in zip(
            heaviest_first[first : first + dp_size], lightest_first, strict=True
        ):
            micro_batch[rank] = sorted(groups[group])
            rank_totals[rank] += totals[group]
        dealt.append(micro_batch)
    return dealt


def busiest_and_means(work: Sequence[float], dealt: Deal) -> list[tuple[float, float]]:
    """(work of the busiest rank, mean over ranks) of each micro-batch."""
    by_rank = [[sum(work[place] for place in places) for places in ranks] for ranks in dealt]
    return [(max(totals), sum(totals) / len(totals)) for totals in by_rank]


class Cost(NamedTuple):
    """Cost of a token and of a (query, key) pair of a sequence, in any unit."""

    of_token: float
    of_pair: float

    def imbalance(self, *, busiest_pairs: float, mean_pairs: float, tokens: float) -> float:
        """The work of the busiest data-parallel rank over the mean, each summed over
        micro-batches.

        `tokens`: of one rank. All ranks have as many.
        """
        same = self.of_token * tokens
        return (self.of_pair * busiest_pairs + same) / (self.of_pair * mean_pairs + same)


def _candidates(work: Sequence[float], dp_size: int, micro_batch_size: int) -> Iterator[Groups]:
    """Groups by number; then in order of work, cut into blocks of 1, 2, 4, ... micro-batches that
    have similar groups.
    """
    yield [
        [*range(first, first + micro_batch_size)]
        for first in range(0, len(work), micro_batch_size)
    ]
    # Small blocks put sequences of similar work into a group, large ones a long sequence with
    # short ones. Which waits less depends on the work, so all are tried.
    order = sorted(range(len(work)), key=lambda place: (-work[place], place))
    block = dp_size * micro_batch_size
    while True:
        blocks = (order[first : first + block] for first in range(0, len(order), block))
        yield [
            group for places in blocks for group in _equal_groups(work, places, micro_batch_size)
        ]
        if micro_batch_size == 1 or block >= len(order):
            return
        block *= 2


def _equal_groups(work: Sequence[float], places: Sequence[int], size: int) -> Groups:
    """Longest processing time first (Graham, 1969): each goes to the group with the least work
    that is not full.
    """
    groups: Groups = [[] for _ in range(len(places) // size)]
    lightest = [(0.0, group) for group in range(len(groups))]
    heapify(lightest)
    for place in places:
        total, group = heappop(lightest)
        groups[group].append(place)
        if len(groups[group]) < size:
            heappush(lightest, (total + work[place], group))
    return groups


def _waits(work: Sequence[float], groups: Groups, dp_size: int) -> float:
    """The work of the busiest rank of each micro-batch, summed."""
    # In descending order, every dp_size-th group is the busiest of its micro-batch.
    totals = sorted((sum(work[place] for place in places) for places in groups), reverse=True)
    return sum(totals[::dp_size])


def _swap(work: Sequence[float], groups: Groups, dp_size: int) -> None:
    """Swaps sequences of two groups as long as that lowers `_waits`."""
    waits = _waits(work, groups, dp_size)
    last = float("inf")
    while waits < last:
        last = waits
        for one, other in combinations(groups, 2):
            for i, j in product(range(len(one)), range(len(other))):
                one[i], other[j] = other[j], one[i]
                swapped = _waits(work, groups, dp_size)
                # Less by more than rounding, or two swaps could undo each other for ever.
                if swapped < waits * (1 - 1e-12):
                    waits = swapped
                else:
                    one[i], other[j] = other[j], one[i]
