"""Which process this is, by the variables of whoever started it."""

from __future__ import annotations

import pytest
import torch
from torch import distributed

from trainer.config.job_config import DistributedSection
from trainer.distributed import World, node_count, process_group, rank_from_environment

SRUN = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}


def test_alone() -> None:
    assert rank_from_environment({}) == (0, 1, 0)


def test_under_torchrun() -> None:
    assert rank_from_environment({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == (5, 8, 1)


def test_under_srun() -> None:
    assert rank_from_environment(SRUN) == (5, 8, 1)


def test_torchrun_inside_srun_counts() -> None:
    assert rank_from_environment(SRUN | {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}) == (2, 4, 0)


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
    ids=["batch script", "single task", "shell in an allocation of eight"],
)
def test_one_task_of_slurm_is_alone(environment: dict[str, str]) -> None:
    assert rank_from_environment(environment) == (0, 1, 0)


def test_the_step_and_not_the_allocation_says_how_many() -> None:
    assert rank_from_environment(SRUN | {"SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "8"}) == (5, 8, 1)


def test_the_machines_of_a_run_are_those_that_its_launcher_names() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert node_count(torchrun | {"LOCAL_WORLD_SIZE": "4"}) == 2
    assert node_count(torchrun) == 1
    assert node_count(SRUN | {"SLURM_STEP_NUM_NODES": "4"}) == 4
    assert node_count(SRUN) == 1
    assert node_count({"SLURM_STEP_NUM_NODES": "4"}) == 1


def test_one_process_has_a_group_that_needs_no_address_and_ends() -> None:
    for _ in range(2):
        with process_group(DistributedSection(start_timeout_minutes=1)) as world:
            assert world == World(0, 1, torch.device("cpu")) or world.device.type == "cuda"
            assert distributed.get_world_size() == 1
        assert not distributed.is_initialized()


def test_a_process_goes_beside_its_device_when_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr("trainer.distributed.bind_to_numa_node", asked.append)
    with process_group(DistributedSection(start_timeout_minutes=1)) as world:
        assert asked == [world.device]


def test_the_group_ends_with_an_error_too() -> None:
    with pytest.raises(ValueError, match="broken"), process_group(DistributedSection()):
        raise ValueError("broken")
    assert not distributed.is_initialized()
