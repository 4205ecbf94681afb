"""In float64, validation is the same on every mesh and for a plain model, for sequences of any
length.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import distributed

from models.batch import IGNORE_INDEX
from tests.build_datasets import build_validation_sets
from tests.ranks import run_ranks
from tests.system.runs import SETS, arguments, write_run
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.run.validation import evaluate_set
from trainer.step.build import ParallelModel
from trainer.step.process_group import World

pytestmark = pytest.mark.ranks

Options = tuple[str, ...]
Found = dict[str, dict[int, dict[str, object]]]

NO_LOSS_PARALLEL = ("parallelism.loss_parallel=false",)
NO_SEQUENCE_PARALLEL = ("parallelism.sequence_parallel=false",)


def mesh(**degrees: object) -> Options:
    return tuple(f"parallelism.{key}={value}" for key, value in degrees.items())


MESHES: dict[int, list[Options]] = {
    2: [
        mesh(dp_shard=2),
        mesh(dp_replicate=2),
        mesh(cp=2, cp_method="ring", cp_layout="headtail"),
        mesh(cp=2, cp_method="allgather"),
        mesh(cp=2, cp_method="ulysses"),
        mesh(tp=2),
        (*mesh(tp=2), *NO_LOSS_PARALLEL, *NO_SEQUENCE_PARALLEL, "memory.recompute=full"),
        mesh(pp=2),
        (
            *mesh(pp=2, pp_schedule="Interleaved1F1B"),
            "memory.recompute=keep_attention",
            "memory.offload=inputs",
        ),
    ],
    3: [mesh(cp=3, cp_method="alltoall"), mesh(dp_shard=3)],
    4: [mesh(cp=2, cp_method="ring", pp=2), mesh(dp_shard=2, tp=2)],
}
MORE_MESHES: dict[int, list[Options]] = {
    2: [
        mesh(cp=2, cp_method="alltoall"),
        (*mesh(tp=2), *NO_LOSS_PARALLEL),
        mesh(pp=2, pp_schedule="GPipe"),
    ],
    4: [
        mesh(cp=4, cp_method="hybrid", cp_ulysses=2),
        mesh(cp=2, cp_method="ring", tp=2),
        mesh(cp=2, pp=2, pp_schedule="Interleaved1F1B"),
        mesh(dp_shard=2, pp=2),
    ],
}


def configured(config: Path, options: Options) -> Config:
    fixed = (
        "model.num_layers=4",
        "training.dtype=float64",
        "training.micro_batch_size=2",
        "data.holdout=0.4",
    )
    return load(
        arguments(
            config, config.with_suffix(""), *(f"--{option}" for option in (*fixed, *options))
        )
    )


def evaluate_on_meshes(config: Path, meshes: list[Options]) -> list[Found]:
    world = World(distributed.get_rank(), distributed.get_world_size(), torch.device("cpu"))
    found = []
    for options in meshes:
        run_config = configured(config, options)
        assert checks.problems(run_config, world.size) == []
        parallel_model = ParallelModel(run_config, world)
        sets = {
            validation_set.name: evaluate_set(
                validation_set, parallel_model, step=0, max_tokens=run_config.training.seq_len * 2
            ).metrics_by_length
            for validation_set in build_validation_sets(run_config)
        }
        found.append(
            {
                name: {length: asdict(seen) for length, seen in each.items()}
                for name, each in sets.items()
            }
        )
    return found


def evaluate_plainly(config: Path) -> Found:
    """One sequence at a time on a model without a mesh; accuracy from the logits."""
    run_config = configured(config, ())
    parallel_model = ParallelModel(run_config, World(0, 1, torch.device("cpu")))
    model = parallel_model.stage_modules[0]
    found = Found()
    for validation_set in build_validation_sets(run_config):
        found[validation_set.name] = {}
        for dataset in validation_set.datasets:
            losses = 0.0
            hits = 0
            count = 0
            for index in range(validation_set.num_sequences):
                batch = dataset.read([index])
                with torch.no_grad():
                    assert model.head is not None
                    head = model.head
                    model.head = None
                    x_BSE = model(batch)
                    model.head = head
                    logits_SV = (head.norm(x_BSE) @ head.proj.weight.T)[0]
                labels_S = batch.labels[0]
                targets_S = labels_S != IGNORE_INDEX
                losses += float(
                    torch.nn.functional.cross_entropy(logits_SV, labels_S, reduction="sum")
                )
                hits += int((logits_SV.argmax(-1) == labels_S)[targets_S].sum())
                count += int(targets_S.sum())
            found[validation_set.name][dataset.seq_len] = {
                "loss": losses / count,
                "accuracy": hits / count,
                "targets": count,
            }
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = write_run(tmp_path_factory.mktemp("parity"))
    config.write_text(config.read_text() + SETS)
    return config


@pytest.fixture(scope="module")
def alone(run: Path) -> tuple[Found, Found]:
    """Results of one rank, and of the plain model."""
    ((found, plain),) = run_ranks(evaluate_both, 1, run)
    return found, plain


def evaluate_both(config: Path) -> tuple[Found, Found]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return evaluate_on_meshes(config, [()])[0], evaluate_plainly(config)


def test_one_rank_matches_a_plain_model(alone: tuple[Found, Found]) -> None:
    found, plain = alone
    assert [(name, [*each]) for name, each in found.items()] == [
        ("packed", [50]),
        ("context", [16, 40, 81]),
    ]
    for name, each in plain.items():
        for length, expected in each.items():
            seen = found[name][length]
            assert seen["targets"] == expected["targets"]
            assert seen["accuracy"] == expected["accuracy"]
            assert seen["loss"] == pytest.approx(expected["loss"], rel=1e-12, abs=0)


def test_context_length_changes_the_loss_but_not_the_targets(alone: tuple[Found, Found]) -> None:
    short, middle, long = alone[0]["context"].values()
    assert short["targets"] == middle["targets"] == long["targets"]
    assert 5 * 10 <= int(str(long["targets"])) <= 5 * 11
    assert len({short["loss"], middle["loss"], long["loss"]}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "meshes"),
    [
        *MESHES.items(),
        *MORE_MESHES.items(),
    ],
)
def test_every_mesh_matches_one_rank(
    run: Path, alone: tuple[Found, Found], processes: int, meshes: list[Options]
) -> None:
    results = run_ranks(evaluate_on_meshes, processes, run, meshes)
    for rank in results:
        for options, found in zip(meshes, rank, strict=True):
            for name, each in alone[0].items():
                for length, expected in each.items():
                    seen = found[name][length]
                    assert seen["targets"] == expected["targets"], options
                    assert seen["accuracy"] == expected["accuracy"], options
                    numbers = [
                        [one["loss"], *filter(None, one["loss_by_position"])]  # type: ignore[call-overload]
                        for one in (seen, expected)
                    ]
                    assert numbers[0] == pytest.approx(numbers[1], rel=1e-12, abs=0), options
