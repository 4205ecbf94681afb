"""`[slurm]`: what a job asks the scheduler for, and how it goes on after signals and crashes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.sections import NonNegativeInt, PositiveInt, Section

# One word of a line that both sbatch and a shell read.
ShellWord = Annotated[str, Field(pattern=r"^[^\s\"'\\$`#]+$")]
ContainerImage = Annotated[str, Field(pattern=r"^[^\s\"'\\$`]+$")]
CommandOption = Annotated[str, Field(pattern=r"^--[A-Za-z][^\n\"'\\$`#]*$")]

MAX_LEAD_SECONDS = 65_535  # seconds: what sbatch takes


class SlurmSection(Section):
    nodes: PositiveInt = 1
    """Nodes of the job."""
    gpus_per_node: NonNegativeInt = 8
    """GPUs of each node, each with a rank of its own. 0: none, and `processes_per_node` says how many ranks."""
    processes_per_node: PositiveInt | None = None
    """Ranks of each node where `gpus_per_node` is 0."""
    cpus_per_task: PositiveInt | None = None
    """Cores of each rank. Left out: as the cluster has it, mostly 1."""
    partition: ShellWord | None = None
    """A name without spaces, or several with commas between."""
    account: ShellWord | None = None
    """Whom the time is charged to: a name without spaces."""
    qos: ShellWord | None = None
    """Quality of service: a name without spaces."""
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d+:[0-5]\d:[0-5]\d$")] | None = None
    """Time limit of each life of the job: `hh:mm:ss` or `d-hh:mm:ss`. Left out: the partition's."""
    memory: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    """Memory of each node: a number and K, M, G or T; `0` is all of it. Left out: as the cluster has it."""
    constraint: ShellWord | None = None
    """Features that nodes must have, without spaces."""
    exclude: ShellWord | None = None
    """Nodes that must not be taken, such as `node[3,7]`."""
    launcher: Literal["srun", "torchrun"] = "srun"
    """What starts ranks: `srun` each as a task of its own; `torchrun` an agent on each node, which starts the node's."""
    lead_seconds: Annotated[int, Field(ge=1, le=MAX_LEAD_SECONDS)] = 300
    """How long before the time limit the ranks are told to save and leave: at least twice an update and a checkpoint, and 30 s."""
    max_requeues: NonNegativeInt = 1000
    """How often the job goes back into the queue by itself."""
    max_stuck: PositiveInt = 3
    """Starts in a row without a new checkpoint after which the job gives up."""
    backoff_seconds: NonNegativeInt = 20
    """Pause before ranks are started again after a crash; twice as long after the second without a new checkpoint, and so on."""
    setup: tuple[str, ...] = ()
    """Lines of shell before anything else, such as `module load cuda`."""
    python: ShellWord | None = None
    """Interpreter on the nodes: a path or a name without spaces. Left out: the one that renders the script, or `python3` in a container."""
    container: ContainerImage | None = None
    """Image that ranks run in, without spaces, such as `nvcr.io#nvidia/pytorch:26.01-py3`; needs the pyxis plugin of srun."""
    options: tuple[CommandOption, ...] = ()
    """Further options of sbatch, such as `--exclusive` or `--mail-type=FAIL`."""
    srun_options: tuple[CommandOption, ...] = ()
    """Further options of srun for ranks, such as `--cpu-bind=none`."""

    @property
    def nproc_per_node(self) -> int:
        """Ranks of a node."""
        return self.gpus_per_node or self.processes_per_node or 1

    def problems(self) -> list[str]:
        problems = []
        if self.gpus_per_node and self.processes_per_node is not None:
            problems.append(
                f"slurm.processes_per_node = {self.processes_per_node} is for slurm.gpus_per_node = 0; "
                f"{self.gpus_per_node} GPUs have as many ranks"
            )
        limit = parse_time_limit(self.time)
        if limit is not None and limit <= self.lead_seconds:
            problems.append(
                f'slurm.lead_seconds = {self.lead_seconds} must be below slurm.time = "{self.time}", {limit} s'
            )
        return problems


def parse_time_limit(time_limit: str | None) -> int | None:
    """A time limit as SLURM writes it."""
    if time_limit is None:
        return None
    days, _, clock = time_limit.rpartition("-")
    hours, minutes, secs = map(int, clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs
