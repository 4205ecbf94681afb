"""Mixtures of experts on meshes of 2 to 8 ranks, ep up to 8: losses of routers, weights and
moments as in one process.
"""

from __future__ import annotations

import random
import shutil
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.selfcheck.test_random_configs import TestPool
from trainer.config.checks import layout_problems
from trainer.config.job_config import Config
from trainer.config.parse import deep_merge
from trainer.selfcheck.comparison import StepDifference, errors_by_kind, worst_over_ranks
from trainer.selfcheck.factors import FACTORS
from trainer.selfcheck.launches import Launch, reference_values
from trainer.selfcheck.random_configs import Case, case_values, normalize
from trainer.selfcheck.shrink import write_sample_documents

pytestmark = pytest.mark.ranks

NUM_STEPS = 5
SEEDS = range(24, 30)
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
DEGREES = ((1, 2), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4), (2, 4, 8))
VARIED = [
    *(key for key in FACTORS if key.startswith(("memory.", "parallelism.cp_", "parallelism.pp_"))),
    *(
        "parallelism.sequence_parallel",
        "model.feed_forward",
        "training.balance_loss",
        "training.balance_over",
    ),
    *(
        "training.router_z_loss",
        "training.global_batch_size",
        "training.micro_batch_size",
        "training.seq_len",
    ),
]
"""Factors whose levels are drawn for each mesh."""
TOLERANCES = {
    "loss": 1e-11,
    "gradient norm": 1e-11,
    "other metrics": 1e-11,
    "weights": 1e-10,
    "moments": 1e-10,
}
"""Five steps of Adam at a high rate divide rounding by gradients near zero."""


def meshes() -> list[dict[str, int]]:
    """All that have experts on several of 2 to 8 ranks."""
    found = [dict(zip(AXES, degrees, strict=True)) for degrees in product(*DEGREES)]
    return [
        mesh
        for mesh in found
        if prod(mesh.values()) // mesh["ep"] <= 8
        and mesh["dp_shard"] * mesh["cp"] % mesh["ep"] == 0
    ]


def values_of(mesh: dict[str, int], case: Case, folder: Path, run: str) -> dict[str, Any]:
    """Eight experts, so that any ep divides them, and enough layers, heads and sequences for any
    mesh.
    """
    experts: dict[str, Any] = (
        {"num_experts": 8, "expert_groups": 4} if case["model.feed_forward"] == "sigmoid" else {}
    )
    sizes = {
        "num_experts": 8,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 8,
        "dim": 64,
    } | experts
    ranks = mesh["dp_replicate"] * mesh["dp_shard"]
    own = {
        "job": {"output_dir": folder / run},
        "data": {"corpus": str(folder / "documents"), "cache_dir": folder / "prepared"},
        "model": sizes,
        "parallelism": mesh,
        "training": {
            "steps": NUM_STEPS,
            "global_batch_size": ranks * mesh["pp"] * int(case["training.global_batch_size"]),
        },
    }
    return deep_merge(case_values(normalize(case)), own)


def drawn(mesh: dict[str, int], seed: int, folder: Path) -> tuple[dict[str, Any], Case]:
    """Settings that are legal on a mesh."""
    rng = random.Random(f"{seed} {mesh}")
    for _ in range(2000):
        case = {factor: rng.choice([*FACTORS[factor]]) for factor in VARIED}
        case["model.feed_forward"] = rng.choice(["softmax", "biases", "sigmoid"])
        try:
            values = values_of(mesh, case, folder, "mesh")
            config = Config.model_validate(values)
        except ValueError:
            continue
        if not layout_problems(config, prod(mesh.values()) // mesh["ep"]):
            return values, case
    raise AssertionError(f"no legal settings on {mesh}")


GRID = meshes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    write_sample_documents(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    GRID,
    ids=lambda mesh: "-".join(f"{axis}{degree}" for axis, degree in mesh.items() if degree > 1),
)
@pytest.mark.parametrize("seed", SEEDS)
def test_five_steps_of_a_mixture_equal_one_process(
    seed: int, mesh: dict[str, int], folder: Path
) -> None:
    values, case = drawn(mesh, seed, folder)
    reference = values_of(mesh, case, folder, "reference")
    found = list[list[list[StepDifference]]]()
    for each in (reference_values(reference), values):
        config = Config.model_validate(each)
        ranks = prod(config.parallelism.degrees(1).values())
        is_reference = not found
        options: dict[str, Any] = {"compared_steps": (NUM_STEPS,), "is_reference": is_reference}
        launch = Launch(config=config, world_size=ranks, last_step=NUM_STEPS, **options)
        found.append(TestPool().run(launch, reference=folder / "tensors"))
    expected = found[0][0]
    assert len(expected) == NUM_STEPS
    assert {"balance_loss", "expert_load_max"} < expected[0].values.keys()
    errors = errors_by_kind(expected, worst_over_ranks(expected, found[1]))
    assert {kind: error for kind, error in errors.items() if error > TOLERANCES[kind]} == {}, case


@pytest.mark.slow
def test_a_resumed_run_repeats_every_bit_and_takes_another_ep(folder: Path) -> None:
    case = {
        "model.feed_forward": "sigmoid",
        "training.global_batch_size": "2",
        "training.balance_loss": "0.1",
    }

    def run(name: str, mesh: dict[str, int], last_step: int) -> list[StepDifference]:
        values = values_of(dict.fromkeys(AXES, 1) | mesh, case, folder, name)
        config = Config.model_validate(
            deep_merge(values, {"checkpoint": {"enabled": True, "async": False}})
        )
        launch = Launch(
            config=config,
            world_size=prod(config.parallelism.degrees(1).values()),
            last_step=last_step,
        )
        return TestPool().run(launch, reference=folder / "tensors")[0]

    straight = run("straight", {"dp_shard": 2, "ep": 2}, 4)
    first = run("resumed", {"dp_shard": 2, "ep": 2}, 2)
    shutil.copytree(folder / "resumed", folder / "other")
    assert [*first, *run("resumed", {"dp_shard": 2, "ep": 2}, 4)] == straight
    other = run("other", {"dp_shard": 2, "cp": 2, "ep": 4}, 4)
    errors = errors_by_kind(straight[2:], worst_over_ranks(straight[2:], [other]))
    assert max(errors.values()) <= 1e-11


def test_the_grid_has_every_degree_of_expert_parallelism_with_every_axis() -> None:
    assert len(GRID) >= 25
    for axis, degree in ((axis, degree) for axis in AXES[:-1] for degree in (1, 2)):
        assert {mesh["ep"] for mesh in GRID if mesh[axis] == degree} >= {2, 4}, axis
