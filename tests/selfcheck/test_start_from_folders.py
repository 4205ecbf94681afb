"""A folder that transformers wrote, of every family, starts the same run on every number of ranks
as in one process.

The process gets its weights from the test, tensor by tensor; `tests/models/test_hf_families.py`
compares that with transformers.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from models.hf_config import read_model
from tests.models.hf_models import MADE, made
from tests.models.hf_models import load as load_model
from tests.selfcheck.test_random_configs import TestPool
from trainer.checkpoint.load import MODEL_PREFIX
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import deep_merge, load
from trainer.hf import main
from trainer.selfcheck.comparison import errors_by_kind, worst_over_ranks
from trainer.selfcheck.factors import BASE
from trainer.selfcheck.finish import quantize
from trainer.selfcheck.launches import Launch, reference_values
from trainer.selfcheck.shrink import write_sample_documents

pytestmark = pytest.mark.ranks

MXFP4 = "GptOss MXFP4"
NAMES = (*MADE, MXFP4)
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
SIZES = (2, 3, 5, 6, 7)
DEFAULT = (("Qwen3Moe", 5),)
NUM_STEPS = 2


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    write_sample_documents(folder)
    return folder


def write_folder(name: str, folder: Path) -> Path:
    """The tiny model of a family, as transformers writes it; of gpt-oss also as it is
    published.
    """
    pytest.importorskip("transformers")
    bytes_only = {"vocab_size": 264}
    if name != MXFP4:
        made(name, **bytes_only).save_pretrained(folder, max_shard_size="20KB")
        return folder
    blocks = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    made("GptOss", **bytes_only, **blocks).save_pretrained(folder)
    quantize(folder)
    return folder


def imported_values(folder: Path, config_file: Path) -> dict[str, Any]:
    """The configuration that `hf import` writes."""
    assert main(["import", str(folder), str(config_file)]) == 0
    return load(["--config", str(config_file)]).model_dump(exclude_unset=True)


@cache
def meshes(size: int) -> list[dict[str, int]]:
    degrees = (*((1, 2, 3, 5, 6, 7) if axis == "dp_shard" else (1, 2, 3) for axis in AXES),)
    found = [dict(zip(AXES, each, strict=True)) for each in product(*degrees)]
    return [mesh for mesh in found if prod(mesh.values()) // mesh["ep"] == size]


def drawn(values: dict[str, Any], size: int, name: str) -> dict[str, Any]:
    """On a mesh that the model fits."""
    candidates = [*meshes(size)]
    random.Random(f"{name} {size}").shuffle(candidates)
    for mesh in candidates:
        own = deep_merge(values, {"parallelism": mesh})
        if not checks.layout_problems(Config.model_validate(own), size):
            return own
    raise AssertionError(f"{name} fits no mesh of {size} ranks")


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(
            *case, marks=[] if case in DEFAULT else [pytest.mark.slow], id=f"{case[0]}-{case[1]}"
        )
        for case in product(NAMES, SIZES)
    ],
)
def test_a_folder_starts_the_same_run_on_every_mesh(
    name: str, size: int, documents: Path, tmp_path: Path
) -> None:
    folder = write_folder(name, tmp_path / "folder")
    weights = {
        f"{MODEL_PREFIX}{ours}": each
        for ours, each in load_model(folder, read_model(folder)).named_tensors().items()
    }
    torch.save(weights, tmp_path / "weights.pt")
    begin = imported_values(folder, tmp_path / "begin.toml")
    sections = {section: values for section, values in BASE.items() if section != "model"}
    own = {
        "job": {"output_dir": tmp_path / "run"},
        "data": {"corpus": str(documents / "documents"), "cache_dir": documents / "prepared"},
        "training": {"seq_len": 64, "global_batch_size": 6, "steps": NUM_STEPS},
    }
    values = deep_merge(deep_merge(begin, sections), own)
    reference, mesh = (
        Launch(
            config=Config.model_validate(each),
            world_size=ranks,
            last_step=NUM_STEPS,
            compared_steps=(1, NUM_STEPS),
        )
        for each, ranks in (
            (deep_merge(reference_values(values), {"checkpoint": {"initial_load_path": None}}), 1),
            (drawn(values, size, name), size),
        )
    )
    reference = replace(
        reference, is_reference=True, weights=tmp_path / "weights.pt", takes_loads=False
    )
    expected, *_ = TestPool().run(reference, reference=tmp_path / "tensors")
    worst = worst_over_ranks(expected, TestPool().run(mesh, reference=tmp_path / "tensors"))
    limits = {
        "loss": 1e-11,
        "gradient norm": 1e-11,
        "other metrics": 1e-11,
        "weights": 1e-9,
        "moments": 1e-9,
    }
    errors = errors_by_kind(expected, worst)
    assert {kind: error for kind, error in errors.items() if error > limits[kind]} == {}
