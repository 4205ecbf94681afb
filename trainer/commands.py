"""What the commands of `longhaul` share: argument parser, overrides, errors and exit codes. Imports no torch."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from math import isfinite
from typing import Any, NoReturn

from trainer.command_table import typed
from trainer.config import extension
from trainer.config.parse import COMMAND_LINE, load
from trainer.errors import EXIT_FAILURE, EXIT_SUCCESS, ConfigError, RankFailedError, RunError

MAX_PROBLEMS = 100
EXIT_HELP = "Exit codes: 0 success, 2 wrong arguments or configuration, 78 unusable data or checkpoint, 1 other errors."


def overrides_help() -> str:
    """The remark on overrides of a command that takes any key."""
    return f"--section.key VALUE sets any key of the configuration; {typed('train', '--help')} lists them."


class CommandParser(ArgumentParser):
    """Raises `ConfigError` instead of exiting. Takes `--section.key VALUE` unless `overrides` is empty.

    An option whose `dest` is `section.key` is short for it.
    """

    def __init__(self, *, overrides: str = "", **options: Any) -> None:
        epilog = f"{overrides}\n{EXIT_HELP}".lstrip()
        super().__init__(epilog=epilog, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False, **options)
        self._takes_overrides = bool(overrides)

    def add_config(self) -> None:
        self.add_argument(
            "--config", metavar="NAME|PATH", help="a TOML file, or the name of one in train_configs/; default: debug"
        )

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (\S+): ", r"\1 ", message).replace("expected one argument", "needs a value")
        message = re.sub(r"invalid choice: '(.+)' \(choose from .+", r'"\1" is unknown; see --help', message)
        message = message.replace("the following arguments are required:", f"{self.prog.split()[-1]} needs")
        raise ConfigError([f"{COMMAND_LINE}: {message}"])

    def parse(self, argv: Sequence[str]) -> tuple[Namespace, list[str]]:
        """The options, and the arguments for `load`: --config and `--section.key=VALUE`. Raises `ConfigError`."""
        arguments, overrides, remaining = list[str](), list[str](), [*argv]
        while remaining:
            argument = remaining.pop(0)
            name, equals, _ = argument.partition("=")
            if not (self._takes_overrides and name.startswith("--") and "." in name):
                arguments.append(argument)
            elif equals or not remaining or remaining[0].startswith("--"):
                overrides.append(argument)
            else:
                overrides.append(f"{argument}={remaining.pop(0)}")
        options, unknown = self.parse_known_args(arguments)
        values = vars(options).items()
        overrides += [
            f"--{key}={value}" for key, value in values if ("." in key or key == "config") and value is not None
        ]
        if unknown:
            self._raise_unknown(unknown, overrides)
        return options, overrides

    def _raise_unknown(self, unknown: Sequence[str], overrides: Sequence[str]) -> NoReturn:
        """Raises `ConfigError` with the unknown arguments, and with everything that is wrong with the overrides."""
        problems = list[str]()
        for previous, argument in pairwise(["", *unknown]):
            if argument.startswith("--") or not previous.startswith("--"):  # Else it is the value of `previous`.
                matches = get_close_matches(argument.partition("=")[0], self._option_string_actions, n=1)
                hint = f"; did you mean {matches[0]}?" if matches else ""
                problems.append(f"{COMMAND_LINE}: unknown argument {argument}{hint}")
        try:
            load(overrides)
        except ConfigError as error:
            problems += error.problems
        raise ConfigError(problems)


def integer(*, minimum: int) -> Callable[[str], int]:
    """An argparse type: an integer of at least `minimum`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not minimum <= int(text) < 1 << 62:
            raise ArgumentTypeError(f"{text} must be an integer, at least {minimum}")
        return int(text)

    return parse


def number(*, positive: bool = False) -> Callable[[str], float]:
    """An argparse type: a finite number above 0, or of at least 0."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not isfinite(value) or value < 0 or (positive and value == 0):
            raise ArgumentTypeError(f"{text} must be a finite number, {'above' if positive else 'at least'} 0")
        return value

    return parse


def run_command(
    argv: Sequence[str], parser: CommandParser, run: Callable[[Namespace, list[str]], int | None], *, rank: int = 0
) -> int:
    """Calls `run` with the options and overrides of `argv`; prints its errors and returns the exit code.

    All ranks find the same problems, which rank 0 prints, except for `RankFailedError` and `OSError`.
    """
    try:
        return run(*parser.parse(argv)) or EXIT_SUCCESS
    except SystemExit:  # argparse has printed the help.
        return EXIT_SUCCESS
    except KeyboardInterrupt:
        failure = RunError("interrupted")
    except OSError as error:
        failure = RankFailedError(EXIT_FAILURE, f"{error.filename}: {error.strerror}")
    except RunError as error:
        failure = error
    except Exception as error:
        if (problem := extension.describe_error(error)) is None:
            raise
        failure = RankFailedError(EXIT_FAILURE, problem)
    prefix = f"error: [rank {rank}] " if rank else "error: "
    if rank == 0 or isinstance(failure, RankFailedError):
        problems, more = failure.problems[:MAX_PROBLEMS], len(failure.problems) - MAX_PROBLEMS
        problems += [f"and {more:,} more"] * (more > 0)
        sys.stderr.write("".join(f"{prefix}{problem}\n" for problem in problems))
    return failure.status


def print_lines(*lines: str) -> None:
    """Prints lines at once, so that a reader of the output sees progress."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def format_table(*rows: Sequence[str]) -> list[str]:
    """One line per row, with columns aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
