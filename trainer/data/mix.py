"""Which of several sources a row is from: a function of its number, exact in proportion after every row.

weights 3, 1    rows    0 1 2 3   4 5 6 7        the shares return every `sum of weights` rows
                from    a a b a   a a b a
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from fractions import Fraction
from itertools import repeat
from math import gcd, lcm

MAX_PERIOD = 100_000  # rows of the longest round


class WeightedRoundRobin:
    """Smooth weighted round-robin: before each row every source gains its weight; who has most is drawn and pays all.

    The number of rows from a source is within one of its share after every row (two sources), and near it for more.
    What is drawn repeats after as many rows as the smallest integers in proportion to the weights sum to, so that one
    such round is all there is to know.
    """

    def __init__(self, weights: Sequence[float | Fraction]) -> None:
        """Raises ValueError for a weight that is not positive or vanishes beside the others."""
        self.weights = integer_weights(weights)
        self.period = sum(self.weights)
        self._source_at, self._count_before = array("H"), array("l")
        credit, counts = [0] * len(self.weights), [0] * len(self.weights)
        for _ in repeat(None, self.period):
            for source, weight in enumerate(self.weights):
                credit[source] += weight
            selected = credit.index(max(credit))
            credit[selected] -= self.period
            self._source_at.append(selected)
            self._count_before.append(counts[selected])
            counts[selected] += 1

    def locate(self, index: int) -> tuple[int, int]:
        """(source, how many rows were from it before) of a row."""
        cycles, position = divmod(index, self.period)
        source = self._source_at[position]
        return source, cycles * self.weights[source] + self._count_before[position]

    def counts(self, num_sequences: int) -> list[int]:
        """How many of so many first rows are from each source."""
        cycles, remainder = divmod(num_sequences, self.period)
        counts = [cycles * share for share in self.weights]
        for source in self._source_at[:remainder]:
            counts[source] += 1
        return counts


def integer_weights(weights: Sequence[float | Fraction]) -> list[int]:
    """The smallest in proportion to the weights; in proportion to 1/PARTS of their sum, if they sum to more."""
    if not weights or min(weights) <= 0:
        raise ValueError(f"weights {list(weights)} must be positive")
    fractions = [Fraction(str(weight)) for weight in weights]
    denominator = lcm(*(weight.denominator for weight in fractions))
    scaled = [int(weight * denominator) for weight in fractions]
    if sum(scaled) // gcd(*scaled) > MAX_PERIOD:
        scaled = [round(weight / sum(fractions) * MAX_PERIOD) for weight in fractions]
    if min(scaled) == 0:
        raise ValueError(f"weights {list(weights)} differ too much")
    return [share // gcd(*scaled) for share in scaled]
