"""`longhaul`: each command is the module behind it, and an unknown one is refused with the list."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import context
from trainer.cli import COMMANDS, main
from trainer.command_table import typed

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


def explain(command: str, out: Path, err: Path) -> None:
    for number, path in ((1, out), (2, err)):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    sys.argv = ["longhaul", *command.split(), "--help"]
    main()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    # A process that has imported torch already, as several commands do.
    process = context.Process(target=explain, args=(command, out, err))
    process.start()
    process.join(120)
    assert (process.exitcode, err.read_text()) == (0, "")
    assert "--" in out.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_in_a_new_process(command: str) -> None:
    done = longhaul(*command.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--" in done.stdout


@pytest.mark.parametrize(
    ("started", "command", "text"),
    [
        ("longhaul slurm", "slurm", "longhaul slurm status 'a run'"),
        ("/checkout/trainer/slurm/__main__.py", "slurm", "python -m trainer.slurm status 'a run'"),
        ("longhaul plan", "evaluate needle", "longhaul evaluate needle status 'a run'"),
        ("-c", "train", "./run_train.sh status 'a run'"),
    ],
)
def test_messages_name_a_command_as_the_reader_typed_this_one(
    started: str, command: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [started])
    assert typed(command, "status", Path("a run")) == text


@pytest.mark.parametrize("command", ["plan search", "slurm render", "selfcheck", "train"])
def test_help_names_no_module_to_a_reader_of_longhaul(command: str) -> None:
    printed = longhaul(*command.split(), "--help").stdout
    assert f"longhaul {command} [" in printed
    assert "python -m" not in printed
    assert "run_train.sh" not in printed


def test_train_is_the_launcher() -> None:
    done = longhaul("train", "--check", "--training.steps", "0")
    assert done.returncode == 2
    assert "training.steps 0 must be at least 1" in done.stderr
