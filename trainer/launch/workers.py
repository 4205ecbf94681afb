"""The workers of this node: one process per rank. If one fails, all are killed. Imports no torch.

torchrun's agent does not fit here: it restarts in place with the previous attempt's store, kills
ranks that are still saving after its own grace period, and exits with an error although all ranks
exited with 0.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from trainer.config.run_spec import STORE_FILE_ENV
from trainer.errors import CONCLUSIVE_EXIT_CODES, EXIT_FAILURE, EXIT_SUCCESS, STACK_DUMP_SIGNAL
from trainer.launch.cluster import LaunchWorld
from trainer.resilience.signals import LAUNCHER_PID_ENV, handle_stop_signals, restoring_handlers

GRACE_SECONDS = 3.0
"""Grace period in which the peers of a failed rank can report their own errors."""
POLL_SECONDS = STACK_DUMP_SECONDS = 0.1


class Workers:
    """Runs `script` once per rank of this node and forwards stop signals to the processes."""

    def __init__(self) -> None:
        self.received_signal: signal.Signals | None = None
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self, script: Path, argv: Sequence[str], cluster: LaunchWorld) -> int:
        """Runs the workers until all have exited; returns the exit status.

        Starts none after a stop signal.
        """
        if self.received_signal:
            return EXIT_FAILURE
        command = [sys.executable, "-u", str(script), *argv]
        workers: list[subprocess.Popen[bytes]] = []
        self._processes = workers
        # A new one for each attempt: what the ranks of the last one wrote would mislead these.
        with _store_file(cluster) as store:
            inherited = [] if store is None else [store]
            try:
                for local_rank in range(cluster.nproc_per_node):
                    environment = os.environ | _rank_environment(cluster, local_rank, store)
                    workers.append(subprocess.Popen(command, env=environment, pass_fds=inherited))
                if self.received_signal:
                    # It arrived during the loop; workers ignore repeats.
                    self._signal_workers()
                return _wait_for_all(workers)
            finally:
                _dump_stacks_and_kill([worker for worker in workers if worker.poll() is None])
                self._processes = []

    @contextmanager
    def forward_signals(self) -> Iterator[None]:
        """Within this context, stop signals go to the workers and do not end this process."""
        with restoring_handlers():
            handle_stop_signals(self._on_signal)
            yield

    def interruptible_sleep(self, seconds: float) -> None:
        """Sleeps until the time is over or a stop signal arrives."""
        deadline = time.monotonic() + seconds
        while not self.received_signal and (remaining := deadline - time.monotonic()) > 0:
            time.sleep(min(remaining, POLL_SECONDS))

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.received_signal = signal.Signals(number)
        self._signal_workers()

    def _signal_workers(self) -> None:
        for worker in self._processes:
            worker.send_signal(self.received_signal or signal.SIGTERM)


def _dump_stacks_and_kill(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Makes workers write their stacks, then kills them."""
    for worker in workers:
        # The rank that failed first names itself; the stacks of its peers show what they waited
        # for.
        worker.send_signal(STACK_DUMP_SIGNAL)
    if workers:
        time.sleep(STACK_DUMP_SECONDS)
    for worker in workers:
        # SIGKILL, because a peer inside a collective does not return to Python to handle SIGTERM.
        worker.kill()
        worker.wait()


@contextmanager
def _store_file(cluster: LaunchWorld) -> Iterator[int | None]:
    """The descriptor of a file in memory, for the store of ranks that are all on this host.

    None for other worlds. Other users reach every port of loopback, but not this file.
    """
    if cluster.num_nodes > 1 or cluster.world_size == 1:
        yield None
        return
    descriptor = os.memfd_create("longhaul-store")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _rank_environment(cluster: LaunchWorld, local_rank: int, store: int | None) -> dict[str, str]:
    address, _, port = cluster.master_endpoint.rpartition(":")
    variables: dict[str, object] = {
        "RANK": cluster.node_rank * cluster.nproc_per_node + local_rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": cluster.world_size,
        "LOCAL_WORLD_SIZE": cluster.nproc_per_node,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        LAUNCHER_PID_ENV: os.getpid(),
    }
    if store is not None:
        variables[STORE_FILE_ENV] = store
    return {key: str(value) for key, value in variables.items()}


def _wait_for_all(workers: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits for all workers, or `GRACE_SECONDS` after the first failure; returns the exit
    status.
    """
    deadline = float("inf")
    while None in (codes := [worker.poll() for worker in workers]) and time.monotonic() < deadline:
        # The first failure is often the cause, and the peers' own errors the consequence; both
        # belong into the log.
        if any(codes) and deadline == float("inf"):
            deadline = time.monotonic() + GRACE_SECONDS
        time.sleep(POLL_SECONDS)
    for local_rank, (worker, code) in enumerate(zip(workers, codes, strict=True)):
        if code:
            report_failed_rank(local_rank, worker.pid, code)
    failed = [code for code in codes if code]
    return exit_status(failed) if failed else EXIT_SUCCESS


def report_failed_rank(local_rank: int, pid: int, code: int) -> None:
    outcome = (
        f"exited with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
    )
    sys.stderr.write(f"error: local rank {local_rank} (pid {pid}) {outcome}\n")


def exit_status(codes: Sequence[int]) -> int:
    """The exit status for failed workers: a conclusive code wins, since the peers only fail as a
    consequence.
    """
    return next((code for code in CONCLUSIVE_EXIT_CODES if code in codes), EXIT_FAILURE)
