"""The Dockerfile: its rules and, with root, its steps in a copy of this machine's file system."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from runpy import run_path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions() -> list[tuple[str, str]]:
    """(instruction, argument), with continued lines joined."""
    text = (ROOT / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    words = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(name, " ".join(argument.split())) for name, argument in words]


STEPS = instructions()


def arguments(name: str) -> list[str]:
    return [argument for instruction, argument in STEPS if instruction == name]


def test_the_base_is_a_release_of_python_that_the_project_takes() -> None:
    (base,) = arguments("FROM")
    release = re.fullmatch(r"python:(\d+)\.(\d+)\.\d+-slim-bookworm", base)
    assert release, f"{base}: the image would change with every build"
    assert PROJECT["requires-python"] == ">=3.11"
    assert (3, 11) <= tuple(map(int, release.groups())) < (3, 15)


def test_no_step_leaves_a_cache_or_takes_more_than_it_names() -> None:
    assert {name for name, _ in STEPS} <= {
        *("FROM", "RUN", "COPY", "ARG", "WORKDIR", "USER", "ENV", "ENTRYPOINT", "CMD"),
    }
    for step in arguments("RUN"):
        assert not re.search(r"\b(curl|wget|sudo|latest)\b", step)
        if "apt-get" in step:
            assert step.startswith("apt-get update && apt-get install --yes --no-install-")
            assert step.endswith("rm -rf /var/lib/apt/lists/*")
        assert step.count("pip install") == step.count("pip install --no-cache-dir")


def test_versions_are_those_of_the_project() -> None:
    text = " ".join(argument for _, argument in STEPS)
    assert "torch" not in text.replace("download.pytorch.org", "")
    assert "project['dependencies']" in text
    (extras,) = (each.partition("=")[2] for each in arguments("ARG") if each.startswith("EXTRAS"))
    assert set(extras.strip('"').split()) <= set(PROJECT["optional-dependencies"])


def test_everything_that_is_built_is_copied_and_nothing_else() -> None:
    pytest.importorskip("setuptools", reason="needs setuptools")
    backend = run_path(str(ROOT / "packages/longhaul/build_backend.py"))
    copied = {source for each in arguments("COPY") for source in each.split()[:-1]}
    needed = {name for name in backend["COPIED"] if not name.startswith("trainer/")}
    assert copied == {*needed, *backend["ROOMS"], "packages/longhaul", "train.py"}
    ignored, *allowed = [
        line for line in (ROOT / ".dockerignore").read_text().split() if line != "**/__pycache__"
    ]
    assert ignored == "*"
    assert {line.removeprefix("!") for line in allowed} == copied
    assert all((ROOT / name).exists() for name in copied)


def test_a_container_does_not_run_as_root() -> None:
    names = [name for name, _ in STEPS]
    assert arguments("USER")[-1] != "root"
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "RUN")
    assert json.loads(arguments("ENTRYPOINT")[0]) == ["longhaul"]


# ---- the steps themselves

ISOLATED = """set -eu
mount -t tmpfs tmpfs {folder}
mkdir {folder}/upper {folder}/work {folder}/root
mount -t overlay overlay -o lowerdir=/,upperdir={folder}/upper,workdir={folder}/work {folder}/root
cd {folder}/root
mount -t proc proc proc
mount -t tmpfs tmpfs dev
mknod -m 666 dev/null c 1 3
mknod -m 666 dev/urandom c 1 9
mkdir -p source tmp/base
chmod 755 root
chmod 1777 tmp
{copies}
chroot . /bin/bash -eu /source/steps.sh
"""
"""A namespace of mounts, in which the root is a copy that is written to memory. Nothing of this
machine is bound into it: a step could delete it.
"""


def copies() -> list[str]:
    """Shell lines that do what COPY does, from the checkout into `source`."""
    lines = []
    for each in arguments("COPY"):
        *sources, target = each.split()
        lines += [f"mkdir -p source/{Path(target).parent}"]
        lines += [f"cp -r {ROOT / source} source/{target}" for source in sources]
    return lines


def is_isolated(folder: str) -> bool:
    """Whether the copy of the root has this folder, whose file system it then is."""
    return Path(folder).stat().st_dev == Path("/").stat().st_dev


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root")
def test_its_steps_make_the_command_work_for_a_user(tmp_path: Path) -> None:
    packages = sysconfig.get_path("purelib")
    if Path("/runs").exists() or Path("/source").exists() or not is_isolated(packages):
        pytest.skip("needs the root's own file system, without the folders of the image")
    # The base has `python` and `pip` first in the path; packages are those of this interpreter,
    # so none is downloaded.
    base = f"""export HOME=/root PATH=/tmp/base/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONDONTWRITEBYTECODE=1
{Path(sys.base_prefix, "bin", "python3")} -m venv /tmp/base
echo {packages} > $(echo /tmp/base/lib/python3*/site-packages)/others.pth
cd /source
EXTRAS=$(echo {arguments("ARG")[0].partition("=")[2]})
"""
    environment = " ".join(arguments("ENV"))
    checked = f"""
cd /runs
su longhaul --command "PATH=$PATH longhaul plan --config debug | head -2; touch /runs/mine; id -un"
chown 4321 /runs
setpriv --reuid 4321 --regid 4321 --clear-groups env -i PATH=$PATH {environment} \\
    longhaul selfcheck --config debug --parallelism.cp 2
"""
    script = tmp_path / "steps.sh"
    script.write_text(base + "\n".join(arguments("RUN")) + checked)
    folder = tmp_path / "isolated"
    folder.mkdir()
    outside = ISOLATED.format(folder=folder, copies="\n".join([*copies(), f"cp {script} source"]))
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--propagation=private", "bash", "-c", outside],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    if "Temporary failure resolving" in done.stderr:
        pytest.skip("needs the package index of Debian")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "FITS" in done.stdout
    assert "longhaul\n" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("match (losses")


def test_a_file_of_the_checkout_that_is_not_named_stays_outside() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"]
    assert not any(fnmatch(".git", pattern) or fnmatch("tests", pattern) for pattern in allowed)
