"""Initial weights: each rank reads its shards on every mesh, validation precedes training, nothing
is deleted.
"""

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
from models.hf_config_write import model_config_to_hf
from models.hf_tensors import tensor_specs
from models.hf_write import write_safetensors
from models.transformer import Transformer
from parallelisms.mesh.collectives import full_tensor, to_local
from tests.ranks import run_ranks
from tests.system.in_process import configured, dataset_of, run_here, trainer_of
from tests.system.runs import checkpoints, forked, metrics, tensors, write_run
from trainer.checkpoint.initial_weights import HF_PREFIX, find_checkpoint
from trainer.checkpoint.manager import CheckpointManager
from trainer.errors import ConfigError
from trainer.launch.initial_checks import model_config_from_values, validate_initial_weights
from trainer.launch.launcher import load_and_validate
from trainer.step.process_group import World
from trainer.step.trainer import Trainer
from trainer.storage.manifest import read_state
from trainer.storage.run_dir import ResumeError, RunDir

ODD = ("--model.ffn_dim=68", "--model.vocab_size=268")
SIX_EXPERTS = (
    "--model.feed_forward=moe",
    "--model.num_experts=6",
    "--model.top_k=2",
    "--model.expert_dim=24",
)


def write_hf_model(
    run: Path, folder: Path, *options: str, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Writes a Hugging Face model with random weights; returns the tensors by parameter name."""
    model = configured(run, run.parent / "run", *options).model.build()
    torch.manual_seed(1)
    weights = {
        name: torch.randn(entry.shape).to(dtype) for name, entry in tensor_specs(model).items()
    }
    folder.mkdir()
    (folder / hf.CONFIG_FILE).write_text(
        json.dumps(model_config_to_hf(model, max_length=64, dtype=str(dtype).partition(".")[2]))
    )
    *_, last = write_safetensors(
        folder, model, weights.__getitem__, dtype=dtype, file_bytes=100_000
    )
    assert last == folder / hf.INDEX_FILE
    return weights


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


# ---- Hugging Face models on every mesh


def load_initial(run: Path, options: tuple[str, ...]) -> tuple[dict[str, Tensor], int, int]:
    """On one rank: (full weights of its stages, number of elements read, number of local
    elements).
    """
    from torch import distributed

    config = configured(run, run.parent / "run", *options)
    world = World(distributed.get_rank(), distributed.get_world_size(), torch.device("cpu"))
    trainer = Trainer(config, world, dataset_of(config))
    parameters = trainer.optimizer.parameters_by_name
    assert all(bool(to_local(weight).isnan().all()) for weight in parameters.values())
    count = 0
    read = hf.SafetensorsReader._slice

    def counting_read(self: hf.SafetensorsReader, *arguments: Any) -> Tensor:
        nonlocal count
        found = read(self, *arguments)
        count += found.numel()
        return found

    hf.SafetensorsReader._slice = counting_read  # type: ignore[assignment, method-assign]
    assert (
        CheckpointManager(config, RunDir(config.output_dir), trainer.world).resume(trainer) is None
    )
    hf.SafetensorsReader._slice = read  # type: ignore[method-assign]
    assert trainer.step == 0
    full_weights = {
        name: full_tensor(weight.detach()).clone() for name, weight in parameters.items()
    }
    return full_weights, count, sum(to_local(weight).numel() for weight in parameters.values())


MESHES: dict[str, tuple[int, tuple[str, ...]]] = {
    "one process": (1, ()),
    "fsdp 3, uneven": (3, ()),
    "qk norm, tp 2, fsdp 2": (4, ("--parallelism.tp=2", "--model.qk_norm=true", *ODD)),
    "biases, tp 4, replicated KV heads": (
        4,
        ("--parallelism.tp=4", "--model.qkv_bias=true", *ODD),
    ),
    "pp 2, fsdp 2": (4, ("--parallelism.pp=2",)),
    "dp_replicate, cp": (
        4,
        ("--parallelism.dp_replicate=2", "--parallelism.dp_shard=1", "--parallelism.cp=2"),
    ),
    "tied, tp 2, fsdp 2": (4, ("--parallelism.tp=2", "--model.tie_embeddings=true")),
    "fsdp 4, a rank without an expert": (4, SIX_EXPERTS),
    "optimizer on the host": (2, ("--memory.optimizer_placement=host",)),
}
QUICK = (
    "fsdp 3, uneven",
    "biases, tp 4, replicated KV heads",
    "pp 2, fsdp 2",
    "tied, tp 2, fsdp 2",
)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(*mesh, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, mesh in MESHES.items()
    ],
)
def test_every_rank_reads_exactly_its_shards(
    run: Path, ranks: int, options: tuple[str, ...]
) -> None:
    folder = run.parent / "model"
    dtype = torch.bfloat16 if ranks == 3 else torch.float32
    expected = write_hf_model(run, folder, *options, dtype=dtype)
    dataset_of(configured(run, run.parent / "run"))  # Tokenize once, not on every rank.
    found = run_ranks(
        load_initial, ranks, run, (*options, f"--checkpoint.initial_load_path={HF_PREFIX}{folder}")
    )
    names = set[str]()
    for weights, count, num_local in found:
        assert count == num_local
        names |= weights.keys()
        for name, weight in weights.items():
            assert weight.dtype == torch.float32
            assert torch.equal(weight, expected[name].float()), name
    assert names == expected.keys()
    if ranks > 1 and "--parallelism.dp_shard=1" not in options:
        assert all(count < sum(map(Tensor.numel, expected.values())) for _, count, _ in found)


# ---- another run's checkpoint


def first_run(run: Path, *options: str) -> Path:
    run_here(configured(run, run.parent / "first", *options))
    return run.parent / "first"


def test_only_the_weights_of_another_run_are_loaded(run: Path) -> None:
    first = first_run(run)
    for path in (".", "checkpoints/step-3"):
        check_loaded_weights(run, first, path)


def check_loaded_weights(run: Path, first: Path, path: str) -> None:
    saved = tensors(find_checkpoint(first / path))
    options = (
        "--optimizer.lr=0.5",
        "--training.seed=4",
        f"--checkpoint.initial_load_path={first / path}",
    )
    config = configured(run, run.parent / "second", *options)
    validate_initial_weights(config)
    with trainer_of(config) as trainer:
        assert (
            CheckpointManager(config, RunDir(config.output_dir), trainer.world).resume(trainer)
            is None
        )
        loaded = trainer.state_dict()
        assert (trainer.step, trainer.next_sequence) == (0, 0)
    assert loaded.keys() == saved.keys()
    for name, tensor in loaded.items():
        expected = saved[name] if name.startswith("model.") else torch.zeros_like(saved[name])
        assert torch.equal(tensor, expected), name


@pytest.mark.slow
@pytest.mark.ranks
def test_initial_weights_load_on_another_mesh(run: Path) -> None:
    first = first_run(run)
    options = (
        "--checkpoint.initial_load_path",
        str(first),
        "--parallelism.tp",
        "2",
        "--training.steps",
        "1",
    )
    done = forked(run, run.parent / "second", *options, processes=4)
    assert done.statuses == [0, 0, 0, 0], done.said
    assert "initial weights: " in done.said
    ((loss,),) = metrics(run.parent / "second", "loss")
    assert loss < metrics(first, "loss")[-2][0] < metrics(first, "loss")[0][0]


def test_a_folder_without_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    config = configured(run, tmp_path / "run", f"--checkpoint.initial_load_path={tmp_path}")
    with pytest.raises(
        ConfigError, match="is neither a checkpoint nor a run folder with a checkpoint"
    ):
        validate_initial_weights(config)


def test_the_model_configuration_of_a_checkpoint_is_restored(run: Path) -> None:
    first = first_run(
        run, "--training.steps=1", "--model.rope.kind=llama3", "--model.rope.factor=4"
    )
    state = read_state(find_checkpoint(first))
    assert (
        model_config_from_values(state.config)
        == configured(
            run, first, "--model.rope.kind=llama3", "--model.rope.factor=4"
        ).model.build()
    )
    state.config["model.experts"] = 8
    with pytest.raises(
        ResumeError,
        match=r"state.json is not of this version's models: .* unexpected keyword argument 'experts'",
    ):
        model_config_from_values(state.config)
    del state.config["model.experts"], state.config["model.dim"]
    with pytest.raises(
        ResumeError, match=r"state.json is not of this version's models: .* missing "
    ):
        model_config_from_values(state.config)


# ---- validation before the run starts


def problems_of(run: Path, *options: str) -> list[str]:
    try:
        validate_initial_weights(configured(run, run.parent / "run", *options))
    except ConfigError as error:
        return error.problems
    return []


def test_every_differing_model_field_is_reported(run: Path) -> None:
    folder = run.parent / "model"
    write_hf_model(run, folder)
    problems = problems_of(
        run,
        f"--checkpoint.initial_load_path=hf:{folder}",
        "--model.ffn_dim=80",
        "--model.norm_eps=1e-6",
    )
    start = f'checkpoint.initial_load_path = "hf:{folder}": model.'
    assert problems == [
        f"{start}ffn_dim = 80, but the initial weights have 96",
        f"{start}norm_eps = 1e-06, but the initial weights have 1e-05",
    ]


def test_another_rope_is_allowed_and_logged(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = run.parent / "model"
    write_hf_model(run, folder)
    caplog.set_level(logging.INFO)
    assert (
        problems_of(run, f"--checkpoint.initial_load_path=hf:{folder}", "--model.rope.theta=8e6")
        == []
    )
    assert caplog.messages == [
        "checkpoint.initial_load_path: model.rope.theta = 8000000.0, but the initial weights have 500000.0"
    ]


def test_missing_and_truncated_files_are_reported(run: Path) -> None:
    folder = run.parent / "model"
    write_hf_model(run, folder)
    first = sorted(folder.glob("*.safetensors"))[0]
    first.write_bytes(first.read_bytes()[:-1])
    (problem,) = problems_of(run, f"--checkpoint.initial_load_path=hf:{folder}")
    assert f"{first} cannot be read" in problem
    assert problems_of(run, "--checkpoint.initial_load_path=hf:/no/where")[0].endswith(
        ": /no/where is not a folder (models are not downloaded)"
    )
    (folder / hf.CONFIG_FILE).unlink()
    assert (
        "config.json cannot be read: No such file"
        in problems_of(run, f"--checkpoint.initial_load_path=hf:{folder}")[0]
    )


def test_the_launcher_validates_the_initial_weights(run: Path) -> None:
    arguments = ["--config", str(run), "--checkpoint.initial_load_path", "hf:/no/where"]
    _, _, problems = load_and_validate(arguments, {"NGPU": "2"})
    assert problems == [
        'checkpoint.initial_load_path = "hf:/no/where": /no/where is not a folder (models are not downloaded)'
    ]


def test_a_tied_model_with_another_head_exits_with_78(run: Path) -> None:
    folder = run.parent / "model"
    write_hf_model(run, folder, "--model.tie_embeddings=true")
    from safetensors.torch import load_file, save_file

    last = sorted(folder.glob("*.safetensors"))[-1]
    head_tensors = load_file(last) | {hf.LM_HEAD: torch.zeros(264, 64)}
    save_file(head_tensors, last)
    index = json.loads((folder / hf.INDEX_FILE).read_text())
    index["weight_map"][hf.LM_HEAD] = last.name
    (folder / hf.INDEX_FILE).write_text(json.dumps(index))
    options = ("--model.tie_embeddings=true", f"--checkpoint.initial_load_path=hf:{folder}")
    assert problems_of(run, *options) == []
    done = forked(run, run.parent / "second", *options)
    assert done.statuses == [78]
    assert "lm_head.weight differs from model.embed_tokens.weight" in done.said


def test_weights_that_are_not_finite_exit_with_78_and_are_named(run: Path) -> None:
    folder = run.parent / "model"
    write_hf_model(run, folder)
    from safetensors.torch import load_file, save_file

    last = sorted(folder.glob("*.safetensors"))[-1]
    tensors = load_file(last)
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[3] = torch.nan
    save_file(tensors, last)
    done = forked(run, run.parent / "second", f"--checkpoint.initial_load_path=hf:{folder}")
    assert done.statuses == [78]
    assert f"{name} has values that are not finite" in done.said


# ---- precedence and retention


def test_a_checkpoint_of_the_run_takes_precedence(run: Path) -> None:
    folder = run.parent / "model"
    write_hf_model(run, folder)
    initial = f"--checkpoint.initial_load_path=hf:{folder}"
    run_here(configured(run, run.parent / "run", initial, "--training.steps=3"))
    saved = tensors(find_checkpoint(run.parent / "run"))
    shutil.rmtree(folder)
    config = configured(run, run.parent / "run", initial)
    validate_initial_weights(config)
    with trainer_of(config) as trainer:
        assert (
            CheckpointManager(config, RunDir(config.output_dir), trainer.world).resume(trainer)
            is not None
        )
        assert trainer.step == 3
        assert all(
            torch.equal(tensor, saved[name]) for name, tensor in trainer.state_dict().items()
        )


def test_initial_weights_load_with_checkpoints_disabled(run: Path) -> None:
    folder = run.parent / "model"
    write_hf_model(run, folder)
    run_here(
        configured(
            run,
            run.parent / "run",
            f"--checkpoint.initial_load_path=hf:{folder}",
            "--checkpoint.enabled=false",
        )
    )
    losses = [loss for (loss,) in metrics(run.parent / "run", "loss")]
    assert losses[0] > 10
    assert all(map(math.isfinite, losses))


def test_initial_weights_in_the_same_folder_are_not_pruned(run: Path) -> None:
    first = first_run(run)
    options = (
        f"--checkpoint.initial_load_path={first / 'checkpoints/step-3'}",
        "--checkpoint.keep=1",
        "--training.steps=9",
    )
    run_here(configured(run, first, *options))
    assert checkpoints(first) == ["step-3", "step-6", "step-9"], (
        "initial weights, resumed checkpoint, newest checkpoint"
    )


def test_parameters_are_nan_until_the_initial_weights_are_loaded(run: Path) -> None:
    config = configured(run, run.parent / "run", "--checkpoint.initial_load_path=hf:/no/where")
    with trainer_of(config) as trainer:
        assert isinstance(trainer.stage_modules[0], Transformer)
        assert all(
            bool(weight.isnan().all()) for weight in trainer.optimizer.parameters_by_name.values()
        )
