"""Exit codes, and the errors that lead to them."""

from __future__ import annotations

import signal

DONE = 0
FAILED = 1
BAD_CONFIGURATION = 2
MISFIT = 3
"""A plan does not fit."""
NO_RETRY = 78
"""Stopped for a reason that a retry cannot mend."""

BEGAN = "LONGHAUL_BEGAN"
"""Environment variable with the time at which the launcher was started."""


STACKS = signal.SIGQUIT
"""Makes a rank write where it is, and go on."""


class RankError(Exception):
    """What ended a single rank, in words; its peers do not know."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class InUseError(Exception):
    """The run folder is another run's, which is under way."""


class RunError(Exception):
    """What ended a run, in words, found by all ranks alike; the next start may do better."""


class ResumeError(Exception):
    """A checkpoint that this configuration cannot continue, or none that can be read; a retry would not mend it."""


class ConfigError(Exception):
    """Everything that is wrong with a configuration, one line each. The caller prints it and leaves with 2."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
