"""Preemption: all ranks save and stop after the same step, whichever was signalled."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ranks import run_ranks
from trainer.config.job_config import Config
from trainer.errors import START_TIME_ENV
from trainer.hardware.host import boot_id, seconds_since_boot
from trainer.resilience.preemption import Decision, Preemption, job_deadline
from trainer.resilience.signals import SignalHandler


def preemption_of(
    rank: int, signals: SignalHandler, deadline: float | None = None, **sections: Any
) -> Preemption:
    return Preemption(
        Config.model_validate(sections), signals, is_leader=rank == 0, deadline=deadline
    )


def signalled_once(signalled_rank: int, signal_step: int) -> list[str]:
    """The stop reason of every step on this rank, if one rank is signalled before one step."""
    from torch import distributed

    rank = distributed.get_rank()
    signals = SignalHandler()
    preemption = preemption_of(rank, signals)
    decisions = []
    for step in range(60):
        if rank == signalled_rank and step == signal_step:
            signals.signal = signal.SIGUSR1
        time.sleep(0.001 * (rank + 1))
        decision = preemption.check(0.0)
        decisions.append(decision.stop_reason)
        if decision.stop_reason:
            break
    return decisions


@pytest.mark.ranks
@pytest.mark.parametrize("signalled_rank", [0, 2])
def test_all_ranks_stop_after_the_same_step(signalled_rank: int) -> None:
    first, *others = run_ranks(signalled_once, 3, signalled_rank, 3)
    assert others == [first] * 2
    assert first[-1] == "SIGUSR1"
    assert 3 <= len(first) <= 60
    assert set(first[:-1]) <= {""}


def clock_decisions(late_rank: int) -> list[tuple[str, bool]]:
    """The first decisions of a rank past its deadline, and of one with a due checkpoint."""
    from torch import distributed

    rank = distributed.get_rank()
    late = preemption_of(
        rank, SignalHandler(), deadline=seconds_since_boot() if rank == late_rank else None
    )
    saving = preemption_of(rank, SignalHandler(), checkpoint={"interval_minutes": 1e-9})
    return [
        (decision.stop_reason, decision.should_save)
        for decision in (late.check(0.0), saving.check(0.0))
    ]


@pytest.mark.ranks
def test_the_clock_of_the_leader_decides() -> None:
    assert run_ranks(clock_decisions, 2, 0) == [[("time limit reached", False), ("", True)]] * 2
    assert run_ranks(clock_decisions, 2, 1) == [[("", False), ("", True)]] * 2


def saves_at(*seconds: float) -> list[bool]:
    """Whether a checkpoint is due at each of these times; a due one is started."""
    import trainer.resilience.preemption as module

    clock = SimpleNamespace(now=0.0)
    vars(module)["time"] = SimpleNamespace(monotonic=lambda: clock.now, time=time.time)
    preemption = preemption_of(0, SignalHandler(), checkpoint={"interval_minutes": 5})
    decisions = []
    for clock.now in seconds:
        decisions.append(preemption.check(0.0).should_save)
        if decisions[-1]:
            preemption.record_save()
    return decisions


@pytest.mark.ranks
def test_interval_minutes_count_from_the_last_checkpoint() -> None:
    (decisions,) = run_ranks(saves_at, 1, 100.0, 299.0, 300.0, 301.0, 599.0, 601.0)
    assert decisions == [False, False, True, False, False, True]


def stops_in_time(seconds: float) -> bool:
    """Whether a run stops this many seconds before its deadline, if checkpoints take ten
    seconds.
    """
    preemption = preemption_of(0, SignalHandler(), deadline=seconds_since_boot() + seconds)
    return preemption.check(10.0) == Decision("time limit reached")


@pytest.mark.ranks
def test_the_reserve_before_the_deadline_fits_two_checkpoints() -> None:
    assert run_ranks(stops_in_time, 1, 20.0) == [True]
    assert run_ranks(stops_in_time, 1, 60.0) == [False]


def count_checks(seconds: float) -> int:
    """The number of collective checks in 40 steps of this length."""
    import trainer.resilience.preemption as module

    preemption = preemption_of(0, SignalHandler())
    calls = []
    real = vars(module)["max_over_ranks"]

    def counting_max(*args: Any) -> Any:
        calls.append(args)
        return real(*args)

    vars(module)["max_over_ranks"] = counting_max
    for _ in range(40):
        time.sleep(seconds)
        preemption.check(0.0)
    return len(calls)


@pytest.mark.ranks
def test_short_steps_are_rarely_checked() -> None:
    (count,) = run_ranks(count_checks, 1, 0.001)
    assert count <= 8


def test_the_deadline_is_the_earlier_of_both_limits() -> None:
    config = Config.model_validate({"job": {"max_minutes": 2.0}})
    began = {START_TIME_ENV: f"{boot_id()} 1000.5"}
    now = seconds_since_boot()
    assert job_deadline(config, began) == 1120.5
    until = {"SLURM_JOB_END_TIME": str(int(time.time()) + 1000)}
    assert job_deadline(config, {START_TIME_ENV: "another-host 5", **until}) == pytest.approx(
        now + 120, abs=5
    )
    assert job_deadline(Config(), until) == pytest.approx(now + 1000, abs=5)
    assert job_deadline(Config(), {"SLURM_JOB_END_TIME": "UNLIMITED"}) is None
    assert job_deadline(Config(), {}) is None


def steps_of_checks(step_seconds: tuple[float, float]) -> list[int]:
    """The steps after which this rank takes part in the first four decisions, by its own clock."""
    from torch import distributed

    import trainer.resilience.preemption as module

    clock = SimpleNamespace(now=0.0)
    step = 0
    checked = list[int]()
    real = vars(module)["max_over_ranks"]

    def recording_max(*args: Any) -> Any:
        checked.append(step)
        return real(*args)

    vars(module)["time"] = SimpleNamespace(monotonic=lambda: clock.now, time=time.time)
    vars(module)["max_over_ranks"] = recording_max
    preemption = preemption_of(distributed.get_rank(), SignalHandler())
    while len(checked) < 4:
        step += 1
        clock.now += step_seconds[distributed.get_rank()]
        preemption.check(0.0)
    return checked


@pytest.mark.ranks
def test_ranks_of_different_speed_check_after_the_same_steps() -> None:
    first, second = run_ranks(steps_of_checks, 2, (0.01, 0.3))
    assert first == second
    assert first[-1] > 4
