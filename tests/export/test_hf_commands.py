"""`python -m trainer.hf`: export a checkpoint to Hugging Face's format and import it again."""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models import hf
from models.hf import read_config
from models.hf_config import model_config_from_hf
from models.hf_config_write import config_differences
from models.hf_tensors import tensor_specs
from models.presets import FAMILIES
from tests.artifacts import forge
from tests.huggingface_folders import write_family
from tests.models.hf_models import load as load_model
from tests.models.hf_models import logits_of, logits_there, made_by_transformers
from tests.system.in_process import configured, run_here, saved_by, trainer_of
from tests.system.runs import forked, metrics, reseal, tensors, write_run
from trainer.checkpoint.manager import CheckpointManager
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.generate import main as generate_main
from trainer.hf import main, nearest_preset
from trainer.storage import progress
from trainer.storage.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def checkpoint_of(config: Config) -> Path:
    """A checkpoint of the run's initial weights."""
    folder = RunDir(config.output_dir)
    with trainer_of(config) as trainer:
        checkpoints = CheckpointManager(config, folder, trainer.world)
        checkpoints.resume(trainer)
        return saved_by(checkpoints, trainer)


def weights_in(folder: Path) -> dict[str, Tensor]:
    model = model_config_from_hf(read_config(folder))
    weights = hf.SafetensorsReader(folder)
    assert weights.problems(model) == []
    return {name: weights.read(entry) for name, entry in tensor_specs(model).items()}


def run_main(*argv: object) -> int:
    return main([str(argument) for argument in argv])


# ---- export


@pytest.mark.slow
@pytest.mark.ranks
def test_a_checkpoint_of_four_ranks_is_exported_unsharded(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = forked(run, run.parent / "run", "--parallelism.tp=2", processes=4)
    assert done.statuses == [0] * 4, done.said
    output = run.parent / "hf"
    assert run_main("export", run.parent / "run", output, "--max-shard-gib", 1e-4) == 0
    assert capsys.readouterr().out.endswith(
        f"{output} is complete: every tensor was read back and is bitwise equal\n"
    )
    names = sorted(path.name for path in output.iterdir())
    assert [name for name in names if not name.startswith("model-")] == [
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert len(names) > 8
    assert {path.stat().st_mode & 0o777 for path in output.iterdir()} == {
        (output / hf.CONFIG_FILE).stat().st_mode & 0o777
    }
    saved = tensors(run.parent / "run/checkpoints/step-6")
    for name, tensor in weights_in(output).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, saved[f"model.{name}"]), name
    values = json.loads((output / "config.json").read_text())
    assert (values["max_position_embeddings"], values["dtype"], values["torch_dtype"]) == (
        64,
        "float32",
        "float32",
    )
    assert json.loads((output / "generation_config.json").read_text()) == {
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    model = model_config_from_hf(values)
    tokens, logits = logits_of(load_model(output, model), model)
    torch.testing.assert_close(logits, logits_there(output, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("trained", "options", "expected_dtype"),
    [
        ("bfloat16", (), torch.bfloat16),
        ("float32", ("--dtype", "bfloat16"), torch.bfloat16),
        ("bfloat16", ("--dtype", "float32"), torch.float32),
        ("float64", (), torch.float32),
    ],
)
def test_weights_are_exported_in_the_requested_dtype(
    run: Path, trained: str, options: tuple[str, ...], expected_dtype: torch.dtype
) -> None:
    checkpoint = checkpoint_of(configured(run, run.parent / "run", f"--training.dtype={trained}"))
    assert run_main("export", checkpoint, run.parent / "hf", *options) == 0
    saved = tensors(checkpoint)
    for name, tensor in weights_in(run.parent / "hf").items():
        assert tensor.dtype == expected_dtype
        assert torch.equal(tensor, saved[f"model.{name}"].to(expected_dtype)), name
    values = read_config(run.parent / "hf")
    assert {f"torch.{values[key]}" for key in ("dtype", "torch_dtype")} == {str(expected_dtype)}


def test_a_tied_head_is_omitted(run: Path) -> None:
    checkpoint = checkpoint_of(configured(run, run.parent / "run", "--model.tie_embeddings=true"))
    assert run_main("export", checkpoint, run.parent / "hf") == 0
    assert read_config(run.parent / "hf")["tie_word_embeddings"] is True
    assert not hf.SafetensorsReader(run.parent / "hf").has_tensor(hf.LM_HEAD)
    model = model_config_from_hf(read_config(run.parent / "hf"))
    tokens, logits = logits_of(load_model(run.parent / "hf", model), model)
    torch.testing.assert_close(logits, logits_there(run.parent / "hf", tokens), rtol=0, atol=1e-4)


def test_a_model_that_its_own_type_cannot_express_has_the_tensors_of_the_type_written(
    run: Path,
) -> None:
    """Phi-3's are fused, and it has no yarn."""
    yarn = ("--model.rope.kind=yarn", "--model.rope.factor=4", "--model.rope.original_length=32")
    checkpoint = checkpoint_of(
        configured(run, run.parent / "run", "--model.model_type=phi3", *yarn)
    )
    assert run_main("export", checkpoint, run.parent / "hf") == 0
    assert read_config(run.parent / "hf")["model_type"] == "llama"
    assert "blocks.0.attention.q_proj.weight" in weights_in(run.parent / "hf")


def test_links_to_files_elsewhere_are_not_exported(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = run.parent / "models--a--b"
    secret = run.parent / "secret"
    source = repository / "snapshots/1"
    blobs = repository / "blobs"
    source.mkdir(parents=True)
    blobs.mkdir()
    write_family(source, "qwen2")
    (source / "tokenizer.json").rename(blobs / ("1" * 40))
    (source / "tokenizer.json").symlink_to("../../blobs/" + "1" * 40)
    own = ("--tokenizer.kind=huggingface", f"--tokenizer.path={source}", "--model.vocab_size=1200")
    checkpoint = checkpoint_of(configured(run, run.parent / "run", *own))
    assert run_main("export", checkpoint, run.parent / "hf") == 0
    secret.write_text("secret")
    (source / "chat_template.jinja").symlink_to(secret)
    assert run_main("export", checkpoint, run.parent / "other") == 2
    assert (
        "chat_template.jinja cannot be copied: it is a link that leads out of its folder"
        in capsys.readouterr().err
    )


def test_the_tokenizer_path_can_be_overridden(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = run.parent / "old"
    new = run.parent / "new"
    old.write_bytes(
        b"".join(b"%s %d\n" % (base64.b64encode(bytes([byte])), byte) for byte in range(256))
    )
    ranks = ("--tokenizer.kind=tiktoken", f"--tokenizer.path={old}", "--tokenizer.pattern=llama3")
    options = (*ranks, "--model.vocab_size=512")
    checkpoint = checkpoint_of(configured(run, run.parent / "run", *options))
    old.rename(new)
    assert run_main("export", checkpoint, run.parent / "hf") == 2
    assert f'tokenizer.path = "{old}" cannot be read' in capsys.readouterr().err
    assert run_main("export", checkpoint, run.parent / "hf", "--tokenizer", new) == 0
    assert (run.parent / "hf/original/tokenizer.model").read_bytes() == new.read_bytes()
    assert read_config(run.parent / "hf")["bos_token_id"] == 256


def test_a_run_on_synthetic_tokens_exports_no_tokenizer(run: Path) -> None:
    options = ("--data.corpus=copy", "--training.steps=1")
    done = forked(run, run.parent / "run", *options)
    assert done.statuses == [0], done.said
    assert run_main("export", run.parent / "run", run.parent / "hf") == 0
    assert not list((run.parent / "hf").glob("tokenizer*"))
    assert read_config(run.parent / "hf")["bos_token_id"] is None


def test_an_existing_folder_is_not_overwritten(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = checkpoint_of(configured(run, run.parent / "run"))
    output = run.parent / "hf"
    output.mkdir()
    assert run_main("export", checkpoint, output) == 0
    before = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    # Earlier tests may have sent the log to stderr.
    capsys.readouterr()
    assert run_main("export", checkpoint, output) == 2
    assert capsys.readouterr().err == f"error: {output} exists already\n"
    assert {path: path.stat().st_mtime_ns for path in output.iterdir()} == before


def test_a_failed_export_leaves_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = checkpoint_of(configured(run, run.parent / "run"))
    data = checkpoint / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:1000])
    before = sorted(run.parent.iterdir())
    assert run_main("export", checkpoint, run.parent / "hf") == 2
    assert " cannot be read: " in capsys.readouterr().err
    assert sorted(run.parent.iterdir()) == before


def test_a_checkpoint_of_another_model_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = checkpoint_of(configured(run, run.parent / "run"))
    changed = {"model.ffn_dim": 97, "model.num_layers": 3}
    forge(checkpoint / "state.json", lambda state: state["config"].update(changed))
    reseal(checkpoint)
    assert run_main("export", checkpoint, run.parent / "hf") == 2
    err = capsys.readouterr().err
    assert (
        "model.blocks.0.feed_forward.up_proj.weight is (96, 64) in the checkpoint and (97, 64) in the model"
        in err
    )
    assert (
        "model.blocks.2.attention.q_proj.weight is absent in the checkpoint and (64, 64) in the model"
        in err
    )


# ---- import


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_import_and_export_of_a_transformers_model_is_bitwise(
    kind: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = run.parent / "source"
    made_by_transformers(kind, torch.bfloat16, vocab_size=264).save_pretrained(
        source, max_shard_size="10KB"
    )
    assert run_main("import", source, run.parent / "begin.toml") == 0
    assert 'rope: kind "default", theta 10000' in capsys.readouterr().out
    assert (
        "# The folder has no tokenizer that can be read. Add [tokenizer]"
        in (run.parent / "begin.toml").read_text()
    )
    options = (
        f"--data.corpus={run.parent / 'corpus'}",
        f"--data.cache_dir={run.parent / 'prepared'}",
    )
    config = configured(
        run.parent / "begin.toml", run.parent / "run", "--training.seq_len=64", *options
    )
    assert config.checkpoint.initial_load_path == f"hf:{source}"
    checkpoint = checkpoint_of(config)
    assert run_main("export", checkpoint, run.parent / "output", "--dtype=bfloat16") == 0
    expected = weights_in(source)
    exported = weights_in(run.parent / "output")
    assert expected.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in expected.items())
    assert (
        config_differences(
            *(
                model_config_from_hf(read_config(folder))
                for folder in (source, run.parent / "output")
            )
        )
        == {}
    )


TOKENIZER_FILES = {
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "special_tokens_map.json": '{"eos_token": "<|im_end|>"}',
    "generation_config.json": '{"eos_token_id": [802, 800], "temperature": 0.6}',
    "vocab.json": "{}",
    "merges.txt": "#version: 0.2",
}


def test_a_model_keeps_its_tokenizer_from_import_to_export(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = run.parent / "source"
    output = run.parent / "output"
    made_by_transformers("Qwen3", torch.bfloat16, vocab_size=1000).save_pretrained(source)
    write_family(source, "qwen3", model_max_length=4096)
    (source / "additional_chat_templates").mkdir()
    for name, content in TOKENIZER_FILES.items():
        (source / name).write_text(content)
    values = json.loads((source / "config.json").read_text()) | {
        "bos_token_id": 800,
        "eos_token_id": [802, 801],
    }
    (source / "config.json").write_text(json.dumps(values))
    begin = run.parent / "begin.toml"
    assert run_main("import", source, begin) == 0
    assert f'[tokenizer]\nkind = "huggingface"\npath = "{source}"\n' in begin.read_text()
    options = ("--training.seq_len=64", "--training.steps=2", "--training.global_batch_size=2")
    data = (
        f"--data.corpus={run.parent / 'corpus'}",
        f"--data.cache_dir={run.parent / 'prepared'}",
    )
    done = forked(begin, run.parent / "run", *options, *data)
    assert done.statuses == [0], done.said
    assert forked(begin, run.parent / "run", *options, *data, "--training.steps=3").statuses == [0]
    assert len(metrics(run.parent / "run", "loss")) == 3
    capsys.readouterr()
    assert run_main("export", run.parent / "run", output) == 0
    assert f"tokenizer: the files of {source}\n" in capsys.readouterr().out
    for name in ("tokenizer.json", "tokenizer_config.json", *TOKENIZER_FILES):
        assert (output / name).read_bytes() == (source / name).read_bytes(), name
    exported = read_config(output)
    assert (exported["bos_token_id"], exported["eos_token_id"]) == (800, [802, 801])
    generated = ("--prompt=the fox", "--tokens=3", "--temperature=0")
    assert generate_main([str(run.parent / "run"), *generated]) == 0
    assert capsys.readouterr().out.startswith("the fox")
    source.rename(run.parent / "moved")
    assert run_main("export", run.parent / "run", run.parent / "again") == 2
    assert (
        f'tokenizer.path = "{source}": {source}/tokenizer.json cannot be read'
        in capsys.readouterr().err
    )
    assert (
        run_main(
            "export", run.parent / "run", run.parent / "again", "--tokenizer", run.parent / "moved"
        )
        == 0
    )


def test_a_shorter_model_max_length_is_raised_to_the_trained_one(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_family(run.parent / "source", "olmo2", model_max_length=32, custom="ü")
    options = (
        "--tokenizer.kind=huggingface",
        f"--tokenizer.path={source}",
        "--model.vocab_size=803",
    )
    checkpoint = checkpoint_of(configured(run, run.parent / "run", *options))
    assert run_main("export", checkpoint, run.parent / "hf") == 0
    assert (
        "tokenizer_config.json: model_max_length raised to the trained length"
        in capsys.readouterr().out
    )
    before, after = (
        json.loads((each / "tokenizer_config.json").read_text())
        for each in (source, run.parent / "hf")
    )
    assert after == before | {"model_max_length": 64}
    assert read_config(run.parent / "hf")["eos_token_id"] == 800


def imported(run: Path, family: str, **config: object) -> Path:
    """A model folder of 1000 tokens with a family's tokenizer."""
    made_by_transformers("Llama", torch.float32, vocab_size=1000).save_pretrained(
        run.parent / "source"
    )
    return write_family(run.parent / "source", family, **config)


def test_import_remarks_that_the_files_disagree_about_the_first_token(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = imported(run, "smollm3", add_bos_token=True)
    assert run_main("import", source) == 0
    expected = "# tokenizer_config.json has add_bos_token = true, but tokenizer.json begins texts with no token."
    assert expected in capsys.readouterr().out


def test_import_refuses_a_tokenizer_that_is_damaged_or_larger_than_the_model(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = imported(run, "llama2")
    assert run_main("import", source) == 2
    assert (
        f"{source}: the tokenizer has 1159 tokens, but the model 1000" in capsys.readouterr().err
    )
    (source / "tokenizer.json").write_text("{")
    assert run_main("import", source) == 2
    assert "tokenizer.json is damaged, or of a newer format" in capsys.readouterr().err


def test_an_exported_model_can_be_imported(
    run: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    run_here(
        configured(run, run.parent / "run", "--model.rope.kind=llama3", "--model.rope.factor=2")
    )
    assert run_main("export", run.parent / "run", run.parent / "hf") == 0
    assert "exporting hf: 100 %, " in caplog.text
    capsys.readouterr()
    assert run_main("import", run.parent / "hf") == 0
    assert "checking hf: 100 %, " in caplog.text
    printed = capsys.readouterr().out
    (run.parent / "again.toml").write_text(printed)
    config = load(["--config", str(run.parent / "again.toml")])
    assert (
        config_differences(
            config.model.build(), model_config_from_hf(read_config(run.parent / "hf"))
        )
        == {}
    )
    assert config.tokenizer.kind == "byte"
    assert "# 95,552 parameters; max_position_embeddings = 64\n" in printed


@pytest.mark.parametrize(
    ("family", "size"), [(family, size) for family in FAMILIES for size in FAMILIES[family]]
)
def test_the_nearest_preset_of_a_preset_is_itself(family: str, size: str) -> None:
    assert nearest_preset(FAMILIES[family][size]) == (family, size, {})


def test_an_inconsistent_model_is_not_imported(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = run.parent / "source"
    made_by_transformers("Llama", torch.float32).save_pretrained(source)
    values = json.loads((source / hf.CONFIG_FILE).read_text())
    (source / hf.CONFIG_FILE).write_text(
        json.dumps(values | {"num_hidden_layers": 1, "intermediate_size": 21})
    )
    capsys.readouterr()
    assert run_main("import", source, run.parent / "begin.toml") == 2
    assert len(capsys.readouterr().err.splitlines()) == 9 + 3
    assert not (run.parent / "begin.toml").exists()


def test_a_tied_model_with_another_head_is_not_imported(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    source = run.parent / "source"
    made_by_transformers("Llama", torch.float32, tie_word_embeddings=True).save_pretrained(source)
    tensors = load_file(source / hf.SINGLE_FILE)
    for change, status in ((0, 0), (1, 2)):
        save_file(
            tensors | {hf.LM_HEAD: tensors["model.embed_tokens.weight"] + change},
            source / hf.SINGLE_FILE,
        )
        assert run_main("import", source, run.parent / f"{change}.toml") == status
    assert "lm_head.weight differs from model.embed_tokens.weight" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ((), "trainer.hf needs a command: export, import"),
        (("export",), "export needs RUN_FOLDER|CHECKPOINT, OUTPUT"),
        (
            ("export", "a", "b", "--max-shard-gib", "0"),
            "--max-shard-gib 0 must be a finite number, above 0",
        ),
        (("export", "a", "b", "--dtype", "int8"), '--dtype "int8" is unknown; see --help'),
        (("fetch", "a"), 'command "fetch" is unknown; see --help'),
    ],
)
def test_wrong_arguments_exit_with_2(
    argv: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(*argv) == 2
    assert capsys.readouterr().err == f"error: command line: {problem}\n"


@pytest.mark.parametrize("source", ["missing", "empty", "file"])
def test_import_of_a_folder_without_a_model_exits_with_2(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert run_main("import", tmp_path / source, tmp_path / "begin.toml") == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {tmp_path / source / 'config.json'} cannot be read: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "begin.toml").exists()
