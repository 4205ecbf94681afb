"""Weights that a run begins with: read in parts on every mesh, checked before, and never drawn or deleted."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import hf
from models.hf_config import model_config_to_hf
from models.transformer import Transformer
from parallelisms.collectives import full_tensor, to_local
from tests.ranks import run_ranks
from tests.system.in_process import configured, rows_of, run_here, trainer_of
from tests.system.runs import checkpoints, forked, metrics, tensors, write_run
from trainer.checkpoint.initial_weights import (
    HF_PREFIX,
    find_checkpoint,
    model_config_from_state,
    validate_initial_weights,
)
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.run_dir import ResumeError, RunDir, read_state
from trainer.distributed import World
from trainer.errors import ConfigError
from trainer.launch.launcher import load_and_validate
from trainer.trainer import Trainer

ODD = ("--model.ffn_dim=68", "--model.vocab_size=268")


def written(run: Path, folder: Path, *options: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A Hugging Face model of random numbers for this configuration, and its tensors by our names."""
    model = configured(run, run.parent / "run", *options).model.build()
    torch.manual_seed(1)
    made = {name: torch.randn(entry.shape).to(dtype) for name, entry in hf.tensor_specs(model).items()}
    folder.mkdir()
    (folder / hf.CONFIG_FILE).write_text(
        json.dumps(model_config_to_hf(model, max_length=64, dtype=str(dtype).partition(".")[2]))
    )
    hf.write_safetensors(folder, model, made.__getitem__, dtype=dtype, file_bytes=100_000)
    assert (folder / hf.INDEX_FILE).exists()
    return made


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


# ---- every mesh


def begun(run: Path, options: tuple[str, ...]) -> tuple[dict[str, Tensor], int, int]:
    """On one rank: the weights of its stages, whole; how many numbers it read, and how many it holds."""
    from torch import distributed

    config = configured(run, run.parent / "run", *options)
    world = World(distributed.get_rank(), distributed.get_world_size(), torch.device("cpu"))
    trainer = Trainer(config, world, rows_of(config))
    named = trainer.optimizer.parameters_by_name
    assert all(bool(to_local(weight).isnan().all()) for weight in named.values())
    count, read = 0, hf.SafetensorsReader.read

    def counted(self: hf.SafetensorsReader, *arguments: Any) -> Tensor:
        nonlocal count
        found = read(self, *arguments)
        count += found.numel()
        return found

    hf.SafetensorsReader.read = counted  # type: ignore[assignment, method-assign]
    assert CheckpointManager(config, RunDir(config.output_dir), trainer.world).resume(trainer) is None
    hf.SafetensorsReader.read = read  # type: ignore[method-assign]
    assert trainer.step == 0
    found = {name: full_tensor(weight.detach()).clone() for name, weight in named.items()}
    return found, count, sum(to_local(weight).numel() for weight in named.values())


MESHES: dict[str, tuple[int, tuple[str, ...]]] = {
    "one process": (1, ()),
    "fsdp 3, uneven": (3, ()),
    "tp 2, fsdp 2": (4, ("--parallelism.tp=2", *ODD)),
    "tp 4, which share key heads": (4, ("--parallelism.tp=4", *ODD)),
    "pp 2, fsdp 2": (4, ("--parallelism.pp=2",)),
    "replicas, cp": (4, ("--parallelism.dp_replicate=2", "--parallelism.dp_shard=1", "--parallelism.cp=2")),
    "tied, tp 2, fsdp 2": (4, ("--parallelism.tp=2", "--model.tie_embeddings=true")),
    "on the host": (2, ("--memory.optimizer_placement=host",)),
}


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "options"), MESHES.values(), ids=list(MESHES))
def test_every_rank_reads_its_part_of_the_weights_and_no_more(run: Path, ranks: int, options: tuple[str, ...]) -> None:
    folder = run.parent / "model"
    dtype = torch.bfloat16 if ranks == 3 else torch.float32
    expected = written(run, folder, *options, dtype=dtype)
    rows_of(configured(run, run.parent / "run"))  # Tokenized once, and not by every rank.
    found = run_ranks(begun, ranks, run, (*options, f"--checkpoint.initial_load_path={HF_PREFIX}{folder}"))
    names = set[str]()
    for weights, count, held in found:
        assert count == held
        names |= weights.keys()
        for name, weight in weights.items():
            assert weight.dtype == torch.float32
            assert torch.equal(weight, expected[name].float()), name
    assert names == expected.keys()
    if ranks > 1 and "--parallelism.dp_shard=1" not in options:
        assert all(count < sum(map(Tensor.numel, expected.values())) for _, count, _ in found)


@pytest.mark.ranks
def test_norms_of_heads_are_read_too(run: Path) -> None:
    folder, options = run.parent / "model", ("--parallelism.tp=2", "--model.qk_norm=true")
    expected = written(run, folder, *options)
    rows_of(configured(run, run.parent / "run"))
    for weights, _, _ in run_ranks(begun, 4, run, (*options, f"--checkpoint.initial_load_path={HF_PREFIX}{folder}")):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


# ---- another run


def first_run(run: Path, *options: str) -> Path:
    run_here(configured(run, run.parent / "first", *options))
    return run.parent / "first"


@pytest.mark.parametrize("place", [".", "checkpoints/step-3"])
def test_another_runs_weights_are_taken_and_nothing_else(run: Path, place: str) -> None:
    first = first_run(run)
    saved = tensors(find_checkpoint(first / place))
    options = ("--optimizer.lr=0.5", "--training.seed=4", f"--checkpoint.initial_load_path={first / place}")
    config = configured(run, run.parent / "second", *options)
    validate_initial_weights(config)
    with trainer_of(config) as trainer:
        assert CheckpointManager(config, RunDir(config.output_dir), trainer.world).resume(trainer) is None
        held = trainer.state_dict()
        assert (trainer.step, trainer.next_sequence) == (0, 0)
    assert held.keys() == saved.keys()
    for name, tensor in held.items():
        expected = saved[name] if name.startswith("model.") else torch.zeros_like(saved[name])
        assert torch.equal(tensor, expected), name


@pytest.mark.ranks
def test_a_run_on_another_mesh_begins_where_the_first_ended(run: Path) -> None:
    first = first_run(run)
    options = ("--checkpoint.initial_load_path", str(first), "--parallelism.tp", "2", "--training.steps", "1")
    said = forked(run, run.parent / "second", *options, processes=4)
    assert said.statuses == [0, 0, 0, 0], said.said
    assert "the run begins with the weights of" in said.said
    ((loss,),) = metrics(run.parent / "second", "loss")
    assert loss < metrics(first, "loss")[-2][0] < metrics(first, "loss")[0][0]


def test_what_is_no_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    config = configured(run, tmp_path / "run", f"--checkpoint.initial_load_path={tmp_path}")
    with pytest.raises(ConfigError, match="is neither a checkpoint nor a run folder with one"):
        validate_initial_weights(config)


def test_the_model_of_a_checkpoint_is_the_one_that_was_trained(run: Path) -> None:
    first = first_run(run, "--training.steps=1", "--model.rope.kind=llama3", "--model.rope.factor=4")
    state = read_state(find_checkpoint(first))
    assert (
        model_config_from_state(state)
        == configured(run, first, "--model.rope.kind=llama3", "--model.rope.factor=4").model.build()
    )
    state["config"]["model.experts"] = 8
    with pytest.raises(ResumeError, match="experts, which this version does not know"):
        model_config_from_state(state)
    del state["config"]["model.experts"], state["config"]["model.dim"]
    with pytest.raises(ResumeError, match="does not describe a model"):
        model_config_from_state(state)


# ---- what is checked before


def problems_of(run: Path, *options: str) -> list[str]:
    try:
        validate_initial_weights(configured(run, run.parent / "run", *options))
    except ConfigError as error:
        return error.problems
    return []


def test_every_field_that_differs_is_told_at_once(run: Path) -> None:
    folder = run.parent / "model"
    written(run, folder)
    told = problems_of(
        run, f"--checkpoint.initial_load_path=hf:{folder}", "--model.ffn_dim=80", "--model.norm_eps=1e-6"
    )
    start = f'checkpoint.initial_load_path = "hf:{folder}": model.'
    assert told == [f"{start}ffn_dim = 80 is 96 there", f"{start}norm_eps = 1e-06 is 1e-05 there"]


def test_another_rope_is_allowed_and_told(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = run.parent / "model"
    written(run, folder)
    caplog.set_level(logging.INFO)
    assert problems_of(run, f"--checkpoint.initial_load_path=hf:{folder}", "--model.rope.theta=8e6") == []
    assert caplog.messages == ["checkpoint.initial_load_path: model.rope.theta = 8000000.0 is 500000.0 there"]


def test_every_tensor_is_looked_for(run: Path) -> None:
    folder = run.parent / "model"
    written(run, folder)
    first = sorted(folder.glob("*.safetensors"))[0]
    first.write_bytes(first.read_bytes()[:-1])
    (told,) = problems_of(run, f"--checkpoint.initial_load_path=hf:{folder}")
    assert f"{first} cannot be read" in told
    assert problems_of(run, "--checkpoint.initial_load_path=hf:/no/where")[0].endswith(
        ": /no/where is not a folder, and nothing is downloaded"
    )
    (folder / hf.CONFIG_FILE).unlink()
    assert (
        "config.json cannot be read: No such file" in problems_of(run, f"--checkpoint.initial_load_path=hf:{folder}")[0]
    )


def test_it_is_checked_before_anything_starts(run: Path) -> None:
    arguments = ["--config", str(run), "--checkpoint.initial_load_path", "hf:/no/where"]
    _, _, problems = load_and_validate(arguments, {"NGPU": "2"})
    assert problems == [
        'checkpoint.initial_load_path = "hf:/no/where": /no/where is not a folder, and nothing is downloaded'
    ]


def test_weights_that_cannot_be_read_end_the_run_for_good(run: Path) -> None:
    folder = run.parent / "model"
    written(run, folder, "--model.tie_embeddings=true")
    from safetensors.torch import load_file, save_file

    last = sorted(folder.glob("*.safetensors"))[-1]
    tensors_there = load_file(last) | {hf.LM_HEAD: torch.zeros(264, 64)}
    save_file(tensors_there, last)
    index = json.loads((folder / hf.INDEX_FILE).read_text())
    index["weight_map"][hf.LM_HEAD] = last.name
    (folder / hf.INDEX_FILE).write_text(json.dumps(index))
    options = ("--model.tie_embeddings=true", f"--checkpoint.initial_load_path=hf:{folder}")
    assert problems_of(run, *options) == []
    done = forked(run, run.parent / "second", *options)
    assert done.statuses == [78]
    assert "lm_head.weight is not model.embed_tokens.weight" in done.said


# ---- what comes first, and what stays


def test_the_runs_own_checkpoint_comes_first(run: Path) -> None:
    folder = run.parent / "model"
    written(run, folder)
    initial = f"--checkpoint.initial_load_path=hf:{folder}"
    run_here(configured(run, run.parent / "run", initial, "--training.steps=3"))
    saved = tensors(find_checkpoint(run.parent / "run"))
    shutil.rmtree(folder)
    config = configured(run, run.parent / "run", initial)
    validate_initial_weights(config)
    with trainer_of(config) as trainer:
        assert CheckpointManager(config, RunDir(config.output_dir), trainer.world).resume(trainer) is not None
        assert trainer.step == 3
        assert all(torch.equal(tensor, saved[name]) for name, tensor in trainer.state_dict().items())


def test_a_run_without_checkpoints_of_its_own_begins_so_too(run: Path) -> None:
    folder = run.parent / "model"
    written(run, folder)
    run_here(
        configured(run, run.parent / "run", f"--checkpoint.initial_load_path=hf:{folder}", "--checkpoint.enabled=false")
    )
    losses = [loss for (loss,) in metrics(run.parent / "run", "loss")]
    assert losses[0] > 10
    assert all(map(math.isfinite, losses))


def test_weights_of_the_same_folder_are_kept(run: Path) -> None:
    first = first_run(run)
    options = (
        f"--checkpoint.initial_load_path={first / 'checkpoints/step-3'}",
        "--checkpoint.keep=1",
        "--training.steps=9",
    )
    run_here(configured(run, first, *options))
    assert checkpoints(first) == ["step-3", "step-6", "step-9"], "what it begins with, resumed from, and the newest"


def test_a_model_without_its_weights_is_not_mistaken_for_one(run: Path) -> None:
    config = configured(run, run.parent / "run", "--checkpoint.initial_load_path=hf:/no/where")
    with trainer_of(config) as trainer:
        assert isinstance(trainer.stage_modules[0], Transformer)
        assert all(bool(weight.isnan().all()) for weight in trainer.optimizer.parameters_by_name.values())
