"""Runs a function on several processes that form a gloo group, and brings every rank's result back.

Workers are forked from a server that has imported torch once, which makes a job of four processes a matter of about a
second. They meet through a file, so no port can be taken.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

Result = TypeVar("Result")

PRELOADED = [
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
    "models.transformer",
    "parallelisms.parallelize",
    "trainer.trainer",
    "tests.ranks",
]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOADED)


class RankError(AssertionError):
    """A rank raised, or died, or did not answer in time."""


def run_ranks(function: Callable[..., Result], world_size: int, *arguments: Any, timeout: float = 60) -> list[Result]:
    """`function(*arguments)` on each of `world_size` ranks: their results, in order.

    `function` stands at the top of a module; arguments and results are pickled, tensors as their values. The first
    rank that raises, dies or is not done after `timeout` seconds ends all of them and raises `RankError`.
    """
    deadline = time.monotonic() + timeout
    job = pickle.dumps((function, arguments))
    workers: list[tuple[ForkServerProcess, Connection]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                place = (rank, world_size, Path(folder) / "store", timeout)
                worker = context.Process(target=_work, args=(theirs, place, job), daemon=True)
                worker.start()
                theirs.close()
                workers.append((worker, ours))
            results = _collect([connection for _, connection in workers], deadline, timeout)
        except BaseException:
            for worker, _ in workers:
                worker.kill()
            raise
        finally:
            # Closing lets the workers go: none leaves before all are done, so none sees a peer vanish.
            for worker, connection in workers:
                connection.close()
                worker.join(10)
                worker.kill()
                worker.join()
                worker.close()
    return results


def _collect(connections: list[Connection], deadline: float, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} were not done after {timeout} s")
        for connection in ready:
            if not isinstance(connection, Connection):
                raise TypeError(f"waited for {connection}")
            rank = waiting.pop(connection)
            try:
                succeeded, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} died") from None
            if not succeeded:
                raise RankError(f"rank {rank} raised\n{value}")
            results[rank] = value
    return [results[rank] for rank in sorted(results)]


def _work(connection: Connection, place: tuple[int, int, Path, float], job: bytes) -> None:
    rank, world_size, store, timeout = place
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    try:
        distributed.init_process_group(
            "gloo",
            store=distributed.FileStore(str(store), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        function, arguments = pickle.loads(job)
        answer = pickle.dumps((True, function(*arguments)))
    except BaseException:  # noqa: BLE001 - whatever it is, the test is to show it
        answer = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(answer)
    try:
        connection.recv_bytes()
    except EOFError:
        distributed.destroy_process_group()
