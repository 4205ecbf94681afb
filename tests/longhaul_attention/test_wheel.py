"""The distribution: what it holds, what it needs, and that it stands beside other packages named
as ours are.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "packages/attention"
MAX_BYTES = 360_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip(["wheel", str(PACKAGE), "--no-deps", "--wheel-dir", str(folder)], folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A folder with the installed distribution, for PYTHONPATH."""
    pip(
        ["install", str(wheel), "--no-deps", "--target", str(wheel.parent / "installed")],
        wheel.parent,
    )
    return wheel.parent / "installed"


def pip(arguments: list[str], folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def python(code: str, folder: Path, *paths: Path) -> str:
    """What a program prints, without the checkout on its path unless `paths` name it."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_is_small_and_holds_one_package_that_needs_torch(wheel: Path) -> None:
    assert wheel.stat().st_size <= MAX_BYTES
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        told = message_from_bytes(file.read(metadata))
        assert sum(each.file_size for each in file.infolist()) <= MAX_BYTES
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"longhaul_attention"}
    assert {
        "longhaul_attention/py.typed",
        "longhaul_attention/parallelisms/context/ring.py",
    } <= set(names)
    assert not any("/trainer/" in name or "tests" in name for name in names)
    assert [each for each in told.get_all("Requires-Dist", []) if "extra ==" not in each] == [
        "torch<2.14,>=2.11"
    ]
    assert told["Name"] == "longhaul-attention"
    assert "shard_batch" in told.get_payload(), "the README is the description"


@pytest.mark.slow
def test_it_stands_beside_a_project_with_packages_of_the_same_names(
    installed: Path, tmp_path: Path
) -> None:
    for name in ("models", "parallelisms", "trainer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"OWNER = 'the project, {name}'\n")
    found = python(
        "import longhaul_attention, models, parallelisms, sys, trainer\n"
        "print(models.OWNER, '|', parallelisms.OWNER, '|', trainer.OWNER)\n"
        "print(longhaul_attention.__file__)\n"
        "print(sorted({'transformers', 'numpy', 'pydantic', 'tomli'} & {name.partition('.')[0] for name in sys.modules}))\n",
        tmp_path,
        installed,
    ).splitlines()
    assert found[0] == "the project, models | the project, parallelisms | the project, trainer"
    assert found[1].startswith(str(installed))
    # torch imports numpy where it is installed.
    assert found[2] in ("[]", "['numpy']")


@pytest.mark.slow
def test_it_runs_in_one_process_with_longhaul(installed: Path, tmp_path: Path) -> None:
    code = """if True:
        import torch
        import longhaul_attention.models.attention_op as theirs
        from models import attention_op as ours
        q, k = torch.randn(1, 9, 4, 8, dtype=torch.float64), torch.randn(1, 9, 2, 8, dtype=torch.float64)
        boundaries = torch.tensor([[0, 4, 9]], dtype=torch.int32)
        assert theirs.attention is not ours.attention
        first = torch.ops.longhaul.attention(q, k, k, boundaries)[0]
        second = torch.ops.longhaul_attention.attention(q, k, k, boundaries)[0]
        assert torch.equal(first, second)
        print(theirs.__file__, ours.__file__)
    """
    found = python(code, tmp_path, installed, ROOT).split()
    assert found[0].startswith(str(installed))
    assert found[1] == str(ROOT / "models/attention_op.py")


def test_every_file_names_what_stands_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        texts = {name: file.read(name).decode() for name in names if name.endswith(".py")}
    for name, text in texts.items():
        for word in (
            "from models",
            "from parallelisms",
            "`models/",
            "`parallelisms/",
            '"longhaul::',
            "trainer.",
        ):
            assert word not in text, (name, word)
        for path in (part.split("`")[0] for part in text.split("`longhaul_attention/")[1:]):
            assert f"longhaul_attention/{path}" in names, (name, path)


def test_an_import_of_what_it_does_not_need_stops_the_build(tmp_path: Path) -> None:
    sys.path.insert(0, str(PACKAGE))
    try:
        backend = pytest.importorskip("build_backend", reason="needs setuptools")
    finally:
        sys.path.remove(str(PACKAGE))
    text = (
        "from models import kernels\n"
        "import parallelisms.context.ring\n"
        "def inside():\n"
        "    from parallelisms import collectives\n"
        "    return 'models/kernels.py', 'longhaul::attention', 'the models/s', 'my.models.x'\n"
    )
    assert backend.renamed(text) == (
        "from longhaul_attention.models import kernels\n"
        "import longhaul_attention.parallelisms.context.ring\n"
        "def inside():\n"
        "    from longhaul_attention.parallelisms import collectives\n"
        "    return 'longhaul_attention/models/kernels.py', 'longhaul_attention::attention', 'the longhaul_attention/models/s', 'my.models.x'\n"
    )
    package = tmp_path / "longhaul_attention"
    package.mkdir()
    (package / "__init__.py").write_text("from models.config import ModelConfig\n")
    assert "models.layers" in backend.reached(package)
    assert "models.attention" not in backend.reached(package)
