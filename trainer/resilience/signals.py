"""Process signals: stop requests and the death of the launcher. Imports no torch, so that both
work while it loads.

A stop signal is only recorded, because other ranks may be waiting in a collective. Launchers and
schedulers send it two to four times; repeats are ignored.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)

LAUNCHER_PID_ENV = "LONGHAUL_LAUNCHER"
"""Environment variable through which the launcher passes its process id to its workers."""

PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """Asks the kernel to kill this process when its launcher ends (Linux).

    Does nothing without a launcher.
    """
    launcher_pid = os.environ.get(LAUNCHER_PID_ENV)
    if launcher_pid is not None:
        die_with_parent(int(launcher_pid))


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when the thread ends that started it (Linux)."""
    # SIGKILL needs no cooperation: a process whose parent is gone may hang in a collective.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        # The parent ended before the call above.
        os.kill(os.getpid(), signal.SIGKILL)


def handle_stop_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Ignored signals stay ignored: under `nohup`, a closed terminal is no stop request."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


@contextmanager
def restoring_handlers() -> Iterator[None]:
    """Restores the handlers of stop signals at the end of the block."""
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Interrupted(BaseException):
    """A stop signal arrived when there was nothing to save and no rank was waiting."""


class SignalHandler:
    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The first stop signal received."""
        self._is_raising = False

    def install(self) -> None:
        """Installs the handlers.

        Call as early as possible: until then a signal ends the process.
        """
        handle_stop_signals(self._handle)

    @contextmanager
    def raising_alone(self) -> Iterator[None]:
        """Installs the handlers, raises `Interrupted` on a signal in the block, and restores the
        previous handlers.
        """
        with restoring_handlers():
            self.install()
            with self.raising():
                yield

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raises `Interrupted` on a signal in the block, and at once if one arrived earlier."""
        if self.signal:
            raise Interrupted
        self._is_raising = True
        try:
            yield
        finally:
            self._is_raising = False

    def _handle(self, number: int, _: FrameType | None) -> None:
        # The first signal names the reason; repeats of launchers and schedulers must not replace
        # it.
        self.signal = self.signal or signal.Signals(number)
        if self._is_raising:
            raise Interrupted
