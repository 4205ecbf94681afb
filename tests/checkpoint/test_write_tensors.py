"""The tensors of a checkpoint are written as torch writes them, though ranks describe their plans
in JSON.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from parallelisms.mesh.collectives import to_local
from tests.ranks import run_ranks
from trainer.checkpoint.write_tensors import StagedSavePlanner, read_item, write_tensors


def save_twice(root: Path) -> None:
    """The same tensors by `write_tensors` and by `dcp.save`: shards, replicas of shards, whole
    copies, and plain tensors.
    """
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    placed: dict[str, Any] = {
        "sharded": distribute_tensor(torch.randn(7, 5), mesh, [Shard(0), Shard(1)]),
        "replicated": distribute_tensor(torch.randn(9, 3), mesh, [Replicate(), Shard(0)]),
        "large": distribute_tensor(torch.randn(40, 30), mesh, [Replicate(), Replicate()]),
        "whole": distribute_tensor(torch.randn(5).bfloat16(), mesh, [Replicate(), Replicate()]),
        "smaller than the mesh": distribute_tensor(
            torch.randn(1, 2), mesh, [Replicate(), Shard(0)]
        ),
        "plain": torch.arange(6.0),
        "step": torch.tensor(3),
    }
    shards = {name: to_local(tensor) for name, tensor in placed.items()}
    group = distributed.group.WORLD
    assert group is not None
    write_tensors(placed, StagedSavePlanner(shards), dcp.FileSystemWriter(root / "ours"), group)
    dcp.save(
        placed,
        storage_writer=dcp.FileSystemWriter(root / "torch"),
        planner=StagedSavePlanner(shards),
    )


def test_the_files_are_those_of_torch(tmp_path: Path) -> None:
    run_ranks(save_twice, 4, tmp_path)
    ours, torchs = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("ours", "torch")
    )
    metadata, expected = (pickle.loads(files.pop(".metadata")) for files in (ours, torchs))
    assert ours == torchs
    for field in ("state_dict_metadata", "storage_data", "planner_data", "version"):
        assert getattr(metadata, field) == getattr(expected, field)


ITEM = ["a.weight", "SHARD", [0, 2], [3, 2], "float32", [3, 4]]


@pytest.mark.parametrize(
    ("at", "junk"),
    [(1, "RUN"), (2, "x"), (3, [1, "y"]), (4, "ops"), (4, "float33"), (5, None)],
    ids=str,
)
def test_a_plan_that_describes_no_tensor_is_refused(at: int, junk: object) -> None:
    assert read_item(ITEM).index.fqn == "a.weight"
    with pytest.raises((TypeError, ValueError, KeyError)):
        read_item([*ITEM[:at], junk, *ITEM[at + 1 :]])
