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

PARTS = 100_000  # rows of the longest round


class Mix:
    """Smooth weighted round-robin: before each row every source gains its weight; who has most is drawn and pays all.

    The number of rows from a source is within one of its share after every row (two sources), and near it for more.
    What is drawn repeats after as many rows as the smallest integers in proportion to the weights sum to, so that one
    such round is all there is to know.
    """

    def __init__(self, weights: Sequence[float | Fraction]) -> None:
        """Raises ValueError for a weight that is not positive or vanishes beside the others."""
        self.shares = integers(weights)
        self.round = sum(self.shares)
        self._drawn, self._before = array("H"), array("l")
        gained, counts = [0] * len(self.shares), [0] * len(self.shares)
        for _ in repeat(None, self.round):
            for source, share in enumerate(self.shares):
                gained[source] += share
            most = gained.index(max(gained))
            gained[most] -= self.round
            self._drawn.append(most)
            self._before.append(counts[most])
            counts[most] += 1

    def locate(self, row: int) -> tuple[int, int]:
        """(source, how many rows were from it before) of a row."""
        rounds, place = divmod(row, self.round)
        source = self._drawn[place]
        return source, rounds * self.shares[source] + self._before[place]

    def counts(self, rows: int) -> list[int]:
        """How many of so many first rows are from each source."""
        rounds, rest = divmod(rows, self.round)
        counts = [rounds * share for share in self.shares]
        for source in self._drawn[:rest]:
            counts[source] += 1
        return counts


def integers(weights: Sequence[float | Fraction]) -> list[int]:
    """The smallest in proportion to the weights; in proportion to 1/PARTS of their sum, if they sum to more."""
    if not weights or min(weights) <= 0:
        raise ValueError(f"weights {list(weights)} must be positive")
    exact = [Fraction(str(weight)) for weight in weights]
    finest = lcm(*(weight.denominator for weight in exact))
    shares = [int(weight * finest) for weight in exact]
    if sum(shares) // gcd(*shares) > PARTS:
        shares = [round(weight / sum(exact) * PARTS) for weight in exact]
    if min(shares) == 0:
        raise ValueError(f"weights {list(weights)} differ too much")
    return [share // gcd(*shares) for share in shares]
