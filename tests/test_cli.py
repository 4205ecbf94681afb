"""`longhaul`: each command is the module behind it, and an unknown one is refused with the list."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainer.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]


def longhaul(*args: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from trainer.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_help_lists_every_command() -> None:
    done = longhaul("--help")
    assert done.returncode == 0
    assert all(f"  {command} " in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("args", [(), ("fly",), ("evaluate",)])
def test_an_unknown_command_exits_2_with_the_list(args: tuple[str, ...]) -> None:
    done = longhaul(*args)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown command ")
    assert "longhaul COMMAND" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    done = longhaul(*command.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--" in done.stdout


def test_train_is_the_launcher() -> None:
    done = longhaul("train", "--check", "--training.steps", "0")
    assert done.returncode == 2
    assert "training.steps 0 must be at least 1" in done.stderr
