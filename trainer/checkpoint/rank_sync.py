"""Runs a function on all ranks and agrees on the outcome: all ranks return, or all raise the same error."""

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
"""Limit of messages in one error: a full disk fails on every rank."""


class PhaseError(Exception):
    """A phase of a save failed on some rank. All ranks raise it."""


def run_and_gather(function: Callable[[], T], group: ProcessGroup | None) -> list[T]:
    """The function's values of all ranks, by rank, once it has succeeded on all. Collective.

    If any rank fails, all ranks raise `ResumeError` or `RunFailedError` if a rank raised that, else `PhaseError`.
    """
    value: T | None = None
    error_type: type[Exception] = PhaseError
    problems: dict[int, str] = {}
    rank = distributed.get_rank(group)
    try:
        value = function()
    except (ResumeError, RunFailedError, PhaseError) as error:
        error_type, problems = type(error), {rank: str(error)}
    except CheckpointException as error:  # Raised on all ranks, with the failures by rank.
        problems = {rank: describe_error(failure) for rank, (failure, _) in error.failures.items()}
    except Exception as error:  # noqa: BLE001 - reported to the other ranks, which would wait for this one
        problems = {rank: describe_error(error)}
    outcomes = all_gather_object((value, error_type, problems), group)
    if problems_by_rank := {rank: problem for _, _, problems in outcomes for rank, problem in sorted(problems.items())}:
        raised_type = next(kind for _, kind, problems in outcomes if problems)
        # A damaged checkpoint looks the same to every rank.
        omit_ranks = raised_type is not PhaseError or len(outcomes) == 1
        messages = dict.fromkeys(
            problem if omit_ranks else f"[rank {rank}] {problem}" for rank, problem in problems_by_rank.items()
        )
        raise raised_type("; ".join([*messages][:MAX_REPORTED_PROBLEMS]))
    return [value for value, _, _ in outcomes]  # type: ignore[misc]  # Set, because no rank failed.


def run_on_all_ranks(function: Callable[[], T], group: ProcessGroup | None) -> T:
    """The function's value on this rank. Raises as `run_and_gather`. Collective."""
    values: list[T] = []
    run_and_gather(lambda: values.append(function()), group)
    return values[0]


def run_on_rank_zero(function: Callable[[], T], group: ProcessGroup | None) -> T:
    """Rank 0's value; the other ranks do not run the function. Raises as `run_and_gather`. Collective."""
    is_rank_zero = distributed.get_rank(group) == 0
    return run_and_gather(lambda: function() if is_rank_zero else None, group)[0]  # type: ignore[return-value]


def describe_error(error: BaseException) -> str:
    """The error in one line; for errors of several ranks, the first."""
    error = root_cause(error)
    return f"{type(error).__name__}: {error}".splitlines()[0]


def root_cause(error: BaseException) -> BaseException:
    """The error that a `CheckpointException` of torch.distributed.checkpoint wraps, of the first failing rank."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error
