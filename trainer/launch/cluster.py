"""The world of a launch, its nodes and processes per node, and the environment of its workers.

Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from trainer.config.job_config import Config
from trainer.errors import ConfigError
from trainer.hardware.host import cluster_environment, loopback_environment


@dataclass(frozen=True, kw_only=True)
class LaunchWorld:
    """Nodes and processes per node.

    `rank` is set if srun or torchrun started this process as a rank.
    """

    nproc_per_node: int
    num_nodes: int = 1
    node_rank: int = 0
    master_endpoint: str = "127.0.0.1:0"
    rank: int | None = None

    @property
    def is_first_of_node(self) -> bool:
        return not self.rank or self.rank % self.nproc_per_node == 0

    @property
    def world_size(self) -> int:
        return self.nproc_per_node * self.num_nodes

    def __str__(self) -> str:
        nodes = (
            ""
            if self.num_nodes == 1
            else f" ({pluralize(self.num_nodes, 'node')} x {self.nproc_per_node})"
        )
        return f"{pluralize(self.world_size, 'process', 'es')}{nodes}"


def launch_id(environment: Mapping[str, str]) -> str | None:
    """An id that the processes of one srun share with no others; None elsewhere.

    A torchrun's `--rdzv-id` does not serve, because it may repeat.
    """
    if "SLURM_STEP_ID" not in environment:
        return None
    return "-".join(
        (
            "launch",
            *(
                environment.get(f"SLURM_{key}", "0")
                for key in ("JOB_ID", "STEP_ID", "RESTART_COUNT")
            ),
        )
    )


MAX_PROCESSES_PER_NODE = 1024


def detect_launch_world(
    environment: Mapping[str, str], config: Config, *, gpus: int
) -> LaunchWorld:
    """The world described by torchrun, srun, or NGPU and NNODES. Raises `ConfigError`."""
    # A world that torchrun or srun has made wins: NGPU and NNODES are for our own launcher.
    rank_world = _rank_world(environment)
    if rank_world is not None:
        return rank_world
    problems: list[str] = []

    def read_int(name: str, default: int, *, minimum: int, upper_bound: int | None = None) -> int:
        text = environment.get(name) or str(default)
        if (
            text.isdecimal()
            and minimum <= int(text)
            and (upper_bound is None or int(text) < upper_bound)
        ):
            return int(text)
        rule = f"at least {minimum}" if upper_bound is None else f"{minimum} to {upper_bound - 1}"
        problems.append(f'environment: {name} = "{text}" must be an integer, {rule}')
        return default

    nproc_per_node = read_int(
        "NGPU",
        gpus or default_nproc_per_node(config),
        minimum=1,
        upper_bound=MAX_PROCESSES_PER_NODE + 1,
    )
    num_nodes = read_int("NNODES", 1, minimum=1)
    node_rank = 0
    port = 0
    if num_nodes > 1:
        node_rank = read_int("NODE_RANK", 0, minimum=0, upper_bound=num_nodes)
        port = read_int("MASTER_PORT", 29500, minimum=1, upper_bound=65536)
        problems += [
            f"environment: NNODES = {num_nodes} needs {name}, {meaning}"
            for name, meaning in (
                ("NODE_RANK", "the index of this node"),
                ("MASTER_ADDR", "the host of node 0"),
            )
            if not environment.get(name)
        ]
    if problems:
        raise ConfigError(problems)
    address = "127.0.0.1" if num_nodes == 1 else environment["MASTER_ADDR"]
    return LaunchWorld(
        nproc_per_node=nproc_per_node,
        num_nodes=num_nodes,
        node_rank=node_rank,
        master_endpoint=f"{address}:{port}",
    )


def default_nproc_per_node(config: Config) -> int:
    """Without GPUs: the product of the stated degrees, at least 2, at most 8."""
    # At least two, so that a run without GPUs uses its collectives; at most eight, for a laptop.
    model_parallel_sizes = [
        prod(stage.config.parallelism.degrees(1).values()) for stage in config.training_stages
    ]
    return min(max(*model_parallel_sizes, 2), 8)


def count_gpus() -> int:
    if not _has_gpu_device_files():
        return 0
    # Importing torch takes seconds, which a check on a machine without GPUs need not wait for.
    import torch

    return int(torch.cuda.device_count())


def set_worker_environment(
    environment: dict[str, str] | os._Environ[str],
    cluster: LaunchWorld,
    *,
    cpu_optimizer: bool = False,
) -> None:
    """Sets the number of OpenMP threads and the CUDA allocator of workers, unless they are set
    already.

    With GPUs one thread is enough, unless the optimizer runs on the host.
    """
    # srun binds a task to its cores; workers of a launcher share them.
    cores = len(os.sched_getaffinity(0))
    threads = str(max(1, cores // (cluster.nproc_per_node if cluster.rank is None else 1)))
    address, _, port = cluster.master_endpoint.rpartition(":")
    # This process becomes the rank, which reads both; srun sets neither, and the port may be
    # derived.
    if cluster.rank is not None:
        environment["MASTER_ADDR"] = address
        environment["MASTER_PORT"] = port
    if cluster.num_nodes == 1:
        environment.update(loopback_environment(environment))
    else:
        environment.update(cluster_environment(environment, address))
    if _has_gpu_device_files():
        # Deterministic cuBLAS needs a fixed workspace, and reads its size when the context is
        # created.
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        environment.setdefault(
            "OMP_NUM_THREADS",
            environment.get("SLURM_CPUS_PER_TASK", threads if cpu_optimizer else "1"),
        )
        # A user may have set the deprecated name, which torch still reads.
        if "PYTORCH_CUDA_ALLOC_CONF" not in environment:
            environment.setdefault("PYTORCH_ALLOC_CONF", allocator_settings(int(threads)))
    environment.setdefault("OMP_NUM_THREADS", threads)


def allocator_settings(threads: int) -> str:
    """Settings of torch's CUDA allocator.

    Segments grow instead of fragmenting. Several threads touch the pages of host memory before it
    is pinned, which takes most of the time.
    """
    register = f"pinned_use_cuda_host_register:True,pinned_num_register_threads:{min(16, threads)}"
    return f"expandable_segments:True,{register}"


def _rank_world(environment: Mapping[str, str]) -> LaunchWorld | None:
    """The world if torchrun or srun started this process as a rank, else None.

    Raises `ConfigError`.
    """
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= environment.keys():
        return _srun_world(environment)
    world_size = int(environment["WORLD_SIZE"])
    local_size = int(environment.get("LOCAL_WORLD_SIZE", world_size))
    return LaunchWorld(
        nproc_per_node=local_size,
        num_nodes=world_size // local_size,
        master_endpoint=f"{environment.get('MASTER_ADDR', '127.0.0.1')}:{environment.get('MASTER_PORT', '29500')}",
        rank=int(environment["RANK"]),
    )


def _srun_world(environment: Mapping[str, str]) -> LaunchWorld | None:
    """The world of an srun step.

    Raises `ConfigError` if ranks on several nodes have no MASTER_ADDR.
    """
    # The count of the step: a shell inside an allocation of several tasks is a step of one.
    num_tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment or num_tasks == "1":
        return None
    # Without MASTER_PORT: derived from the job, so that tasks agree and other jobs on the host
    # differ.
    port = environment.get("MASTER_PORT") or str(
        20_000 + int(environment.get("SLURM_JOB_ID", "0")) % 10_000
    )
    nodes = environment.get("SLURM_STEP_NUM_NODES", "1")
    for name, text in (("SLURM_NTASKS", num_tasks), ("MASTER_PORT", port)):
        if not text.isdecimal():
            raise ConfigError([f'environment: {name} = "{text}" must be an integer'])
    address = environment.get("MASTER_ADDR")
    if address is None:
        if nodes != "1":
            raise ConfigError(
                [f"environment: srun on {nodes} nodes needs MASTER_ADDR, the host of task 0"]
            )
        address = "127.0.0.1"
    # srun may distribute tasks unevenly. Such a world has no number of ranks per node, so it
    # counts as one node.
    num_nodes = int(nodes) if int(num_tasks) % int(nodes) == 0 else 1
    return LaunchWorld(
        nproc_per_node=int(num_tasks) // num_nodes,
        num_nodes=num_nodes,
        master_endpoint=f"{address}:{port}",
        rank=int(environment["SLURM_PROCID"]),
    )


def _has_gpu_device_files() -> bool:
    return (
        any(Path("/dev").glob("nvidia[0-9]*"))
        or Path("/dev/kfd").exists()
        or Path("/dev/dxg").exists()
    )


def pluralize(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{plural if number != 1 else ''}"
