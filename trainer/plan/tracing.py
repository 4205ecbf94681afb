"""Plans by traces, several at once. Imports no torch but for a trace that is not known."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import active_children, get_context
from threading import Thread

from trainer.config import extension
from trainer.config.job_config import Config
from trainer.errors import RunError
from trainer.plan.plan import TrainingPlan
from trainer.trace.answers import is_known, traced_rank_steps
from trainer.trace.errors import UntraceableError

MAX_PROCESSES = 8
"""A search traces as many layouts at once."""

Trace = Callable[[Sequence[TrainingPlan]], Sequence[TrainingPlan | None]]
"""Plans whose steps are traced; None for what no trace can show."""


def traced_plans(plans: Sequence[TrainingPlan]) -> list[TrainingPlan | None]:
    """The plans, traced one after the other."""
    return [*map(_traced, plans)]


def _traced(plan: TrainingPlan) -> TrainingPlan | None:
    try:
        _ = plan.rank_steps
    except UntraceableError:
        return None
    return plan


@contextmanager
def tracing_processes() -> Iterator[Trace]:
    """Traces plans in as many processes as there are cores, up to MAX_PROCESSES.

    Each imports torch, so none is started before two traces are unknown.
    """
    num_processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    with ExitStack() as stack:
        pools = list[ProcessPoolExecutor]()

        def trace(plans: Sequence[TrainingPlan]) -> list[TrainingPlan | None]:
            unknown = [plan for plan in plans if not is_known(plan.config, plan.world_size)]
            if pools or (num_processes > 1 and len(unknown) > 1):
                if not pools:
                    pools.append(stack.enter_context(_pool(num_processes)))
                _trace_all(pools[0], unknown)
            return traced_plans(plans)

        yield trace


def _trace_all(pool: ProcessPoolExecutor, plans: Sequence[TrainingPlan]) -> None:
    """Answers are on disk then."""
    # Processes start with the first request and inherit the mask: an interrupt is this one's.
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        requests = [pool.submit(_trace, plan.config, plan.world_size) for plan in plans]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
    try:
        for request in requests:
            request.result()
    except BaseException:
        # They would end what they began, up to a minute of it.
        for process in active_children():
            process.terminate()
        raise


def _pool(num_processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        num_processes,
        # Threads of this process would not survive a fork.
        mp_context=get_context("spawn"),
        initializer=_start,
        initargs=(extension.references(), os.getpid()),
    )


def _start(extensions: Sequence[str], parent: int) -> None:
    Thread(target=end_with, args=(parent,), daemon=True).start()
    extension.install(extensions)


def end_with(parent: int) -> None:
    """Ends this process once the one that started it is gone, however that ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _trace(config: Config, world_size: int) -> None:
    # Whoever asks for the answer meets the error.
    with suppress(RunError):
        traced_rank_steps(config, world_size)
