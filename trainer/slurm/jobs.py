"""The SLURM jobs of a run: submission folders, and status from the scheduler and the run folder.

RUN/slurm/<n>/      one per submission: job.sh, config.toml, code.txt, code.diff, job.json
RUN/slurm/job-<id>.log
RUN/slurm/stuck     consecutive launches without a new checkpoint
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from trainer.checkpoint.run_dir import RunDir
from trainer.commands import format_table
from trainer.metrics.loggers import format_duration
from trainer.resilience import exit_markers
from trainer.slurm import scheduler
from trainer.slurm.scheduler import JobState, SlurmError
from trainer.slurm.script import log_path

TAIL_BYTES = 1 << 16  # bytes read from the end of metrics.jsonl; more than one line


def create_submission_dir(run_dir: Path) -> Path:
    """Creates the folder of the next submission."""
    folder = run_dir / "slurm" / str(max(_submissions(run_dir), default=0) + 1)
    folder.mkdir(parents=True)
    return folder


def submitted_job_ids(run_dir: Path) -> list[str]:
    """The job ids of a run, oldest first."""
    records = [_read_json(run_dir / "slurm" / str(number) / "job.json") for number in _submissions(run_dir)]
    return [str(record["job"]) for record in records if record and "job" in record]


def _submissions(run_dir: Path) -> list[int]:
    return sorted(int(path.name) for path in (run_dir / "slurm").glob("*") if path.name.isdecimal())


def active_jobs(run_dir: Path) -> list[JobState]:
    """The queued and running jobs of a run. Raises `SlurmError`."""
    states = [scheduler.query_job(job) for job in submitted_job_ids(run_dir)]
    return [state for state in states if state is not None and not state.is_finished]


def status_report(run_dir: Path) -> list[str]:
    """Status lines of a run: jobs, newest step and checkpoint, exit markers, log."""
    jobs = submitted_job_ids(run_dir)
    lines = [("run", str(run_dir)), *((f"job {job}", text) for job, text in _queue_states(jobs))]
    lines += [("newest step", _latest_step(run_dir)), ("newest checkpoint", _latest_checkpoint(run_dir))]
    markers = {name: _read_json(run_dir / name) for name in exit_markers.EXIT_MARKERS}
    lines += [(name, _format_marker(marker)) for name, marker in markers.items() if marker is not None]
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
            states.append((job, str(state) if state else "finished; the scheduler no longer has its record"))
    return states


def _latest_step(run_dir: Path) -> str:
    path = RunDir(run_dir).metrics_path
    if not path.exists():
        return "none"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        complete_lines = [line for line in file if line.endswith(b"\n")]
    metrics = json.loads(complete_lines[-1]) if complete_lines else {}
    numbers = {key: metrics.get(key) for key in ("loss", "grad_norm", "step_seconds")}
    fields = [f"{key} {value:.5g}" for key, value in numbers.items() if value is not None]
    return ", ".join([f"step {metrics.get('step', 'unknown')}", *fields, f"written {_format_age(path)}"])


def _latest_checkpoint(run_dir: Path) -> str:
    committed = RunDir(run_dir).committed_checkpoints()
    return f"{committed[-1][1].name}, written {_format_age(committed[-1][1])}" if committed else "none"


def _format_marker(marker: dict[str, Any]) -> str:
    fields = [f"{key} {marker[key]}" for key in ("step", "reason", "attempt") if marker.get(key) is not None]
    if isinstance(timestamp := marker.get("time"), int | float):
        fields.append(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp)))
    return ", ".join(fields) or "written"


def _format_age(path: Path) -> str:
    return f"{format_duration(max(0.0, time.time() - path.stat().st_mtime))} ago"


def _read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; None if the file is missing, empty if it is torn."""
    try:
        content = json.loads(path.read_text())
    except OSError:
        return None
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
