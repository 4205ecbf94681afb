"""Composition of recorded pieces, on pieces written by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainer.trace.compose import ComposedStep, Correspondence, compose
from trainer.trace.pieces import (
    BEGIN,
    OPTIMIZER,
    Allocation,
    Event,
    Free,
    Piece,
    Place,
    ProductKey,
    State,
    Trace,
    Work,
)

STATE = 1000
SAVED = 10
SCRATCH = 500
GRADIENT = 3


def allocation(size: int, *, on_host: bool = False) -> Allocation:
    return Allocation(size, on_host, (size,), "uint8", f"{size}")


def hand_written(blocks: int) -> Trace:
    """A micro-batch: a block saves something until its backward pass, which gives a gradient that
    the optimizer frees.
    """
    pieces = [Piece(BEGIN)]

    def add(place: Place, *events: Event) -> None:
        work = Work()
        work.products[ProductKey("forward", 1)] = len(events)
        pieces.append(Piece(place, [*events], [work]))

    for block in range(blocks):
        own = len(pieces)
        add(Place("forward", 0, 0, block), allocation(SAVED), allocation(SCRATCH), Free(own, 1))
    for block in reversed(range(blocks)):
        add(Place("backward", 0, 0, block), allocation(GRADIENT), Free(1 + block, 0))
    add(OPTIMIZER, *(Free(1 + blocks + block, 0) for block in range(blocks)))
    states = (
        State("parameters", "blocks.*.weight", STATE, (STATE,), "uint8", (0, block))
        for block in range(blocks)
    )
    return Trace(tuple(pieces), tuple(states))


def order(blocks: int, micro_batches: int = 1) -> Iterator[Place]:
    yield BEGIN
    for number in range(micro_batches):
        for block in range(blocks):
            yield Place("forward", 0, number, block)
        for block in reversed(range(blocks)):
            yield Place("backward", 0, number, block)
    yield OPTIMIZER


def whole(recorded: int, blocks: int) -> ComposedStep:
    originals = (0, *(1 for _ in range(blocks - 2)), recorded - 1)
    return compose(hand_written(recorded), [*order(blocks)], Correspondence({0: originals}, 1, 1))


@pytest.mark.parametrize("blocks", [3, 4, 40])
def test_states_saved_tensors_and_scratch_add_up(blocks: int) -> None:
    found = whole(3, blocks)
    assert found.peak.size == blocks * (STATE + SAVED) + SCRATCH
    assert found.peak.place == Place("forward", 0, 0, blocks - 1)
    assert sum(each.size for each in found.live) == blocks * SAVED + SCRATCH
    assert found.is_closed


def test_work_is_that_of_every_copy() -> None:
    assert whole(3, 40).work.matmul_flops.total() == 40 * (3 + 2) + 3


def test_the_peak_moves_to_where_gradients_outgrow_what_was_saved() -> None:
    trace = hand_written(3)
    for piece in trace.pieces:
        piece.events[:] = [
            allocation(20) if event == allocation(GRADIENT) else event for event in piece.events
        ]
    few, many = (
        compose(
            trace, [*order(blocks)], Correspondence({0: (0, *[1] * (blocks - 2), 2)}, 1, 1)
        ).peak
        for blocks in (8, 80)
    )
    assert (few.size, few.place) == (8 * (STATE + SAVED) + SCRATCH, Place("forward", 0, 0, 7))
    assert (many.size, many.place) == (80 * (STATE + 20) + SAVED, Place("backward", 0, 0, 0))


def test_what_a_copy_frees_in_vain_is_missing() -> None:
    """Block 2 of the trace frees what only block 0 allocated: nothing like it exists elsewhere."""
    trace = hand_written(3)
    trace.pieces[1].events.append(allocation(7000))
    trace.pieces[4].events.append(Free(1, 2))
    found = compose(trace, [*order(8)], Correspondence({0: (0, 1, 2, 2, 2, 2, 2, 2)}, 1, 1))
    assert not found.is_closed
    assert not found.left
    assert {name.allocation.size for _, _, name in found.missing} == {7000}


def test_what_no_copy_frees_is_left() -> None:
    """Block 0 frees what block 1 allocated; the other copies of block 1 have no block 0 before
    them.
    """
    trace = hand_written(3)
    trace.pieces[2].events.append(allocation(7000))
    trace.pieces[6].events.append(Free(2, 2))
    found = compose(trace, [*order(8)], Correspondence({0: (0, *[1] * 6, 2)}, 1, 1))
    assert not found.is_closed
    assert {(name.allocation.size, count) for (_, name), count in found.left.items()} == {
        (7000, 5)
    }
    assert compose(trace, [*order(3)], Correspondence({0: (0, 1, 2)}, 1, 1)).is_closed


def test_buffers_of_the_host_are_used_again_and_never_given_back() -> None:
    trace = hand_written(3)
    for block in range(3):
        trace.pieces[1 + block].events.append(allocation(64, on_host=True))
        trace.pieces[6 - block].events.append(Free(1 + block, 2))
    found = compose(trace, [*order(10, 4)], Correspondence({0: (0, *[1] * 8, 2)}, 4, 1))
    assert found.host_bytes == 10 * 64
