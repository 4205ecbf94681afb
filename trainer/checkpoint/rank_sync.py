"""What all ranks do, and whether it went well on all of them: then all go on, else all raise the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import distributed
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import CheckpointException

from parallelisms.collectives import gather_over
from trainer.errors import ResumeError, RunError

T = TypeVar("T")
SHOWN = 3
"""Ranks whose problems are told; a disk that is full is a problem of all."""


class PhaseError(Exception):
    """What went wrong on some ranks, in words; all ranks raise it."""


def everywhere(function: Callable[[], T], group: ProcessGroup | None) -> T:
    """The function's value on this rank, once it has succeeded on all.

    Raises, on all ranks alike, `ResumeError` or `RunError` if that is what one of them met, else `PhaseError`.
    """
    value: T | None = None
    kind: type[Exception] = PhaseError
    problems: dict[int, str] = {}
    rank = distributed.get_rank(group)
    try:
        value = function()
    except (ResumeError, RunError, PhaseError) as error:
        kind, problems = type(error), {rank: str(error)}
    except CheckpointException as error:  # All ranks raise it, and it says who met what.
        problems = {rank: describe(failure) for rank, (failure, _) in error.failures.items()}
    except Exception as error:  # noqa: BLE001 - whatever it is, the others are to hear of it
        problems = {rank: describe(error)}
    outcomes = gather_over((kind, problems), group)
    if met := {rank: problem for _, problems in outcomes for rank, problem in sorted(problems.items())}:
        first = next(kind for kind, problems in outcomes if problems)
        # What is wrong with a checkpoint is the same whoever reads it.
        unnamed = first is not PhaseError or distributed.get_world_size(group) == 1
        told = dict.fromkeys(problem if unnamed else f"[rank {rank}] {problem}" for rank, problem in met.items())
        raise first("; ".join([*told][:SHOWN]))
    return value  # type: ignore[return-value]  # Without a problem it is the function's.


def agreed(function: Callable[[], T], group: ProcessGroup | None) -> list[T]:
    """The function's values, by rank. Raises as `everywhere` does."""
    return gather_over(everywhere(function, group), group)


def describe(error: BaseException) -> str:
    """An error in one line; of several ranks' errors the first."""
    error = cause(error)
    return f"{type(error).__name__}: {error}".splitlines()[0]


def cause(error: BaseException) -> BaseException:
    """What is behind an error of torch.distributed.checkpoint, on the first rank that met one."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error
