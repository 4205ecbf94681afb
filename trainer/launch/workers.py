"""The workers of this node: a process for each rank, started together and, if one fails, ended together.

Not torchrun's agent: it restarts in place with the store of the attempt before, ends ranks that were asked to save after
a grace of its own, and leaves with an error although all of them left with none. Imports no torch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from trainer.errors import BAD_CONFIGURATION, DONE, FAILED, NO_RETRY, STACKS
from trainer.launch.cluster import Cluster
from trainer.launch.parent_death import LAUNCHER
from trainer.resilience.signals import ASKING

TELLING_CODES = (NO_RETRY, BAD_CONFIGURATION)
GRACE_SECONDS = 3.0
"""In which the peers of a rank that failed may say what they saw."""
POLL_SECONDS = STACKS_SECONDS = 0.1


class Workers:
    """Processes of `script`, one for each rank of this node, and the signal that this process was sent meanwhile."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, script: Path, argv: Sequence[str], cluster: Cluster) -> int:
        """Runs until all have left; returns the exit status. Starts none once this process was asked to leave."""
        if self.asked:
            return FAILED
        first = cluster.node_rank * cluster.processes
        command = [sys.executable, "-u", str(script), *argv]
        environment = os.environ | _world(cluster)
        workers: list[subprocess.Popen[bytes]] = []
        self._running = workers
        try:
            for local in range(cluster.processes):
                place = {"RANK": str(first + local), "LOCAL_RANK": str(local)}
                workers.append(subprocess.Popen(command, env=environment | place))
            if self.asked:
                self._hand_on()  # It came while they were started; twice is not more than once.
            return _ended(workers)
        finally:
            _kill([worker for worker in workers if worker.poll() is None])
            self._running = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within, a request to stop is the workers' to answer, and this process leaves as they do."""
        heard = [number for number in ASKING if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._forward) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def pause(self, seconds: float) -> None:
        """Waits, unless this process is asked to leave."""
        deadline = time.monotonic() + seconds
        while not self.asked and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, POLL_SECONDS))

    def _forward(self, number: int, _: FrameType | None) -> None:
        self.asked = signal.Signals(number)
        self._hand_on()

    def _hand_on(self) -> None:
        for worker in self._running:
            worker.send_signal(self.asked or signal.SIGTERM)


def _kill(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends what is left, which may first say where it is."""
    for worker in workers:
        worker.send_signal(STACKS)
    if workers:
        time.sleep(STACKS_SECONDS)
    for worker in workers:
        worker.kill()
        worker.wait()


def _world(cluster: Cluster) -> dict[str, str]:
    address, _, port = cluster.master.rpartition(":")
    world = {
        "WORLD_SIZE": cluster.world_size,
        "LOCAL_WORLD_SIZE": cluster.processes,
        "MASTER_ADDR": address,
        "MASTER_PORT": port if int(port) else free_port(address),
        LAUNCHER: os.getpid(),
    }
    return {key: str(value) for key, value in world.items()}


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _ended(workers: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits for all of them; of those that fail, the peers are killed, who would wait for them."""
    deadline = float("inf")
    while None in (codes := [worker.poll() for worker in workers]) and time.monotonic() < deadline:
        if any(codes) and deadline == float("inf"):
            deadline = time.monotonic() + GRACE_SECONDS
        time.sleep(POLL_SECONDS)
    for local, (worker, code) in enumerate(zip(workers, codes, strict=True)):
        if code:
            how = f"left with {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
            sys.stderr.write(f"error: local rank {local} (pid {worker.pid}) {how}\n")
    failed = [code for code in codes if code]
    return exit_status(failed) if failed else DONE


def exit_status(codes: Sequence[int]) -> int:
    """Of the workers that failed, the one that says why decides: its peers fail because it left."""
    return next((code for code in TELLING_CODES if code in codes), FAILED)
