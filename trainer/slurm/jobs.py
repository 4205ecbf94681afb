"""The SLURM jobs of a run: submission folders, and status from the scheduler and the run folder.

RUN/slurm/<n>/      one per submission: job.sh, config.toml, code.txt, code.diff, job.json
RUN/slurm/job-<id>.log
RUN/slurm/stuck     consecutive launches without a new checkpoint
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, ClassVar

from trainer.commands import format_table
from trainer.config.migrations import Migration
from trainer.config.training_stages import Recipe
from trainer.errors import ResumeError
from trainer.metrics.loggers import format_duration
from trainer.slurm import scheduler
from trainer.slurm.scheduler import JobState, SlurmError
from trainer.slurm.script import log_path
from trainer.storage import exit_markers
from trainer.storage.artifact import (
    Artifact,
    DamageError,
    open_regular,
    parse_object,
    read_artifact,
    write_artifact,
)
from trainer.storage.run_dir import RunDir

log = logging.getLogger("trainer")

# bytes read from the end of metrics.jsonl; more than one line
TAIL_BYTES = 1 << 16


class JobRecord(Artifact):
    """Record of a submission, in its folder."""

    kind: ClassVar[str] = "job record"
    migrations: ClassVar[tuple[Migration, ...]] = (
        Migration(new_keys={"folder": None, "path": None}),
    )
    job: str
    time: float
    nodes: int
    processes: int
    folder: int | None
    """Inode of the run folder, and its path: a copy of the folder has neither. None in older
    records.
    """
    path: str | None

    @classmethod
    def from_unsealed(cls, data: bytes) -> tuple[dict[str, Any], int]:
        return parse_object(data), 1


def record_submission(folder: Path, run_dir: Path, job_id: str, config: Recipe) -> None:
    slurm = config.slurm
    inode = run_dir.stat().st_ino
    record = JobRecord(
        job=job_id,
        time=time.time(),
        nodes=slurm.nodes,
        processes=slurm.nproc_per_node,
        folder=inode,
        path=str(run_dir.absolute()),
    )
    write_artifact(folder / "job.json", record, owner=job_id)


def create_submission_dir(run_dir: Path) -> Path:
    """Creates the folder of the next submission."""
    folder = run_dir / "slurm" / str(max(_submissions(run_dir), default=0) + 1)
    folder.mkdir(parents=True)
    return folder


def submitted_job_ids(run_dir: Path) -> list[str]:
    """The job ids of a run, oldest first.

    Those of the run that the folder was copied from are not its own.
    """
    job_ids = []
    for number in _submissions(run_dir):
        path = run_dir / "slurm" / str(number) / "job.json"
        try:
            record = read_artifact(path, JobRecord)
        except FileNotFoundError:
            continue
        except (OSError, DamageError, ResumeError) as error:
            log.warning("%s cannot be read, so its job is unknown: %s", path, error)
            continue
        # A moved folder keeps its inode, and a restored one its path; a copy has neither.
        if record.folder in (None, run_dir.stat().st_ino) or record.path == str(
            run_dir.absolute()
        ):
            job_ids.append(record.job)
    return job_ids


def _submissions(run_dir: Path) -> list[int]:
    return sorted(
        int(path.name) for path in (run_dir / "slurm").glob("*") if path.name.isdecimal()
    )


def active_jobs(run_dir: Path) -> list[JobState]:
    """The queued and running jobs of a run. Raises `SlurmError`."""
    states = [scheduler.query_job(job) for job in submitted_job_ids(run_dir)]
    return [state for state in states if state is not None and not state.is_finished]


def status_report(run_dir: Path) -> list[str]:
    """Status lines of a run: jobs, newest step and checkpoint, exit markers, log."""
    jobs = submitted_job_ids(run_dir)
    lines = [("run", str(run_dir)), *((f"job {job}", text) for job, text in _queue_states(jobs))]
    lines += [
        ("newest step", _latest_step(run_dir)),
        ("newest checkpoint", _latest_checkpoint(run_dir)),
    ]
    present = (name for name in exit_markers.EXIT_MARKERS if (run_dir / name).exists())
    lines += [(name, _format_marker(exit_markers.content_of(run_dir, name))) for name in present]
    if jobs:
        lines.append(("log", str(log_path(run_dir, jobs[-1]))))
    return format_table(*lines)


def _queue_states(jobs: list[str]) -> list[tuple[str, str]]:
    """The state of the newest job and of older unfinished ones."""
    states = []
    for job in jobs:
        try:
            state = scheduler.query_job(job)
        except SlurmError as error:
            return [(jobs[-1], f"unknown: {error}")]
        if job == jobs[-1] or (state is not None and not state.is_finished):
            states.append(
                (job, str(state) if state else "finished; the scheduler no longer has its record")
            )
    return states


def _latest_step(run_dir: Path) -> str:
    path = RunDir(run_dir).metrics_path
    try:
        with open_regular(path) as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            # The run may be writing the last line.
            complete_lines = [line for line in file if line.endswith(b"\n")]
        metrics = parse_object(complete_lines[-1]) if complete_lines else {}
    except FileNotFoundError:
        return "none"
    except (OSError, DamageError) as error:
        return f"unknown: {path} cannot be read: {error}"
    numbers = {key: metrics.get(key) for key in ("loss", "grad_norm", "step_seconds")}
    fields = [
        f"{key} {value:.5g}" for key, value in numbers.items() if isinstance(value, int | float)
    ]
    return ", ".join(
        [f"step {metrics.get('step', 'unknown')}", *fields, f"written {_format_age(path)}"]
    )


def _latest_checkpoint(run_dir: Path) -> str:
    committed = RunDir(run_dir).committed_checkpoints()
    return (
        f"{committed[-1][1].name}, written {_format_age(committed[-1][1])}"
        if committed
        else "none"
    )


def _format_marker(marker: exit_markers.Marker | None) -> str:
    if marker is None:
        return "damaged"
    fields = [
        f"{key} {value}"
        for key in ("step", "reason", "attempt")
        if (value := getattr(marker, key))
    ]
    return ", ".join([*fields, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(marker.time))])


def _format_age(path: Path) -> str:
    return f"{format_duration(max(0.0, time.time() - path.stat().st_mtime))} ago"
