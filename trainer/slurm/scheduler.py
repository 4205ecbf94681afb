"""SLURM commands; no other module calls them."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from trainer.errors import RunFailedError
from trainer.launch.cluster import pluralize

FINISHED_STATES = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
}
FINISHED_STATES |= {"PREEMPTED", "TIMEOUT"}


class SlurmError(RunFailedError):
    """A SLURM command is missing or failed."""


class JobState:
    """The scheduler's record of a job: the output of `scontrol --oneliner show job`."""

    def __init__(self, job_id: str, output: str) -> None:
        self.job_id = job_id
        self._fields: defaultdict[str, str] = defaultdict(
            str, re.findall(r"(?:^|\s)([\w:/]+)=(\S*)", output)
        )
        self.state = self._fields["JobState"] or "UNKNOWN"
        self.is_finished = self.state in FINISHED_STATES
        self.exit_code, self.requeues = (
            self._fields["ExitCode"],
            int(self._fields["Restarts"] or 0),
        )

    def __str__(self) -> str:
        text = f"{self.state} on {{NodeList}} for {{RunTime}} of {{TimeLimit}}".format_map(
            self._fields
        )
        if self.is_finished:
            text = f"{self.state}, exit code {self.exit_code}"
        elif self.state == "PENDING":
            text = f"PENDING ({self._fields['Reason']})"
        return f"{text}, requeued {pluralize(self.requeues, 'time')}" if self.requeues else text


def submit(script: Path) -> str:
    """Submits a script and returns the job id."""
    return _run("sbatch", "--parsable", str(script)).strip().partition(";")[0]


def query_job(job_id: str) -> JobState | None:
    """The state of a job; None some minutes after its end, when the scheduler drops its record."""
    try:
        output = _run("scontrol", "--oneliner", "show", "job", job_id)
    except SlurmError as error:
        # SLURM forgets a job after MinJobAge; its exit code does not tell this from other errors.
        if "Invalid job id" in str(error):
            return None
        raise
    return JobState(job_id, output)


def cancel(job_id: str) -> None:
    """Cancels a job permanently: neither the scheduler nor the batch script can requeue it."""
    with suppress(SlurmError):  # The job may have just ended.
        # Before scancel: the batch script may be about to requeue the job.
        _run("scontrol", "update", f"JobId={job_id}", "Requeue=0")
    _run("scancel", job_id)


def _run(*command: str) -> str:
    name = command[0]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SlurmError(
            f"{name} is not on PATH: run this on a machine that can submit SLURM jobs"
        ) from None
    if completed.returncode:
        message = " ".join(completed.stderr.split()) or f"exited with code {completed.returncode}"
        raise SlurmError(message if message.startswith(name) else f"{name}: {message}")
    return completed.stdout
