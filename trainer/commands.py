"""Shared CLI of all `longhaul` commands: argument parser, overrides, errors and exit codes.

Imports no torch.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from math import isfinite
from pathlib import Path
from textwrap import fill
from typing import NoReturn

from trainer.command_table import resolve, typed
from trainer.config import extension
from trainer.config.parse import COMMAND_LINE, load, parse_arguments, sections_with
from trainer.config.sections import (
    MAX_SEQ_LEN,
    REMOTE_SCHEMES,
    is_remote,
    read_length,
    require_remote,
)
from trainer.errors import (
    EXIT_FAILURE,
    EXIT_SUCCESS,
    ConfigError,
    RankFailedError,
    RunError,
    in_one_line,
    printable,
)
from trainer.storage.durable_io import keep_others_from_writing

MAX_PROBLEMS = 100
OTHER_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
EXIT_HELP = "Exit codes: 0 success, 2 wrong arguments or configuration, 78 unusable data or checkpoint, 1 other errors."


def overrides_help() -> str:
    """The remark on overrides of a command that takes any key."""
    return f"--section.key VALUE sets any key of the configuration; {typed('train', '--help')} lists them."


Run = Callable[[Namespace, list[str]], int | None]
"""The function of a command: takes its options and the arguments for `load`, returns the exit
code; None for success.
"""


def later(reference: str) -> Run:
    """A function of a module that imports torch, which help does not need."""

    def run(options: Namespace, overrides: list[str]) -> int | None:
        status: int | None = resolve(reference)(options, overrides)
        return status

    return run


class CommandParser(ArgumentParser):
    """The arguments of a command. Raises `ConfigError` instead of exiting.

    It takes `--section.key VALUE` if `overrides` describes that. An option whose `dest` is
    `section.key` is short for it. With `add_command` it has commands of its own; without `run` one
    of them must be given.
    """

    def __init__(
        self,
        prog: str,
        description: str,
        *,
        run: Run | None = None,
        overrides: str | Callable[[], str] = "",
        rank: Callable[[], int] = lambda: 0,
        report: Callable[[Sequence[str], Sequence[str]], str] | None = None,
    ) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=RawDescriptionHelpFormatter,
            # An abbreviation would take an option that a later version adds for another one.
            allow_abbrev=False,
        )
        self.rank = rank
        """Rank of this process. All ranks find the same problems, which rank 0 prints."""
        self.report = report
        """Formats refused arguments, given the problems and the arguments; None: one line per
        problem.
        """
        self._run = run
        self._overrides = overrides
        self.commands: dict[str, tuple[CommandParser, str]] = {}
        """Commands of this command by name, with a summary."""
        self.set_defaults(run=run)

    def add_command(
        self, name: str, summary: str, *, run: Run, overrides: str = ""
    ) -> CommandParser:
        """The parser of a command of this command."""
        description = f"{summary[:1].upper()}{summary[1:]}."
        parser = CommandParser(
            f"{self.prog} {name}", description, run=run, overrides=overrides, rank=self.rank
        )
        self.commands[name] = (parser, summary)
        return parser

    def add_config(self) -> None:
        self.add_argument(
            "--config",
            metavar="NAME|PATH",
            help="a TOML file, or the name of one in train_configs/; default: debug",
        )

    def format_usage(self) -> str:
        return super().format_usage() if self._run else f"usage: {self.prog} COMMAND ...\n"

    def format_help(self) -> str:
        """Formats the help when it is asked for, because that of `train` lists every key."""
        overrides = self._overrides if isinstance(self._overrides, str) else self._overrides()
        self.epilog = f"{self._command_list()}{overrides}\n{EXIT_HELP}".lstrip()
        if not self._run:
            self.usage = "%(prog)s COMMAND ..."
        return super().format_help()

    def _command_list(self) -> str:
        """The commands of this command; a summary of several lines is indented."""
        width = max(map(len, self.commands), default=0) + 4
        lines = [
            f"  {name}".ljust(width) + fill(summary, 110 - width, subsequent_indent=" " * width)
            for name, (_, summary) in self.commands.items()
        ]
        title = "other commands" if self._run else "commands"
        return "\n".join([f"{title}, each with its own --help:", *lines, "", ""]) if lines else ""

    def error(self, message: str) -> NoReturn:
        if wrong := re.fullmatch(
            r"argument (\S+): invalid choice: '(.*)' \(choose from (.+)\)", message, re.DOTALL
        ):
            option, given, listed = wrong.groups()
            hint = _hint(given, re.findall(r"[^', ]+", listed))
            raise ConfigError([f'{COMMAND_LINE}: {option} "{given}" is unknown; {hint}'])
        # argparse's wording, in the form of our own problems: option first, then what it needs.
        message = re.sub(r"^argument (\S+): ", r"\1 ", message).replace(
            "expected one argument", "needs a value"
        )
        message = message.replace(
            "the following arguments are required:", f"{self.prog.split()[-1]} needs"
        )
        raise ConfigError([f"{COMMAND_LINE}: {message}"])

    def parse(self, argv: Sequence[str]) -> tuple[Namespace, list[str]]:
        """The options, and the arguments for `load`: --config and `--section.key=VALUE`. Raises
        `ConfigError`.

        `run` of the options is what the command does, `words` are the arguments as they were
        given.
        """
        if argv and argv[0] in self.commands:
            options, overrides = self.commands[argv[0]][0].parse(argv[1:])
            options.words = [*argv]
            return options, overrides
        if not self._run:
            self._raise_without_command(argv)
        arguments = list[str]()
        overrides = list[str]()
        remaining = [*argv]
        while remaining:
            argument = remaining.pop(0)
            name, equals, _ = argument.partition("=")
            # argparse cannot know the keys, of which extensions add more. They are set aside for
            # `load`, which checks them.
            if not (self._overrides and name.startswith("--") and "." in name):
                arguments.append(argument)
            # `--key` without a value stays as it is: `load` says what it needs.
            elif equals or not remaining or remaining[0].startswith("--"):
                overrides.append(argument)
            else:
                overrides.append(f"{argument}={remaining.pop(0)}")
        options, unknown = self.parse_known_args(arguments)
        options.words = [*argv]
        values = vars(options).items()
        overrides += [
            f"--{key}={value}"
            for key, value in values
            if ("." in key or key == "config") and value is not None
        ]
        if unknown:
            self._raise_unknown(unknown, overrides)
        return options, overrides

    def _raise_without_command(self, argv: Sequence[str]) -> NoReturn:
        self.parse_known_args(argv)  # Prints the help, if that is asked for.
        given = next((word for word in argv if not word.startswith("-")), None)
        if given is None:
            raise ConfigError(
                [
                    f"{COMMAND_LINE}: {self.prog.split()[-1]} needs a command: {', '.join(self.commands)}"
                ]
            )
        raise ConfigError(
            [f'{COMMAND_LINE}: command "{given}" is unknown; {_hint(given, self.commands)}']
        )

    def _raise_unknown(self, unknown: Sequence[str], overrides: Sequence[str]) -> NoReturn:
        """Raises `ConfigError` with the unknown arguments, and with everything that is wrong with
        the overrides.
        """
        problems = [
            f"{COMMAND_LINE}: unknown argument {argument}{self._nearest(argument)}"
            for previous, argument in pairwise(["", *unknown])
            # Else it is the value of `previous`.
            if argument.startswith("--") or not previous.startswith("--")
        ]
        try:
            load(overrides)
        except ConfigError as error:
            problems += error.problems
        raise ConfigError(problems)

    def _nearest(self, argument: str) -> str:
        """A hint at the option, command or key that an unknown argument may be meant for."""
        name = argument.partition("=")[0]
        key = name.removeprefix("--").replace("-", "_")
        # The whole of a key's name says more than the likeness of an option's.
        if self._overrides and (sections := sections_with(key)):
            meant = " or ".join(f"--{section}.{key}" for section in sections)
            return f"; did you mean {meant}?"
        if get_close_matches(name, known := [*self._option_string_actions, *self.commands], n=1):
            return f"; {_hint(name, known)}"
        hints = [
            problem.partition("; ")[2]
            for problem in parse_arguments([name]).problems
            if self._overrides
        ]
        return f"; {hints[0]}" if hints and hints[0] else ""


def _hint(given: str, known: Iterable[str]) -> str:
    matches = get_close_matches(given, known, n=1)
    return f"did you mean {matches[0]}?" if matches else "see --help"


def integer(*, minimum: int) -> Callable[[str], int]:
    """An argparse type: an integer of at least `minimum`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not minimum <= int(text) < 1 << 62:
            raise ArgumentTypeError(f"{text} must be an integer, at least {minimum}")
        return int(text)

    return parse


def count(text: str, *, minimum: int = 1, maximum: int = 1 << 62) -> int:
    """An argparse type: an integer of at least `minimum`, also as 128K or 1M."""
    read = str(read_length(text))
    value = int(read) if read.isdecimal() else 0
    if not minimum <= value <= maximum:
        limits = f"at least {minimum}"
        if maximum == MAX_SEQ_LEN:
            limits += f", at most {maximum:,}"
        raise ArgumentTypeError(
            f"{text} must be an integer, {limits}, optionally with suffix K or M"
        )
    return value


def number(*, positive: bool = False) -> Callable[[str], float]:
    """An argparse type: a finite number above 0, or of at least 0."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not isfinite(value) or value < 0 or (positive and value == 0):
            raise ArgumentTypeError(
                f"{text} must be a finite number, {'above' if positive else 'at least'} 0"
            )
        return value

    return parse


def text_or_url(text: str) -> str:
    """An argparse type: text, which must keep the rules of URLs if it is one of object storage."""
    try:
        return str(require_remote(text)).rstrip("/") if is_remote(text) else text
    except ValueError as error:
        # The URL is not repeated: it may hold a password.
        raise ArgumentTypeError(f"the URL {error}") from None


def folder_or_url(text: str) -> Path | str:
    """An argparse type: a local path, or the URL of a folder of object storage as text."""
    if is_remote(text):
        return text_or_url(text)
    if OTHER_SCHEME.match(text):
        # Otherwise a folder of this name would be created here.
        schemes = ", ".join(f"{scheme}://" for scheme in REMOTE_SCHEMES)
        raise ArgumentTypeError(f"the URL must begin with one of {schemes}")
    return Path(text)


CHECKPOINT_HELP = "run folder, RUN@STEP or RUN/checkpoints/step-STEP"


def local_path(text: str) -> Path:
    """An argparse type: a path of something of a run, and no URL."""
    if OTHER_SCHEME.match(text):
        reason = "checkpoint.remote restores a run from there, and checkpoint.initial_load_path takes its weights"
        raise ArgumentTypeError(f"this command takes what is on this machine: {reason}")
    return Path(text)


def checkpoint_path(text: str) -> Path:
    """An argparse type: a run folder or a checkpoint, of which RUN@STEP is another name."""
    path = local_path(text)
    run, at, step = text.rpartition("@")
    # A folder may have an @ in its name.
    is_folder = os.path.exists(text)  # noqa: PTH110 - Path.exists raises for a long name
    if at and step.isascii() and step.isdecimal() and not is_folder:
        return Path(run, "checkpoints", f"step-{step.lstrip('0') or 0}")
    return path


def checkpoint_or_url(text: str) -> Path | str:
    """An argparse type: as `checkpoint_path`, or the URL of copies as text."""
    place = folder_or_url(text)
    return checkpoint_path(text) if isinstance(place, Path) else place


def writable_file(text: str) -> Path:
    """An argparse type: a file in an existing folder."""
    file = Path(text)
    if file.is_dir() or not file.parent.is_dir():
        reason = "a folder" if file.is_dir() else f"{file.parent} is not a folder"
        raise ArgumentTypeError(f"{file} cannot be written: {reason}")
    return file


def run_command(argv: Sequence[str], parser: CommandParser) -> int:
    """Runs a command with its arguments; prints its errors and returns the exit code.

    All ranks find the same problems, which rank 0 prints, except for `RankFailedError` and
    `OSError`.
    """
    keep_others_from_writing()
    open_missing_streams()
    try:
        options, overrides = parser.parse(argv)
    except SystemExit:  # argparse has printed the help.
        return EXIT_SUCCESS
    except ConfigError as error:
        if parser.report is None:
            return _print_failure(error, parser.rank())
        sys.stderr.write(parser.report(error.problems, argv))
        return error.status
    try:
        return options.run(options, overrides) or EXIT_SUCCESS
    except KeyboardInterrupt:
        failure = RunError("interrupted")
    except OSError as error:
        place = "" if error.filename is None else f"{error.filename}: "
        failure = RankFailedError(EXIT_FAILURE, f"{place}{error.strerror}")
    except RunError as error:
        failure = error
    except Exception as error:
        # An error of our own keeps its traceback; one of an extension is reported as such.
        if (problem := extension.describe_error(error)) is None:
            raise
        failure = RankFailedError(EXIT_FAILURE, problem)
    return _print_failure(failure, parser.rank())


def open_missing_streams() -> None:
    """Gives a process whose standard output or error was closed a place to write to."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _print_failure(failure: RunError, rank: int) -> int:
    prefix = f"error: [rank {rank}] " if rank else "error: "
    if rank == 0 or isinstance(failure, RankFailedError):
        problems = failure.problems[:MAX_PROBLEMS]
        more = len(failure.problems) - MAX_PROBLEMS
        if more > 0:
            problems = [*problems, f"and {more:,} more"]
        sys.stderr.write("".join(f"{prefix}{problem}\n" for problem in problems))
    return failure.status


def print_lines(*lines: str) -> None:
    """Prints lines at once, so that a reader of the output sees progress, with control characters
    escaped.
    """
    sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
    sys.stdout.flush()


def print_table(header: Sequence[str], *rows: Sequence[str]) -> None:
    """Prints a table; on a terminal, cells are wrapped so that it fits."""
    if not sys.stdout.isatty():
        print_lines(*format_table(header, *rows))
        return
    # Only here: others need not wait for its import.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*map(in_one_line, header), box=None, pad_edge=False, header_style="")
    for row in rows:
        table.add_row(*(Text(in_one_line(cell), overflow="fold") for cell in row))
    print_lines("".join(part.text for part in Console().render(table)).rstrip("\n"))


def format_table(*rows: Sequence[str]) -> list[str]:
    """One line per row, with columns aligned to the left."""
    # A name of a file may have lines, which would look like rows.
    lines = [[*map(in_one_line, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
