"""Exit codes, and the errors that lead to them."""

from __future__ import annotations

import signal
import sys

EXIT_SUCCESS = 0
EXIT_FAILURE = 1
EXIT_BAD_CONFIG = 2
EXIT_DOES_NOT_FIT = 3
"""A plan does not fit."""
EXIT_NO_RETRY = 78
"""Stopped for a reason that a retry cannot mend."""

START_TIME_ENV = "LONGHAUL_BEGAN"
"""Environment variable with the time at which the launcher was started."""


STACK_DUMP_SIGNAL = signal.SIGQUIT
"""Makes a rank write where it is, and go on."""


class RankFailedError(Exception):
    """What ended a single rank, in words; its peers do not know."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class RunFolderInUseError(Exception):
    """The run folder is another run's, which is under way."""


class RunFailedError(Exception):
    """What ended a run, in words, found by all ranks alike; the next start may do better."""


class DataError(ValueError):
    """Data or a tokenizer file cannot be used. A retry fails again."""


def missing_package(package: str, needed_by: object) -> DataError:
    return DataError(f"{needed_by} needs {package}: {sys.executable} -m pip install {package}")


class ResumeError(Exception):
    """A checkpoint that this configuration cannot continue, or none that can be read; a retry would not mend it."""


class ConfigError(Exception):
    """Everything that is wrong with a configuration, one line each. The caller prints it and leaves with 2."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
