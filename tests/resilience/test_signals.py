"""Stop signals are recorded, and raised only within `raising`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from trainer.resilience.signals import STOP_SIGNALS, Interrupted, SignalHandler


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As in a terminal: `nohup`, or a shell's background, lets processes ignore some."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_repeated_signals_are_recorded_once(number: signal.Signals) -> None:
    signals = SignalHandler()
    signals.install()
    assert signals.signal is None
    for _ in range(4):
        os.kill(os.getpid(), number)
    assert signals.signal == number


def test_the_first_signal_is_kept() -> None:
    signals = SignalHandler()
    signals.install()
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.signal == signal.SIGUSR1


def test_raising_interrupts_at_once_and_for_an_earlier_signal() -> None:
    signals = SignalHandler()
    signals.install()
    with pytest.raises(Interrupted), signals.raising():
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("unreachable")
    with pytest.raises(Interrupted), signals.raising():
        raise AssertionError("unreachable")


def test_after_raising_a_signal_is_only_recorded() -> None:
    signals = SignalHandler()
    signals.install()
    with signals.raising():
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.signal == signal.SIGTERM
