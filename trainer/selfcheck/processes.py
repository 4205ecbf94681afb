"""The ranks of a self-check: a pool of processes forked from a server that has imported torch,
killed with this process.

Imports no torch.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import Thread

from trainer.config import extension
from trainer.errors import EXIT_FAILURE, EXIT_SUCCESS, RankFailedError
from trainer.selfcheck.comparison import StepDifference
from trainer.selfcheck.launches import Launch

PRELOADED_MODULES = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "trainer.selfcheck.worker",
]
TIMEOUT_SECONDS = 300.0
"""Limit for one launch."""


class RankPool:
    """Processes that run one launch after the other; those of a launch that fails are replaced."""

    def __init__(self, *, device_type: str = "cpu", timeout: float = TIMEOUT_SECONDS) -> None:
        # A forked rank shares the pages of torch, which the server imported once; forking this
        # process would copy its threads' locks.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED_MODULES)
        self._device_type = device_type
        self._timeout = timeout
        self._ranks: list[tuple[ForkServerProcess, Connection]] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(grace=10.0)

    def _end(self, *, grace: float) -> None:
        """Kills the ranks that do not exit within `grace` seconds."""
        deadline = time.monotonic() + grace
        for _, connection in self._ranks:
            # The end of the pipe ends a rank that waits for a task.
            connection.close()
        for process, _ in self._ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        self._ranks.clear()

    def run(self, launch: Launch, *, reference: Path) -> list[list[StepDifference]]:
        """The steps on each rank.

        Raises `RankFailedError` if a rank raises, dies or exceeds the time limit.
        """
        while len(self._ranks) < launch.world_size:
            self._start_rank()
        with tempfile.TemporaryDirectory(prefix="longhaul-store-") as folder:
            # A new store for each launch: an old one still has the keys of earlier groups.
            task = (launch, Path(folder) / "store", reference, self._device_type)
            ranks = self._ranks[: launch.world_size]
            try:
                for rank, (_, connection) in enumerate(ranks):
                    connection.send((rank, *task))
                return _collect_results(ranks, self._timeout)
            except BaseException:
                # Peers of a failed rank wait in a collective and cannot be used again.
                self._end(grace=0.0)
                raise

    def _start_rank(self) -> None:
        parent_end, child_end = self._context.Pipe()
        process = self._context.Process(target=_rank_main, args=(child_end,), daemon=True)
        # A half-started process would print a traceback.
        with _sigint_blocked():
            process.start()
            child_end.close()
            self._ranks.append((process, parent_end))


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _collect_results(
    ranks: list[tuple[ForkServerProcess, Connection]], timeout: float
) -> list[list[StepDifference]]:
    deadline = time.monotonic() + timeout
    results: dict[int, list[StepDifference]] = {}
    pending = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            unfinished = ", ".join(map(str, pending.values()))
            raise RankFailedError(
                EXIT_FAILURE, f"ranks {unfinished} did not finish in {timeout:g} s"
            )
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


# ---- in a rank


def _rank_main(connection: Connection) -> None:
    # A terminal sends it to all; the parent kills the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_exit_with_parent, daemon=True).start()
    # Every rank would repeat the libraries' warnings.
    with Path(os.devnull).open("w") as devnull:
        os.dup2(devnull.fileno(), 1)
        os.dup2(devnull.fileno(), 2)
    from trainer.selfcheck.worker import clean_up, run_task  # Imports torch.

    gc.freeze()
    # A trainer freezes what it finds and unfreezes it at its end: that would bring back a million
    # objects of torch.
    gc.freeze = gc.unfreeze = lambda: None
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        # Only now: all ranks have finished the previous launch, so none loses a peer.
        clean_up()
        result: list[StepDifference] | str
        try:
            result = run_task(*task)
        except BaseException as error:  # noqa: BLE001 - every error is sent to the parent
            result = _describe(error)
        connection.send(result)


def _describe(error: BaseException) -> str:
    if isinstance(error, RankFailedError):
        return str(error)
    if (problem := extension.describe_error(error)) is not None:
        return problem
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message} ({Path(frame.filename).name}:{frame.lineno})"


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        # The forkserver is the ranks' parent, so the death of this process reaches them by its
        # sentinel only.
        wait([parent.sentinel])
    os._exit(EXIT_SUCCESS)
