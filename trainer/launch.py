"""`python -m trainer.launch`: checks a run in one process, for the world it would have, and only then starts it.

Workers are started by torchrun's agent inside this process, or, as a task of `srun`, this process becomes the worker.
Leaves with 2 when the configuration is wrong, else as the workers do. torch is imported after the checks.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from types import FrameType

from trainer.config import Config
from trainer.fit import fitted, memory_of_node, told
from trainer.initial import require_initial
from trainer.ledger import GIB, ledger
from trainer.levers import short
from trainer.load import find, load, show_path, split, to_toml
from trainer.orphans import LAUNCHER
from trainer.run_folder import ResumeError, RunFolder, finished, next_stage
from trainer.stages import Recipe
from trainer.status import BAD_CONFIGURATION, FAILED, NO_RETRY, ConfigError

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
TELLING_CODES = (NO_RETRY, BAD_CONFIGURATION)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What starts where: `processes` on each of `nodes`; `task` is this process's rank if srun started it."""

    processes: int
    nodes: int = 1
    node_rank: int = 0
    master: str = "127.0.0.1:0"
    task: int | None = None

    @property
    def world_size(self) -> int:
        return self.processes * self.nodes


def main() -> int:
    words = sys.argv[1:]
    flags = {"-h", "--help", "--check", "--plan"}.intersection(words)
    argv = [word for word in words if word not in flags]
    if flags & {"-h", "--help"}:
        from trainer.describe import help_text

        sys.stdout.write(help_text() + "\n")
        return 0
    if "--plan" in flags:
        sys.stderr.write("error: --plan: the planner does not exist yet\n")
        return BAD_CONFIGURATION
    config, cluster, problems = examine(argv, os.environ)
    if "--check" in flags and cluster and not cluster.task and not config.shape_problems(cluster.world_size):
        sys.stdout.write(report(config, cluster))  # Also where corpus and tokenizer are not.
    if problems or cluster is None:
        if cluster is None or not cluster.task:
            sys.stderr.write(complaint(problems, argv, cluster))
        return BAD_CONFIGURATION
    if "--check" in flags:
        return 0
    settled = nothing_to_start(config)
    if settled is not None:
        status, reason = settled
        if not cluster.task:
            sys.stderr.write(f"{reason}\n")
        return status
    prepare_environment(os.environ, cluster, host_works=config.memory.optimizer_placement == "host")
    if cluster.task is not None:
        os.execv(sys.executable, [sys.executable, "-u", str(TRAIN), *argv])
    logging.disable(logging.ERROR)  # The agent's view of a failed worker; `start` tells it in one line.
    return start_stages(config, argv, cluster)


def start_stages(config: Config, argv: Sequence[str], cluster: Cluster) -> int:
    """Runs what is left of the stages, each in processes of its own; returns the exit status of the last one started."""
    before = next_stage(config)
    while True:
        status = start(TRAIN, argv, cluster)
        if status or before is None or not before.name:
            return status
        try:
            after = next_stage(load(argv))  # What is still to come may have been changed meanwhile.
        except (ConfigError, ResumeError) as error:
            sys.stderr.write(f"error: {error}\n")
            return BAD_CONFIGURATION if isinstance(error, ConfigError) else NO_RETRY
        if after is None or after.index == before.index:
            return status
        before = after


def nothing_to_start(config: Config) -> tuple[int, str] | None:
    """Exit status and reason, if the run folder says that there is nothing to do or that it must not be done."""
    try:
        RunFolder(config.output_dir).make()
        already = finished(config)
    except ConfigError as error:
        return BAD_CONFIGURATION, f"error: {error}"
    except ResumeError as error:
        return NO_RETRY, f"error: {error}"
    return (0, already) if already else None


def examine(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[Recipe, Cluster | None, list[str]]:
    """The run, its world if that is known, and everything that is wrong with either."""
    problems: list[str] = []
    config, cluster = Recipe(), None
    try:
        config = load(argv)
    except ConfigError as error:
        problems += error.problems
    try:
        cluster = read_cluster(environment, config, gpus=0 if environment.get("NGPU") else count_gpus())
    except ConfigError as error:
        problems += error.problems
    if problems:
        return config, None, problems
    if cluster is None or config.stage_problems():
        return config, cluster, config.stage_problems()
    left = config.stages[first_stage(config) :]
    problems = config.problems(cluster.world_size, first=left[0].index)
    if not left[0].config.model.problems():
        problems += complaints_of(lambda: require_initial(left[0].config))
    for stage in () if problems else left:
        problems += complaints_of(partial(_fitted, stage.config, cluster))
    return config, cluster, problems


def complaints_of(check: Callable[[], object]) -> list[str]:
    """What a check raises."""
    try:
        check()
    except ConfigError as error:
        return error.problems
    return []


def first_stage(config: Config) -> int:
    """The number of the stage that is next; what is done may not fit the processes that are left. 0 if that is unclear."""
    with suppress(ResumeError, ConfigError):
        stage = next_stage(config)
        return 0 if stage is None else stage.index
    return 0


# ---- the world


def read_cluster(environment: Mapping[str, str], config: Config, *, gpus: int) -> Cluster:
    """The world that NGPU and NNODES, or srun, describe. Raises `ConfigError`."""
    task = _slurm_task(environment)
    if task is not None:
        return task
    problems: list[str] = []

    def integer(name: str, default: int, *, least: int, below: int | None = None) -> int:
        text = environment.get(name) or str(default)
        if text.isdecimal() and least <= int(text) and (below is None or int(text) < below):
            return int(text)
        rule = f"at least {least}" if below is None else f"{least} to {below - 1}"
        problems.append(f'environment: {name} = "{text}" must be an integer, {rule}')
        return default

    processes = integer("NGPU", gpus or default_processes(config), least=1)
    nodes = integer("NNODES", 1, least=1)
    node_rank, port = 0, 0
    if nodes > 1:
        node_rank = integer("NODE_RANK", 0, least=0, below=nodes)
        port = integer("MASTER_PORT", 29500, least=1, below=65536)
        problems += [
            f"environment: NNODES = {nodes} needs {name}, {meaning}"
            for name, meaning in (("NODE_RANK", "this node's number"), ("MASTER_ADDR", "the host of node 0"))
            if not environment.get(name)
        ]
    if problems:
        raise ConfigError(problems)
    address = "127.0.0.1" if nodes == 1 else environment["MASTER_ADDR"]
    return Cluster(processes=processes, nodes=nodes, node_rank=node_rank, master=f"{address}:{port}")


def default_processes(config: Config) -> int:
    """Without GPUs: as many processes as the stated degrees need, within what one machine stands."""
    needed = [prod(stage.config.parallelism.degrees(1).values()) for stage in config.stages]
    return min(max(*needed, 2), 8)


def count_gpus() -> int:
    if not _has_gpus():
        return 0
    import torch

    return int(torch.cuda.device_count())


def prepare_environment(
    environment: dict[str, str] | os._Environ[str], cluster: Cluster, *, host_works: bool = False
) -> None:
    """What workers inherit: threads that share the cores, and an allocator that does not fragment; both can be set.

    Beside GPUs one thread is enough, unless the host updates the weights.
    """
    cores = len(os.sched_getaffinity(0))  # srun binds a task to its own cores, torchrun's workers share them.
    share = str(max(1, cores // (cluster.processes if cluster.task is None else 1)))
    if cluster.task is not None:
        environment["MASTER_ADDR"], _, environment["MASTER_PORT"] = cluster.master.rpartition(":")
    if _has_gpus():
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # For training.deterministic; too early to ask.
        environment.setdefault("OMP_NUM_THREADS", environment.get("SLURM_CPUS_PER_TASK", share if host_works else "1"))
        if "PYTORCH_CUDA_ALLOC_CONF" not in environment:  # The old name, which torch still reads, with a warning.
            environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    environment.setdefault("OMP_NUM_THREADS", share)


def _slurm_task(environment: Mapping[str, str]) -> Cluster | None:
    """The world of an srun step. Raises `ConfigError` when ranks on several nodes could not find each other."""
    # The step's own count: a shell inside an allocation of several tasks is a step of one.
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment or tasks == "1":
        return None
    # Without MASTER_PORT, one that all tasks of the step know and other jobs on the host do not use.
    port = environment.get("MASTER_PORT") or str(20_000 + int(environment.get("SLURM_JOB_ID", "0")) % 10_000)
    nodes = environment.get("SLURM_STEP_NUM_NODES", "1")
    for name, text in (("SLURM_NTASKS", tasks), ("MASTER_PORT", port)):
        if not text.isdecimal():
            raise ConfigError([f'environment: {name} = "{text}" must be an integer'])
    address = environment.get("MASTER_ADDR")
    if address is None:
        if nodes != "1":
            raise ConfigError([f"environment: srun on {nodes} nodes needs MASTER_ADDR, the host of task 0"])
        address = "127.0.0.1"
    even = int(nodes) if int(tasks) % int(nodes) == 0 else 1  # srun may deal tasks unevenly.
    return Cluster(
        processes=int(tasks) // even,
        nodes=even,
        master=f"{address}:{port}",
        task=int(environment["SLURM_PROCID"]),
    )


def _has_gpus() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists() or Path("/dev/dxg").exists()


# ---- what is told before anything starts


def complaint(problems: Sequence[str], argv: Sequence[str], cluster: Cluster | None) -> str:
    """A line for each problem, and one for where they are."""
    name = split(argv).config
    with suppress(ConfigError):
        name = show_path(find(name))
    world = f" for {_world(cluster)}" if cluster else ""
    lines = [f"error: {problem}\n" for problem in problems]
    return "".join([*lines, f"nothing was started: {count(len(problems), 'problem')} in {name}{world}\n"])


def report(config: Config, cluster: Cluster) -> str:
    """The resolved configuration, and as comments, so that the whole is TOML, what it means for this world."""
    lines = [f"mesh of {_world(cluster)}"]
    for stage in config.stages:
        lines += [stage.summary()] * bool(stage.name) + report_stage(stage.config, cluster)
    return to_toml(config) + "\n" + "".join(f"# {line}\n" for line in lines)


def report_stage(config: Config, cluster: Cluster) -> list[str]:
    model, training = config.model.build(), config.training
    topology = config.topology(cluster.world_size, nodes=cluster.nodes)
    total, each = config.micro_batches(cluster.world_size)
    rows = training.global_batch_size
    settled = _settled(config, cluster)
    return [
        *(f"  {line}" for line in topology.drawing()),
        *config.plans(cluster.world_size),
        *settled,
        f"model {config.model.family} {config.model.size}: {model.num_parameters:,} parameters",
        f"update of {count(rows, 'row')} x {training.seq_len:,} tokens = {rows * training.seq_len:,} tokens: "
        f"{count(total, 'micro-batch', 'es')} of {count(training.micro_batch_size, 'row')}, "
        f"{each} on each data-parallel rank",
        *(f"remark: {remark}" for remark in (*config.remarks(cluster.world_size), *topology.remarks())),
    ]


def _settled(config: Config, cluster: Cluster) -> list[str]:
    """What memory will hold, as far as it is known before a device is seen."""
    try:
        found = _fitted(config, cluster)
    except ConfigError:  # Told elsewhere.
        return []
    if found is None:
        return ['memory.recompute = "auto" is settled when devices are seen; with memory.device_gib it is shown here']
    chosen = [f'memory.recompute = "auto" takes {told(found)}'] * (found is not config)
    return [*chosen, short(ledger(found, cluster.world_size))]


def _fitted(config: Config, cluster: Cluster) -> Config | None:
    """With `auto` made into levers; None as long as no device is known. Raises ConfigError."""
    if config.memory.recompute == "auto" and config.memory.device_gib is None:
        return None
    device = (config.memory.device_gib or 0) * GIB
    return fitted(config, cluster.world_size, ranks=cluster.processes, device=device, host=memory_of_node())


def count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{plural if number != 1 else ''}"


def _world(cluster: Cluster) -> str:
    nodes = "" if cluster.nodes == 1 else f" ({count(cluster.nodes, 'node')} x {cluster.processes})"
    return f"{count(cluster.world_size, 'process', 'es')}{nodes}"


# ---- the workers


def start(script: Path, argv: Sequence[str], cluster: Cluster) -> int:
    """Runs `script` once per process of this node under torchrun's agent, without restarts; returns the exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, get_args_parser

    _forward_stop_signals()
    os.environ[LAUNCHER] = str(os.getpid())
    config, command, arguments = config_from_args(
        get_args_parser().parse_args(_torchrun_options(cluster, script, argv))
    )
    try:
        elastic_launch(config, command)(*arguments)
    except ChildFailedError as error:
        failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        told = [failure for failure in failures if failure.exitcode != -signal.SIGTERM] or failures
        for failure in told:  # The agent ends the others with SIGTERM.
            how = f"left with {failure.exitcode}" if failure.exitcode > 0 else f"was killed by {failure.signal_name()}"
            sys.stderr.write(f"error: local rank {failure.local_rank} (pid {failure.pid}) {how}\n")
        return exit_status(failure.exitcode for failure in failures)
    except SignalException as error:
        sys.stderr.write(f"error: stopped by {error.sigval.name}\n")
        return 1
    return 0


def exit_status(codes: Iterable[int]) -> int:
    """Of the workers that failed, the one that says why decides: its peers fail because it left."""
    failed = list(codes)
    return next((code for code in TELLING_CODES if code in failed), 1)


def _torchrun_options(cluster: Cluster, script: Path, argv: Sequence[str]) -> list[str]:
    alone = cluster.nodes == 1
    options: dict[str, object] = {
        "--nnodes": cluster.nodes,
        "--nproc-per-node": cluster.processes,
        "--max-restarts": 0,
        "--signals-to-handle": "SIGINT,SIGHUP,SIGQUIT",
    }
    address, _, port = cluster.master.rpartition(":")
    if alone:
        options |= {"--rdzv-backend": "c10d", "--rdzv-endpoint": cluster.master, "--local-addr": address}
    else:  # c10d would number the nodes as they arrive; rank 0 and its log belong on node 0.
        options |= {"--node-rank": cluster.node_rank, "--master-addr": address, "--master-port": port}
    return [*(f"{option}={value}" for option, value in options.items()), str(script), *argv]


def _forward_stop_signals() -> None:
    """A request to stop is the workers' to answer, and this process leaves as they do.

    torchrun's agent would kill them after a grace that a large checkpoint does not keep.
    """

    def forward(number: int, _: FrameType | None) -> None:
        workers = [pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]
        if not workers:
            raise SystemExit(1)
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(int(pid), number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(FAILED)
