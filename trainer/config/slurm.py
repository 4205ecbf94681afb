"""`[slurm]`: resources of a job, and its requeue and restart policy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from trainer.config.sections import NonNegativeInt, PositiveInt, Section

# Patterns without characters that sbatch or a shell would interpret.
ShellWord = Annotated[str, Field(pattern=r"^[^\s\"'\\$`#]+$")]
ContainerImage = Annotated[str, Field(pattern=r"^[^\s\"'\\$`]+$")]
CommandOption = Annotated[str, Field(pattern=r"^--[A-Za-z][^\n\"'\\$`#]*$")]


def require_allowed_option(option: str) -> str:
    name = option.removeprefix("--").partition("=")[0].split()[0]
    for forbidden, reason in FORBIDDEN_OPTIONS.items():
        if forbidden.startswith(name):  # sbatch takes beginnings of names, too.
            raise ValueError(f"must not be --{forbidden}: {reason}")
    return option


SET_HERE = "a key of [slurm] or the batch script itself sets it"
FORBIDDEN_OPTIONS = {
    "array": "every task of the array would train in the same run folder",
    "no-requeue": "the run could not continue after its time limit",
    "wait": "it would wait for requeued launches",
    **dict.fromkeys(
        (
            "requeue",
            "open-mode",
            "signal",
            "output",
            "error",
            "chdir",
            "job-name",
            "nodes",
            "ntasks",
        ),
        SET_HERE,
    ),
    **dict.fromkeys(
        ("ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem", "time", "partition"), SET_HERE
    ),
}
SbatchOption = Annotated[CommandOption, AfterValidator(require_allowed_option)]
MAX_LEAD_SECONDS = 65_535  # limit of sbatch --signal


class SlurmSection(Section):
    nodes: PositiveInt = 1
    """Number of nodes."""
    gpus_per_node: NonNegativeInt = 8
    """GPUs per node, one rank each. 0: a CPU job, with `processes_per_node` ranks per node."""
    processes_per_node: PositiveInt | None = None
    """Ranks per node if `gpus_per_node` is 0."""
    cpus_per_task: PositiveInt | None = None
    """Cores per rank. Left out: the cluster's default, usually 1."""
    partition: ShellWord | None = None
    """Partition, or several separated by commas, without spaces."""
    account: ShellWord | None = None
    """Account to charge, without spaces."""
    qos: ShellWord | None = None
    """Quality of service, without spaces."""
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d+:[0-5]\d:[0-5]\d$")] | None = None
    """Time limit of each launch of the job: `hh:mm:ss` or `d-hh:mm:ss`.

    Left out: the partition's.
    """
    memory: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    """Memory per node: a number and K, M, G or T; `0` is all of it.

    Left out: the cluster's default.
    """
    constraint: ShellWord | None = None
    """Required node features, without spaces."""
    exclude: ShellWord | None = None
    """Nodes to exclude, such as `node[3,7]`."""
    preflight: bool = True
    """Check each node before the ranks start, in at most a minute (`longhaul preflight`); a node
    that fails does not train.
    """
    spare_nodes: NonNegativeInt = 0
    """Nodes allocated besides `nodes`, to take the place of those that fail the preflight or that
    this run's events accuse.
    """
    launcher: Literal["srun", "torchrun"] = "srun"
    """Launcher of the ranks: `srun` with one task per rank, or `torchrun` with one agent per node.
    """
    lead_seconds: Annotated[int, Field(ge=1, le=MAX_LEAD_SECONDS)] = 300
    """Lead time before the time limit at which ranks are signalled to save and exit: at least
    twice the time of a step and a checkpoint, plus 30 s.
    """
    max_requeues: NonNegativeInt = 1000
    """Maximum number of automatic requeues."""
    max_stuck: PositiveInt = 3
    """Consecutive launches without a new checkpoint after which the job gives up."""
    backoff_seconds: NonNegativeInt = 20
    """Delay before ranks are restarted after a crash without a new checkpoint; twice and three
    times that before the next restarts without one. After a crash with one there is none.
    """
    setup: tuple[str, ...] = ()
    """Shell lines at the start of the script, such as `module load cuda`."""
    python: ShellWord | None = None
    """Interpreter on the nodes: a path or name without spaces.

    Left out: the interpreter that renders the script, or `python3` in a container.
    """
    container: ContainerImage | None = None
    """Container image for the ranks, without spaces, such as `nvcr.io#nvidia/pytorch:26.01-py3`;
    needs the pyxis plugin.
    """
    options: tuple[SbatchOption, ...] = ()
    """More sbatch options, such as `--exclusive` or `--mail-type=FAIL`."""
    srun_options: tuple[CommandOption, ...] = ()
    """More srun options for the ranks, such as `--cpu-bind=none`."""

    @property
    def nproc_per_node(self) -> int:
        return self.gpus_per_node or self.processes_per_node or 1


def parse_time_limit(time_limit: str | None) -> int | None:
    """Seconds of a time limit in SLURM's format."""
    if time_limit is None:
        return None
    days, _, clock = time_limit.rpartition("-")
    hours, minutes, secs = map(int, clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs
