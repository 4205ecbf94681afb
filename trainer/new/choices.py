"""The choices of a new run: given as options, asked for on a terminal, or missing."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trainer.config.data import HF_PREFIX, STDLIB_CORPUS
from trainer.errors import ConfigError, RunError, printable

T = TypeVar("T")


@dataclass(frozen=True)
class Question(Generic[T]):
    """A choice that has no default of its own."""

    option: str
    meaning: str
    parse: Callable[[str], T]
    """Raises `ArgumentTypeError` or `RunError` for an answer that is no value."""
    suggestion: str = ""
    """The answer of an empty line; without one the question is asked again."""


def corpus_text(answer: str) -> str:
    """The parser of a corpus, whose files are looked at later."""
    if not answer:
        raise ArgumentTypeError("a corpus must not be empty")
    return answer


CORPUS = Question(
    "--corpus",
    f"a file or folder of text, {HF_PREFIX}DATASET, or {STDLIB_CORPUS}",
    corpus_text,
)


@dataclass
class Choices:
    """Collects choices in order."""

    is_terminal: bool
    missing: list[str] = field(default_factory=list)
    """A line for each choice that is not given where nobody can be asked."""
    answers: list[str] = field(default_factory=list)
    """Options and values that stand for the answers."""

    def choose(self, given: T | None, question: Question[T]) -> T | None:
        """The choice as given, else as answered; None if there is nobody to ask."""
        if given is not None:
            return given
        if self.is_terminal:
            return self._ask(question)
        self.missing.append(f"{question.option} is missing: {question.meaning}")
        return None

    def _ask(self, question: Question[T]) -> T:
        """Asks until the answer is a value. Raises `ConfigError` at the end of the input."""
        suggestion = f" [{question.suggestion}]" if question.suggestion else ""
        while True:
            sys.stderr.write(f"{question.meaning}{suggestion}: ")
            sys.stderr.flush()
            line = sys.stdin.readline()
            if not line:
                raise ConfigError([f"{question.option} is missing: the input ended"])
            answer = line.strip() or question.suggestion
            if not answer:
                continue
            try:
                value = question.parse(answer)
            except ArgumentTypeError as error:
                sys.stderr.write(f"{printable(str(error))}\n")
                continue
            except RunError as error:
                sys.stderr.write("".join(f"{problem}\n" for problem in error.problems))
                continue
            self.answers += [question.option, answer]
            return value
