"""Runs a function on several processes that form a gloo group, and brings every rank's result
back.

The processes are a pool: they stay for the next call, so only the first call pays for starting
them. They are forked from a server that has imported torch once. Between calls a process gets its
state back; if it cannot, or if any rank fails, it is replaced. Ranks meet through a file, so no
port can be taken.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

from tests.garbage import freeze_imports, settle

Result = TypeVar("Result")

PRELOADED = [
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
    "torch.utils.tensorboard",
    "models.transformer",
    "parallelisms.mesh.host_staging",
    "parallelisms.parallelize",
    "trainer.step.trainer",
    "train",
    "tests.ranks",
]
# Modules whose patched attributes are put back after a call.
OURS = ("models", "parallelisms", "trainer", "train", "os", "time")

KEPT_FOLDERS = 16
_folders = deque[Path]()

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOADED)


class RankError(AssertionError):
    """A rank raised, or died, or did not answer in time."""


@dataclass(frozen=True)
class Outcome:
    """What became of a rank's task: its value, or its traceback, or neither if the process
    died.
    """

    value: Any = None
    error: str = ""
    died: bool = False
    reusable: bool = False
    """Whether the process may take another task."""

    @property
    def succeeded(self) -> bool:
        return not self.error and not self.died


def run_ranks(
    function: Callable[..., Result],
    world_size: int,
    *arguments: Any,
    timeout: float = 60,
    fresh: bool = False,
    backend: str = "gloo",
) -> list[Result]:
    """`function(*arguments)` on each of `world_size` ranks: their results, in order.

    `function` stands at the top of a module; arguments and results are pickled, tensors as their
    values. The first rank that raises, dies or is not done after `timeout` seconds ends all of
    them and raises `RankError`. A function that patches other libraries, or measures what earlier
    calls change, asks for `fresh` processes.
    """
    folder = _new_folder()
    call = partial(function, *arguments)
    tasks = [
        partial(_in_group, (rank, world_size, folder / "store"), timeout, backend, call)
        for rank in range(world_size)
    ]
    with team(tasks, fresh=fresh) as ranks:
        outcomes = ranks.outcomes(timeout, failed=lambda outcome: not outcome.succeeded)
    stacks = [
        f"\n{path.name}\n{path.read_text()}" for path in sorted(folder.glob("stacks of rank *"))
    ]
    for rank, outcome in outcomes.items():
        if not outcome.succeeded:
            raise RankError(
                f"rank {rank} died" if outcome.died else f"rank {rank} raised\n{outcome.error}"
            )
    if missing := sorted(set(range(world_size)) - set(outcomes)):
        raise RankError(f"ranks {missing} were not done after {timeout} s{''.join(stacks)}")
    return [outcomes[rank].value for rank in range(world_size)]


# ---- the pool, in the process of the tests


@dataclass(frozen=True)
class Worker:
    process: ForkServerProcess
    connection: Connection

    @classmethod
    def start(cls) -> Worker:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    def end(self) -> int | None:
        """Ends the process; returns its exit status, negative for a signal."""
        self.connection.close()
        self.process.kill()
        self.process.join()
        status = self.process.exitcode
        self.process.close()
        return status


IDLE: list[Worker] = []


@atexit.register
def _end_all() -> None:
    while IDLE:
        IDLE.pop().end()


@dataclass
class Team:
    """Workers that have a task each."""

    workers: list[Worker]
    found: dict[int, Outcome] = field(default_factory=dict)
    statuses: dict[int, int | None] = field(default_factory=dict)
    """Exit statuses of the processes that did not stay in the pool, once the team is released."""

    def outcomes(
        self, timeout: float, *, failed: Callable[[Outcome], bool], grace: float = 0
    ) -> dict[int, Outcome]:
        """What became of each rank, in the order of answers, until `grace` seconds after one
        failed.

        Ranks that were not done then, or after `timeout` seconds, are missing.
        """
        deadline = time.monotonic() + timeout
        waiting = {worker.connection: rank for rank, worker in enumerate(self.workers)}
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                if not isinstance(connection, Connection):
                    raise TypeError(f"waited for {connection}")
                rank = waiting.pop(connection)
                try:
                    outcome = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    outcome = Outcome(died=True)
                self.found[rank] = outcome
                if failed(outcome):
                    deadline = min(deadline, time.monotonic() + grace)
        return self.found


@contextmanager
def team(tasks: Sequence[Callable[[], object]], *, fresh: bool = False) -> Iterator[Team]:
    """Gives each task to a worker of the pool, or to a `fresh` one; takes them back into the pool
    where possible.
    """
    jobs = [pickle.dumps((sys.path, task)) for task in tasks]
    ours = Team([IDLE.pop(0) if IDLE and not fresh else Worker.start() for _ in jobs])
    try:
        for worker, job in zip(ours.workers, jobs, strict=True):
            worker.connection.send_bytes(job)
        yield ours
    finally:
        # None leaves its group before all are done: one whose peer vanished could wait for it
        # forever.
        are_done = not fresh and len(ours.found) == len(jobs)
        kept = [
            worker
            for rank, worker in enumerate(ours.workers)
            if are_done and ours.found[rank].reusable
        ]
        for worker in kept:
            worker.connection.send_bytes(b"")
        for rank, worker in enumerate(ours.workers):
            if worker not in kept:
                ours.statuses[rank] = worker.end()
        IDLE[:0] = kept


# ---- a worker


def _serve(connection: Connection) -> None:
    freeze_imports()
    become_strict()
    while True:
        try:
            path, task = pickle.loads(connection.recv_bytes())
            sys.path[:] = path
            state = _State()
            outcome = _done(task, state)
            connection.send_bytes(outcome)
            connection.recv_bytes()
        except EOFError:
            return
        state.restore()


def become_strict() -> None:
    """One thread of computation, and warnings as errors."""
    torch.set_num_threads(1)
    warnings.resetwarnings()
    warnings.simplefilter("error")


def _done(task: Callable[[], object], state: _State) -> bytes:
    """The pickled outcome of a task."""
    try:
        value = task()
        return pickle.dumps(Outcome(value, reusable=state.is_restorable()))
    except BaseException:  # noqa: BLE001 - whatever it is, the test is to show it
        return pickle.dumps(Outcome(error=traceback.format_exc()))


def _new_folder() -> Path:
    """A folder of ranks, which is removed after some others.

    A store opens its file once more when it is deleted, which may be after the rank's result, and
    ends the process if the file is gone.
    """
    if len(_folders) >= KEPT_FOLDERS:
        shutil.rmtree(_folders.popleft(), ignore_errors=True)
    _folders.append(Path(tempfile.mkdtemp(prefix="ranks-")))
    return _folders[-1]


@atexit.register
def _remove_folders() -> None:
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)


def _in_group(
    place: tuple[int, int, Path], timeout: float, backend: str, call: Callable[[], Result]
) -> Result:
    rank, world_size, store = place
    stacks = (store.parent / f"stacks of rank {rank}").open("w")
    faulthandler.dump_traceback_later(0.7 * timeout, file=stacks)
    distributed.init_process_group(
        backend,
        store=distributed.FileStore(str(store), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        return call()
    finally:
        faulthandler.cancel_dump_traceback_later()
        stacks.close()


class _State:
    """What a task may change in its process, as it was before."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.folder = Path.cwd()
        self.threads = _threads()
        self.handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self.random = torch.get_rng_state()
        self.logging = [(logger, list(logger.handlers), logger.level) for logger in _loggers()]
        self.modules = {
            name: dict(vars(module))
            for name, module in sys.modules.items()
            if name.split(".")[0] in OURS
        }

    def is_restorable(self) -> bool:
        for thread in _threads() - self.threads:
            thread.join(1)
        return _threads() <= self.threads

    def restore(self) -> None:
        # In the process of the tests it would take a second.
        from torch import _dynamo
        from torch._dynamo import utils

        from trainer.selfcheck.worker import clear_mesh_caches

        if distributed.is_initialized():
            distributed.destroy_process_group()
        clear_mesh_caches()
        if utils.counters:
            _dynamo.reset()
            utils.counters.clear()
        torch.compiler.set_stance("default")
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        faulthandler.cancel_dump_traceback_later()
        for number, handler in self.handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        for logger, handlers, level in self.logging:
            for added in set(logger.handlers) - set(handlers):
                logger.removeHandler(added)
                added.close()
            # Setting it clears the caches of all loggers.
            if logger.level != level:
                logger.setLevel(level)
        for name, attributes in self.modules.items():
            now = vars(sys.modules[name])
            now.update(
                {key: value for key, value in attributes.items() if now.get(key) is not value}
            )
        torch.set_rng_state(self.random)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(mode=False)
        become_strict()
        settle()


def _loggers() -> list[logging.Logger]:
    known = logging.root.manager.loggerDict.values()
    return [logging.root, *(logger for logger in known if isinstance(logger, logging.Logger))]


def _threads() -> set[threading.Thread]:
    """Those that Python started: others have no end that it would know of."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith("Dummy-")}
