"""What all ranks do, and whether it went well on all of them: then all go on, else all raise the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import distributed
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import CheckpointException

from parallelisms.collectives import all_gather_object
from trainer.errors import ResumeError, RunFailedError

T = TypeVar("T")
MAX_REPORTED_PROBLEMS = 3
"""Ranks whose problems are told; a disk that is full is a problem of all."""


class PhaseError(Exception):
    """What went wrong on some ranks, in words; all ranks raise it."""


def run_on_all_ranks(function: Callable[[], T], group: ProcessGroup | None) -> T:
    """The function's value on this rank, once it has succeeded on all.

    Raises, on all ranks alike, `ResumeError` or `RunError` if that is what one of them met, else `PhaseError`.
    """
    value: T | None = None
    error_type: type[Exception] = PhaseError
    problems: dict[int, str] = {}
    rank = distributed.get_rank(group)
    try:
        value = function()
    except (ResumeError, RunFailedError, PhaseError) as error:
        error_type, problems = type(error), {rank: str(error)}
    except CheckpointException as error:  # All ranks raise it, and it says who met what.
        problems = {rank: describe_error(failure) for rank, (failure, _) in error.failures.items()}
    except Exception as error:  # noqa: BLE001 - whatever it is, the others are to hear of it
        problems = {rank: describe_error(error)}
    outcomes = all_gather_object((error_type, problems), group)
    if problems_by_rank := {rank: problem for _, problems in outcomes for rank, problem in sorted(problems.items())}:
        raised_type = next(kind for kind, problems in outcomes if problems)
        # What is wrong with a checkpoint is the same whoever reads it.
        omit_ranks = raised_type is not PhaseError or distributed.get_world_size(group) == 1
        messages = dict.fromkeys(
            problem if omit_ranks else f"[rank {rank}] {problem}" for rank, problem in problems_by_rank.items()
        )
        raise raised_type("; ".join([*messages][:MAX_REPORTED_PROBLEMS]))
    return value  # type: ignore[return-value]  # Without a problem it is the function's.


def run_and_gather(function: Callable[[], T], group: ProcessGroup | None) -> list[T]:
    """The function's values, by rank. Raises as `everywhere` does."""
    return all_gather_object(run_on_all_ranks(function, group), group)


def describe_error(error: BaseException) -> str:
    """An error in one line; of several ranks' errors the first."""
    error = root_cause(error)
    return f"{type(error).__name__}: {error}".splitlines()[0]


def root_cause(error: BaseException) -> BaseException:
    """What is behind an error of torch.distributed.checkpoint, on the first rank that met one."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error
