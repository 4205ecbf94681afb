"""The examples of other trainers prove, with the installed wheel, that loss and gradients are those of one process."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.longhaul_attention.test_wheel import PACKAGE, ROOT, installed, wheel

__all__ = ["installed", "wheel"]
EXAMPLES = PACKAGE / "examples"
NEEDS = {
    "plain_pytorch": (),
    "transformers_trainer": ("accelerate",),
    "accelerate_loop": ("accelerate",),
    "trl_sft": ("accelerate", "datasets", "trl"),
    "lightning_module": ("lightning",),
    "sdpa_context": (),
    "diffusion_attention": (),
}
TORCHTITAN = ("torch==2.13.0", "torchtitan==0.2.2")
MAX_LINES = 60

pytestmark = pytest.mark.ranks


def proof(name: str, folder: Path, python: Path | str, installed: Path) -> str:
    """The line of an example that says how exact it was, on four ranks."""
    starts_ranks = name == "lightning_module"
    launcher = [] if starts_ranks else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    shutil.copytree(EXAMPLES, folder, dirs_exist_ok=True)
    done = subprocess.run(
        [str(python), *launcher, f"{name}.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = (
        line for line in done.stdout.splitlines() if re.search("largest error of (loss|output) and gradients", line)
    )
    return line


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_an_integration_equals_one_process(name: str, tmp_path: Path, installed: Path) -> None:
    missing = [package for package in ("transformers", *NEEDS[name]) if find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install 'longhaul-attention[integrations]'")
    assert "of one process" in proof(name, tmp_path, sys.executable, installed)


@pytest.mark.slow
def test_torchtitan_equals_one_process(tmp_path: Path, installed: Path) -> None:
    """In an environment of its own: it asks for another torch."""
    environment = ROOT / ".venv-torchtitan"
    python = environment / "bin/python"
    if not (environment / "complete").exists():
        for command in ([sys.executable, "-m", "venv", environment], [python, "-m", "pip", "install", *TORCHTITAN]):
            done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=900)
            if done.returncode:
                pytest.skip(f"torchtitan cannot be installed: {done.stderr[-300:]}")
        (environment / "complete").touch()
    assert "torchtitan: loss" in proof("torchtitan_trainer", tmp_path, python, installed)


def test_integrations_are_short_and_all_of_them_run() -> None:
    helpers = {"tiny", "torchtitan_on_cpu"}
    lengths = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert {*lengths} - helpers == {*NEEDS, "torchtitan_trainer"}
    assert {name: length for name, length in lengths.items() if name not in helpers and length >= MAX_LINES} == {}


def trained(folder: Path, kind: str, ranks: int, *options: str) -> dict[tuple[int, str], float]:
    """What a run logs, by step and name."""
    folder.mkdir(parents=True, exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    module = ["-m", "tests.longhaul_attention.trainer_runs", str(folder / "found.json"), kind, *options]
    done = subprocess.run(
        [sys.executable, *launcher, *module],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{PACKAGE}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {(step, name): value for step, name, value in json.loads((folder / "found.json").read_text())}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trainer", "sft"])
def test_trainers_log_what_one_process_does_in_training_evaluation_and_after_resuming(
    kind: str, tmp_path: Path
) -> None:
    pytest.importorskip("trl", reason="needs pip install 'longhaul-attention[integrations]'")
    one = trained(tmp_path / "one", kind, 1)
    assert {name for _, name in one} >= {"loss", "grad_norm", "eval_loss"}
    assert len([step for step, name in one if name == "loss"]) == 6
    assert trained(tmp_path / "four", kind, 4, "--cp", "4") == pytest.approx(one, rel=1e-4)
    trained(tmp_path / "resumed", kind, 4, "--cp", "4", "--stop", "4")  # In the second epoch.
    assert trained(tmp_path / "resumed", kind, 4, "--cp", "4", "--resume") == pytest.approx(one, rel=1e-4)
    two = trained(tmp_path / "two", kind, 2)
    assert trained(tmp_path / "both", kind, 4, "--cp", "2") == pytest.approx(two, rel=1e-4)
