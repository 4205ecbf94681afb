"""The jobs of a run: what each was submitted with, and what the scheduler and the run folder say of them now.

RUN/slurm/<n>/      one per submission: job.sh, config.toml, code.txt, code.diff, job.json
RUN/slurm/job-<id>.log
RUN/slurm/stuck     starts in a row without a new checkpoint
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from trainer.checkpoint.run_dir import RunFolder
from trainer.resilience import exit_markers
from trainer.slurm import scheduler
from trainer.slurm.scheduler import SlurmError, State
from trainer.slurm.script import log_of

TAIL = 1 << 16  # bytes of metrics.jsonl, more than a line has


def next_folder(run: Path) -> Path:
    """Made for the next submission."""
    numbers = [int(path.name) for path in (run / "slurm").glob("*") if path.name.isdecimal()]
    folder = run / "slurm" / str(max(numbers, default=0) + 1)
    folder.mkdir(parents=True)
    return folder


def submitted(run: Path) -> list[str]:
    """The numbers of a run's jobs, oldest first."""
    folders = sorted((int(path.name), path) for path in (run / "slurm").glob("*") if path.name.isdecimal())
    found = [_read(path / "job.json") for _, path in folders]
    return [str(facts["job"]) for facts in found if facts and "job" in facts]


def unfinished(run: Path) -> list[State]:
    """Jobs of a run that the scheduler will run or runs. Raises `SlurmError`."""
    states = [scheduler.state(job) for job in submitted(run)]
    return [state for state in states if state is not None and not state.is_over]


def report(run: Path) -> list[str]:
    """What is known of a run, one line each, the scheduler's part first."""
    jobs = submitted(run)
    lines = [("run", str(run)), *((f"job {job}", told) for job, told in _queue(jobs))]
    lines += [("newest update", _newest_update(run)), ("newest checkpoint", _newest_checkpoint(run))]
    lines += [(name, _marker(facts)) for name in exit_markers.KINDS if (facts := _read(run / name)) is not None]
    if jobs:
        lines.append(("log", str(log_of(run, jobs[-1]))))
    width = max(len(name) for name, _ in lines)
    return [f"{name:{width}}  {told}" for name, told in lines]


def _queue(jobs: list[str]) -> list[tuple[str, str]]:
    """The newest job, and older ones that are not over."""
    found = []
    for job in jobs:
        try:
            state = scheduler.state(job)
        except SlurmError as error:
            return [(jobs[-1], f"unknown: {error}")]
        if job == jobs[-1] or (state is not None and not state.is_over):
            found.append((job, str(state) if state else "is over, and the scheduler has forgotten it"))
    return found


def _newest_update(run: Path) -> str:
    path = RunFolder(run).metrics
    if not path.exists():
        return "none"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        whole = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
    facts = json.loads(whole[-1]) if whole else {}
    told = [f"{key} {facts[key]:.5g}" for key in ("loss", "grad_norm", "step_seconds") if facts.get(key) is not None]
    return ", ".join([f"step {facts.get('step', 'unknown')}", *told, f"written {_ago(path)}"])


def _newest_checkpoint(run: Path) -> str:
    committed = RunFolder(run).committed()
    return f"{committed[-1][1].name}, written {_ago(committed[-1][1])}" if committed else "none"


def _marker(facts: dict[str, Any]) -> str:
    told = [f"{key} {facts[key]}" for key in ("step", "reason", "attempt") if facts.get(key) is not None]
    if isinstance(at := facts.get("time"), int | float):
        told.append(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)))
    return ", ".join(told) or "written"


def _ago(path: Path) -> str:
    seconds = max(0, int(time.time() - path.stat().st_mtime))
    amount, unit = (
        (seconds // 3600, "h") if seconds >= 7200 else (seconds // 60, "min") if seconds >= 120 else (seconds, "s")
    )
    return f"{amount} {unit} ago"


def _read(path: Path) -> dict[str, Any] | None:
    """An object of JSON; None without the file, empty if it is torn."""
    try:
        found = json.loads(path.read_text())
    except OSError:
        return None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
