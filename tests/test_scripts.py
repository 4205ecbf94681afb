"""The shell scripts: which interpreter they take, and that they add nothing of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("run_train.sh", "run_tests.sh", "setup_env.sh", ".ci/run")
PROJECT = '[project]\ndependencies = {}\n[project.optional-dependencies]\ndev = ["pytest>=8"]\n'
# As if the active interpreters had nothing installed.
SET_UP_ANEW = """
source ./setup_env.sh
eval "installed_$(declare -f requirements)"
requirements() { [[ $1 == */.venv/* ]] && installed_requirements "$@"; }
setup_env
echo "$PYTHON"
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The scripts in a folder of their own, with a project that needs little."""
    folder = tmp_path / "a clone"
    (folder / ".ci").mkdir(parents=True)
    for name in SCRIPTS:
        shutil.copy(ROOT / name, folder / name)
    (folder / "pyproject.toml").write_text(PROJECT.format('["tomli>=2.2", "torch>=2.11,<2.14"]'))
    return folder


def bash(code: str, *, cwd: Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `code`, with this interpreter as the active one unless another PATH is given."""
    environment = os.environ | {
        "PATH": path or f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    }
    command = ["bash", "-euo", "pipefail", "-c", code]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


def stub(clone: Path, body: str) -> None:
    """Puts a script in the place of Python."""
    (clone / "python").write_text(f"#!/bin/bash\n{body}\n")
    (clone / "python").chmod(0o755)
    (clone / "setup_env.sh").write_text(
        f'ROOT="{clone}"\nsetup_env() {{ PYTHON="$ROOT/python"; }}\n'
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_valid_and_stops_at_the_first_fault(name: str) -> None:
    assert bash(f"bash -n {name}", cwd=ROOT).returncode == 0
    if name != "setup_env.sh":
        assert os.access(ROOT / name, os.X_OK)
        assert "set -euo pipefail" in (ROOT / name).read_text()


def test_the_active_interpreter_is_taken_if_it_has_everything(clone: Path) -> None:
    done = bash('source "a clone/setup_env.sh"; setup_env dev; echo "$PYTHON"', cwd=clone.parent)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (
        0,
        str(Path(sys.executable).parent / "python"),
        "",
    )
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize(
    ("dependencies", "has_all"),
    [
        ('["tomli>=2.2", "torch>=2.11,<2.14"]', True),
        ('["tomli>=2.2", "torch>=2.11,<2.11.0"]', False),
        ('["tomli>=99"]', False),
        ('["no-such-package"]', False),
        ('["tomli"]', True),
    ],
)
def test_requirements_are_compared_with_what_is_installed(
    clone: Path,
    dependencies: str,
    has_all: bool,  # noqa: FBT001
) -> None:
    (clone / "pyproject.toml").write_text(PROJECT.format(dependencies))
    done = bash(f'source ./setup_env.sh; requirements "{sys.executable}"', cwd=clone)
    assert (done.returncode == 0) == has_all
    assert len(done.stdout.splitlines()) == dependencies.count('"') // 2
    assert done.stderr == ""


def test_an_interrupted_set_up_does_not_count(clone: Path) -> None:
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/bin/python").symlink_to(sys.executable)
    (clone / "pyproject.toml").write_text(PROJECT.format("[]"))
    assert bash('source ./setup_env.sh; has_all ""', cwd=clone).returncode == 0
    (clone / ".venv/incomplete").touch()
    assert bash('source ./setup_env.sh; has_all ""', cwd=clone).returncode == 1


def test_without_a_python_the_message_says_which_one_is_needed(clone: Path) -> None:
    tools = clone / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname", "mkdir", "touch", "flock"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    done = bash("source ./setup_env.sh; setup_env; echo not reached", cwd=clone, path=str(tools))
    assert done.returncode != 0
    assert "error: no Python 3.11 to 3.14" in done.stderr
    assert done.stdout == ""


def test_training_works_from_any_folder_with_paths_of_that_folder(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()  # Must not be taken for ours.
    (tmp_path / "mine.toml").write_text("[training]\nsteps = 0\n")
    done = bash(f"{ROOT}/run_train.sh --config ./mine.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert "error: mine.toml: training.steps = 0 must be at least 1" in done.stderr


def test_training_leaves_no_shell_in_between_and_passes_arguments_whole(clone: Path) -> None:
    stub(clone, 'echo $$; printf "%s\\n" "$@" "$PYTHONPATH"')
    process = subprocess.Popen(
        [clone / "run_train.sh", "--job.name", "a b"],
        stdout=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
    told = process.communicate(timeout=60)[0].splitlines()
    assert told == [
        str(process.pid),
        "-P",
        "-m",
        "trainer.launch",
        "--job.name",
        "a b",
        str(clone),
    ]


def test_the_check_runs_its_stages_in_order_and_passes_arguments_to_pytest(clone: Path) -> None:
    stub(clone, 'echo "$@"')
    done = bash("./run_tests.sh -k 'one or two' --all", cwd=clone)
    stages = [line for line in done.stdout.splitlines() if not line.startswith("==")]
    assert done.returncode == 0
    assert stages[:3] == ["-m ruff format --check", "-m ruff check", "-m mypy"]
    assert [stage.partition("-m not slurm ")[2] for stage in stages[3:4]] == ["-k one or two"]
    assert stages[4:] == ["-m pytest -m slurm -k one or two"]
    told = bash("./run_tests.sh", cwd=clone).stdout
    assert "-m not slow and not slurm" in told
    assert "-m pytest -m not slow and slurm" in told


def test_the_tests_run_on_another_torch_release_in_an_environment_of_that_release(
    clone: Path,
) -> None:
    stub(clone, 'echo "$@"')
    shutil.copy(ROOT / "setup_env.sh", clone / "setup_env.sh")
    wanted = """
    source ./setup_env.sh
    with_torch 2.11
    echo "$VENV"
    requirements python dev
    """
    told = bash(wanted, cwd=clone).stdout.splitlines()
    assert told == [
        f"{clone}/.venv-torch2.11",
        "tomli>=2.2",
        "torch>=2.11,<2.14",
        "pytest>=8",
        "torch>=2.11,<2.12",
    ]
    # That environment exists and has everything.
    (clone / ".venv-torch2.11/bin").mkdir(parents=True)
    python = clone / ".venv-torch2.11/bin/python"
    python.write_text(
        '#!/bin/bash\n[[ $* == *pyproject.toml* ]] && exit\necho "$0 $*"\ncommand -v python\n'
    )
    python.chmod(0o755)
    done = bash("./run_tests.sh --torch 2.11 -k some", cwd=clone)
    assert done.returncode == 0, done.stderr
    stages = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(str(python)) and line != str(python)
    ]
    assert [stage.partition(" -m ")[2].partition(" ")[0] for stage in stages] == [
        "pytest",
        "pytest",
    ]
    assert done.stdout.splitlines().count(str(python)) == 2


@pytest.mark.parametrize("arguments", ["--torch", "--torch new", "--torch 2.11.0"])
def test_a_torch_release_that_is_none_is_refused(clone: Path, arguments: str) -> None:
    done = bash(f"./run_tests.sh {arguments}", cwd=clone)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: torch ")


@pytest.mark.parametrize(("empty", "status"), [("not slurm", 0), ("and slurm", 0), ("pytest", 1)])
def test_a_choice_of_tests_may_be_of_one_kind_only(clone: Path, empty: str, status: int) -> None:
    stub(clone, f'[[ " $* " != *"{empty}"* ]] || exit 5')
    assert bash("./run_tests.sh -k some", cwd=clone).returncode == status


@pytest.mark.skipif(os.geteuid() != 0, reason="only root fetches packages")
@pytest.mark.parametrize("fetched", [True, False])
def test_ci_fetches_what_is_missing_and_goes_on_without(clone: Path, fetched: bool) -> None:  # noqa: FBT001
    tools = clone / "tools"
    tools.mkdir()
    for tool in ("bash", "env", "dirname", "readlink", "nproc", "timeout"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    (tools / "apt-get").write_text(
        f'#!/bin/bash\necho "$@" >>"{clone}/asked"\nexit {int(not fetched)}\n'
    )
    (tools / "apt-get").chmod(0o755)
    stub(clone, "exit 0")
    done = bash(".ci/run", cwd=clone, path=str(tools))
    assert done.returncode == 0
    assert done.stdout.count("that failed; tests that need it are skipped") == (
        0 if fetched else 2
    )
    asked = (clone / "asked").read_text().splitlines()
    install = "-qq install -y --no-install-recommends"
    update = ["-qq update"]
    slurm, browser = (
        [f"{install} {packages}"] * fetched
        for packages in ("slurm-wlm munge iproute2", "chromium fonts-dejavu-core")
    )
    assert asked == update + slurm + update + browser
    for name, fetches in (("slurmctld", 2), ("munged", 1), ("chromium", 0)):
        (tools / name).symlink_to("/bin/true")
        assert bash(".ci/run", cwd=clone, path=str(tools)).stdout.count("fetching") == fetches


@pytest.mark.parametrize(
    ("word", "stage"), [("format", "format"), ("mypy", "types"), ("pytest", "tests")]
)
def test_the_check_stops_at_the_first_failing_stage_and_names_it(
    clone: Path, word: str, stage: str
) -> None:
    stub(clone, f'[[ " $* " != *" {word} "* ]]')
    done = bash("./run_tests.sh", cwd=clone)
    assert done.returncode == 1
    assert done.stderr == f"run_tests.sh: {stage} failed\n"
    assert done.stdout.splitlines()[-1] == f"== {stage}"


@pytest.mark.slow
def test_two_set_ups_at_once_make_one_environment_and_an_interrupted_one_is_repaired(
    clone: Path,
) -> None:
    (clone / "pyproject.toml").write_text(PROJECT.format('["tomli>=2.2"]'))
    command = ["bash", "-euo", "pipefail", "-c", SET_UP_ANEW]
    both = [
        subprocess.Popen(
            command, cwd=clone, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    told = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert [out for out, _ in told] == [f"{clone}/.venv/bin/python\n"] * 2
    assert sum("setting up " in errors for _, errors in told) == 1
    (clone / ".venv/incomplete").touch()
    done = bash(SET_UP_ANEW, cwd=clone)
    assert done.returncode == 0
    assert "setting up " in done.stderr
    assert not (clone / ".venv/incomplete").exists()
