"""Rank, world size and process groups."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from torch import distributed

from parallelisms.mesh import host_staging
from parallelisms.mesh.collectives import (
    all_gather_values,
    authenticate_values,
    max_over_ranks,
)
from trainer.config.job_config import Config
from trainer.config.run_spec import SECRET_ENV
from trainer.config.sections import DistributedSection
from trainer.errors import ConfigError, RunFailedError
from trainer.hardware.device import bind_to_numa_node, choose_device
from trainer.hardware.host import loopback_environment, node_memory_bytes
from trainer.step.planner import ask_planner, with_smallest_chunk
from trainer.step.store import find_store
from trainer.storage.exit_markers import ATTEMPT_VARIABLE
from trainer.storage.run_dir import flatten_config, is_source_path

log = logging.getLogger("trainer")

# Paths, which may differ between nodes.
NODE_LOCAL_KEYS = ("data.corpus", "data.cache_dir", "tokenizer.path")


@dataclass(frozen=True)
class World:
    """Rank, world size and device of this process."""

    rank: int
    size: int
    device: torch.device
    num_nodes: int = 1
    ranks_per_device: int = 1
    """Ranks that share this one's GPU."""


def rank_from_environment(environment: Mapping[str, str] = os.environ) -> tuple[int, int, int]:
    """(rank, world size, local rank) from the variables of torchrun or srun; (0, 1, 0) without
    either.
    """
    if "RANK" in environment:
        return (
            int(environment["RANK"]),
            int(environment["WORLD_SIZE"]),
            int(environment["LOCAL_RANK"]),
        )
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    if "SLURM_STEP_ID" in environment and int(tasks) > 1:
        return int(environment["SLURM_PROCID"]), int(tasks), int(environment["SLURM_LOCALID"])
    return 0, 1, 0


def node_count(environment: Mapping[str, str]) -> int:
    """Number of nodes from the variables of torchrun or srun; 1 without either."""
    _, size, _ = rank_from_environment(environment)
    if "RANK" in environment:
        return size // int(environment.get("LOCAL_WORLD_SIZE", size))
    return int(environment.get("SLURM_STEP_NUM_NODES", "1")) if size > 1 else 1


def require_same_config(config: Config, data_facts: Mapping[str, str]) -> None:
    """Raises ConfigError on all ranks if their configurations or data fingerprints differ.

    Collective.
    """
    values = flatten_config(config) | dict(data_facts)
    values = {
        key: value
        for key, value in values.items()
        if key not in NODE_LOCAL_KEYS and not is_source_path(key)
    }
    # Every rank compares all of them, so that all raise the same error.
    first, *others = all_gather_values(values)
    if problems := [
        f"{key} is {json.dumps(first.get(key))} on rank 0 and {json.dumps(other.get(key))} on rank {rank}"
        for rank, other in enumerate(others, 1)
        for key in values
        if other.get(key) != first.get(key)
    ]:
        raise ConfigError(problems)


def require_same_checkpoint(checkpoint: str) -> None:
    """Raises RunFailedError on all ranks if they see different checkpoints, as on a lagging shared
    file system.
    """
    checkpoints = all_gather_values(checkpoint)
    if differing_rank := next(
        (rank for rank, seen in enumerate(checkpoints) if seen != checkpoints[0]), None
    ):
        raise RunFailedError(
            f"rank 0 would start {checkpoints[0]}, but rank {differing_rank} {checkpoints[differing_rank]}: "
            "the shared file system may lag, so the next restart may succeed"
        )


def resolve_auto_memory(config: Config, world: World, prediction_path: Path) -> Config:
    """Replaces the memory options that are "auto" by those that fit the smallest device and node
    of all ranks.

    A child process of rank 0 plans them and writes the prediction of the run; on a CPU only if
    there is something to plan. Collective. Raises ConfigError on all ranks if nothing fits.
    """
    on_cpu = world.device.type == "cpu"
    if on_cpu and config.memory.loss_chunk_mib == "auto":
        config = with_smallest_chunk(config)
    if on_cpu and config.memory.recompute != "auto" and config.plan.device is None:
        return config
    ranks_per_node = max(1, world.size // world.num_nodes)
    host_bytes = node_memory_bytes()
    if on_cpu:
        # The other half stands in for device memory.
        host_bytes /= 2
        device_bytes = host_bytes / ranks_per_node
    else:
        properties = torch.cuda.get_device_properties(world.device)
        device_bytes = properties.total_memory / world.ranks_per_device
    # The least of all ranks, as the negated maximum of the negated values.
    device_bytes, host_bytes = (
        -size for size in max_over_ranks(None, [-device_bytes, -host_bytes])
    )
    answer: dict[str, Any] = {}
    if world.rank == 0:
        answer = ask_planner(
            config,
            world.size,
            ranks_per_node=ranks_per_node,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            on_cpu=on_cpu,
            prediction_path=prediction_path,
        )
    # All ranks wait for rank 0's answer: with options of their own they would build different
    # models.
    answer, *_ = all_gather_values(answer)
    if answer["problems"]:
        raise ConfigError(answer["problems"])
    if world.rank == 0 and answer["choice"]:
        log.info('memory options that are "auto": %s', answer["choice"])
    return config.model_copy(update={"memory": config.memory.model_copy(update=answer["memory"])})


@contextmanager
def process_group(config: DistributedSection) -> Iterator[World]:
    """The default process group: gloo for host tensors, NCCL for CUDA tensors unless they travel
    through the host.
    """
    rank, size, local_rank = rank_from_environment()
    # Not for child processes, and not for whoever prints the environment.
    secret = os.environ.pop(SECRET_ENV, "").encode()
    device = choose_device(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Before threads and buffers exist, which inherit the binding.
    bind_to_numa_node(device)
    timeout = timedelta(minutes=config.start_timeout_minutes)
    distributed.init_process_group(
        _backend(device, through_host=config.through_host),
        store=find_store(rank, size, node_count(os.environ), secret, timeout),
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    is_clean_exit = size == 1
    try:
        authenticate_values(secret)
        sharing = ranks_on_device(device, may_share=config.through_host)
        if config.through_host and rank == 0:
            log.warning(
                "tensors travel through host memory (distributed.through_host): far slower than NCCL"
            )
        yield World(rank, size, device, node_count(os.environ), sharing)
        is_clean_exit = True
    finally:
        # Not after an error: peers may be inside a collective, and the exit must not wait for
        # them.
        if is_clean_exit:
            distributed.destroy_process_group()


def ranks_on_device(device: torch.device, *, may_share: bool) -> int:
    """How many ranks share this one's GPU; 1 on a CPU. Collective.

    Raises ConfigError on all ranks if some share one and may not: NCCL refuses it later, in words
    of its own.
    """
    if device.type != "cuda":
        return 1
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    found = all_gather_values(uuid)
    sharing = [str(rank) for rank, other in enumerate(found) if found.count(other) > 1]
    if sharing and not may_share:
        raise ConfigError(
            [
                f"ranks {', '.join(sharing)} share a GPU with another rank, and NCCL needs one for each: start fewer ranks, "
                "or set distributed.through_host = true to check a mesh slowly"
            ]
        )
    return found.count(uuid)


def _backend(device: torch.device, *, through_host: bool) -> str:
    if through_host:
        return host_staging.BACKEND
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def gloo_group(config: DistributedSection) -> distributed.ProcessGroup:
    """A gloo group of all ranks, for a background thread. Collective."""
    minutes = max(config.start_timeout_minutes, config.timeout_minutes)
    group: distributed.ProcessGroup = distributed.new_group(
        backend="gloo", timeout=timedelta(minutes=minutes)
    )
    return group


def attempt_name() -> str:
    """The name of this launch on all ranks: `LONGHAUL_ATTEMPT`, else random. Collective."""
    # The name becomes part of a folder's name.
    name = re.sub(r"[^A-Za-z0-9_-]", "-", os.environ.get(ATTEMPT_VARIABLE, ""))[:64] or token_hex(
        4
    )
    return all_gather_values(name)[0]


def init_single_host(
    config: DistributedSection, *, rank: int, size: int, store: Path, device_type: str = "cpu"
) -> World:
    """Creates a process group that meets in the file `store`: on the CPU, even if there are GPUs,
    or on the GPUs, which ranks share where they are fewer.

    The sockets of its ranks are on loopback.
    """
    device = torch.device("cpu")
    sharing = 1
    if device_type == "cuda":
        device = choose_device(rank)
        torch.cuda.set_device(device)
        sharing = -(-size // torch.cuda.device_count())
    os.environ.update(loopback_environment(os.environ))
    distributed.init_process_group(
        _backend(device, through_host=config.through_host or sharing > 1),
        store=distributed.FileStore(str(store), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=config.start_timeout_minutes),
    )
    return World(rank, size, device, ranks_per_device=sharing)


def destroy_process_group() -> None:
    """Destroys the default process group, if there is one.

    All ranks must have left its collectives.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()
