"""Exit codes and the errors that cause them."""

from __future__ import annotations

import re
import signal
import sys
from typing import NamedTuple

EXIT_SUCCESS = 0
EXIT_FAILURE = 1
EXIT_BAD_CONFIG = 2
EXIT_DOES_NOT_FIT = 3
"""Exit code of a plan that needs more memory than the devices have."""
EXIT_BAD_NODE = 3
"""Exit code of a preflight in which the node fails."""
# EX_CONFIG of sysexits.h: neither Python nor torch exits with it.
EXIT_NO_RETRY = 78
"""Stopped for a reason that a retry cannot fix."""
MAX_PROBLEM_CHARS = 4000
CONCLUSIVE_EXIT_CODES = (EXIT_NO_RETRY, EXIT_BAD_CONFIG)


class Ending(NamedTuple):
    """One of the ways in which a launch ends."""

    exit_code: int
    marker: str
    """The file in the run folder that says so."""
    meaning: str
    then: str
    """The reaction of the launcher and the batch script."""


ENDINGS = (
    Ending(EXIT_SUCCESS, "DONE", "all steps are done", "nothing"),
    Ending(
        EXIT_SUCCESS,
        "REQUEUE",
        "saved, after a signal or near the time limit",
        "requeue the job; the same command resumes",
    ),
    Ending(
        EXIT_FAILURE,
        "RETRY",
        "a failure that may not repeat",
        "start again, until too many launches in a row made no checkpoint",
    ),
    Ending(EXIT_BAD_CONFIG, "STOP", "wrong configuration or arguments", "nothing"),
    Ending(EXIT_NO_RETRY, "STOP", "a failure that would repeat: it needs a person", "nothing"),
)


def failure_ending(exit_code: int) -> Ending:
    """How a launch ends that fails with this code."""
    return next(
        (ending for ending in ENDINGS if ending.exit_code == exit_code != EXIT_SUCCESS), ENDINGS[2]
    )


START_TIME_ENV = "LONGHAUL_BEGAN"
"""Environment variable: when the launcher started, as the host's `boot_id` and
`seconds_since_boot`.
"""
STACK_DUMP_SIGNAL = signal.SIGQUIT
"""Makes a rank dump its stack and continue."""


def printable(text: str) -> str:
    """`text` as a terminal shows it: characters that control one, or are not seen, are escaped;
    lines stay lines.

    Names of files, and whatever else is quoted, may come from a stranger.
    """
    return re.sub(r"[^\n\t]+", lambda found: in_one_line(found[0]), text)


def in_one_line(text: str) -> str:
    """`text` with everything escaped that a terminal would not show as a character of a line."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def shorten(problem: str) -> str:
    """A problem that quotes something long, without its middle."""
    if len(problem) <= MAX_PROBLEM_CHARS:
        return problem
    half = MAX_PROBLEM_CHARS // 2
    return f"{problem[:half]} [... {len(problem) - 2 * half:,} characters ...] {problem[-half:]}"


class RunError(Exception):
    """Ends a run with the exit code `status`, after each of `problems` is printed on a line."""

    status = EXIT_FAILURE

    def __init__(self, *problems: str) -> None:
        # Escaped here, once: problems reach terminals, logs and exit markers.
        self.problems = [printable(shorten(problem)) for problem in problems]
        super().__init__("\n".join(self.problems))


class RankFailedError(RunError):
    """A failure of a single rank, which its peers do not know of."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class RunFolderInUseError(RunError):
    """Another launch on this host is using the run folder."""

    status = EXIT_BAD_CONFIG


class RunFolderHeldElsewhereError(RunError):
    """A launch on another host is using the run folder; it may end."""


class RunFailedError(RunError):
    """A failure that all ranks found alike; a restart may succeed."""


class UnreadableError(RunFailedError):
    """The device fails to read a file, also when asked again."""


class DivergedError(RunError):
    """The run's metrics show that it will not recover."""

    status = EXIT_NO_RETRY


class LostMetricsError(RunError):
    """Metrics or events of a launch could not be written to the end.

    A retry does not bring them back.
    """

    status = EXIT_NO_RETRY


class DataError(RunError, ValueError):
    """Data or a tokenizer file cannot be used. A retry fails again."""

    status = EXIT_NO_RETRY


class CorpusRefusedError(DataError):
    """Files of a corpus would be read as what they are not.

    Commands that find it before they begin exit with 2.
    """


class ResumeError(RunError):
    """No checkpoint is readable, or this configuration cannot resume from it; a retry would not
    help.
    """

    status = EXIT_NO_RETRY


class ConfigError(RunError):
    """All problems of a configuration, one line each."""

    status = EXIT_BAD_CONFIG

    def __init__(self, problems: list[str]) -> None:
        super().__init__(*problems)


class DoesNotFitError(RunError):
    """A plan that needs more memory than the devices have."""

    status = EXIT_DOES_NOT_FIT


def missing_package(package: str, needed_by: object) -> DataError:
    return DataError(f"{needed_by} needs {package}: {sys.executable} -m pip install {package}")
