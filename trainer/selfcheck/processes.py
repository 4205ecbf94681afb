"""The processes of a self-check: forked from a server that has imported torch once, gone when this one is.

Nothing here imports torch.
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
from trainer.errors import DONE, FAILED, RankError
from trainer.selfcheck.comparison import Seen

PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "trainer.selfcheck.worker",
]
PATIENCE = 300.0
"""Seconds that a run may take."""


def preload() -> None:
    """Lets the server, which starts with the first run of this process, import what all of them need."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)


def run(config: Config, size: int, folder: Path, *, reference: Path, patience: float = PATIENCE) -> list[list[Seen]]:
    """What each of `size` ranks saw of the run. `folder` is theirs alone.

    The first that raises, dies or is not done in time ends all of them and raises RankError.
    """
    context = multiprocessing.get_context("forkserver")
    folder.mkdir()
    ranks: list[tuple[ForkServerProcess, Connection]] = []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, config, rank, size, folder, reference), daemon=True)
            with _uninterrupted():  # A process of which only half has been told would say so, on top of what is said.
                process.start()
                theirs.close()
                ranks.append((process, ours))
        return _collected(ranks, patience)
    finally:
        for process, connection in ranks:
            connection.close()  # None leaves before all are done, so none sees a peer vanish.
            process.kill()
            process.join()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _collected(ranks: list[tuple[ForkServerProcess, Connection]], patience: float) -> list[list[Seen]]:
    deadline = time.monotonic() + patience
    found: dict[int, list[Seen]] = {}
    waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(FAILED, f"ranks {', '.join(map(str, waiting.values()))} were not done in {patience:g} s")
        for connection, rank in [(connection, rank) for connection, rank in waiting.items() if connection in ready]:
            del waiting[connection]
            try:
                answer = connection.recv()
            except EOFError:
                ranks[rank][0].join()
                raise RankError(FAILED, f"rank {rank} died: {_cause(ranks[rank][0].exitcode)}") from None
            if isinstance(answer, str):
                raise RankError(FAILED, f"rank {rank}: {answer}")
            found[rank] = answer
    return [found[rank] for rank in sorted(found)]


def _cause(status: int | None) -> str:
    return signal.Signals(-status).name if status and status < 0 else f"status {status}"


def _work(connection: Connection, config: Config, rank: int, size: int, folder: Path, reference: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal sends it to all; the process that asked ends the others.
    watch = Thread(target=_leave_with, args=(connection,))
    watch.start()
    with Path(os.devnull).open("w") as nowhere:  # Libraries greet and warn, eight times.
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    answer: list[Seen] | str
    try:
        from trainer.selfcheck.worker import measure  # It needs torch.

        answer = measure(config, rank=rank, size=size, store=folder / "store", reference=reference)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is to be told
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = str(error).strip().partition("\n")[0]
        answer = f"{type(error).__name__}: {said} ({Path(frame.filename).name}:{frame.lineno})"
    connection.send(answer)
    watch.join()


def _leave_with(connection: Connection) -> None:
    """Ends this process when the one at the other end is done with it, or gone."""
    connection.poll(None)
    os._exit(DONE)
