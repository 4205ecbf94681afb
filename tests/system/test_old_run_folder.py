"""Run folders of an earlier version, with its key names, resume as in that version."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.system.runs import launched, metrics, state, steps
from trainer.checkpoint.load import CheckpointReader, read_full_tensor

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
RUN = "run_5676d2a"
RECIPE = "recipe_5676d2a"
SMALL = sorted(path.name for path in FIXTURES.glob("small_*") if path.is_dir())
RECORD: dict[str, Any] = json.loads((FIXTURES / f"{RUN}.json").read_text())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return shutil.copytree(FIXTURES, tmp_path / "fixtures")


def start(copy: Path, folder: Path, *options: str) -> str:
    """Launches the run with its own config.toml; returns the output."""
    # Its paths are relative to the working directory of the launch, here the copy.
    config = Path(shutil.copy(folder / "config.toml", copy / "run.toml"))
    done = launched(config, folder, *options, processes=1)
    assert done.statuses == [0], done.said
    return done.said


def digests(checkpoint: Path) -> dict[str, str]:
    """The sha256 of every tensor, read by the product's reader."""
    reader = CheckpointReader(checkpoint)
    tensors = {
        name: read_full_tensor(reader, name).view(-1).view(torch.uint8).numpy()
        for name in reader.tensor_metadata
    }
    return {name: hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", [RUN, RECIPE])
def test_old_checkpoints_have_the_recorded_tensors(name: str) -> None:
    assert digests(FIXTURES / name / "checkpoints" / "step-6") == RECORD[name]["tensors"]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "last"), [(RUN, ("--training.steps=12",), 12), (RECIPE, (), 8)]
)
def test_resumed_steps_match_the_earlier_version(
    copy: Path, name: str, options: tuple[str, ...], last: int
) -> None:
    before = metrics(copy / name, "step", "loss")
    said = start(copy, copy / name, *options)
    assert f"resumed from {copy / name}/checkpoints/step-6" in said
    assert steps(copy / name) == [*range(1, last + 1)]
    assert metrics(copy / name, "step", "loss")[:6] == before
    for key in ("tokens", "lr", "loss", "grad_norm"):
        found = [value for (value,) in metrics(copy / name, key)[6:]]
        expected = [step[key] for step in RECORD[name]["resumed"]["steps"]]
        assert found == pytest.approx(expected, rel=1e-5), key
    assert state(copy / name / "checkpoints" / f"step-{last}")["step"] == last
    start(copy, copy / name, "--check")  # config.toml is now this version's.


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_small_runs_of_earlier_versions_resume(copy: Path, name: str) -> None:
    record = json.loads((FIXTURES / f"{name}.json").read_text())
    assert digests(FIXTURES / name / "checkpoints" / "step-2") == record["tensors"]
    said = start(copy, copy / name, "--training.steps=4", f"--data.cache_dir={copy}/prepared")
    assert f"resumed from {copy / name}/checkpoints/step-2" in said
    for key in ("tokens", "lr", "loss", "grad_norm"):
        found = [value for (value,) in metrics(copy / name, key)[2:]]
        assert found == pytest.approx(
            [step[key] for step in record["resumed"]["steps"]], rel=1e-5
        ), key


@pytest.mark.slow
@pytest.mark.ranks
def test_initial_weights_may_come_from_the_earlier_version(copy: Path) -> None:
    new = copy / "new"
    new.mkdir()
    shutil.copy(copy / RUN / "config.toml", new)
    start(copy, new, f"--checkpoint.initial_load_path={RUN}", "--training.steps=1")
    # The same first sequences, which these weights have trained on.
    assert metrics(new, "loss")[0] < metrics(copy / RUN, "loss")[0]
