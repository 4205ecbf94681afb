"""The batch script of a run: `batch.sh`, with its marked lines replaced by what the configuration says."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config.job_config import Config
from trainer.config.slurm import SlurmSection

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = Path(__file__).with_name("batch.sh")
KILL_TOGETHER = "--kill-on-bad-exit=1 --wait=60 --label"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a script runs, and where; paths are absolute."""

    config: Config
    arguments: Sequence[str]
    """Of `trainer.launch`."""
    run: Path
    here: Path
    """What relative paths are relative to."""
    python: str
    code: str
    """The version that the script was made with."""


def log_of(run: Path, job: str) -> Path:
    """What all lives of a job write."""
    return run / "slurm" / f"job-{job}.log"


def render(job: Job) -> str:
    parts = {
        "about": about(job),
        "directives": directives(job.config, job.run, job.here),
        "settings": settings(job),
        "setup": [*job.config.slurm.setup],
        "report": report(job.config.slurm),
        "launch": launch(job.config.slurm),
    }
    return "\n".join(line for text in TEMPLATE.read_text().splitlines() for line in _filled(text, parts)) + "\n"


def _filled(line: str, parts: dict[str, list[str]]) -> list[str]:
    """A line of the template: itself, or what its mark stands for, as far to the right."""
    name = line.strip().removeprefix("# @")
    if f"# @{name}" != line.strip():
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return [f"{indent}{text}" for text in parts[name]]


def about(job: Job) -> list[str]:
    slurm = job.config.slurm
    return [
        f"# Longhaul: {job.config.job.name} on {slurm.nodes} nodes x {slurm.processes} ranks; made with {job.code}.",
        f"# To be given to sbatch; {job.run / 'slurm'} must be there. docs/slurm.md says what it does on which signal.",
    ]


def directives(config: Config, run: Path, here: Path) -> list[str]:
    """#SBATCH lines. What the configuration leaves out is left to the cluster."""
    slurm = config.slurm
    tasks, cores = (1, slurm.processes) if slurm.launcher == "torchrun" else (slurm.processes, 1)
    asked: list[tuple[str, object]] = [
        ("job-name", config.job.name),
        ("nodes", slurm.nodes),
        ("ntasks-per-node", tasks),
        ("gpus-per-node", slurm.gpus_per_node or None),
        ("cpus-per-task", slurm.cpus_per_task and slurm.cpus_per_task * cores),
        ("mem", slurm.memory),
        ("time", slurm.time),
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("constraint", slurm.constraint),
        ("exclude", slurm.exclude),
        ("chdir", _quoted(here)),
        ("output", _quoted(str(log_of(run, "")).replace("%", "%%").replace("job-.log", "job-%j.log"))),
        ("signal", f"B:USR1@{slurm.lead_seconds}"),
    ]
    given = [f"#SBATCH --{name}={value}" for name, value in asked if value is not None]
    return [*given, "#SBATCH --requeue", "#SBATCH --open-mode=append", *(f"#SBATCH {line}" for line in slurm.options)]


def settings(job: Job) -> list[str]:
    slurm = job.config.slurm
    return [
        f"RUN={shlex.quote(str(job.run))} # the run folder",
        f"ROOT={shlex.quote(str(ROOT))} # Longhaul",
        f"PYTHON={shlex.quote(job.python)}",
        f"ARGUMENTS=({shlex.join(job.arguments)})",
        f"MAX_REQUEUES={slurm.max_requeues}",
        f"MAX_STUCK={slurm.max_stuck} # starts in a row without a new checkpoint",
        f"BACKOFF={slurm.backoff_seconds} # seconds",
    ]


def report(slurm: SlurmSection) -> list[str]:
    """What prints a line about each node."""
    command = '"$PYTHON" -P -m trainer.slurm.node_info'
    words = ["timeout 120 srun --ntasks-per-node=1", '--ntasks="$SLURM_JOB_NUM_NODES" --label', *container(slurm)]
    return _lines(" ".join(words), command)


def launch(slurm: SlurmSection) -> list[str]:
    """What starts all ranks."""
    # srun does not take the number of cores over from sbatch.
    cores = ['--cpus-per-task="$SLURM_CPUS_PER_TASK"'] if slurm.cpus_per_task else []
    words = [f"srun {KILL_TOGETHER}", *cores, *container(slurm), *map(shlex.quote, slurm.srun_options)]
    ours = '"${ARGUMENTS[@]}"'
    if slurm.launcher == "srun":
        return _lines(" ".join(words), f'"$PYTHON" -P -u -m trainer.launch {ours}')
    place = f'--nodes "$SLURM_JOB_NUM_NODES" --processes {slurm.processes} --meet "$MASTER_ADDR:$MASTER_PORT"'
    agent = f'"$PYTHON" -P -u -m trainer.slurm.torchrun_agent {place}'
    return _lines(" ".join(words), agent, f'--id "$LONGHAUL_ATTEMPT" {ours}')


def container(slurm: SlurmSection) -> list[str]:
    """Options of srun, in whose image every path is the same as outside."""
    if slurm.container is None:
        return []
    mounts = ",".join(f"{place}:{place}" for place in ("$ROOT", "$RUN", "$PWD"))
    return [f'--container-image={slurm.container} --container-mounts="{mounts}" --container-workdir="$PWD"']


def _lines(*parts: str) -> list[str]:
    """One command in the background, over several lines."""
    first, *rest = parts
    broken = [first, *(f"    {part}" for part in rest)]
    return [*(f"{line} \\" for line in broken[:-1]), f"{broken[-1]} &"]


def python_of(slurm: SlurmSection, here: str) -> str:
    """The interpreter of ranks, where `here` is the one that asks."""
    return slurm.python or ("python3" if slurm.container else here)


def _quoted(path: Path | str) -> str:
    """As sbatch reads it."""
    return f'"{path}"' if " " in str(path) else str(path)
