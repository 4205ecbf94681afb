"""Runs a function on all ranks and agrees on the outcome: all ranks return, or all raise the same
error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed
from torch.distributed import ProcessGroup

from parallelisms.mesh.collectives import all_gather_values
from trainer.errors import ResumeError, RunFailedError, UnreadableError

T = TypeVar("T")
MAX_REPORTED_PROBLEMS = 3
"""Limit of messages in one error: a full disk fails on every rank."""


class PhaseError(Exception):
    """A phase of a save failed on some rank. All ranks raise it."""


SHARED_ERRORS: dict[str, type[Exception]] = {
    error_type.__name__: error_type
    for error_type in (PhaseError, ResumeError, UnreadableError, RunFailedError)
}
"""Errors that one rank may raise for all, by the name that it sends; every other one becomes a
`PhaseError`.
"""


def run_and_gather(function: Callable[[], T], group: ProcessGroup | None) -> list[T]:
    """The function's values of all ranks, by rank, once it has succeeded on all. Collective.

    A value is what `all_gather_values` takes. If any rank fails, all ranks raise `ResumeError`,
    `RunFailedError` or `UnreadableError` if a rank raised that, else `PhaseError`.
    """
    value: T | None = None
    error_name = ""
    problem = ""
    try:
        value = function()
    except Exception as error:  # noqa: BLE001 - reported to the other ranks, which would wait for this one
        # The most derived class that all ranks know: peers raise the same type by its name.
        shared = [each.__name__ for each in type(error).__mro__ if each in SHARED_ERRORS.values()]
        error_name = shared[0] if shared else PhaseError.__name__
        problem = str(error) if shared else describe_error(error)
    outcome: list[Any] = [value, error_name, problem]
    outcomes = all_gather_values(outcome, group)
    failures = {rank: (name, problem) for rank, (_, name, problem) in enumerate(outcomes) if name}
    if failures:
        raised_name, _ = next(iter(failures.values()))
        raised_type = SHARED_ERRORS.get(raised_name, PhaseError)
        # A damaged checkpoint looks the same to every rank.
        omit_ranks = raised_type is not PhaseError or len(outcomes) == 1
        messages = dict.fromkeys(
            problem if omit_ranks else f"[rank {rank}] {problem}"
            for rank, (_, problem) in failures.items()
        )
        raise raised_type("; ".join([*messages][:MAX_REPORTED_PROBLEMS]))
    return [value for value, _, _ in outcomes]


def run_on_all_ranks(function: Callable[[], T], group: ProcessGroup | None) -> T:
    """The function's value on this rank. Raises as `run_and_gather`. Collective."""
    # The value stays on its rank: it may be a tensor or a file, which is not sent as JSON.
    values: list[T] = []
    run_and_gather(lambda: values.append(function()), group)
    return values[0]


def run_on_rank_zero(function: Callable[[], T], group: ProcessGroup | None) -> T:
    """Rank 0's value; the other ranks do not run the function.

    Raises as `run_and_gather`. Collective.
    """
    # Other ranks take part, so that they learn of a failure instead of waiting for rank 0.
    is_rank_zero = distributed.get_rank(group) == 0
    return run_and_gather(lambda: function() if is_rank_zero else None, group)[0]  # type: ignore[return-value]


def describe_error(error: BaseException) -> str:
    """The error in one line; for errors of several ranks, the first."""
    error = root_cause(error)
    return f"{type(error).__name__}: {error}".splitlines()[0]


def root_cause(error: BaseException) -> BaseException:
    """The error that a `CheckpointException` of torch.distributed.checkpoint wraps, of the first
    failing rank.
    """
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error
