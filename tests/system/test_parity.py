"""In float64 every mesh computes the same run, and a checkpoint of one is a checkpoint of all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.system.runs import forked, metrics, state, tensors, write_run

pytestmark = pytest.mark.ranks


def cp(degree: int, method: str, *options: str) -> tuple[str, ...]:
    return ("--parallelism.cp", str(degree), "--parallelism.cp_method", method, *options)


REPLICAS = ("--parallelism.dp_replicate", "2")
KEEP = ("--memory.recompute", "keep_attention")
ROWS = ("--training.micro_batch_size", "5")
MESHES: dict[str, tuple[int, tuple[str, ...]]] = {
    "alone": (1, ()),
    "dp_shard 4": (4, ()),
    "dp_replicate 2 x dp_shard 2": (4, ("--parallelism.dp_replicate", "2", "--parallelism.dp_shard", "2")),
    "3 processes": (3, ()),
    "2 processes, whole rows at once": (2, ROWS),
    "cp 4 ring": (4, cp(4, "ring", *KEEP)),
    "cp 3 alltoall, rows that do not divide": (3, cp(3, "alltoall")),
    "cp 2 alltoall, head-tail, rows at once": (2, cp(2, "alltoall", "--parallelism.cp_layout", "headtail", *ROWS)),
    "cp 4 allgather": (4, cp(4, "allgather")),
    "dp_shard 2 x cp 2 ulysses": (4, cp(2, "ulysses", "--memory.recompute", "full")),
    "dp_replicate 2 x cp 2 auto": (4, cp(2, "auto", *REPLICAS)),
    "cp 4 hybrid": (4, cp(4, "hybrid", "--parallelism.cp_ulysses", "2")),
}
# 5 rows: some ranks of every mesh but one run a micro-batch that is empty.
OPTIONS = ("--training.dtype", "float64", "--training.global_batch_size", "5")
SPREAD = list(MESHES)[1:]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of six updates per mesh, each in the folder of its name."""
    root = tmp_path_factory.mktemp("parity")
    config = write_run(root)
    for name, (processes, options) in MESHES.items():
        done = forked(config, root / name, *OPTIONS, *options, processes=processes)
        assert done.statuses == [0] * processes, done.said
    return root


def assert_same_run(folder: Path, reference: Path) -> None:
    assert metrics(folder, "step", "tokens", "lr") == metrics(reference, "step", "tokens", "lr")
    ours, theirs = (
        torch.tensor(metrics(path, "loss", "grad_norm"), dtype=torch.float64) for path in (folder, reference)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", SPREAD)
def test_every_mesh_has_the_same_losses_and_norms(root: Path, name: str) -> None:
    assert len(metrics(root / name, "loss")) == 6
    assert_same_run(root / name, root / "alone")


@pytest.mark.parametrize("name", SPREAD)
def test_every_mesh_ends_with_the_same_weights_and_moments(root: Path, name: str) -> None:
    ours, theirs = (tensors(root / mesh / "checkpoints" / "step-6") for mesh in (name, "alone"))
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[key], rtol=1e-12, atol=1e-12, msg=key)


def test_the_runs_are_not_trivially_equal(root: Path) -> None:
    first, last = (tensors(root / "alone" / "checkpoints" / step) for step in ("step-3", "step-6"))
    for key in first:
        assert not torch.equal(first[key], last[key]), f"{key} did not move"
    norms = [norm for (norm,) in metrics(root / "alone", "grad_norm")]
    assert max(norms) > 1 > 0.1 * min(norms) > 0, "clipping should matter"


@pytest.mark.parametrize(
    ("before", "after"), [("dp_shard 4", 1), ("alone", 4), ("dp_replicate 2 x dp_shard 2", 3), ("cp 4 ring", 2)]
)
def test_a_checkpoint_resumes_on_another_number_of_ranks(root: Path, tmp_path: Path, before: str, after: int) -> None:
    folder = tmp_path / "copied"
    shutil.copytree(root / before, folder)
    shutil.rmtree(folder / "checkpoints" / "step-6")
    done = forked(root / "run.toml", folder, *OPTIONS, processes=after)
    assert done.statuses == [0] * after, done.said
    assert f"resumed from {folder}/checkpoints/step-3: next are update 4 and row 15" in done.said
    assert_same_run(folder, root / "alone")
    assert metrics(folder, "loss")[:3] == metrics(root / before, "loss")[:3]
    ours, theirs = (state(path / "checkpoints" / "step-6") for path in (folder, root / "alone"))
    assert ours["trainer"] == theirs["trainer"]
