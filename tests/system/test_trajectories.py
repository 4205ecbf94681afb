"""Small runs repeat the losses and gradient norms that earlier commits had: drift between commits
is seen.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.system.runs import ROOT
from tests.trajectories import goldens
from tests.trajectories.runs import RUNS, Trajectory, trajectory, write_corpus
from trainer.config.parse import load

pytestmark = pytest.mark.ranks

DOCUMENT = goldens.read()
CAPABILITY = torch.backends.cpu.get_cpu_capability()
HINT = "if intended, run python -m tests.trajectories --rewrite and give the reason in the commit"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trajectories")
    write_corpus(folder)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if run.is_slow else [])
        for name, run in RUNS.items()
    ],
)
def test_runs_follow_their_golden_trajectories(root: Path, name: str) -> None:
    assert goldens.drift(name, trajectory(name, root), DOCUMENT, CAPABILITY) == {}, HINT


def test_every_run_has_one_golden() -> None:
    assert [*goldens.trajectories(DOCUMENT)] == [*RUNS], HINT


def test_the_runs_cover_what_changes_numbers(tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    configs = [
        load(
            ["--config", str(tmp_path / "run.toml"), *(f"--{option}" for option in run.arguments)]
        )
        for run in RUNS.values()
    ]
    ropes = [config.model.build().rope for config in configs]
    assert {rope.kind for rope in ropes} == {"default", "linear", "llama3", "yarn", "longrope"}
    assert {rope.precision for rope in ropes} == {"float64", "float32"}
    assert {config.schedule.kind for config in configs} == {"cosine", "linear", "wsd", "constant"}
    assert {config.data.packing for config in configs} == {"best_fit", "concat", "single"}
    assert {config.data.mask for config in configs} == {"document", "none"}
    assert {config.training.dtype for config in configs} == {"float64", "float32", "bfloat16"}
    assert {config.memory.optimizer_placement for config in configs} == {"device", "host"}
    assert {config.memory.optimizer_dtype for config in configs} == {"float32", "bfloat16"}


def test_gradients_are_clipped_and_losses_fall() -> None:
    for name, run in goldens.trajectories(DOCUMENT).items():
        assert max(run["grad_norm"]) > 1, name
        assert run["loss"][-1] < run["loss"][0] or name == "copy", name


def scale(quantity: str, factor: float) -> Callable[[Trajectory], None]:
    def change(run: Trajectory) -> None:
        run[quantity][-1] *= factor

    return change


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("llama3", scale("loss", 1 + 1e-7), {"loss"}),
        ("llama3", scale("grad_norm", float("nan")), {"grad_norm"}),
        ("llama3", scale("lr", 1 + 1e-11), {"lr"}),
        ("llama3", lambda run: run["loss"].pop(), {"loss"}),
        ("validation", lambda run: run.pop("validation packed"), {"validation packed"}),
        ("validation", lambda run: run.update(extra=[1.0]), {"extra"}),
        ("validation", scale("tokens", 1 + 1e-9), {"tokens"}),
        ("bfloat16", scale("loss", 1.1), {"loss"}),
        ("bfloat16", scale("loss", 1 + 1e-9), set()),
    ],
)
@pytest.mark.parametrize("capability", goldens.SAME_INITIAL_WEIGHTS)
def test_a_difference_beyond_its_bound_is_drift(
    name: str, change: Callable[[Trajectory], object], expected: set[str], capability: str
) -> None:
    golden = goldens.trajectories(DOCUMENT)[name]
    found = copy.deepcopy(golden)
    change(found)
    assert {*goldens.drift(name, found, DOCUMENT, capability)} == expected
    assert goldens.drift(name, golden, DOCUMENT, capability) == {}


def test_float64_and_float32_have_looser_bounds_where_initial_weights_differ() -> None:
    bounds = DOCUMENT["bounds"]
    for quantity in ("loss", "grad_norm", "validation packed"):
        assert goldens.bound(quantity, "float64", "AVX2", bounds) == 1e-12
        loose = {
            dtype: goldens.bound(quantity, dtype, "DEFAULT", bounds)
            for dtype in ("float64", "float32", "bfloat16")
        }
        assert loose["float64"] == loose["float32"] <= 1e-4
        assert loose["bfloat16"] == goldens.bound(quantity, "bfloat16", "AVX512", bounds)
        assert loose["float32"] > goldens.bound(quantity, "float32", "AVX512", bounds)


def test_a_rewrite_keeps_every_bit_and_the_head_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "goldens.toml"
    runs = goldens.trajectories(DOCUMENT)
    path.write_text(goldens.PATH.read_text())
    goldens.write(runs, {name: DOCUMENT["runs"][name]["made_with"] for name in runs}, path)
    assert path.read_text() == goldens.PATH.read_text()
    runs["llama3"]["loss"][0] = 0.1 + 0.2
    goldens.write({"llama3": runs["llama3"]}, {"llama3": "another"}, path)
    document: dict[str, Any] = goldens.read(path)
    assert document["bounds"] == DOCUMENT["bounds"]
    assert goldens.trajectories(document) == {"llama3": runs["llama3"]}
    assert "commit" in path.read_text().partition(goldens.GENERATED)[0]


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_goldens_hold_with_fewer_instructions_another_hash_seed_and_more_threads(
    capability: str,
) -> None:
    # A CPU without AVX2 has no other.
    chosen = capability if CAPABILITY in goldens.SAME_INITIAL_WEIGHTS else "default"
    environment = os.environ | {
        "ATEN_CPU_CAPABILITY": chosen,
        "PYTHONHASHSEED": "7",
        "OMP_NUM_THREADS": "4",
    }
    command = [sys.executable, "-m", "tests.trajectories"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("kept") == len(RUNS)
