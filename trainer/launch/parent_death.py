"""A worker ends with its launcher, however that ends. Imports no torch: it has to come first."""

from __future__ import annotations

import ctypes
import os
import signal

LAUNCHER = "LONGHAUL_LAUNCHER"
"""Environment variable in which the launcher leaves its process id to its workers."""

SET_PARENT_DEATH_SIGNAL = 1


def die_with_launcher() -> None:
    """Asks the kernel to kill this process when its launcher ends (Linux). Without a launcher, nothing happens."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != int(launcher):
        # It ended before the kernel was asked.
        os.kill(os.getpid(), signal.SIGKILL)
