"""All ranks save and leave after the same update, whoever was asked."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ranks import run_ranks
from trainer.config.job_config import Config
from trainer.errors import START_TIME_ENV
from trainer.resilience.preemption import Decision, Preemption, job_deadline
from trainer.resilience.signals import SignalHandler


def stops_of(rank: int, requests: SignalHandler, limit: float | None = None, **sections: Any) -> Preemption:
    return Preemption(Config.model_validate(sections), requests, is_leader=rank == 0, deadline=limit)


def asked_once(who: int, at: int) -> list[str]:
    """What every update's verdict is on this rank; rank `who` is asked before update `at`."""
    from torch import distributed

    rank, requests = distributed.get_rank(), SignalHandler()
    stops = stops_of(rank, requests)
    found = []
    for update in range(60):
        if rank == who and update == at:
            requests.signal = signal.SIGUSR1
        time.sleep(0.001 * (rank + 1))
        verdict = stops.check(0.0)
        found.append(verdict.stop_reason)
        if verdict.stop_reason:
            break
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("who", [0, 2])
def test_all_ranks_leave_after_the_same_update(who: int) -> None:
    first, *others = run_ranks(asked_once, 3, who, 3)
    assert others == [first] * 2
    assert first[-1] == "SIGUSR1"
    assert 3 <= len(first) <= 60
    assert set(first[:-1]) <= {""}


def clocks(limit_of: int) -> list[tuple[str, bool]]:
    """The first verdict of a rank whose time is over, and of one whose clock asks for a checkpoint."""
    from torch import distributed

    rank = distributed.get_rank()
    late = stops_of(rank, SignalHandler(), limit=time.time() if rank == limit_of else None)
    saving = stops_of(rank, SignalHandler(), checkpoint={"interval_minutes": 1e-9})
    return [(verdict.stop_reason, verdict.should_save) for verdict in (late.check(0.0), saving.check(0.0))]


@pytest.mark.ranks
def test_the_clock_of_the_first_rank_decides() -> None:
    assert run_ranks(clocks, 2, 0) == [[("its time is over", False), ("", True)]] * 2
    assert run_ranks(clocks, 2, 1) == [[("", False), ("", True)]] * 2


def saves_at(*seconds: float) -> list[bool]:
    """Whether the clock asks for a checkpoint at these times, each of which is then begun."""
    import trainer.resilience.preemption as module

    clock = SimpleNamespace(now=0.0)
    vars(module)["time"] = SimpleNamespace(monotonic=lambda: clock.now, time=time.time)
    stops, found = stops_of(0, SignalHandler(), checkpoint={"interval_minutes": 5}), []
    for clock.now in seconds:
        found.append(stops.check(0.0).should_save)
        if found[-1]:
            stops.record_save()
    return found


@pytest.mark.ranks
def test_minutes_count_from_the_last_checkpoint() -> None:
    (found,) = run_ranks(saves_at, 1, 100.0, 299.0, 300.0, 301.0, 599.0, 601.0)
    assert found == [False, False, True, False, False, True]


def leaves(seconds: float) -> bool:
    """Whether a run with so much time left leaves, whose checkpoints take ten seconds."""
    stops = stops_of(0, SignalHandler(), limit=time.time() + seconds)
    return stops.check(10.0) == Decision("its time is over")


@pytest.mark.ranks
def test_there_is_time_left_for_two_checkpoints() -> None:
    assert run_ranks(leaves, 1, 20.0) == [True]
    assert run_ranks(leaves, 1, 60.0) == [False]


def asking(seconds: float) -> int:
    """How many updates of that length go by before ranks ask each other again, in the end."""
    import trainer.resilience.preemption as module

    stops, asked, real = stops_of(0, SignalHandler()), [], vars(module)["max_over_ranks"]

    def counted(*given: Any) -> Any:
        asked.append(given)
        return real(*given)

    vars(module)["max_over_ranks"] = counted
    for _ in range(40):
        time.sleep(seconds)
        stops.check(0.0)
    return len(asked)


@pytest.mark.ranks
def test_short_updates_are_not_held_up_by_asking() -> None:
    (count,) = run_ranks(asking, 1, 0.001)
    assert count <= 8


def test_the_end_is_the_earlier_of_both() -> None:
    config = Config.model_validate({"job": {"max_minutes": 2.0}})
    assert job_deadline(config, {START_TIME_ENV: "1000"}) == 1120
    assert job_deadline(config, {START_TIME_ENV: "1000", "SLURM_JOB_END_TIME": "1100"}) == 1100
    assert job_deadline(Config(), {"SLURM_JOB_END_TIME": "1100"}) == 1100
    assert job_deadline(Config(), {"SLURM_JOB_END_TIME": "UNLIMITED"}) is None
    assert job_deadline(Config(), {}) is None
