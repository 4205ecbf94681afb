"""No file that is damaged, forged or no file at all makes the trainer hang, crash, lose something
or train otherwise.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_cases(*options: str) -> str:
    command = [sys.executable, "-m", "tests.bad_inputs", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.ranks
def test_sixty_bad_inputs_of_every_command() -> None:
    assert run_cases("--quick", "--jobs", "1").startswith("60 cases, 0 wrong")


@pytest.mark.slow
def test_every_bad_input() -> None:
    assert ", 0 wrong, " in run_cases()
