"""SLURM commands; no other module calls them."""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import RunFailedError
from trainer.launch.cluster import pluralize

FINISHED_STATES = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"}
FINISHED_STATES |= {"PREEMPTED", "TIMEOUT"}


class SlurmError(RunFailedError):
    """A SLURM command is missing or failed."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The scheduler's record of a job."""

    job_id: str
    state: str
    reason: str
    nodes: str
    requeues: int
    exit_code: str
    run_time: str
    time_limit: str

    @classmethod
    def parse(cls, job_id: str, output: str) -> JobState:
        """Parses the output of `scontrol --oneliner show job`."""
        fields = dict(re.findall(r"(?:^|\s)([\w:/]+)=(\S*)", output))
        return cls(
            job_id=job_id,
            state=fields.get("JobState", "UNKNOWN"),
            reason=fields.get("Reason", ""),
            nodes=fields.get("NodeList", ""),
            requeues=int(fields.get("Restarts", "0")),
            exit_code=fields.get("ExitCode", ""),
            run_time=fields.get("RunTime", ""),
            time_limit=fields.get("TimeLimit", ""),
        )

    @property
    def is_finished(self) -> bool:
        return self.state in FINISHED_STATES

    def __str__(self) -> str:
        if self.is_finished:
            text = f"{self.state}, exit code {self.exit_code}"
        elif self.state == "PENDING":
            text = f"PENDING ({self.reason})"
        else:
            text = f"{self.state} on {self.nodes} for {self.run_time} of {self.time_limit}"
        return f"{text}, requeued {pluralize(self.requeues, 'time')}" if self.requeues else text


def submit(script: Path) -> str:
    """Submits a script and returns the job id."""
    return _run("sbatch", "--parsable", str(script)).strip().partition(";")[0]


def query_job(job_id: str) -> JobState | None:
    """The state of a job; None some minutes after its end, when the scheduler drops its record."""
    try:
        output = _run("scontrol", "--oneliner", "show", "job", job_id)
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    return JobState.parse(job_id, output)


def cancel(job_id: str) -> None:
    """Cancels a job permanently: neither the scheduler nor the batch script can requeue it."""
    with suppress(SlurmError):  # The job may have just ended.
        _run("scontrol", "update", f"JobId={job_id}", "Requeue=0")
    _run("scancel", job_id)


def _run(*command: str) -> str:
    name = command[0]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SlurmError(f"{name} is not on PATH: run this on a machine that can submit SLURM jobs") from None
    if completed.returncode:
        message = " ".join(completed.stderr.split()) or f"exited with code {completed.returncode}"
        raise SlurmError(message if message.startswith(name) else f"{name}: {message}")
    return completed.stdout
