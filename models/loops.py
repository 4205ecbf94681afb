"""Loops over parts that cost alike: tiles, chunks, hops of a ring. A trace on fake tensors runs few of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

Part = TypeVar("Part")
Likeness = Callable[[Any], Hashable]
"""Equal for parts that take the same operations on tensors of the same shapes, wherever they are in the loop."""
Loop = Callable[[Sequence[Any], Likeness], Iterator[Any]]

_loops: list[Loop] = []


def each(parts: Sequence[Part], likeness: Likeness = lambda _: None) -> Iterator[Part]:
    """The parts, one after the other. No part may need what the body keeps of a certain other one."""
    return _loops[-1](parts, likeness) if _loops else iter(parts)


def each_chunk(length: int, size: int) -> Iterator[slice]:
    """Of `size` each; the last one may be shorter."""
    return each([slice(start, start + size) for start in range(0, length, size)])


@contextmanager
def loops_run_by(loop: Loop) -> Iterator[None]:
    """Until the end of the context, `loop` chooses which parts `each` gives. For fake tensors only."""
    _loops.append(loop)
    try:
        yield
    finally:
        _loops.pop()
