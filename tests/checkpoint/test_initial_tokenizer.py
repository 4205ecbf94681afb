"""Weights of a Hugging Face model are only trained with a tokenizer that gives the ids they
know.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.test_initial_weights import write_hf_model
from tests.export.test_hf_tokenizer import export_tokenizer
from tests.huggingface_folders import write_family
from tests.system.in_process import configured, run_here
from tests.system.runs import write_run
from trainer.data.tokenizer import load_tokenizer
from trainer.errors import ConfigError
from trainer.launch.initial_tokenizer import validate_initial_tokenizer
from trainer.launch.launcher import load_and_validate

SIZE = "--model.vocab_size=1200"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


@pytest.fixture
def model(run: Path) -> Path:
    write_hf_model(run, run.parent / "model", SIZE)
    return run.parent / "model"


def problems_of(run: Path, model: Path, *options: str) -> list[str]:
    initial = f"--checkpoint.initial_load_path=hf:{model}"
    try:
        validate_initial_tokenizer(configured(run, run.parent / "run", initial, SIZE, *options))
    except ConfigError as error:
        return error.problems
    return []


def huggingface(folder: Path) -> tuple[str, str]:
    return "--tokenizer.kind=huggingface", f"--tokenizer.path={folder}"


def test_bytes_are_refused_for_a_model_with_a_tokenizer(run: Path, model: Path) -> None:
    write_family(model, "qwen3")
    own_ids = load_tokenizer("huggingface", model).encode("The quick").tolist()[:4]
    assert problems_of(run, model) == [
        f'checkpoint.initial_load_path = "hf:{model}": tokenizer.kind = "byte": the first token of documents, 256, is no '
        "special token of the model's tokenizer; the last token of documents, 257, is no special token of the model's "
        f"tokenizer; a probe text gives ids [84, 104, 101, 32], but {own_ids} with the model's tokenizer; set "
        f'tokenizer.kind = "huggingface" and tokenizer.path = "{model}"'
    ]
    assert problems_of(run, model, *huggingface(model)) == []
    assert problems_of(run, model, "--data.corpus=copy") == []


def test_the_launcher_refuses_them(run: Path, model: Path) -> None:
    write_family(model, "qwen3")
    arguments = ["--config", str(run), "--checkpoint.initial_load_path", f"hf:{model}", SIZE]
    (problem,) = load_and_validate(arguments, {"NGPU": "2"})[2]
    assert f'set tokenizer.kind = "huggingface" and tokenizer.path = "{model}"' in problem


def test_a_copy_of_the_tokenizer_is_accepted_and_another_one_refused(
    run: Path, model: Path, tmp_path: Path
) -> None:
    write_family(model, "qwen3")
    assert (
        problems_of(
            run,
            model,
            *huggingface(write_family(tmp_path / "copy", "qwen3", eos_token="<|endoftext|>")),
        )
        == []
    )
    (problem,) = problems_of(
        run, model, *huggingface(write_family(tmp_path / "other", "gpt_neox"))
    )
    assert "a probe text gives ids" in problem
    assert (
        "the last token of documents, 0, is no special token of the model's tokenizer" in problem
    )


def test_a_special_token_with_another_id_is_refused(
    run: Path, model: Path, tmp_path: Path
) -> None:
    write_family(model, "qwen2")
    other = write_family(tmp_path / "other", "qwen2") / "tokenizer.json"
    content = json.loads(other.read_text())
    content["added_tokens"][0]["content"] = "<|im_start|>"
    content["added_tokens"][1]["content"] = "<|endoftext|>"
    other.write_text(json.dumps(content))
    (problem,) = problems_of(run, model, *huggingface(other))
    assert (
        'special token "<|endoftext|>" is 801, but 800 for the model; special token "<|im_start|>" is 800'
        in problem
    )


def test_metas_file_is_accepted_for_the_tokenizer_json_made_from_it(
    run: Path, model: Path, tmp_path: Path
) -> None:
    _, exported = export_tokenizer("tiktoken", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(exported / name, model)
    path = exported / "original/tokenizer.model"
    ranks = ("--tokenizer.kind=tiktoken", f"--tokenizer.path={path}", "--tokenizer.pattern=llama3")
    assert problems_of(run, model, *ranks) == []
    assert problems_of(run, model, *huggingface(exported)) == []


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(run: Path, model: Path) -> None:
    write_family(model, "qwen2")
    options = (*huggingface(model), "--model.vocab_size=800")
    assert problems_of(run, model, *options) == [
        'model.vocab_size = 800 must be at least 803, the vocabulary size of tokenizer.kind = "huggingface"'
    ]


def test_bytes_need_a_model_of_bytes_in_a_folder_without_tokenizer(run: Path, model: Path) -> None:
    assert problems_of(run, model) == [
        f'checkpoint.initial_load_path = "hf:{model}": tokenizer.kind = "byte" has 264 tokens, but the model 1200 and no '
        "tokenizer in its folder: set [tokenizer] to the one it was trained with"
    ]
    assert problems_of(run, model, "--model.vocab_size=264") == []


def test_a_damaged_tokenizer_is_named(run: Path, model: Path) -> None:
    (model / "tokenizer.json").write_text('{"model": null}')
    (problem,) = problems_of(run, model)
    assert "tokenizer.json is damaged, or of a newer format" in problem


def test_a_run_with_a_checkpoint_needs_no_folder(run: Path, model: Path) -> None:
    write_family(model, "qwen3")
    run_here(configured(run, run.parent / "run", SIZE, "--training.steps=3"))
    assert problems_of(run, model) == []
