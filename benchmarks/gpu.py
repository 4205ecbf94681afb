"""What one GPU makes of Longhaul: is it right, how fast is it, beside which other library; within
the minutes that are given.

    python -m benchmarks.gpu --minutes 8                       on a fresh machine
    python -m benchmarks.gpu --minutes 8 --rows FILE...        what these rows leave unknown
    python -m benchmarks.gpu --minutes 8 --wheels FOLDER       with other libraries from this folder of wheels
    python -m benchmarks.gpu --rehearse                        tiny sizes, also on a CPU: a test of the script

Checks and compilations run first, side by side in several processes, for at most half of the
minutes; then timings, one at a time. The most valuable jobs come first: one of each kind, then the
others in the order of benchmarks/gpu_jobs.py. A row that was measured from the same sources on the
same kind of card with the same torch is valid and is not measured again. Rows are on disk
(`--out`, rows.jsonl) as soon as they are known, with date, commit, card and torch. A job that
fails, hangs or crashes becomes a row that says so, and the next runs in a new process. The end is
a page: each step measured, as the planner predicts it, and beside other libraries; and what did
not run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import torch

from benchmarks import gpu_rivals
from benchmarks.gpu_bench import ROOT, UNKNOWN, Bench, Row, output
from benchmarks.gpu_jobs import (
    Job,
    affordable,
    all_jobs,
    compilations,
    digest,
    is_current,
    next_job,
    unknown,
)
from benchmarks.measured import page, read_rows
from trainer.hardware.device import choose_device
from trainer.hardware.host import GIB, loopback_environment
from trainer.launch.cluster import LaunchWorld, set_worker_environment

LANES = 6
"""Processes that share the device during checks and compilations."""
FREE = 0.95
"""Share of device memory that jobs may take together; each process has a context, too."""
PAGE_SECONDS = 10
"""Left for the page at the end."""
SPAWN = multiprocessing.get_context("spawn")


# ---- the process that measures


def serve(connection: Connection, folder: Path, *, rehearse: bool) -> None:
    """Measures the jobs that are asked for by name until one fails; answers with rows, the last of
    which has a `state`.
    """
    # So that this process can be killed with all that it has started.
    os.setsid()
    log = os.open(folder / "jobs.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # A machine without a network has a name that nobody resolves.
    os.environ |= loopback_environment(os.environ)
    # Several processes compile at once.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    threads = max(1, (os.cpu_count() or 1) // LANES)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore")
    jobs = all_jobs()
    by_name = {job.name: job for job in [*jobs, *compilations(jobs)]}
    own = folder / str(os.getpid())
    own.mkdir()
    bench = Bench(choose_device(0), connection.send, own, rehearse)
    with suppress(EOFError):
        while not (failed := measure(by_name[connection.recv()], bench)):
            connection.send({"state": "measured"})
        connection.send(failed)


def measure(job: Job, bench: Bench) -> Row | None:
    """None if it went well, else the row that says why not."""
    try:
        job.measure(bench)
        bench.clear()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other rows are still wanted
        lines = str(error).strip().splitlines() or [""]
        is_memory = isinstance(error, torch.OutOfMemoryError)
        reason = "out of memory" if is_memory else type(error).__name__
        return {"state": "failed", "result": f"{reason}: {lines[0][:300]}"}
    return None


# ---- the process that decides


class Worker(Protocol):
    job: Job | None
    begun: float
    """When the job began, in seconds of the clock."""

    def begin(self, job: Job) -> None: ...

    def answers(self) -> list[Row]:
        """Rows since the last call. The last row of a job has a `state`."""

    def close(self) -> None:
        """Ends the process with all that it has started."""


class Process:
    """A worker in a process."""

    def __init__(self, folder: Path, *, rehearse: bool) -> None:
        self.job: Job | None = None
        self.begun = 0.0
        self._connection, theirs = SPAWN.Pipe()
        options = {"rehearse": rehearse}
        self._process = SPAWN.Process(target=serve, args=(theirs, folder), kwargs=options)
        self._process.start()
        theirs.close()

    def begin(self, job: Job) -> None:
        # `answers` says that the process has ended.
        with suppress(BrokenPipeError):
            self._connection.send(job.name)

    def answers(self) -> list[Row]:
        found = []
        try:
            while self._connection.poll():
                found.append(self._connection.recv())
        except (EOFError, OSError):
            if not found or "state" not in found[-1]:
                self._process.join()
                found.append(
                    {
                        "state": "failed",
                        "result": f"its process ended with {self._process.exitcode}",
                    }
                )
        return found

    def close(self) -> None:
        self._connection.close()
        # It reads that there is no other job, and ends by itself.
        if self.job is None:
            self._process.join(5)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()
        self._process.join()


class Clock(Protocol):
    def time(self) -> float:
        """Seconds."""

    def sleep(self, seconds: float) -> None: ...


@dataclass
class Schedule:
    """Gives jobs to workers, in order, as long as they fit into time and memory."""

    open_worker: Callable[[], Worker]
    report: Callable[[Job, Row], None]
    """Takes each row."""
    gib: float
    """Device memory of all jobs that run."""
    clock: Clock = time
    workers: list[Worker] = field(default_factory=list)

    def run(self, jobs: Iterable[Job], *, deadline: float, lanes: int) -> list[Job]:
        """Returns the jobs that did not run.

        A job ends at its limit, and all end at the deadline.
        """
        waiting = list(jobs)
        while True:
            now = self.clock.time()
            self.workers = [
                worker for worker in self.workers if self._collect(worker, now, deadline)
            ]
            while (job := self._next(waiting, deadline - now, lanes)) is not None:
                waiting.remove(job)
                self._begin(job, now)
            if not any(worker.job for worker in self.workers):
                return waiting
            self.clock.sleep(0.05)

    def _next(self, waiting: Sequence[Job], seconds: float, lanes: int) -> Job | None:
        running = [worker.job for worker in self.workers if worker.job is not None]
        if len(running) >= lanes:
            return None
        return next_job(waiting, seconds=seconds, gib=self.gib - sum(job.gib for job in running))

    def _begin(self, job: Job, now: float) -> None:
        worker = next((each for each in self.workers if each.job is None), None)
        if worker is None:
            worker = self.open_worker()
            self.workers.append(worker)
        worker.job = job
        worker.begun = now
        worker.begin(job)

    def _collect(self, worker: Worker, now: float, deadline: float) -> bool:
        """Reports what a worker has answered; whether it can take another job.

        One whose job failed or is late cannot.
        """
        job = worker.job
        took = now - worker.begun
        if job is None:
            return True
        rows = worker.answers()
        if not any("state" in row for row in rows) and now >= min(
            worker.begun + job.limit, deadline
        ):
            rows.append({"state": "failed", "result": f"ended after {took:.0f} s"})
        for row in rows:
            self.report(job, row | {"took": took} if "state" in row else row)
        states = [row["state"] for row in rows if "state" in row]
        worker.job = None if states else job
        if "failed" in states:
            worker.close()
        return "failed" not in states

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers = []


def run_all(schedule: Schedule, jobs: Sequence[Job], *, deadline: float) -> list[Job]:
    """Checks and compilations side by side in at most half of the time, then timings alone;
    returns what did not run.
    """
    halfway = (schedule.clock.time() + deadline) / 2
    apart = [job for job in jobs if job.alone]
    together = [
        *(job for job in jobs if not job.alone),
        *compilations(affordable(apart, deadline - halfway)),
    ]
    left = schedule.run(together, deadline=halfway, lanes=LANES)
    # Nothing holds memory or a context beside the timings.
    schedule.close()
    left = [job for job in left if job.kind != "compile"]
    left += schedule.run(apart, deadline=deadline, lanes=1)
    left = schedule.run(left, deadline=deadline, lanes=1)
    schedule.close()
    return left


# ---- the command


def machine(*, rehearse: bool = False) -> Row:
    """What rows must share to be compared; no row of a rehearsal is one of a measurement."""
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.machine()
    return {"device": f"{name}, rehearsal" if rehearse else name, "torch": torch.__version__}


def device_gib() -> float:
    """Memory of the device; of a CPU, as much as jobs ask for."""
    return (
        torch.cuda.get_device_properties(0).total_memory / GIB
        if torch.cuda.is_available()
        else float("inf")
    )


@dataclass(frozen=True)
class Report:
    """Writes rows to a file, and a line of each to the terminal."""

    path: Path
    common: Row
    rows: list[Row] = field(default_factory=list)

    def __call__(self, job: Job, row: Row) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        full = {"job": job.name, **row, "date": now, "sources": digest(job.sources), **self.common}
        self.rows.append(full)
        with self.path.open("a") as file:
            file.write(json.dumps(full, default=str) + "\n")
        cells = ", ".join(
            f"{name} {_shown(value)}" for name, value in row.items() if value not in (None, "")
        )
        sys.stdout.write(f"{job.name}: {cells}\n")
        sys.stdout.flush()


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=8, help="within which the command ends")
    parser.add_argument(
        "--rows", type=Path, nargs="+", default=[], metavar="FILE", help="of earlier calls"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("outputs", "gpu"), help="folder of rows.jsonl and of logs"
    )
    parser.add_argument("--wheels", type=Path, help="folder of wheels of other libraries")
    parser.add_argument("--only", default="", metavar="TEXT", help="jobs whose names contain it")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, unchecked kernels")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    given = options(argv)
    begin = time.time()
    if not torch.cuda.is_available() and not given.rehearse:
        sys.stdout.write("no CUDA device: nothing measured\n")
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    if given.wheels is not None:
        gpu_rivals.install(given.wheels.resolve(), given.out.resolve() / "rivals")
    path = given.out / "rows.jsonl"
    here = machine(rehearse=given.rehearse)
    jobs = all_jobs()
    earlier = [row for file in {*given.rows, path} for row in read_rows(file)]
    asked = [job for job in jobs if given.only in job.name]
    absent = sorted(
        {job.library for job in asked if job.library and gpu_rivals.is_absent(job.library)}
    )
    sys.stdout.write(
        "".join(f"{library} is not installed: its rows are left out\n" for library in absent)
    )
    wanted = unknown([job for job in asked if job.library not in absent], earlier, here)
    commit = output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    report = Report(path, here | ({} if commit == UNKNOWN else {"commit": commit}))
    schedule = Schedule(
        lambda: Process(given.out.resolve(), rehearse=given.rehearse), report, FREE * device_gib()
    )
    try:
        left = run_all(schedule, wanted, deadline=begin + 60 * given.minutes - PAGE_SECONDS)
    finally:
        schedule.close()
    by_name = {job.name: job for job in [*jobs, *compilations(jobs)]}
    rows = [*earlier, *report.rows]
    current = [
        row
        for row in rows
        if row.get("job") in by_name and is_current(row, by_name[row["job"]], here)
    ]
    sys.stdout.write(page(current, [job.name for job in left]))
    failed = any(row.get("state") == "failed" for row in report.rows)
    return int(given.rehearse and (bool(left) or failed))


if __name__ == "__main__":
    # torch reads the settings of its allocator when the processes that measure import it.
    set_worker_environment(os.environ, LaunchWorld(nproc_per_node=1))
    sys.exit(main(sys.argv[1:]))
