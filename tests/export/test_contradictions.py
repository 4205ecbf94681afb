"""Folders whose files contradict each other are named in words; what is in no text, or vouched
for, is let through.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import hf
from tests.huggingface_folders import write_family
from tests.models.hf_models import made_by_transformers
from tests.system.in_process import configured
from tests.system.runs import write_run
from trainer.data.prepare import prepare_datasets
from trainer.errors import ConfigError
from trainer.hf import main
from trainer.launch.initial_checks import validate_initial_weights
from trainer.launch.initial_tokenizer import validate_initial_tokenizer

SIZE = 1159
"""Tokens of the tokenizer."""
IMAGE = {"id": SIZE, "content": "<image_soft_token>", "special": True}
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made_by_transformers("Llama", torch.float32, vocab_size=SIZE).save_pretrained(
        tmp_path / "source"
    )
    return write_family(tmp_path / "source", "llama2")


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def in_two_files(folder: Path, *, names: tuple[str, str], keep: str | None = None) -> None:
    """The weights in two files, of which both have `keep`."""
    weights = load_file(folder / hf.SINGLE_FILE)
    (folder / hf.SINGLE_FILE).unlink()
    tensors = sorted(weights)
    parts = tensors[::2], tensors[1::2]
    for name, part in zip(names, parts, strict=True):
        save_file(
            {each: weights[each] for each in {*part, *([keep] if keep else [])}}, folder / name
        )
    weight_map = {each: name for name, part in zip(names, parts, strict=True) for each in part}
    (folder / hf.INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def twice(folder: Path) -> None:
    in_two_files(folder, names=("a.safetensors", "b.safetensors"), keep="model.norm.weight")


def beside_another(folder: Path) -> None:
    whole = (folder / hf.SINGLE_FILE).read_bytes()
    in_two_files(folder, names=("a.safetensors", "b.safetensors"))
    (folder / hf.SINGLE_FILE).write_bytes(whole)


def without_a_file(folder: Path) -> None:
    in_two_files(folder, names=("a.safetensors", "b.safetensors"))
    (folder / "b.safetensors").unlink()


def index_with_nan(folder: Path) -> None:
    in_two_files(folder, names=("a.safetensors", "b.safetensors"))
    edit(
        folder / hf.INDEX_FILE, lambda values: values.update(metadata={"total_size": float("nan")})
    )


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / hf.CONFIG_FILE, lambda values: values.update(changes))


def ordinary_token_beyond(folder: Path) -> None:
    token = {**IMAGE, "special": False, **FLAGS}
    edit(folder / "tokenizer.json", lambda values: values["added_tokens"].append(token))


def end_beyond(folder: Path) -> None:
    edit(
        folder / "tokenizer.json", lambda values: values["added_tokens"].append({**IMAGE, **FLAGS})
    )
    edit(
        folder / "tokenizer_config.json", lambda values: values.update(eos_token=IMAGE["content"])
    )


def other_id(folder: Path) -> None:
    decoder = {"5": {"content": "</s>", "special": True}}
    edit(
        folder / "tokenizer_config.json",
        lambda values: values.update(added_tokens_decoder=decoder),
    )


CONTRADICTIONS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a tensor twice": (twice, "model.norm.weight is in a.safetensors and in b.safetensors"),
    "two sets of weights": (
        beside_another,
        "has both model.safetensors and model.safetensors.index.json",
    ),
    "a file that is not there": (without_a_file, "names b.safetensors, which does not exist"),
    "an index with NaN": (index_with_nan, "cannot be read: NaN is not a number"),
    "another width": (
        config(hidden_size=32),
        "model.embed_tokens.weight has shape [1159, 24], expected [1159, 32]",
    ),
    "another head": (config(head_dim=4), "q_proj.weight has shape [24, 24], expected [16, 24]"),
    "more layers": (
        config(num_hidden_layers=3),
        "model.layers.2.self_attn.q_proj.weight is missing",
    ),
    "fewer layers": (
        config(num_hidden_layers=1),
        "model.layers.1.self_attn.q_proj.weight [24, 24] is unexpected",
    ),
    "another theta": (
        config(rope_theta=7.0),
        "rope_theta = 7.0 and rope_parameters.rope_theta = 10000.0 disagree",
    ),
    "a tied head": (
        config(tie_word_embeddings=True),
        "lm_head.weight differs from model.embed_tokens.weight",
    ),
    "a list": (config(rope_parameters=[1]), "rope_parameters = [1] must be an object"),
    "an ordinary token beyond": (
        ordinary_token_beyond,
        "the tokenizer has 1160 tokens, but the model 1159",
    ),
    "an end beyond": (end_beyond, "the tokenizer has 1160 tokens, but the model 1159"),
    "another id of a token": (other_id, '"</s>" is 5, but'),
}


@pytest.mark.parametrize(("change", "problem"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_folder_that_contradicts_itself_is_refused_in_words(
    change: Callable[[Path], None], problem: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder)
    assert main(["import", str(folder)]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("name", [hf.CONFIG_FILE, hf.INDEX_FILE])
@pytest.mark.parametrize(
    "content",
    ["", "null", "[]", "1", '"x"', "{", '{"weight_map": 1}', "[" * 100_000, "\x00", "NaN"],
)
def test_a_file_that_is_not_an_object_is_refused_in_words(
    name: str, content: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_two_files(folder, names=("a.safetensors", "b.safetensors"))
    (folder / name).write_text(content)
    assert main(["import", str(folder)]) == 2
    said = capsys.readouterr().err
    assert name in said
    assert "Traceback" not in said


# ---- what is let through, with a line


def test_a_special_token_beyond_the_vocabulary_is_no_reason_to_refuse(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in Gemma 3 1B: an image's, of which its model of text has no embedding."""
    edit(
        folder / "tokenizer.json", lambda values: values["added_tokens"].append({**IMAGE, **FLAGS})
    )
    begin = tmp_path / "begin.toml"
    assert main(["import", str(folder), str(begin)]) == 0
    line = "ignored: special tokens that no text has, beyond the model's 1159: 1159 (<image_soft_token>)"
    assert line in capsys.readouterr().out
    assert f"# {line}\n" in begin.read_text()
    corpus = write_run(tmp_path).parent / "corpus"
    (corpus / "image.txt").write_text("an <image_soft_token> in a text")
    options = (
        f"--data.corpus={corpus}",
        f"--data.cache_dir={tmp_path / 'prepared'}",
        "--training.seq_len=64",
    )
    run = configured(begin, tmp_path / "run", *options)
    validate_initial_weights(run)
    validate_initial_tokenizer(run)
    assert prepare_datasets(run)
    with pytest.raises(ConfigError, match=r"model.vocab_size = 1159 must be at least 1160"):
        prepare_datasets(
            configured(begin, tmp_path / "run", *options, "--data.separators=<image_soft_token>")
        )


def test_an_unknown_key_is_ignored_at_import_and_by_the_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config(internal_version="7b", pretraining_tp=2, other=1)(folder)
    begin = tmp_path / "begin.toml"
    assert main(["import", str(folder), str(begin), "--ignore-key", "internal_version"]) == 2
    said = capsys.readouterr().err
    assert (
        "other = 1 is unknown for model_type llama; --ignore-key other imports the model without it"
        in said
    )
    assert "internal_version" not in said
    assert (
        main(
            [
                "import",
                str(folder),
                str(begin),
                "--ignore-key",
                "internal_version",
                "--ignore-key",
                "other",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    written = begin.read_text()
    for line in (
        'internal_version = "7b": --ignore-key',
        "pretraining_tp = 2: products are computed in slices",
    ):
        assert f"ignored: {line}" in said
        assert f"# ignored: {line}" in written
    assert 'initial_ignore_keys = ["internal_version", "other"]\n' in written
    options = (f"--data.corpus={write_run(tmp_path).parent / 'corpus'}", "--training.seq_len=64")
    validate_initial_weights(configured(begin, tmp_path / "run", *options))
    without = configured(begin, tmp_path / "run", *options, "--checkpoint.initial_ignore_keys=[]")
    with pytest.raises(
        ConfigError, match=r"internal_version = .* is unknown for model_type llama"
    ):
        validate_initial_weights(without)


def test_the_run_logs_what_it_ignores(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config(rope_interleaved=False)(folder)
    begin = tmp_path / "begin.toml"
    assert main(["import", str(folder), str(begin)]) == 0
    options = (f"--data.corpus={write_run(tmp_path).parent / 'corpus'}", "--training.seq_len=64")
    with caplog.at_level("INFO", "trainer"):
        validate_initial_weights(configured(begin, tmp_path / "run", *options))
    assert (
        "checkpoint.initial_load_path: ignored: rope_interleaved = false: the halves of a head rotate"
        in caplog.text
    )
