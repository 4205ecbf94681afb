"""The extension of docs/extending.md, in a folder of its own, and what must not be imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config.extension import (
    BUILT_IN_OPTIMIZERS,
    BUILT_IN_TOKENIZERS,
    BUILT_IN_TRACKERS,
)
from trainer.data.tokenizer import KINDS as TOKENIZERS
from trainer.metrics.trackers import TRACKERS
from trainer.step.optimizer import RULES

ROOT = Path(__file__).resolve().parents[1]
RUN = """
[job]
extension = "nemotron_parts:extension"
[model]
family = "nemotron"
size = "tiny"
[training]
seq_len = 64
global_batch_size = 4
steps = 2
dtype = "float32"
[parallelism]
cp = 2
tp = 2
[checkpoint]
interval = 2
[data]
corpus = "own"
[tokenizer]
kind = "byte"
"""
WIDE = (
    "--model.ffn_dim",
    "65536",
    "--training.seq_len",
    "4096",
    "--memory.recompute",
    "none",
    "--training.compile",
    "false",
)
ALONE = ("--parallelism.cp", "1", "--parallelism.tp", "1")
GIVEN = ("--job.extension", "nemotron_parts:extension")


def command(
    folder: Path, module: str, *words: str, ranks: int = 1
) -> subprocess.CompletedProcess[str]:
    """In the folder, which has modules with the names of ours."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "NGPU": str(ranks),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    return subprocess.run(
        [sys.executable, "-P", "-m", module, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def write_example(folder: Path, *changes: tuple[str, str]) -> None:
    code = re.search(
        r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL
    )
    assert code is not None
    text = code[1]
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    (folder / "nemotron_parts.py").write_text(text)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the example has trained on four ranks."""
    folder = tmp_path_factory.mktemp("elsewhere")
    write_example(folder)
    (folder / "run.toml").write_text(RUN)
    (folder / "own").mkdir()
    (folder / "own" / "text.txt").write_text(
        "The quick brown fox jumps over the lazy dog.\n" * 200
    )
    done = command(folder, "trainer.launch", "--config", "run.toml", ranks=4)
    assert done.returncode == 0, done.stderr
    assert "extension nemotron parts 1 from" in done.stderr + done.stdout
    return folder


def test_its_layers_train_and_its_tracker_hears_of_steps(trained: Path) -> None:
    assert [
        line.split()[0] for line in (trained / "outputs/run/losses.txt").read_text().splitlines()
    ] == ["1", "2"]


def test_a_resume_names_a_missing_or_another_extension(trained: Path) -> None:
    (trained / "plain.toml").write_text(RUN.replace('extension = "nemotron_parts:extension"', ""))
    missing = command(
        trained, "trainer.launch", "--config", "plain.toml", "--training.steps", "3", *ALONE
    )
    assert missing.returncode == 2
    assert 'model.family = "nemotron" is unknown' in missing.stderr
    write_example(trained, ('version="1"', 'version="2"'))
    try:
        other = command(
            trained, "trainer.launch", "--config", "run.toml", "--training.steps", "3", *ALONE
        )
    finally:
        write_example(trained)
    assert other.returncode == 78
    assert 'extension.nemotron parts was "1" and is now "2"' in other.stderr


def test_a_run_folder_imports_nothing_unless_it_is_named_again(trained: Path) -> None:
    words = ("outputs/run", "--prompt", "The", "--tokens", "2")
    (trained / "nemotron_parts.py").write_text('open("imported", "w")\n')
    try:
        for module, *arguments in (
            ("trainer.generate", *words),
            ("trainer.checkpoint", "verify", "outputs/run"),
        ):
            done = command(trained, module, *arguments)
            assert not (trained / "imported").exists(), module
            assert "Traceback" not in done.stderr
            if module != "trainer.checkpoint":
                assert done.returncode == 2
                assert "add --job.extension nemotron_parts:extension" in done.stderr
    finally:
        write_example(trained)


@pytest.mark.slow
def test_a_run_generates_and_is_evaluated_with_the_extension_named(trained: Path) -> None:
    words = ("outputs/run", "--prompt", "The", "--tokens", "2")
    assert command(trained, "trainer.generate", *words, *GIVEN).returncode == 0
    refused = command(trained, "trainer.evaluation.perplexity", "outputs/run")
    assert refused.returncode == 2
    assert "add --job.extension nemotron_parts:extension" in refused.stderr
    done = command(trained, "trainer.evaluation.perplexity", "outputs/run", *GIVEN)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_its_optimizer_trains_saves_and_resumes(trained: Path) -> None:
    words = (
        "trainer.launch",
        "--config",
        "run.toml",
        "--optimizer.name",
        "momentum",
        "--schedule.kind",
        "constant",
    )
    losses = {}
    for name, launches in {"whole": ("4",), "parts": ("2", "4")}.items():
        for steps in launches:
            done = command(trained, *words, "--job.name", name, "--training.steps", steps, ranks=4)
            assert done.returncode == 0, done.stderr
        losses[name] = (trained / "outputs" / name / "losses.txt").read_text().splitlines()[-1]
    assert losses["whole"] == losses["parts"]


def test_an_optimizer_that_nobody_adds_is_an_error(trained: Path) -> None:
    done = command(
        trained, "trainer.launch", "--config", "run.toml", "--optimizer.name", "lion", *ALONE
    )
    assert done.returncode == 2
    assert 'optimizer.name = "lion" is unknown; there are adamw, momentum' in done.stderr


@pytest.mark.slow
def test_it_is_planned_from_its_code(trained: Path) -> None:
    words = ("trainer.plan", "--config", "run.toml", "--why", *WIDE)
    done = command(trained, *words)
    assert done.returncode == 0, done.stderr
    assert "nemotron_parts.py" in done.stdout
    write_example(trained, (".relu().square()", ".relu().square().square()"))
    try:
        assert command(trained, *words).returncode == 0
    finally:
        write_example(trained)
    traces = [*(trained / "cache" / "longhaul" / "traces").glob("*.json")]
    assert len(traces) == 2, "other code has another trace"


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_it_equals_one_process_on_every_mesh(trained: Path, optimizer: str) -> None:
    done = command(
        trained, "trainer.selfcheck", "--config", "run.toml", "--optimizer.name", optimizer
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def extension():\n    return None\n", "it must return an Extension, not NoneType"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def extension():\n    raise ValueError('mine')\n", "ValueError: mine ("),
        ("import sys\nsys.exit('mine')\n", "SystemExit: mine ("),
        (
            "from models.layers import SublayerKind\nfrom trainer.config.extension import Extension, Sublayer\n"
            "def extension():\n    return Extension(name='x', mixers={'attention': Sublayer(SublayerKind({}), print)})\n",
            'it may not replace mixers "attention"',
        ),
        (
            "from trainer.config.extension import Extension\n"
            "def extension():\n    return Extension(name='x', trackers={'tensorboard': print})\n",
            'it may not replace trackers "tensorboard"',
        ),
        (
            "from trainer.config.extension import Extension\n"
            "def extension():\n    return Extension(name='x', sources={'.json': print}, tokenizers={'byte': print})\n",
            'it may not replace sources ".json", tokenizers "byte"',
        ),
        (
            "from trainer.config.extension import Extension\n"
            "def extension():\n    return Extension(name='x', sources={'notes': print})\n",
            "sources notes: a suffix is written .name, in lower case",
        ),
    ],
)
def test_a_wrong_extension_is_one_error_with_its_name(
    tmp_path: Path, code: str, problem: str
) -> None:
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "run.toml").write_text('[job]\nextension = "mine:extension"\n')
    done = command(tmp_path, "trainer.launch", "--config", "run.toml", "--check")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: job.extension = mine:extension: ")
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


def test_names_that_are_taken_are_those_of_our_tables() -> None:
    assert tuple(RULES) == BUILT_IN_OPTIMIZERS
    assert tuple(TRACKERS) == BUILT_IN_TRACKERS
    assert tuple(TOKENIZERS) == BUILT_IN_TOKENIZERS


def test_a_package_of_ours_is_no_extension(tmp_path: Path) -> None:
    done = command(
        tmp_path,
        "trainer.launch",
        "--config",
        "debug",
        "--job.extension",
        "trainer.cli:main",
        "--check",
    )
    assert done.returncode == 2
    assert (
        "its package must not be called models, parallelisms, trainer, train, longhaul"
        in done.stderr
    )


@pytest.mark.slow
def test_a_hook_that_raises_ends_the_run_with_its_line(trained: Path) -> None:
    write_example(trained, ("view.step > 1_000_000", "view.step > 0"))
    try:
        done = command(
            trained, "trainer.launch", "--config", "run.toml", "--job.name", "short", *ALONE
        )
    finally:
        write_example(trained)
    assert done.returncode == 78
    named = r'on_step of extension "nemotron parts" 1: RuntimeError: this was meant to be short \(.*nemotron_parts.py:\d+\)'
    assert re.search(named, done.stderr)


@pytest.mark.slow
def test_an_error_in_a_layer_names_the_extension_and_the_line(trained: Path) -> None:
    write_example(trained, (".relu().square()", ".no_such_method()"))
    named = r"""error: (\[rank 0\] )?extension "nemotron parts" 1: AttributeError: '\w+' object has no attribute 'no_such_method' \(.*:\d+\)"""
    try:
        planned = command(trained, "trainer.plan", "--config", "run.toml")
        launch = (
            "trainer.launch",
            "--config",
            "run.toml",
            "--job.name",
            "wrong",
            "--distributed.restarts",
            "0",
            *ALONE,
        )
        trained_on = command(trained, *launch)
    finally:
        write_example(trained)
    # The second is found before the first step, and would repeat.
    assert (planned.returncode, trained_on.returncode) == (1, 2)
    assert "Traceback" not in trained_on.stderr
    assert re.fullmatch(named, planned.stderr.strip())
    assert re.search(named, trained_on.stderr)


@pytest.mark.slow
def test_a_tracker_that_raises_is_left_out(trained: Path) -> None:
    write_example(trained, ("self.file.write(", "self.file.no_such_method("))
    try:
        done = command(
            trained, "trainer.launch", "--config", "run.toml", "--job.name", "silent", *ALONE
        )
    finally:
        write_example(trained)
    assert done.returncode == 0, done.stderr
    assert (
        'tracker lines of extension "nemotron parts" is left out from here on: AttributeError'
    ) in done.stderr + done.stdout
