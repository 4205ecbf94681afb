"""From a checkpoint to a folder in Hugging Face's format, and back, as the commands do it."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models import hf
from models.hf_config import config_differences, model_config_from_hf
from models.presets import FAMILIES
from tests.models.hf_models import load as load_model
from tests.models.hf_models import logits_of, logits_there, made_by_transformers
from tests.system.in_process import configured, run_here, saved_by, trainer_of
from tests.system.runs import forked, reseal, tensors, write_run
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.run_dir import RunDir
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.export.hf import main, nearest_preset


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def checkpoint_of(config: Config) -> Path:
    """A checkpoint of the weights that a run begins with."""
    folder = RunDir(config.output_dir)
    with trainer_of(config) as trainer:
        checkpoints = CheckpointManager(config, folder, trainer.world)
        checkpoints.resume(trainer)
        return saved_by(checkpoints, trainer)


def weights_in(folder: Path) -> dict[str, Tensor]:
    model = model_config_from_hf(hf.read_config(folder))
    weights = hf.SafetensorsReader(folder)
    assert weights.problems(model) == []
    return {name: weights.read(entry) for name, entry in hf.tensor_specs(model).items()}


def run_main(*words: object) -> int:
    return main([str(word) for word in words])


# ---- export


@pytest.mark.ranks
def test_a_checkpoint_of_four_ranks_becomes_a_whole_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = forked(run, run.parent / "run", "--parallelism.tp=2", processes=4)
    assert said.statuses == [0] * 4, said.said
    out = run.parent / "hf"
    assert run_main("export", run.parent / "run", out, "--max-shard-gib", 1e-4) == 0
    assert capsys.readouterr().out.endswith(f"{out} is complete: every tensor was read again and is the same\n")
    names = sorted(path.name for path in out.iterdir())
    assert [name for name in names if not name.startswith("model-")] == [
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert len(names) > 8
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {(out / hf.CONFIG_FILE).stat().st_mode & 0o777}
    saved = tensors(run.parent / "run/checkpoints/step-6")
    for name, tensor in weights_in(out).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, saved[f"model.{name}"]), name
    values = json.loads((out / "config.json").read_text())
    assert (values["max_position_embeddings"], values["dtype"], values["torch_dtype"]) == (64, "float32", "float32")
    assert json.loads((out / "generation_config.json").read_text()) == {"bos_token_id": 256, "eos_token_id": 257}
    model = model_config_from_hf(values)
    tokens, logits = logits_of(load_model(out, model), model)
    torch.testing.assert_close(logits, logits_there(out, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("trained", "asked", "written"),
    [
        ("bfloat16", (), torch.bfloat16),
        ("float32", ("--dtype", "bfloat16"), torch.bfloat16),
        ("bfloat16", ("--dtype", "float32"), torch.float32),
        ("float64", (), torch.float32),
    ],
)
def test_weights_are_written_in_the_type_that_is_asked_for(
    run: Path, trained: str, asked: tuple[str, ...], written: torch.dtype
) -> None:
    checkpoint = checkpoint_of(configured(run, run.parent / "run", f"--training.dtype={trained}"))
    assert run_main("export", checkpoint, run.parent / "hf", *asked) == 0
    saved = tensors(checkpoint)
    for name, tensor in weights_in(run.parent / "hf").items():
        assert tensor.dtype == written
        assert torch.equal(tensor, saved[f"model.{name}"].to(written)), name
    values = hf.read_config(run.parent / "hf")
    assert {f"torch.{values[key]}" for key in ("dtype", "torch_dtype")} == {str(written)}


def test_a_tied_head_is_left_out(run: Path) -> None:
    checkpoint = checkpoint_of(configured(run, run.parent / "run", "--model.tie_embeddings=true"))
    assert run_main("export", checkpoint, run.parent / "hf") == 0
    assert hf.read_config(run.parent / "hf")["tie_word_embeddings"] is True
    assert not hf.SafetensorsReader(run.parent / "hf").has_tensor(hf.LM_HEAD)
    model = model_config_from_hf(hf.read_config(run.parent / "hf"))
    tokens, logits = logits_of(load_model(run.parent / "hf", model), model)
    torch.testing.assert_close(logits, logits_there(run.parent / "hf", tokens), rtol=0, atol=1e-4)


def test_a_tokenizer_may_have_moved(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = run.parent / "old", run.parent / "new"
    old.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)))
    options = ("--tokenizer.kind=tiktoken", f"--tokenizer.path={old}", "--model.vocab_size=512")
    checkpoint = checkpoint_of(configured(run, run.parent / "run", *options))
    old.rename(new)
    assert run_main("export", checkpoint, run.parent / "hf") == 2
    assert f'tokenizer.path = "{old}" cannot be read' in capsys.readouterr().err
    assert run_main("export", checkpoint, run.parent / "hf", "--tokenizer", new) == 0
    assert (run.parent / "hf/original/tokenizer.model").read_bytes() == new.read_bytes()
    assert hf.read_config(run.parent / "hf")["bos_token_id"] == 256


def test_a_run_without_text_has_no_tokenizer(run: Path) -> None:
    run_here_options = ("--data.corpus=copy", "--training.steps=1")
    said = forked(run, run.parent / "run", *run_here_options)
    assert said.statuses == [0], said.said
    assert run_main("export", run.parent / "run", run.parent / "hf") == 0
    assert not list((run.parent / "hf").glob("tokenizer*"))
    assert hf.read_config(run.parent / "hf")["bos_token_id"] is None


def test_what_is_there_is_not_written_over(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = checkpoint_of(configured(run, run.parent / "run"))
    out = run.parent / "hf"
    out.mkdir()
    assert run_main("export", checkpoint, out) == 0
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert run_main("export", checkpoint, out) == 2
    assert capsys.readouterr().err == f"error: {out} is there already\n"
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_an_export_that_fails_leaves_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = checkpoint_of(configured(run, run.parent / "run"))
    data = checkpoint / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:1000])
    before = sorted(run.parent.iterdir())
    assert run_main("export", checkpoint, run.parent / "hf") == 2
    assert " cannot be read: " in capsys.readouterr().err
    assert sorted(run.parent.iterdir()) == before


def test_a_checkpoint_of_another_model_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = checkpoint_of(configured(run, run.parent / "run"))
    state = json.loads((checkpoint / "state.json").read_text())
    state["config"] |= {"model.ffn_dim": 97, "model.num_layers": 3}
    (checkpoint / "state.json").write_text(json.dumps(state))
    reseal(checkpoint)
    assert run_main("export", checkpoint, run.parent / "hf") == 2
    told = capsys.readouterr().err
    assert "model.blocks.0.feed_forward.up_proj.weight is (96, 64) there and (97, 64) here" in told
    assert "model.blocks.2.attention.q_proj.weight is absent there and (64, 64) here" in told


# ---- import


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_a_model_of_transformers_goes_in_and_comes_out_bit_by_bit(
    kind: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = run.parent / "there"
    made_by_transformers(kind, torch.bfloat16, vocab_size=264).save_pretrained(there, max_shard_size="10KB")
    assert run_main("import", there, run.parent / "begin.toml") == 0
    assert 'rope: kind "default", theta 10000' in capsys.readouterr().out
    assert "# No file of its tokenizer is one that is read here. Without" in (run.parent / "begin.toml").read_text()
    options = (f"--data.corpus={run.parent / 'corpus'}", f"--data.cache_dir={run.parent / 'prepared'}")
    config = configured(run.parent / "begin.toml", run.parent / "run", "--training.seq_len=64", *options)
    assert config.checkpoint.initial_load_path == f"hf:{there}"
    checkpoint = checkpoint_of(config)
    assert run_main("export", checkpoint, run.parent / "out", "--dtype=bfloat16") == 0
    expected, found = weights_in(there), weights_in(run.parent / "out")
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert (
        config_differences(*(model_config_from_hf(hf.read_config(folder)) for folder in (there, run.parent / "out")))
        == {}
    )


def test_what_was_exported_begins_another_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(configured(run, run.parent / "run", "--model.rope.kind=llama3", "--model.rope.factor=2"))
    assert run_main("export", run.parent / "run", run.parent / "hf") == 0
    capsys.readouterr()
    assert run_main("import", run.parent / "hf") == 0
    printed = capsys.readouterr().out
    (run.parent / "again.toml").write_text(printed)
    config = load(["--config", str(run.parent / "again.toml")])
    assert config_differences(config.model.build(), model_config_from_hf(hf.read_config(run.parent / "hf"))) == {}
    assert config.tokenizer.kind == "byte"
    assert "# 95,552 parameters; max_position_embeddings = 64\n" in printed


@pytest.mark.parametrize(("family", "size"), [(family, size) for family in FAMILIES for size in FAMILIES[family]])
def test_a_preset_is_the_nearest_to_itself(family: str, size: str) -> None:
    assert nearest_preset(FAMILIES[family][size]) == (family, size, {})


def test_a_model_that_is_not_whole_is_not_brought_in(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = run.parent / "there"
    made_by_transformers("Llama", torch.float32).save_pretrained(there)
    values = json.loads((there / hf.CONFIG_FILE).read_text())
    (there / hf.CONFIG_FILE).write_text(json.dumps(values | {"num_hidden_layers": 1, "intermediate_size": 21}))
    capsys.readouterr()
    assert run_main("import", there, run.parent / "begin.toml") == 2
    assert len(capsys.readouterr().err.splitlines()) == 9 + 3
    assert not (run.parent / "begin.toml").exists()


@pytest.mark.parametrize("words", [(), ("export",), ("export", "a", "b", "--max-shard-gib", "0"), ("fetch", "a")])
def test_a_wrong_command_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_main(*words)
