"""The ranks of a self-check: forked from a server that has imported torch, killed with this process.

Imports no torch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import Thread

from trainer.config.job_config import Config
from trainer.errors import EXIT_FAILURE, EXIT_SUCCESS, RankFailedError
from trainer.selfcheck.comparison import StepDifference

PRELOADED_MODULES = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "trainer.selfcheck.worker",
]
TIMEOUT_SECONDS = 300.0
"""Limit for one run."""


def preload_forkserver() -> None:
    """Makes the fork server, which starts with the first run, import torch and the trainer once."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED_MODULES)


def run_ranks(
    config: Config, world_size: int, folder: Path, *, reference: Path, timeout: float = TIMEOUT_SECONDS
) -> list[list[StepDifference]]:
    """Runs `world_size` ranks in `folder`, which must not exist; returns the steps of each rank.

    Raises `RankFailedError` and kills all ranks if one raises, dies or exceeds `timeout` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    folder.mkdir()
    ranks: list[tuple[ForkServerProcess, Connection]] = []
    try:
        for rank in range(world_size):
            parent_end, child_end = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(child_end, config, rank, world_size, folder, reference), daemon=True
            )
            with _sigint_blocked():  # A half-started process would print a traceback.
                process.start()
                child_end.close()
                ranks.append((process, parent_end))
        return _collect_results(ranks, timeout)
    finally:
        for process, connection in ranks:
            connection.close()  # Ranks exit only now, so none loses a peer.
            process.kill()
            process.join()


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _collect_results(ranks: list[tuple[ForkServerProcess, Connection]], timeout: float) -> list[list[StepDifference]]:
    deadline = time.monotonic() + timeout
    results: dict[int, list[StepDifference]] = {}
    pending = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            unfinished = ", ".join(map(str, pending.values()))
            raise RankFailedError(EXIT_FAILURE, f"ranks {unfinished} did not finish in {timeout:g} s")
        for connection in [each for each in pending if each in ready]:
            rank = pending.pop(connection)
            try:
                result = connection.recv()
            except EOFError:
                ranks[rank][0].join()
                status = ranks[rank][0].exitcode or 0
                cause = signal.Signals(-status).name if status < 0 else f"status {status}"
                raise RankFailedError(EXIT_FAILURE, f"rank {rank} died: {cause}") from None
            if isinstance(result, str):
                raise RankFailedError(EXIT_FAILURE, f"rank {rank}: {result}")
            results[rank] = result
    return [results[rank] for rank in sorted(results)]


def _rank_main(
    connection: Connection, config: Config, rank: int, world_size: int, folder: Path, reference: Path
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal sends it to all; the parent kills the ranks.
    watcher = Thread(target=_exit_with_parent, args=(connection,))
    watcher.start()
    with Path(os.devnull).open("w") as devnull:  # Every rank would repeat the libraries' warnings.
        os.dup2(devnull.fileno(), 1)
        os.dup2(devnull.fileno(), 2)
    result: list[StepDifference] | str
    try:
        from trainer.selfcheck.worker import run_and_compare  # Imports torch.

        result = run_and_compare(config, rank=rank, world_size=world_size, store=folder / "store", reference=reference)
    except BaseException as error:  # noqa: BLE001 - every error is sent to the parent
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message = str(error).strip().partition("\n")[0]
        result = f"{type(error).__name__}: {message} ({Path(frame.filename).name}:{frame.lineno})"
    connection.send(result)
    watcher.join()


def _exit_with_parent(connection: Connection) -> None:
    """Ends this process when the parent closes the connection or dies."""
    connection.poll(None)
    os._exit(EXIT_SUCCESS)
