"""The wheel and the source distribution, in a folder whose modules have the names of ours."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RUN = """
[model]
family = "llama3"
size = "debug"
[training]
seq_len = 64
global_batch_size = 2
steps = 2
dtype = "float32"
[parallelism]
cp = 2
[data]
corpus = "own"
[tokenizer]
kind = "byte"
"""
Longhaul = Callable[..., subprocess.CompletedProcess[str]]


def run(*command: object, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    return subprocess.run(
        words,
        cwd=folder,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, which is built from the checkout."""
    pytest.importorskip("setuptools", reason="needs setuptools")
    folder = tmp_path_factory.mktemp("built")
    code = (
        "import os, sys; sys.path.insert(0, 'packages/longhaul'); import build_backend; "
        "print(getattr(build_backend, sys.argv[1])(sys.argv[2]))"
    )
    for kind, source in (("build_sdist", ROOT), ("build_wheel", folder / "source")):
        if kind == "build_wheel":
            (folder / "source").mkdir()
            archive = next(folder.glob("*.tar.gz"))
            assert not run(
                "tar", "xf", archive, "--strip-components=1", "-C", source, folder=folder
            ).returncode
        done = run(sys.executable, "-c", code, kind, folder, folder=source)
        assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel. Other packages are those of this interpreter."""
    environment = tmp_path_factory.mktemp("venv")
    venv.create(environment, with_pip=False)
    packages = next(environment.glob("lib/python3*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return environment


@pytest.fixture(scope="module")
def longhaul(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Longhaul:
    """The command of an installation, run in a hostile folder."""
    packages = next(environment.glob("lib/python3*/site-packages"))
    folder = tmp_path_factory.mktemp("hostile")
    for name in ("models/__init__.py", "parallelisms/__init__.py", "trainer.py", "train.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(
            f"raise SystemExit('{name} of the current folder was imported')\n"
        )
    (folder / "run.toml").write_text(RUN)
    (folder / "own").mkdir()
    (folder / "own" / "text.txt").write_text(
        "The quick brown fox jumps over the lazy dog.\n" * 200
    )
    script = (
        packages / next(packages.glob("longhaul-*.dist-info")).name / "entry_points.txt"
    ).read_text()
    assert "longhaul = longhaul.__main__:main" in script

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; sys.argv[0] = 'longhaul'; from longhaul.__main__ import main; main()"
        return run(
            environment / "bin" / "python", "-P", "-c", code, *words, folder=folder, NGPU="2"
        )

    return call


def test_one_name_is_installed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"longhaul"}
    for file in (
        "train.py",
        "train_configs/llama3_8b_1m.toml",
        "trainer/slurm/batch.sh",
        "trainer/plan/charts.html.j2",
        "trainer/plan/report.html.j2",
        "trainer/plan/watch.html.j2",
    ):
        assert f"longhaul/{file}" in names


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--version",), "longhaul "),
        (("evaluate", "--help"), "evaluate perplexity"),
        (("completion", "bash"), "complete -o filenames -F _longhaul longhaul"),
        (("completion", "zsh"), "--training.seq_len"),
        (("plan", "--config", "debug"), "FITS"),
        (("prepare", "--config", "run.toml"), "documents"),
        pytest.param(
            ("train", "--config", "run.toml"), "done: all 2 steps", marks=pytest.mark.slow
        ),
    ],
)
def test_commands_work_in_a_folder_with_modules_of_the_same_names(
    words: tuple[str, ...], said: str, longhaul: Longhaul
) -> None:
    done = longhaul(*words)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout + done.stderr


@pytest.mark.slow
def test_the_self_check_of_an_installation_finds_its_own_rooms(longhaul: Longhaul) -> None:
    done = longhaul("selfcheck", "--config", "run.toml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_unknown_command_is_an_error(longhaul: Longhaul) -> None:
    done = longhaul("trian")
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown command trian")


def test_a_job_script_names_what_is_installed(longhaul: Longhaul) -> None:
    done = longhaul(
        "slurm",
        "render",
        "--config",
        "run.toml",
        "--slurm.nodes",
        "1",
        "--slurm.gpus_per_node",
        "2",
    )
    assert done.returncode == 0, done.stderr
    root = next(line for line in done.stdout.splitlines() if line.startswith("ROOT="))
    assert "site-packages/longhaul" in root


OWN_LOOP = """
import os, sys
from longhaul.data import PackedDataLoader, open_packed

dataset = open_packed(sys.argv[1], seq_len=64)
loader = PackedDataLoader(dataset, num_workers=1)
items = iter(loader)
first, second = next(items), next(items)
state = loader.state_dict()
resumed = PackedDataLoader(dataset, dp_rank=1, dp_size=2)
resumed.load_state_dict(state)
third, fourth = next(items), next(items)
assert (next(iter(resumed))["input_ids"] == fourth["input_ids"]).all()
print(sys.modules["trainer"].__file__)
"""


@pytest.mark.slow
def test_packed_folders_are_read_in_a_loop_of_ones_own(
    environment: Path, longhaul: Longhaul, tmp_path: Path
) -> None:
    (tmp_path / "loop.py").write_text(OWN_LOOP)
    (tmp_path / "own.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 200)
    prepared = longhaul(
        *("prepare", "--corpus", str(tmp_path / "own.txt"), "--tokenizer.kind", "byte"),
        *("--output", str(tmp_path / "prepared")),
    )
    assert prepared.returncode == 0, prepared.stderr
    loop = (environment / "bin" / "python", tmp_path / "loop.py", tmp_path / "prepared")
    done = run(*loop, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "site-packages/longhaul/trainer" in done.stdout
    (tmp_path / "models" / "weights").mkdir(parents=True)
    assert run(*loop, folder=tmp_path).returncode == 0, "a folder is no module"
    (tmp_path / "models.py").write_text("")
    done = run(*loop, folder=tmp_path)
    assert f"ImportError: models is a module of yours ({tmp_path}/models.py)" in done.stderr
