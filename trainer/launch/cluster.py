"""What starts where: the processes and nodes that a launch is for, and the environment that they inherit. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from trainer.config.job_config import Config
from trainer.errors import ConfigError


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

    def __str__(self) -> str:
        nodes = "" if self.nodes == 1 else f" ({count(self.nodes, 'node')} x {self.processes})"
        return f"{count(self.world_size, 'process', 'es')}{nodes}"


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
    cores = len(os.sched_getaffinity(0))  # srun binds a task to its own cores, those of a launcher share them.
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


def count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{plural if number != 1 else ''}"
