"""Which blocks and micro-batches a short step has."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence

import pytest

from tests.trace.small_steps import configured
from trainer.trace.pieces import BEGIN, FINISH, OPTIMIZER, Place
from trainer.trace.shorten import ShortStep, shortened_blocks, shortened_runs


def sequences_of_kinds() -> Iterator[tuple[str, ...]]:
    """A pattern that repeats, after a start of other kinds."""
    rng = random.Random(0)
    for _ in range(300):
        start, pattern = (rng.choices("abc", k=rng.randint(least, 4)) for least in (0, 1))
        yield (*start, *(pattern * rng.randint(1, 9))[: rng.randint(1, 30)])


def neighbours(kinds: Sequence[Hashable], block: int) -> tuple[Hashable, ...]:
    """The kinds of a block and of the two on either side; None beyond the ends."""
    padded = (None, None, *kinds, None, None)
    return padded[block : block + 5]


def test_every_block_is_like_its_original_and_has_the_same_neighbours() -> None:
    shorter = 0
    for kinds in sequences_of_kinds():
        found = shortened_blocks(kinds)
        short = [kinds[block] for block in found.kept]
        assert len(found.originals) == len(kinds)
        for block, original in enumerate(found.originals):
            assert neighbours(short, original)[1:4] == neighbours(kinds, block)[1:4], (
                kinds,
                block,
            )
        shorter += len(short) < len(kinds)
    assert shorter > 100


def test_every_recorded_block_is_the_original_of_some_block() -> None:
    for kinds in sequences_of_kinds():
        found = shortened_blocks(kinds)
        assert {*found.originals} == {*range(len(found.kept))}


def test_blocks_that_are_alike_need_five() -> None:
    assert shortened_blocks("a" * 126).kept == (0, 1, 2, 124, 125)
    assert len(shortened_blocks("ab" * 24).kept) == 6
    assert shortened_blocks("aaab").kept == (0, 1, 2, 3)


def test_runs_are_shortened_by_themselves() -> None:
    found = shortened_runs(["a" * 20, "b" * 30])
    assert found.kept == (0, 1, 2, 18, 19, 20, 21, 22, 48, 49)
    assert found.originals[19:21] == (4, 5)


def test_extra_periods_are_recorded_on_demand() -> None:
    lengths = [len(shortened_blocks("abc" * 30, extra).kept) for extra in range(3)]
    assert lengths == [9, 12, 15]


def test_the_order_of_a_step_has_every_pass_of_every_block_once() -> None:
    step = ShortStep(configured("model.num_layers=9 training.global_batch_size=3"), 1)
    order = [*step.order()]
    assert (order[0], order[-1]) == (BEGIN, OPTIMIZER)
    assert len({*order}) == len(order) == 2 + 3 * (1 + 2 * (9 + 2))
    assert (step.micro_batches, len(step.stages[0].kept)) == (2, 5)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B"])
def test_a_rank_of_a_pipeline_sends_what_its_neighbours_receive(schedule: str) -> None:
    changes = f"model.num_layers=8 parallelism.pp=2 parallelism.pp_schedule={schedule} training.global_batch_size=4"
    first, last = (ShortStep(configured(changes), 2, rank) for rank in range(2))
    sent = [place for place in first.order() if place.action == "send forward"]
    received = [place for place in last.order() if place.action == "receive forward"]
    assert [(place.stage + 1, place.micro_batch) for place in sent] == [
        (place.stage, place.micro_batch) for place in received
    ]
    assert {first.target(place) for place in sent} == {1}
    assert FINISH in first.order()


def test_a_pipeline_records_three_micro_batches_whatever_its_schedule_needs() -> None:
    step = ShortStep(
        configured("model.num_layers=8 parallelism.pp=4 training.global_batch_size=8"), 4, 1
    )
    assert (step.micro_batches, step.config.training.global_batch_size) == (3, 3)
    assert (step.config.parallelism.pp_schedule, step.config.parallelism.pp_layers) == (
        "GPipe",
        (1, 2, 1, 1),
    )


def test_a_place_reads_as_what_it_does() -> None:
    assert str(Place("forward", 1, 3, 0)) == "forward pass of block 0, micro-batch 3"
    assert str(OPTIMIZER) == "optimizer"
