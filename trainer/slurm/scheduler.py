"""The scheduler's commands: nothing else calls them."""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.launch.cluster import count

ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}


class SlurmError(Exception):
    """The scheduler could not be asked, or refused."""


@dataclass(frozen=True, kw_only=True)
class State:
    """A job, as the scheduler has it."""

    job: str
    state: str
    reason: str
    nodes: str
    requeues: int
    exit_code: str
    ran: str
    limit: str

    @classmethod
    def read(cls, job: str, told: str) -> State:
        """From what `scontrol --oneliner show job` says."""
        facts = dict(re.findall(r"(?:^|\s)([\w:/]+)=(\S*)", told))
        return cls(
            job=job,
            state=facts.get("JobState", "UNKNOWN"),
            reason=facts.get("Reason", ""),
            nodes=facts.get("NodeList", ""),
            requeues=int(facts.get("Restarts", "0")),
            exit_code=facts.get("ExitCode", ""),
            ran=facts.get("RunTime", ""),
            limit=facts.get("TimeLimit", ""),
        )

    @property
    def is_over(self) -> bool:
        return self.state in ENDED

    def __str__(self) -> str:
        if self.is_over:
            told = f"{self.state}, exit code {self.exit_code}"
        elif self.state == "PENDING":
            told = f"PENDING ({self.reason})"
        else:
            told = f"{self.state} on {self.nodes} for {self.ran} of {self.limit}"
        return f"{told}, requeued {count(self.requeues, 'time')}" if self.requeues else told


def submit(script: Path) -> str:
    """The job's number."""
    return _run("sbatch", "--parsable", str(script)).strip().partition(";")[0]


def state(job: str) -> State | None:
    """None for a job that the scheduler has forgotten, which it does some minutes after its end."""
    try:
        told = _run("scontrol", "--oneliner", "show", "job", job)
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    return State.read(job, told)


def cancel(job: str) -> None:
    """For good: from here on neither the scheduler nor the job's own script can requeue it."""
    with suppress(SlurmError):  # It may end at this moment.
        _run("scontrol", "update", f"JobId={job}", "Requeue=0")
    _run("scancel", job)


def _run(*command: str) -> str:
    name = command[0]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SlurmError(
            f"{name} is not on PATH: this has to be typed on a machine that can submit jobs to SLURM"
        ) from None
    if done.returncode:
        told = " ".join(done.stderr.split()) or f"left with {done.returncode}"
        raise SlurmError(told if told.startswith(name) else f"{name}: {told}")
    return done.stdout
