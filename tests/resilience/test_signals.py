"""Signals are noted, and raised only where nobody waits."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from trainer.resilience.signals import STOP_SIGNALS, Interrupted, SignalHandler


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_a_signal_is_noted_however_often_it_comes(number: signal.Signals) -> None:
    requests = SignalHandler()
    requests.install()
    assert requests.signal is None
    for _ in range(4):
        os.kill(os.getpid(), number)
    assert requests.signal == number


def test_the_first_counts() -> None:
    requests = SignalHandler()
    requests.install()
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert requests.signal == signal.SIGUSR1


def test_where_nobody_waits_it_is_raised_also_if_it_came_before() -> None:
    requests = SignalHandler()
    requests.install()
    with pytest.raises(Interrupted), requests.raising():
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("this is not reached")
    with pytest.raises(Interrupted), requests.raising():
        raise AssertionError("this is not reached")


def test_afterwards_it_is_only_noted() -> None:
    requests = SignalHandler()
    requests.install()
    with requests.raising():
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    assert requests.signal == signal.SIGTERM
