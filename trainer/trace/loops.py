"""Runs few parts of long loops over tiles, chunks and hops, and counts each for all that are like
it.

What the body of a loop keeps of every part counts at the end of the loop, not while its last parts
run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from models.tiling import Likeness, loops_run_by
from trainer.trace.operators import OpCounterMode

FIRST_PARTS = 2
LAST_PARTS = 1
"""Sums are allocated for the first part, or widened for the second; the last one may be shorter,
or send nothing on.
"""


class Repeated(NamedTuple):
    part: int
    """Place of the part that runs."""
    times: int
    """How many parts it counts for."""


@contextmanager
def shortened_loops(counter: OpCounterMode) -> Iterator[None]:
    with loops_run_by(partial(_run, counter)):
        yield


def shortened(kinds: Sequence[Hashable]) -> list[Repeated]:
    """The first parts, one of every kind between, and the last."""
    end = max(FIRST_PARTS, len(kinds) - LAST_PARTS)
    between = kinds[FIRST_PARTS:end]
    counts = Counter(between)
    found = [Repeated(FIRST_PARTS + between.index(kind), counts[kind]) for kind in counts]
    ends = (*range(min(FIRST_PARTS, len(kinds))), *range(end, len(kinds)))
    return sorted([*found, *(Repeated(index, 1) for index in ends)])


def _run(counter: OpCounterMode, parts: Sequence[Any], likeness: Likeness) -> Iterator[Any]:
    # Too short to leave out a part.
    if len(parts) <= FIRST_PARTS + LAST_PARTS + 1:
        yield from parts
        return
    kept = list[tuple[range, int]]()
    for index, times in shortened([likeness(part) for part in parts]):
        with counter.repeated(times):
            first = counter.storages.num_added
            yield parts[index]
            # Storages of this part are those added while it ran.
            kept.append((range(first, counter.storages.num_added), times))
    for numbers, times in kept:
        counter.storages.multiply(numbers, times)
