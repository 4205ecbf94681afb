"""Processes: who this one is, and its process group."""

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

import torch
from torch import distributed

from parallelisms.collectives import gather_over, max_over
from trainer.checkpoint.run_dir import flat, is_place
from trainer.config.job_config import Config, DistributedSection
from trainer.errors import ConfigError, RunError
from trainer.hardware.device import choose_device, stay_near
from trainer.memory.auto import fitted, memory_of_node, told
from trainer.memory.estimator import GIB
from trainer.resilience.exit_markers import ATTEMPT

log = logging.getLogger("trainer")

# Where things lie may differ between nodes.
OWN = ("data.corpus", "data.cache_dir", "tokenizer.path")


@dataclass(frozen=True)
class World:
    """A process among all of them."""

    rank: int
    size: int
    device: torch.device
    nodes: int = 1


def place(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, world size, rank on this node), as torchrun's variables give them, or srun's; alone without either."""
    if "RANK" in environment:
        return int(environment["RANK"]), int(environment["WORLD_SIZE"]), int(environment["LOCAL_RANK"])
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    if "SLURM_STEP_ID" in environment and int(tasks) > 1:
        return int(environment["SLURM_PROCID"]), int(tasks), int(environment["SLURM_LOCALID"])
    return 0, 1, 0


def here() -> tuple[int, int, int]:
    """`place` of this process."""
    return place(os.environ)


def nodes(environment: Mapping[str, str]) -> int:
    """On how many machines the processes run; 1 where nobody says."""
    _, size, _ = place(environment)
    if "RANK" in environment:
        return size // int(environment.get("LOCAL_WORLD_SIZE", size))
    return int(environment.get("SLURM_STEP_NUM_NODES", "1")) if size > 1 else 1


def require_agreement(config: Config, facts: Mapping[str, str]) -> None:
    """Raises `ConfigError`, on all ranks, if some were started with another configuration or read other data."""
    mine = flat(config) | dict(facts)
    mine = {key: value for key, value in mine.items() if key not in OWN and not is_place(key)}
    everyone = gather_over(mine)
    problems = [
        f"{key} is {json.dumps(everyone[0].get(key))} on rank 0 and {json.dumps(other.get(key))} on rank {rank}"
        for rank, other in enumerate(everyone)
        for key in mine
        if other.get(key) != everyone[0].get(key)
    ]
    if problems:
        raise ConfigError(problems)


def require_same_start(start: str) -> None:
    """Raises `RunError`, on all ranks, if some see another checkpoint: file systems of several hosts may lag behind."""
    everyone = gather_over(start)
    if other := next((rank for rank, seen in enumerate(everyone) if seen != everyone[0]), None):
        raise RunError(
            f"rank 0 would start {everyone[0]}, and rank {other} {everyone[other]}: the next start may see the same"
        )


def settled(config: Config, world: World) -> Config:
    """With `memory.recompute = "auto"` made into levers, as the smallest device and node of all ranks allow."""
    if config.memory.recompute != "auto":
        return config
    host = memory_of_node()
    ranks = max(1, world.size // world.nodes)
    device = host = host / 2  # A CPU's own memory is both.
    device /= ranks
    if world.device.type == "cuda":
        host, device = memory_of_node(), float(torch.cuda.get_device_properties(world.device).total_memory)
    if config.memory.device_gib is not None:
        device = config.memory.device_gib * GIB
    device, host = (-size for size in max_over(None, [-device, -host]))
    found = fitted(config, world.size, ranks=ranks, device=device, host=host)
    if world.rank == 0:
        log.info('memory.recompute = "auto" takes %s', told(found))
    return found


@contextmanager
def process_group(config: DistributedSection) -> Iterator[World]:
    """Joins the run's processes: gloo for host tensors, NCCL beside it on CUDA devices."""
    rank, size, local_rank = here()
    device = choose_device(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    stay_near(device)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=distributed.HashStore() if size == 1 else None,
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=config.start_timeout_minutes),
    )
    whole = size == 1
    try:
        yield World(rank, size, device, nodes(os.environ))
        whole = True
    finally:
        # Not after an error: peers may be inside a collective, and leaving must not wait for them.
        if whole:
            distributed.destroy_process_group()


def gloo_group(config: DistributedSection) -> distributed.ProcessGroup:
    """All ranks once more, through the host, for a thread beside training. Collective."""
    minutes = max(config.start_timeout_minutes, config.timeout_minutes)
    group = distributed.new_group(backend="gloo", timeout=timedelta(minutes=minutes))
    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(f"all ranks are one of its ranks, but the group is {group}")
    return group


def attempt() -> str:
    """What this start of the run is called, on all ranks alike: `LONGHAUL_ATTEMPT`, else a random name. Collective."""
    mine = re.sub(r"[^A-Za-z0-9_-]", "-", os.environ.get(ATTEMPT, ""))[:64] or token_hex(4)
    return gather_over(mine)[0]


@contextmanager
def on_this_machine(config: DistributedSection, *, rank: int, size: int, store: Path) -> Iterator[World]:
    """Joins processes that meet in the file `store`, to compute on the CPU also where there are other devices."""
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(str(store), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=config.start_timeout_minutes),
    )
    yield World(rank, size, torch.device("cpu"))
    distributed.destroy_process_group()  # After an error it is left to itself, for the same reason.
