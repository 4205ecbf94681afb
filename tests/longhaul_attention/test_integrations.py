"""The examples of other trainers prove, with the installed wheel, that loss and gradients are
those of one process.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.pages import replace_block
from tests.longhaul_attention import trainer_cases
from tests.longhaul_attention.test_wheel import PACKAGE, ROOT, installed, wheel

__all__ = ["installed", "wheel"]
EXAMPLES = PACKAGE / "examples"
NEEDS = {
    "plain_pytorch": (),
    "transformers_trainer": ("accelerate",),
    "accelerate_loop": ("accelerate",),
    "trl_sft": ("accelerate", "datasets", "trl"),
    "trl_dpo": ("accelerate", "datasets", "trl"),
    "lightning_module": ("lightning",),
    "sdpa_context": (),
    "diffusion_attention": (),
}
TORCHTITAN = ("torch==2.13.0", "torchtitan==0.2.2")
MAX_LINES = 66

pytestmark = pytest.mark.ranks


def proof(name: str, folder: Path, python: Path | str, installed: Path) -> str:
    """The line of an example that says how exact it was, on four ranks."""
    starts_ranks = name == "lightning_module"
    launcher = (
        []
        if starts_ranks
        else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    )
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
        line
        for line in done.stdout.splitlines()
        if re.search("largest error of (loss|output) and gradients", line)
    )
    return line


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_an_integration_equals_one_process(name: str, tmp_path: Path, installed: Path) -> None:
    missing = [package for package in ("transformers", *NEEDS[name]) if find_spec(package) is None]
    if missing:
        pytest.skip(
            f"{', '.join(missing)} not installed: pip install 'longhaul-attention[integrations]'"
        )
    assert "of one process" in proof(name, tmp_path, sys.executable, installed)


@pytest.mark.slow
def test_torchtitan_equals_one_process(tmp_path: Path, installed: Path) -> None:
    """In an environment of its own: it asks for another torch."""
    environment = ROOT / ".venv-torchtitan"
    python = environment / "bin/python"
    if not (environment / "complete").exists():
        for command in (
            [sys.executable, "-m", "venv", environment],
            [python, "-m", "pip", "install", *TORCHTITAN],
        ):
            done = subprocess.run(
                [*map(str, command)], capture_output=True, text=True, timeout=900
            )
            if done.returncode:
                pytest.skip(f"torchtitan cannot be installed: {done.stderr[-300:]}")
        (environment / "complete").touch()
    assert "torchtitan: loss" in proof("torchtitan_trainer", tmp_path, python, installed)


def test_integrations_are_short_and_all_of_them_run() -> None:
    helpers = {"tiny", "torchtitan_on_cpu"}
    lengths = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert {*lengths} - helpers == {*NEEDS, "torchtitan_trainer"}
    assert {
        name: length
        for name, length in lengths.items()
        if name not in helpers and length >= MAX_LINES
    } == {}


def test_the_readme_says_which_runs_were_equal() -> None:
    page = (PACKAGE / "README.md").read_text()
    assert page == replace_block(page, "trainer-cases", trainer_cases.table())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_drawn_runs_of_trainers_equal_one_process(seed: int) -> None:
    for package in ("accelerate", "datasets", "peft", "trl"):
        pytest.importorskip(package, reason="needs pip install 'longhaul-attention[integrations]'")
    command = [
        sys.executable,
        "-m",
        "tests.longhaul_attention.trainer_cases",
        "--cases",
        "100",
        "--seed",
        str(seed),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["100 cases, 0 differ"], done.stdout + done.stderr
