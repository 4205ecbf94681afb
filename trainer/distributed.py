"""Processes: who this one is, and its process group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed

from trainer.config import DistributedSection
from trainer.hardware import choose_device


@dataclass(frozen=True)
class World:
    """A process among all of them."""

    rank: int
    size: int
    device: torch.device


def place(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, world size, rank on this node), as torchrun's variables give them, or srun's; alone without either."""
    if "RANK" in environment:
        return int(environment["RANK"]), int(environment["WORLD_SIZE"]), int(environment["LOCAL_RANK"])
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    if "SLURM_STEP_ID" in environment and int(tasks) > 1:
        return int(environment["SLURM_PROCID"]), int(tasks), int(environment["SLURM_LOCALID"])
    return 0, 1, 0


@contextmanager
def process_group(config: DistributedSection) -> Iterator[World]:
    """Joins the run's processes: gloo for host tensors, NCCL beside it on CUDA devices."""
    rank, size, local_rank = place(os.environ)
    device = choose_device(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=distributed.HashStore() if size == 1 else None,
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=config.timeout_minutes),
    )
    try:
        yield World(rank, size, device)
    finally:
        distributed.destroy_process_group()
