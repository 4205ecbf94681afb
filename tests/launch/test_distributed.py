"""A process finds its rank in the environment set by its launcher."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from trainer.config.sections import DistributedSection
from trainer.errors import ConfigError
from trainer.step import process_group as process_group_module
from trainer.step.process_group import World, node_count, process_group, rank_from_environment

SRUN = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}


def test_without_a_launcher_the_world_has_one_rank() -> None:
    assert rank_from_environment({}) == (0, 1, 0)


def test_torchrun_variables_give_the_rank() -> None:
    assert rank_from_environment({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == (5, 8, 1)


def test_srun_variables_give_the_rank() -> None:
    assert rank_from_environment(SRUN) == (5, 8, 1)


def test_torchrun_inside_srun_takes_precedence() -> None:
    assert rank_from_environment(SRUN | {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}) == (
        2,
        4,
        0,
    )


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
    ids=["batch script", "single task", "shell in an allocation of eight"],
)
def test_a_single_slurm_task_is_a_world_of_one_rank(environment: dict[str, str]) -> None:
    assert rank_from_environment(environment) == (0, 1, 0)


def test_the_slurm_step_and_not_the_allocation_gives_the_world_size() -> None:
    assert rank_from_environment(SRUN | {"SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "8"}) == (
        5,
        8,
        1,
    )


def test_node_count_comes_from_the_launcher() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert node_count(torchrun | {"LOCAL_WORLD_SIZE": "4"}) == 2
    assert node_count(torchrun) == 1
    assert node_count(SRUN | {"SLURM_STEP_NUM_NODES": "4"}) == 4
    assert node_count(SRUN) == 1
    assert node_count({"SLURM_STEP_NUM_NODES": "4"}) == 1


def test_a_single_process_gets_a_process_group_without_an_address() -> None:
    for _ in range(2):
        with process_group(DistributedSection(start_timeout_minutes=1)) as world:
            assert world == World(0, 1, torch.device("cpu")) or world.device.type == "cuda"
            assert distributed.get_world_size() == 1
        assert not distributed.is_initialized()


def test_joining_binds_the_process_to_the_numa_node_of_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound: list[torch.device] = []
    monkeypatch.setattr("trainer.step.process_group.bind_to_numa_node", bound.append)
    with process_group(DistributedSection(start_timeout_minutes=1)) as world:
        assert bound == [world.device]


def test_an_error_destroys_the_process_group() -> None:
    with pytest.raises(ValueError, match="broken"), process_group(DistributedSection()):
        raise ValueError("broken")
    assert not distributed.is_initialized()


@pytest.mark.parametrize(
    ("uuids", "sharing"),
    [(["a", "b", "c"], ""), (["a", "b", "a"], "0, 2"), (["a", "a", "a"], "0, 1, 2")],
)
def test_ranks_that_share_a_gpu_are_refused_by_their_numbers(
    uuids: list[str], sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group_module, "all_gather_values", lambda _: uuids)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a"))
    expected = (
        pytest.raises(ConfigError, match=f"^ranks {sharing} share a GPU with another rank")
        if sharing
        else nullcontext()
    )
    ranks_on_device = process_group_module.ranks_on_device
    device = torch.device("cuda", 0)
    with expected:
        assert ranks_on_device(device, may_share=False) == 1
    assert ranks_on_device(device, may_share=True) == uuids.count("a")
    assert ranks_on_device(torch.device("cpu"), may_share=False) == 1
