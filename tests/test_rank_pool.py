"""The harness itself: results in order, errors with their rank, nothing left behind."""

from __future__ import annotations

import os
import signal
import time
import warnings

import pytest
import torch
from torch import distributed

from tests.ranks import RankError, run_ranks

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
    distributed.barrier()


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
    with pytest.raises(RankError, match=r"(?s)rank 1 raised.*in fail_at.*ValueError: broken on purpose"):
        run_ranks(fail_at, 2, 1)


def test_a_rank_that_dies_ends_the_others() -> None:
    with pytest.raises(RankError, match="rank 1 died"):
        run_ranks(die_at, 2, 1)


def test_a_rank_that_hangs_ends_the_others() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"ranks \[1\] were not done after 2 s"):
        run_ranks(hang_at, 2, 1, timeout=2)
    assert time.monotonic() - started < 10


def test_a_warning_is_an_error() -> None:
    with pytest.raises(RankError, match="UserWarning: careful"):
        run_ranks(warn, 1)
