"""The pool of ranks: results in order, errors with their rank, and no call notices the one before
it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.ranks import RankError, run_ranks
from trainer import errors

pytestmark = pytest.mark.ranks


def rank_and_sum(x: torch.Tensor) -> tuple[int, torch.Tensor]:
    total = x * (distributed.get_rank() + 1)
    distributed.all_reduce(total)
    return distributed.get_rank(), total


def fail_at(rank: int) -> None:
    if distributed.get_rank() == rank:
        raise ValueError("broken on purpose")
    distributed.barrier()


def die_at(rank: int) -> None:
    if distributed.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # In a collective it could fail first.


def hang_at(rank: int) -> None:
    if distributed.get_rank() == rank:
        time.sleep(60)


def warn() -> None:
    warnings.warn("careful", stacklevel=1)


def test_results_come_in_the_order_of_ranks() -> None:
    results = run_ranks(rank_and_sum, 3, torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(total.tolist() == [6.0, 12.0] for _, total in results)


def test_an_error_is_raised_here_with_its_rank_and_place() -> None:
    with pytest.raises(
        RankError, match=r"(?s)rank 1 raised.*in fail_at.*ValueError: broken on purpose"
    ):
        run_ranks(fail_at, 2, 1)


def test_a_rank_that_dies_ends_the_others() -> None:
    with pytest.raises(RankError, match="rank 1 died"):
        run_ranks(die_at, 2, 1)


def test_a_rank_that_hangs_ends_the_others_and_shows_where() -> None:
    # Processes that wait in the pool: starting them takes longer than the time limit below.
    run_ranks(process, 2)
    started = time.monotonic()
    with pytest.raises(
        RankError, match=r"(?s)ranks \[1\] were not done after 3 s.*stacks of rank 1.*in hang_at"
    ):
        run_ranks(hang_at, 2, 1, timeout=3)
    assert time.monotonic() - started < 30


def test_a_warning_is_an_error() -> None:
    with pytest.raises(RankError, match="UserWarning: careful"):
        run_ranks(warn, 1)


# ---- what stays, and what does not


def process() -> int:
    return os.getpid()


def leave_traces() -> None:
    os.environ["LEFT"] = "here"
    os.chdir("/")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.getLogger().addHandler(logging.NullHandler())
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.manual_seed(1)
    torch.set_grad_enabled(False)
    torch.compiler.set_stance("force_eager")
    vars(errors)["EXIT_FAILURE"] = -1


def compiles() -> bool:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    torch.compile(torch.nn.functional.relu, backend=counter)(torch.ones(1))
    return bool(counter.frame_count)


def traces() -> tuple[object, ...]:
    return (
        os.environ.get("LEFT"),
        Path.cwd(),
        signal.getsignal(signal.SIGTERM),
        logging.getLogger().handlers,
        logging.getLogger("torch.distributed").level,
        warnings.filters[0][0],
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.rand(1).item(),
        torch.is_grad_enabled(),
        errors.EXIT_FAILURE,
        compiles(),
    )


def leave_a_thread() -> int:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return os.getpid()


def group_of_one() -> tuple[int, int]:
    """The size of the world, and a rank's number in a new group of it alone."""
    groups = [distributed.new_group([rank]) for rank in range(distributed.get_world_size())]
    return distributed.get_world_size(), distributed.get_rank(groups[distributed.get_rank()])


def test_processes_stay_for_calls_of_every_size() -> None:
    processes = run_ranks(process, 3)
    assert run_ranks(process, 3) == processes
    assert run_ranks(process, 2) == processes[:2]
    assert not {*run_ranks(process, 3, fresh=True)} & {*processes}
    assert run_ranks(process, 3) == processes


def test_every_call_has_its_own_groups() -> None:
    for size in (2, 3, 1):
        assert run_ranks(group_of_one, size) == [(size, 0)] * size


def test_a_call_does_not_notice_what_the_one_before_changed() -> None:
    (before,) = run_ranks(process, 1)
    expected = run_ranks(traces, 1)
    run_ranks(leave_traces, 1)
    assert run_ranks(traces, 1) == expected
    assert run_ranks(process, 1) == [before], "it was restored, not replaced"


@pytest.mark.parametrize("failing", [fail_at, die_at])
def test_a_call_after_a_failure_finds_new_processes(failing: object) -> None:
    before = run_ranks(process, 2)
    with pytest.raises(RankError):
        run_ranks(failing, 2, 1)  # type: ignore[arg-type]
    assert not {*run_ranks(process, 2)} & {*before}


def test_a_process_with_a_thread_that_goes_on_is_replaced() -> None:
    (before,) = run_ranks(leave_a_thread, 1)
    assert run_ranks(process, 1) != [before]
