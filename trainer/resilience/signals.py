"""Requests to stop: signals, which are only noted, since other ranks may be waiting for this one. Imports no torch.

Launchers and schedulers send them two to four times, so the second means no more than the first.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class Interrupted(BaseException):
    """A request that came when there was nothing to save and nobody waited."""


class SignalHandler:
    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The first that came."""
        self._is_raising = False
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """To be called as early as possible: until then a signal ends the process.

        What is ignored stays so: `nohup` means that the end of a terminal is no request.
        """
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)

    @contextmanager
    def raising_alone(self) -> Iterator[None]:
        """Installs the handler and raises `Interrupted` within; then gives signals back to whoever had them before."""
        self.install()
        try:
            with self.raising():
                yield
        finally:
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Within, a request raises `Asked`, also one that came before."""
        if self.signal:
            raise Interrupted
        self._is_raising = True
        try:
            yield
        finally:
            self._is_raising = False

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)
        if self._is_raising:
            raise Interrupted
