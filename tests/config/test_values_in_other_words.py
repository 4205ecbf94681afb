"""Lengths as 128K, values in the words of other trainers, names of the Hub, and a learning rate in
place of a fraction.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest

from benchmarks import config_pages
from trainer.checkpoint.initial_weights import resolve_initial_path
from trainer.commands import count
from trainer.config import aliases, checks
from trainer.config.parse import all_sections, load
from trainer.config.training_stages import Recipe
from trainer.errors import ConfigError, ResumeError
from trainer.evaluation.arguments import sequence_lengths

LENGTHS = """
[training]
seq_len = "128K"
[data]
max_document = "1M"
copy_period = "1.5k"
[[data.mix]]
source = "corpus"
min_length = "4K"
max_length = "64K"
max_len = "32K"
[model]
window = "4K"
[model.rope]
kind = "yarn"
factor = 4.0
original_length = "8K"
[validation.sets.long]
seq_len = ["16K", 32768]
tail = "2K"
"""
STAGES = """
[[stage]]
name = "long"
seq_len = "1M"
batch_tokens = "4M"
tokens = "8M"
"""


def read(folder: Path, text: str, *options: str) -> Recipe:
    (folder / "run.toml").write_text(text)
    return load(["--config", str(folder / "run.toml"), *options])


def test_a_file_takes_lengths_as_the_field_writes_them(tmp_path: Path) -> None:
    run = read(tmp_path, LENGTHS)
    (mix,) = run.data.mix
    long = run.validation.sets["long"]
    assert (run.training.seq_len, run.data.max_document, run.data.copy_period) == (
        131_072,
        1_048_576,
        1536,
    )
    assert (mix.min_length, mix.max_length, mix.max_len) == (4096, 65_536, 32_768)
    assert (run.model.window, run.model.rope.original_length) == (4096, 8192)
    assert (long.seq_len, long.tail) == ((16_384, 32_768), 2048)
    (stage,) = read(tmp_path, STAGES).stage
    assert (stage.seq_len, stage.batch_tokens, stage.tokens) == (1_048_576, 4_194_304, 8_388_608)


def test_the_schema_of_files_takes_the_same_lengths() -> None:
    schema = json.loads(config_pages.render_json_schema())
    for text in (LENGTHS, STAGES):
        jsonschema.validate(tomllib.loads(text), schema)
    for wrong in ("128 K", "1G", "128"):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"training": {"seq_len": wrong}}, schema)


def test_commands_take_them_too(tmp_path: Path) -> None:
    assert (
        read(tmp_path, "", "--training.seq_len", "128K", "--data.max_document=1m").training.seq_len
        == 131_072
    )
    assert sequence_lengths("32K, 1024") == [1024, 32_768]
    assert count("1.5M", minimum=2) == 1_572_864


@pytest.mark.parametrize("value", ["128 K", "K", "1G", "-1K", "1.0001K", "128"])
def test_other_texts_are_no_length(value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"seq_len = .* must be an integer, not a string"):
        read(tmp_path, f'[training]\nseq_len = "{value}"\n')


def test_a_length_is_bounded_as_before(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be at most"):
        read(tmp_path, '[validation.sets.long]\nseq_len = "4096M"\n')


def test_values_have_the_words_of_other_trainers(tmp_path: Path) -> None:
    text = '[training]\ndtype = "BF16"\nattention = "flash_attention_2"\n[memory]\nrecompute = "selective"\n'
    run = read(
        tmp_path, text, "--parallelism.cp_layout", "zigzag", "--parallelism.pp_schedule", "1f1b"
    )
    assert (run.training.dtype, run.training.attention, run.memory.recompute) == (
        "bfloat16",
        "flash",
        "keep_attention",
    )
    assert (run.parallelism.cp_layout, run.parallelism.pp_schedule) == ("headtail", "1F1B")
    text = f'{STAGES}parallelism = {{ cp = 2, cp_method = "p2p" }}\n'
    assert read(tmp_path, text).stage[0].parallelism.cp_method == "ring"


def test_other_words_lead_to_values_that_exist() -> None:
    for name, words in aliases.VALUES.items():
        section, _, key = name.rpartition(".")
        annotation: Any = all_sections()[section].fields_by_key()[key].annotation
        ours = get_args(annotation)
        for word, value in words.items():
            assert word == word.lower(), "they are looked up in lower case"
            assert word not in ours
            assert not ours or value in ours


def test_names_of_the_hub_are_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ResumeError, match=r'is "hf:meta-llama/Llama-3.1-8B"$'):
        resolve_initial_path("meta-llama/Llama-3.1-8B", Path())
    run = read(
        tmp_path,
        "",
        "--data.corpus",
        "HuggingFaceFW/fineweb",
        "--tokenizer.kind",
        "hf",
        "--tokenizer.path",
        "o/m",
    )
    corpus, tokenizer = sorted(checks.data_problems(run))
    assert 'a dataset ("hf:HuggingFaceFW/fineweb")' in corpus
    assert tokenizer.endswith("tokenizers are not downloaded: hf download o/m --local-dir o/m")


@pytest.mark.parametrize(
    ("factor", "lr", "is_meant"), [(3e-5, 3e-4, False), (1e-2, 1e-2, True), (0, 3e-4, True)]
)
def test_a_learning_rate_is_no_fraction(
    factor: float,
    lr: float,
    is_meant: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    options = ("--schedule.min_lr_factor", str(factor), "--optimizer.lr", str(lr))
    found = [
        problem
        for problem in checks.layout_problems(read(tmp_path, "", *options), 1)
        if "min_lr" in problem
    ]
    rule = "schedule.min_lr_factor = 3e-05 is a fraction of optimizer.lr = 0.0003: for a last learning rate of 3e-05 write 0.1"
    assert [problem.startswith(rule) for problem in found] == ([] if is_meant else [True])
