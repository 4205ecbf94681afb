"""The clock of a rank on pieces written by hand: what is exposed, what overlaps, and what a launch
costs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.trace.small_steps import configured
from trainer.hardware.device_specs import load_device
from trainer.plan.interconnect import CALL_OVERHEAD, GroupTopology
from trainer.plan.rank_clock import RankClock, rank_clocks
from trainer.plan.step_time import CONTENTION_FRACTION
from trainer.trace.pieces import (
    OPTIMIZER,
    Arrival,
    AttentionKey,
    Departure,
    Piece,
    Place,
    ProductKey,
    Timeline,
    Work,
)
from trainer.trace.rank_step import RankStep
from trainer.trace.tensors import MemoryEstimate

DEVICE = replace(
    load_device("h100-80gb"),
    hbm_bandwidth=1e9,
    link_bandwidth=1e9,
    host_link_bandwidth=1e9,
    launch_latency=0.0,
    link_latency=0.0,
)
GROUPS = {name: GroupTopology(2, 2, 1) for name in ("fsdp", "cp", "tp", "dp_replicate")}


def passes(seconds: float) -> Work:
    """Kernels that move memory for so long."""
    work = Work()
    work.moved_bytes["forward"] = int(seconds * 1e9)
    return work


def message(channel: str, kind: str, seconds: float, number: int) -> Departure:
    latency = CALL_OVERHEAD if channel != "host" else 0
    return Departure((channel, kind, "forward"), (seconds - latency) * 1e9, number)


def recorded(*timelines: Timeline) -> RankStep:
    pieces = [
        Piece(Place("forward", 0, 0, block), [], timeline)
        for block, timeline in enumerate(timelines)
    ]
    pieces.append(Piece(OPTIMIZER, [], [passes(0)]))
    memory = MemoryEstimate("", 0, 1, ())
    return RankStep(2, memory, tuple(pieces), tuple(range(len(pieces))), {}, 1.0)


def clock(*timelines: Timeline, **device: float) -> RankClock:
    config = configured("parallelism.cp=2")
    return RankClock(config, recorded(*timelines), replace(DEVICE, **device), GROUPS)  # type: ignore[arg-type]


def test_pipeline_ranks_share_a_clock_if_they_run_the_same_timelines() -> None:
    short: Timeline = [passes(1)]
    long: Timeline = [passes(2)]
    warm_up, other = recorded(short, long, short), recorded(long, long, short)
    optimizer = warm_up.pieces[-1]
    steps = [
        replace(step, pieces=(*step.pieces[:-1], optimizer))
        for step in (warm_up, recorded(long, short, short), other)
    ]
    clocks = rank_clocks(configured("parallelism.cp=2"), steps, DEVICE, GROUPS)
    assert clocks[0] is clocks[1]
    assert [each.step_time.busy for each in clocks] == pytest.approx([4, 4, 5])


def test_a_message_that_is_waited_for_at_once_is_exposed() -> None:
    found = clock([passes(1), message("cp", "send", 3, 1), passes(1)]).step_time
    assert found.exposed == pytest.approx({"cp": 3})
    assert found.busy == pytest.approx(5)


def test_kernels_between_start_and_arrival_hide_a_message() -> None:
    found = clock([message("cp", "send", 3, 1), passes(2), Arrival(1), passes(1)]).step_time
    assert found.exposed == pytest.approx({"cp": 1})
    assert found.overlapped == pytest.approx({"cp": 2})


def test_weights_are_gathered_while_the_piece_before_runs() -> None:
    gather = message("fsdp", "all_gather", 3, 2)
    found = clock([passes(2)], [gather, passes(2)]).step_time
    assert found.exposed == pytest.approx({"fsdp": 1})


def test_gradients_are_reduced_until_the_next_ones_are() -> None:
    reductions = [message("fsdp", "reduce_scatter", 3, number) for number in (1, 2)]
    found = clock([reductions[0], passes(2)], [reductions[1]]).step_time
    assert found.exposed == pytest.approx({"fsdp": 1 + 3})


def test_messages_on_one_link_share_it() -> None:
    one, other = (
        message(channel, "send", 2, number) for channel, number in (("cp", 1), ("tp", 2))
    )
    exposed = clock([one, other, Arrival(1)]).step_time.exposed
    assert sum(exposed.values()) == pytest.approx(4, abs=1e-4)


def test_a_message_does_not_wait_for_a_large_one_of_another_group() -> None:
    gather = message("fsdp", "all_gather", 10, 1)
    hop = message("cp", "send", 1, 2)
    # The gather of the second piece is under way while the first one runs.
    found = clock([hop, passes(20)], [gather, passes(1)]).step_time
    assert found.exposed == pytest.approx({"cp": 2}, abs=1e-4)


def test_the_latency_of_a_message_leaves_its_link_to_others() -> None:
    gather = message("fsdp", "all_gather", 1, 1)
    hop = message("cp", "send", 4, 2)
    found = clock([hop, passes(20)], [gather, passes(1)], link_latency=5.0).step_time
    assert found.exposed == pytest.approx({"cp": 1 + 4 + 5}, abs=1e-4)


def test_copies_to_the_host_are_exposed_only_where_kernels_wait() -> None:
    copy = message("host", "copy", 3, 1)
    assert clock([copy, passes(1)]).step_time.exposed == {}
    assert clock([copy, passes(1), Arrival(1)]).step_time.exposed == pytest.approx({"host": 2})


def test_kernels_that_end_before_the_next_is_launched_leave_gaps() -> None:
    work = passes(1)
    work.kernels["forward"] = 5
    assert clock([work], launch_latency=1.0).step_time.compute["launch overhead"] == pytest.approx(
        4
    )


def test_products_beyond_two_gradients_are_recomputed() -> None:
    work = Work()
    work.products[ProductKey("forward", 4096)] = 10**15
    work.products[ProductKey("backward", 4096)] = 3 * 10**15
    found = clock([work]).step_time.compute
    assert found["matmul"] == pytest.approx(3 * found["recompute"])


def test_short_sequences_take_attention_longer() -> None:
    def seconds(keys: int) -> float:
        work = Work()
        work.attention[AttentionKey("forward", "flash", keys, 128)] = 10**15
        return clock([work]).step_time.compute["attention"]

    assert seconds(700) > 1.9 * seconds(1 << 20)
    # The rates of a table were measured at 16K tokens, and no longer sequence was faster.
    assert seconds(8 << 10) == pytest.approx(1.04 * seconds(16 << 10), rel=2e-3)
    assert seconds(16 << 10) == seconds(1 << 20)


def test_grouped_products_run_at_a_share_of_the_rate_of_single_ones() -> None:
    def seconds(*, is_grouped: bool) -> float:
        work = Work()
        work.products[ProductKey("forward", 4096, is_grouped)] = 10**15
        return clock([work]).step_time.compute["matmul"]

    assert seconds(is_grouped=False) == pytest.approx(0.84 * seconds(is_grouped=True))


def test_weights_come_from_the_host_while_the_piece_before_runs_and_gradients_go_back() -> None:
    weights = [message("host", "weights", 3, 1), message("fsdp", "all_gather", 1, 2)]
    gradients = [message("fsdp", "reduce_scatter", 1, 3), message("host", "gradients", 2, 4)]
    found = clock([passes(2)], [*weights, passes(2), *gradients]).step_time
    # The gather begins when the weights are there, at 3, and ends at 4. Then 2 seconds of kernels;
    # the reduction takes 1, the way back 2.
    assert found.exposed == pytest.approx({"host": 2 + 2, "fsdp": 1})
    assert found.busy == pytest.approx(2 + 2 + 2 + 1 + 2 + CONTENTION_FRACTION)


def test_gradients_on_their_way_to_the_host_delay_no_weights() -> None:
    back = message("host", "gradients", 5, 1)
    there = [message("host", "weights", 2, 2), message("fsdp", "all_gather", 1, 3)]
    found = clock([passes(1), back, passes(3)], [*there, passes(3)]).step_time
    assert found.exposed.get("fsdp", 0) == 0
    assert found.busy == pytest.approx(7 + CONTENTION_FRACTION)
