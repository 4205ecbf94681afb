"""A run as a job of the test cluster: submit, signal, query, and inspect its results."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.slurm.cluster import Cluster
from trainer.storage.run_dir import RunDir

SIZE = (
    "--nodes",
    "2",
    "--gpus-per-node",
    "0",
    "--processes-per-node",
    "2",
    "--backoff-seconds",
    "1",
)
UNCHECKED = ("--slurm.preflight", "false")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Job:
    def __init__(self, cluster: Cluster, folder: Path, *options: str) -> None:
        """`options` are those of a run in that folder, on two nodes with two ranks each."""
        self.cluster = cluster
        self.folder = folder
        self.options = ("--job.output_dir", str(folder), *UNCHECKED, *options)
        self.number = ""

    def submit(self, *options: str) -> str:
        output = self.slurm("submit", *self.options, *SIZE, *options)
        self.number = output.split()[1]
        return output

    def slurm(self, *words: str) -> str:
        return self.cluster.command(sys.executable, "-m", "trainer.slurm", *words)

    def near_the_limit(self) -> None:
        """Sends the signal of `--signal=B:USR1@...`."""
        self.cluster.command("scancel", "--batch", "--signal=USR1", self.number)

    def ended(self, state: str, *, seconds: float = 60) -> str:
        """Waits until the job ends in this state; returns the exit code."""
        found = self.cluster.wait_state(self.number, *OVER, seconds=seconds)
        assert found.state == state, f"{found}\n{self.log()}"
        return found.exit_code

    def log(self) -> str:
        path = self.folder / "slurm" / f"job-{self.number}.log"
        return path.read_text() if path.exists() else ""

    def wait_log(self, text: str, *, seconds: float = 60) -> None:
        try:
            self.cluster.wait_for(lambda: text in self.log(), seconds, text)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.log()[-4000:]}") from None

    def newest(self) -> int:
        """The step of the newest checkpoint, 0 without any."""
        return max((step for step, _ in RunDir(self.folder).committed_checkpoints()), default=0)

    def wait_progress(self, *, seconds: float = 120) -> None:
        """Waits for a new checkpoint."""
        before = self.newest()
        deadline = time.monotonic() + seconds
        while self.newest() <= before:
            assert time.monotonic() < deadline, f"no new checkpoint\n{self.log()[-4000:]}"
            time.sleep(0.05)
