"""A worker ends with its launcher, however that ends. Imports no torch: it has to come first."""

from __future__ import annotations

import ctypes
import os
import signal

LAUNCHER_PID_ENV = "LONGHAUL_LAUNCHER"
"""Environment variable in which the launcher leaves its process id to its workers."""

PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """Asks the kernel to kill this process when its launcher ends (Linux). Without a launcher, nothing happens."""
    launcher_pid = os.environ.get(LAUNCHER_PID_ENV)
    if launcher_pid is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher_pid):
        # It ended before the kernel was asked.
        os.kill(os.getpid(), signal.SIGKILL)
