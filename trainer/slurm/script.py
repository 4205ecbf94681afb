"""Renders the batch script of a run: `batch.sh`, with its placeholder lines filled from the
configuration.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from trainer.config.job_config import Config
from trainer.config.slurm import SlurmSection
from trainer.config.training_stages import Recipe
from trainer.hardware.device_specs import select_device
from trainer.plan.interconnect import first_groups_of, used_domain_size
from trainer.slurm.container import CLEAN_INTERPRETER, mounted_paths

ROOT = Path(__file__).resolve().parents[2]
BATCH_TEMPLATE = Path(__file__).with_name("batch.sh")
EXIT_WAIT_SECONDS = 60
"""Time after the exit of the first rank after which SLURM ends the others."""


def log_path(run_dir: Path, job_id: str) -> Path:
    """The log of a job, shared by all its launches."""
    return run_dir / "slurm" / f"job-{job_id}.log"


def render(
    config: Recipe,
    arguments: Sequence[str],
    *,
    working_dir: Path,
    current_python: str,
    code_version: str,
) -> str:
    """The script that runs `trainer.launch` with these arguments, in the directory that relative
    paths refer to.
    """
    slurm = config.slurm
    run_dir = config.output_dir.absolute()
    # The image's interpreter is not on the node itself.
    outside_python = current_python if slurm.container else slurm.python or current_python
    placeholders = {
        "about": [
            f"# Longhaul: {config.job.name} on {slurm.nodes} nodes x {slurm.nproc_per_node} ranks; rendered with {code_version}.",
            f"# Submit with sbatch; {run_dir / 'slurm'} must exist. docs/slurm.md describes how it handles signals.",
        ],
        "directives": sbatch_directives(config, run_dir, working_dir),
        "settings": [
            f"RUN={shlex.quote(str(run_dir))} # the run folder",
            f"ROOT={shlex.quote(str(ROOT))} # Longhaul",
            f"PYTHON={shlex.quote(slurm.python or ('python3' if slurm.container else current_python))}",
            f"OUTSIDE_PYTHON={shlex.quote(outside_python)} # in no container",
            f"ARGUMENTS=({shlex.join(arguments)})",
            f"NODES={slurm.nodes} # that train",
            f"RANKS={slurm.nproc_per_node * slurm.nodes if slurm.launcher == 'srun' else slurm.nodes} # tasks of srun",
            f"PREFLIGHT={int(slurm.preflight)}",
            f"MAX_REQUEUES={slurm.max_requeues}",
            f"MAX_STUCK={slurm.max_stuck} # consecutive launches without a new checkpoint",
            f"BACKOFF={slurm.backoff_seconds} # seconds",
            *container_mounts(config, run_dir, working_dir),
        ],
        "setup": [*slurm.setup],
        "report": node_report_command(slurm),
        "preflight": preflight_command(slurm),
        # Rank 0 may upload long after the others are done; without a limit it can.
        "launch": launch_command(
            slurm, exit_wait=EXIT_WAIT_SECONDS if config.checkpoint.remote is None else 0
        ),
    }
    lines = (
        _fill_placeholder(line, placeholders) for line in BATCH_TEMPLATE.read_text().splitlines()
    )
    return "".join(f"{line}\n" for filled in lines for line in filled)


def _fill_placeholder(line: str, placeholders: dict[str, list[str]]) -> list[str]:
    """A line of the template, or the lines that replace its placeholder, with the same indent."""
    name = line.strip().removeprefix("# @")
    if f"# @{name}" != line.strip():
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return [f"{indent}{text}" for text in placeholders[name]]


def sbatch_directives(config: Config, run_dir: Path, working_dir: Path) -> list[str]:
    """#SBATCH lines. Unset keys keep the cluster's defaults."""
    slurm = config.slurm
    tasks, cores = (
        # torchrun starts a node's ranks itself: one task with the cores of all of them.
        (1, slurm.nproc_per_node) if slurm.launcher == "torchrun" else (slurm.nproc_per_node, 1)
    )
    options: list[tuple[str, object]] = [
        ("job-name", config.job.name),
        ("nodes", slurm.nodes + slurm.spare_nodes),
        ("segment", segment_nodes(config)),
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
        ("chdir", _sbatch_quote(working_dir)),
        (
            "output",
            _sbatch_quote(
                # sbatch expands %j; a % in the path must not be expanded.
                str(log_path(run_dir, "")).replace("%", "%%").replace("job-.log", "job-%j.log")
            ),
        ),
        ("signal", f"B:USR1@{slurm.lead_seconds}"),
    ]
    lines = [f"#SBATCH --{name}={value}" for name, value in options if value is not None]
    return [
        *lines,
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        *(f"#SBATCH {line}" for line in slurm.options),
    ]


def segment_nodes(config: Config) -> int | None:
    """Nodes that must share a link domain, for block topologies of SLURM; None if a domain of the
    device is one node.
    """
    slurm = config.slurm
    device = select_device(config)
    is_stated = any(option.startswith("--segment") for option in slurm.options)
    if is_stated or device is None or device.devices_per_node != slurm.nproc_per_node:
        return None
    if device.link_domain_size <= device.devices_per_node:
        return None
    world_size = slurm.nodes * slurm.nproc_per_node
    # Ranks that exchange most should share a link domain, such as NVL72: ask SLURM for nodes in
    # blocks of that size.
    first_groups = [
        first_groups_of(stage.config, world_size).values() for stage in config.training_stages
    ]
    used_nodes = (
        used_domain_size([*chain(*first_groups)], world_size, device) // device.devices_per_node
    )
    segment = min(used_nodes, slurm.nodes)
    # SLURM requires that segments divide the number of nodes.
    return segment if (slurm.nodes + slurm.spare_nodes) % segment == 0 else None


def node_report_command(slurm: SlurmSection) -> list[str]:
    """The srun command that prints one line per node."""
    srun_command = 'timeout 120 srun --ntasks-per-node=1 --ntasks="$SLURM_JOB_NUM_NODES" --label'
    return _background_command(
        " ".join([srun_command, *container_options(slurm)]),
        f"{interpreter(slurm)} -P -m trainer.slurm.node_info",
    )


def preflight_command(slurm: SlurmSection) -> list[str]:
    """The srun command that checks each node."""
    srun_command = 'timeout 180 srun --ntasks-per-node=1 --ntasks="$SLURM_JOB_NUM_NODES" --label'
    expected = f"--devices {slurm.gpus_per_node}" if slurm.gpus_per_node else ""
    check = f'{interpreter(slurm)} -P -m trainer.preflight --path "$RUN" --json "$RUN/slurm/preflight" {expected}'.rstrip()
    return _background_command(" ".join([srun_command, *container_options(slurm)]), check)


def launch_command(slurm: SlurmSection, *, exit_wait: int) -> list[str]:
    """The srun command that starts all ranks."""
    # srun does not inherit --cpus-per-task from sbatch.
    cores = ['--cpus-per-task="$SLURM_CPUS_PER_TASK"'] if slurm.cpus_per_task else []
    chosen = '--nodes="$NODES" --ntasks="$RANKS" --nodelist="$used"'
    srun_command = [
        f"srun --kill-on-bad-exit=1 --wait={exit_wait} --label {chosen}",
        *cores,
        *container_options(slurm),
        *map(shlex.quote, slurm.srun_options),
    ]
    run_arguments = '"${ARGUMENTS[@]}"'
    if slurm.launcher == "srun":
        return _background_command(
            " ".join(srun_command), f"{interpreter(slurm)} -P -u -m trainer.launch {run_arguments}"
        )
    rendezvous = (
        f'--nodes "$NODES" --processes {slurm.nproc_per_node} --meet "$MASTER_ADDR:$MASTER_PORT"'
    )
    agent = f"{interpreter(slurm)} -P -u -m trainer.slurm.torchrun_agent {rendezvous}"
    return _background_command(
        " ".join(srun_command), agent, f'--id "$LONGHAUL_ATTEMPT" {run_arguments}'
    )


def container_options(slurm: SlurmSection) -> list[str]:
    """Options of srun for the container, with every path mounted under the same name."""
    if slurm.container is None:
        return []
    return [
        f'--container-image={shlex.quote(slurm.container)} --container-mounts="$MOUNTS" --container-workdir="$PWD"'
    ]


def container_mounts(config: Recipe, run_dir: Path, working_dir: Path) -> list[str]:
    """The setting of what the container mounts; none without a container."""
    if config.slurm.container is None:
        return []
    always = [ROOT, run_dir, working_dir]
    paths = [*always, *mounted_paths(config, mounted=always, working_dir=working_dir)]
    mounts = ",".join(f"{path}:{path}" for path in paths)
    return [f"MOUNTS={shlex.quote(mounts)} # in the container"]


def interpreter(slurm: SlurmSection) -> str:
    """The command of the interpreter, in the container if there is one."""
    return '"$PYTHON"' if slurm.container is None else CLEAN_INTERPRETER


def _background_command(*parts: str) -> list[str]:
    """One background command over several lines."""
    return (" \\\n    ".join(parts) + " &").splitlines()


def _sbatch_quote(path: Path | str) -> str:
    """Quotes a path for an #SBATCH line."""
    return f'"{path}"' if " " in str(path) else str(path)
