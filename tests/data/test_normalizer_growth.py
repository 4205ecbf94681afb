"""A tokenizer that makes pages of a letter is refused by name, before the memory is taken."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from tests.huggingface_folders import write_family
from tests.sentencepiece_model import train_sentencepiece
from trainer.config.parse import load
from trainer.data import huggingface_tokenizer, sentencepiece_tokenizer
from trainer.data.huggingface_tokenizer import load_huggingface_tokenizer
from trainer.data.normalizer_growth import (
    PRE_TOKENIZER_GROWTH,
    UNICODE_GROWTH,
    UNICODE_STEPS,
    charsmap_growth,
    definition_growth,
    normalizer_growth,
    require_normalized_length,
)
from trainer.data.prepare import __main__ as prepare_command
from trainer.data.prepare import prepare_datasets
from trainer.data.text_chunks import EncodingError
from trainer.errors import DataError

PAGE = "b" * 10_000


def replace_by(content: str, pattern: str = "a") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def folder_with(folder: Path, *steps: dict[str, Any], family: str = "llama2") -> Path:
    """A model's tokenizer with another normalizer."""
    path = write_family(folder, family) / "tokenizer.json"
    definition = json.loads(path.read_text())
    definition["normalizer"] = {"type": "Sequence", "normalizers": [*steps]}
    path.write_text(json.dumps(definition))
    return folder


def described(step: Any) -> list[Mapping[str, Any]]:
    return [json.loads(step.__getstate__())]


BUILT = {
    "Replace a letter": normalizers.Replace("a", "xyz"),
    "Replace two letters": normalizers.Replace("ab", "xyz"),
    "Replace by nothing": normalizers.Replace("a", ""),
    "Replace nothing": normalizers.Replace("", "xyz"),
    "Replace what may be nothing": normalizers.Replace(Regex("z*"), "xyz"),
    "Prepend": normalizers.Prepend("▁▁"),
    "BertNormalizer": normalizers.BertNormalizer(),
    "ByteLevel": normalizers.ByteLevel(),
    "NFKD": normalizers.NFKD(),
}


@pytest.mark.parametrize("name", BUILT)
def test_no_text_grows_by_more_than_the_bound(name: str) -> None:
    step = BUILT[name]
    growth = normalizer_growth(described(step))
    for text in ("a", "b", "ab", "aab", "abab" * 9, "中", "\ufdfa", "é", "\U0001f600", "İ"):
        assert len(step.normalize_str(text)) <= growth * len(text), text


def test_the_bound_of_a_letter_is_reached() -> None:
    assert len(normalizers.NFKD().normalize_str("\ufdfa")) == UNICODE_GROWTH
    steps = [replace_by("xyz"), replace_by("aa", pattern="x"), replace_by("12", pattern="y")]
    built = normalizers.Sequence(
        [normalizers.Replace(each["pattern"]["String"], each["content"]) for each in steps]
    )
    assert len(built.normalize_str("a")) <= normalizer_growth(steps) == 12


def test_every_step_of_the_library_is_known() -> None:
    classes = {name for name in dir(normalizers) if name[0].isupper() and name != "NORMALIZERS"}
    other = {
        "Normalizer",
        "Sequence",
        "Replace",
        "Prepend",
        "Precompiled",
        "BertNormalizer",
        "ByteLevel",
    }
    assert classes - other == UNICODE_STEPS
    assert set(dir(pre_tokenizers)) >= set(PRE_TOKENIZER_GROWTH)
    with pytest.raises(
        DataError,
        match='has the normalizer "Other", of which is not known how long it makes a text',
    ):
        normalizer_growth([{"type": "Other"}])


@pytest.mark.slow
def test_no_character_grows_by_more_than_the_bound_in_unicode_steps() -> None:
    forms = [
        normalizers.NFC(),
        normalizers.NFD(),
        normalizers.NFKC(),
        normalizers.NFKD(),
        normalizers.Lowercase(),
    ]
    characters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    growing = [
        each for each in characters if any(len(form.normalize_str(each)) > 1 for form in forms)
    ]
    for pair in permutations(forms, 3):
        built = normalizers.Sequence([*pair])
        assert max(len(built.normalize_str(each)) for each in growing) <= UNICODE_GROWTH


def test_a_charsmap_grows_by_its_longest_entry() -> None:
    assert charsmap_growth(b"") == 1
    assert charsmap_growth(b"\x03\0\0\0trieab\0" + "é".encode() * 40 + b"\0c\0") == 40


CHAIN = [replace_by(PAGE), replace_by("a" * 10_000, pattern="b")]


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        (CHAIN, "its normalizer may make 100,000,000 characters of one, more than 65,536"),
        (CHAIN * 20, r"its normalizer may make 10\^18 characters of one, more than 65,536"),
        (
            [{"type": "Prepend", "prepend": "x" * 99_999}],
            "its normalizer may make 100,000 characters of one",
        ),
        ([replace_by(PAGE)] * 2, "its normalizer may make 100,000,000 characters"),
    ],
    ids=range(4),
)
def test_a_chain_of_replacements_is_refused_before_the_library_reads_it(
    steps: list[dict[str, Any]], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(huggingface_tokenizer, "build_tokenizer", fail)
    folder = folder_with(tmp_path, *steps)
    with pytest.raises(
        DataError, match=rf'^tokenizer.path = "{folder}": tokenizer.json: {problem}'
    ):
        load_huggingface_tokenizer(folder)


def test_a_chain_of_pre_tokenizers_is_refused() -> None:
    byte_level = {"type": "ByteLevel"}
    assert (
        definition_growth({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [byte_level]}})
        == 1
    )
    with pytest.raises(
        DataError, match="its pre-tokenizer may make 125 characters of one, more than 32"
    ):
        definition_growth(
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [byte_level] * 3}}
        )


def test_names_of_added_tokens_must_not_grow_without_bound(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, replace_by(PAGE))
    path = folder / "tokenizer.json"
    definition = json.loads(path.read_text())
    definition["added_tokens"] += [
        {"id": 5000 + n, "content": "a" * 999 + str(n), "normalized": True, "special": False}
        for n in range(99)
    ]
    path.write_text(json.dumps(definition))
    with pytest.raises(DataError, match="too many for added tokens of"):
        load_huggingface_tokenizer(folder)


def test_a_text_is_measured_in_parts_that_fit() -> None:
    lengths = []

    def normalize(text: str) -> str:
        lengths.append(len(text))
        return text * 10

    require_normalized_length("x" * 10, 10, normalize, max_chars=100, name="it")
    # As long as a text is short, nothing is normalized twice.
    assert not lengths
    require_normalized_length("x" * 10, 30, normalize, max_chars=100, name="it")
    assert lengths == [3, 3, 3, 1]
    with pytest.raises(
        EncodingError,
        match="it: its normalizer makes more than 100 characters of the first 12 of a text",
    ):
        require_normalized_length("x" * 11, 30, normalize, max_chars=100, name="it")


def prepare_text(folder: Path, tokenizer: Path) -> list[str]:
    (folder / "text").mkdir()
    (folder / "text/a.txt").write_text("a" * 300_000)
    stated = [
        f"--tokenizer.path={tokenizer}",
        "--tokenizer.kind=huggingface",
        f"--data.cache_dir={folder / 'cache'}",
    ]
    return [*stated, f"--data.corpus={folder / 'text'}", "--model.vocab_size=2048"]


def test_preparing_and_starting_name_a_tokenizer_whose_texts_explode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = prepare_text(tmp_path, folder_with(tmp_path / "model", replace_by(PAGE)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert prepare_command.main(["--output", str(tmp_path / "made"), *options]) == 78
    problem = f'a.txt: tokenizer.path = "{tmp_path}/model": its normalizer makes more than 33,554,432 characters of the first'
    assert problem in capsys.readouterr().err
    with pytest.raises(
        DataError, match="its normalizer makes more than 33,554,432 characters of the first"
    ):
        prepare_datasets(load(options))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10


def test_what_a_model_may_do_is_read(tmp_path: Path) -> None:
    steps = [
        replace_by('"', pattern="``"),
        *({"type": each} for each in ("NFKD", "StripAccents", "Lowercase")),
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
    ]
    tokenizer = load_huggingface_tokenizer(folder_with(tmp_path, *steps))
    assert tokenizer.encode("A``b  c").tolist() == tokenizer.encode('a"b c').tolist()


def test_a_sentencepiece_model_is_bounded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["a text \ufdfa and more of it"] * 50
    path = train_sentencepiece(
        tmp_path / "a.model", lines, vocab_size=300, normalization_rule_name="nmt_nfkc"
    )
    tokenizer = sentencepiece_tokenizer.SentencePieceTokenizer(path.read_bytes())
    assert len(tokenizer.encode("\ufdfa" * 20)) > 0
    monkeypatch.setattr(sentencepiece_tokenizer, "MAX_CHARS", 30)
    tokenizer.encode("x" * 25)
    with pytest.raises(
        EncodingError,
        match="the sentencepiece model: its normalizer makes more than 60 characters",
    ):
        tokenizer.encode("\ufdfa" * 20)
