"""`longhaul`: each command is the module behind it, and an unknown one is refused with the
list.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import context
from trainer.cli import main
from trainer.command_table import COMMANDS, Command, resolve, typed
from trainer.commands import EXIT_HELP, CommandParser, run_command

ROOT = Path(__file__).resolve().parents[1]


def longhaul(*args: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from trainer.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


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
    out = tmp_path / "out"
    err = tmp_path / "err"
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


def parsers(parser: CommandParser) -> Iterator[CommandParser]:
    """A parser and those of its own commands."""
    yield parser
    for inner, _ in parser.commands.values():
        yield from parsers(inner)


@pytest.mark.parametrize("command", COMMANDS)
def test_options_are_declared_refused_and_explained_in_one_way(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = resolve(COMMANDS[command].parser)()
    for each in parsers(parser):
        assert each.prog.startswith(typed(command))
        words = each.prog.removeprefix(typed(command)).split()
        assert run_command([*words, "--help"], parser) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(f"usage: {each.prog} ")
        assert EXIT_HELP in printed
        # A command that consists of others has no options of its own.
        meant = (
            max((name for name in each._option_string_actions), key=len)
            if each.get_default("run")
            else None
        )
        wrong = [*words, f"{meant}x"] if meant else [f"{next(iter(each.commands))}x"]
        positional = (
            ["x"] * sum(not action.option_strings for action in each._actions) if meant else []
        )
        required = [
            word
            for action in each._actions
            if action.required and action.option_strings
            for word in (action.option_strings[0], "1")
        ]
        assert run_command([*wrong, *positional, *required], parser) == 2
        refused = capsys.readouterr().err
        assert f"did you mean {meant or next(iter(each.commands))}?" in refused
        assert refused.startswith("error: command line: ")


def test_no_help_imports_torch() -> None:
    code = """if True:
        import sys
        from trainer.command_table import COMMANDS, resolve
        from trainer.commands import run_command
        for each in COMMANDS.values():
            assert run_command(["--help"], resolve(each.parser)()) == 0
            assert "torch" not in sys.modules, each
    """
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS.values())
def test_a_parser_runs_what_exists(command: Command) -> None:
    source = "".join(path.read_text() for path in (ROOT / "trainer").rglob("*arguments.py"))
    for reference in re.findall(r'"(trainer[\w.]*:\w+)"', source):
        assert callable(resolve(reference))
    assert importlib.util.find_spec(command.module) is not None


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (("trian",), "train"),
        (("evalute", "needle"), "evaluate needle"),
        (("evaluate", "perplexty"), "evaluate perplexity"),
    ],
)
def test_an_unknown_command_is_refused_with_the_nearest(args: tuple[str, ...], hint: str) -> None:
    done = longhaul(*args)
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"error: unknown command {' '.join(args)}; did you mean longhaul {hint}?\n"
    )


def test_an_unknown_option_of_a_run_names_the_key_that_is_meant() -> None:
    done = longhaul("train", "--chek", "--seq_len", "5", "--check")
    assert done.returncode == 2
    assert "unknown argument --chek; did you mean --check?" in done.stderr
    assert "unknown argument --seq_len; did you mean --training.seq_len?" in done.stderr
    assert "nothing was started: 2 problems with " in done.stderr


def test_train_is_the_launcher() -> None:
    done = longhaul("train", "--check", "--training.steps", "0")
    assert done.returncode == 2
    assert "training.steps 0 must be at least 1" in done.stderr
