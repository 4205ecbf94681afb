"""Exported tokenizers: transformers gives the ids of training and decodes them to the same
text.
"""

from __future__ import annotations

import base64
import json
import re
import sysconfig
import warnings
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.sentencepiece_model import train_sentencepiece
from trainer.config.data import TokenizerSection
from trainer.data.hf_tokenizer import META_TOKENIZER_PATH, detect_tokenizer, hf_tokenizer_files
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError

ODD = (
    "  two  spaces\t\ttabs\r\n\n\n naïve ﬁ 中文字符 🙂🙂 e\u0301 I'LL we've 1234567 a_b.c=='d'\u00a0\u2003x\n"
    "        indented\n \n</ s> ▁ end  "
)


def corpus(size: int) -> str:
    """Sources of the standard library, and unusual characters."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = (path.read_text("utf-8", "ignore") for path in sorted(folder.glob("[a-f]*.py")))
    return (ODD + "".join(files))[:size]


TEXT = corpus(300_000)


def trained_ranks(text: str, merges: int) -> list[bytes]:
    """Tokens of a byte pair encoding trained on words."""
    words = Counter(re.findall(r" ?\w+| ?[^\w\s]+|\s+", text))
    split = {word: [bytes([byte]) for byte in word.encode()] for word in words}
    tokens = [bytes([byte]) for byte in range(256)]
    for _ in range(merges):
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, parts in split.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        (left, right), _ = pairs.most_common(1)[0]
        tokens.append(left + right)
        for word, parts in split.items():
            if left in parts:
                split[word] = merge_pair(parts, left, right)
    return tokens


def merge_pair(parts: list[bytes], left: bytes, right: bytes) -> list[bytes]:
    out: list[bytes] = []
    for part in parts:
        if out and part == right and out[-1] == left:
            out[-1] = left + right
        else:
            out.append(part)
    return out


def tiktoken_file(folder: Path) -> Path:
    path = folder / "bpe"
    # The last token is not a merge of two tokens: only the whole word encodes to it.
    tokens = [*trained_ranks(TEXT[:30_000], 250), b" indented"]
    path.write_bytes(
        b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    )
    return path


def sentencepiece_file(folder: Path, *, dummy_prefix: bool) -> Path:
    """A model with the recommended options, or with a dummy prefix as Llama 2's."""
    return train_sentencepiece(
        folder / "sp",
        islice((line for line in TEXT.split("\n") if line), 3000),
        vocab_size=500,
        add_dummy_prefix=dummy_prefix,
        user_defined_symbols=[] if dummy_prefix else ["\n"],
        split_digits=False,
        split_by_whitespace=True,
    )


def export_tokenizer(kind: str, folder: Path) -> tuple[Tokenizer, Path]:
    """Our tokenizer and the folder with its exported files."""
    path = None
    if kind == "tiktoken":
        path = tiktoken_file(folder)
    elif kind != "byte":
        path = sentencepiece_file(folder, dummy_prefix=kind != "sentencepiece")
    stated = {"kind": "sentencepiece" if "sentence" in kind else kind, "path": path}
    stated |= {"pattern": "llama3"} if kind == "tiktoken" else {}
    tokenizer, files = hf_tokenizer_files(TokenizerSection.model_validate(stated), max_length=64)
    for name, content in {**files, Path("config.json"): b'{"model_type": "llama"}'}.items():
        (folder / "hf" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "hf" / name).write_bytes(content)
    return tokenizer, folder / "hf"


def load_with_transformers(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        # From the sentencepiece and protobuf bindings.
        warnings.simplefilter("ignore", DeprecationWarning)
        return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "kind", ["byte", "tiktoken", "sentencepiece", "sentencepiece with dummy prefix"]
)
def test_transformers_gives_the_ids_of_training_and_decodes_them(
    kind: str, tmp_path: Path
) -> None:
    ours, folder = export_tokenizer(kind, tmp_path)
    hf_tokenizer = load_with_transformers(folder)
    assert hf_tokenizer.is_fast
    text = TEXT.lstrip() if "prefix" in kind else TEXT  # transformers 5 adds no second space.
    expected = ours.encode(text).tolist()
    actual = hf_tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    assert len(expected) < len(text) * 1.1
    assert actual == expected
    assert hf_tokenizer.decode(actual) == ours.decode(expected)
    assert ours.decode(expected) == text.replace("▁", " ") if "sentence" in kind else text
    assert (hf_tokenizer.bos_token_id, hf_tokenizer.eos_token_id) == (ours.bos, ours.eos)
    assert hf_tokenizer("a b")["input_ids"] == [ours.bos, *ours.encode("a b").tolist()]
    assert len(hf_tokenizer) == ours.vocab_size
    assert hf_tokenizer.model_max_length == 64
    assert hf_tokenizer("a").keys() == {"input_ids", "attention_mask"}


@pytest.mark.parametrize(
    ("kind", "detected", "name"),
    [
        ("byte", "byte", None),
        ("tiktoken", "huggingface", ""),
        ("sentencepiece", "sentencepiece", "tokenizer.model"),
    ],
)
def test_an_exported_tokenizer_is_detected(
    kind: str, detected: str, name: str | None, tmp_path: Path
) -> None:
    ours, folder = export_tokenizer(kind, tmp_path)
    actual = detect_tokenizer(folder)
    assert actual == (detected, None if name is None else folder / name)
    stated = TokenizerSection.model_validate(dict(zip(("kind", "path"), actual, strict=True)))
    reloaded, files = hf_tokenizer_files(stated, max_length=64)
    assert reloaded.encode(TEXT).tolist() == ours.encode(TEXT).tolist()
    assert (reloaded.bos, reloaded.eos, reloaded.vocab_size) == (
        ours.bos,
        ours.eos,
        ours.vocab_size,
    )
    assert {name: (folder / name).read_bytes() for name in files} == files


def test_metas_file_is_detected_where_there_is_no_tokenizer_json(tmp_path: Path) -> None:
    ours, folder = export_tokenizer("tiktoken", tmp_path)
    (folder / "tokenizer.json").unlink()
    actual = detect_tokenizer(folder)
    assert actual == ("tiktoken", folder / META_TOKENIZER_PATH)
    stated = TokenizerSection(kind="tiktoken", path=actual[1], pattern="llama3")
    assert hf_tokenizer_files(stated, max_length=64)[0].fingerprint == ours.fingerprint


STATED = {"kind": "tiktoken", "special_tokens": ("<first>", "<end>"), "eos": "<end>"}


@pytest.mark.parametrize("pattern", ["qwen2", "gpt2", r"\p{L}+|[^\p{L}]+"])
def test_stated_ranks_are_exported_as_they_are_read(pattern: str, tmp_path: Path) -> None:
    stated = TokenizerSection.model_validate(
        STATED | {"path": tiktoken_file(tmp_path), "pattern": pattern}
    )
    ours, files = hf_tokenizer_files(stated, max_length=64)
    for name, content in files.items():
        (tmp_path / "hf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hf" / name).write_bytes(content)
    theirs = load_with_transformers(tmp_path / "hf")
    text = TEXT[:20_000]
    assert theirs(text, verbose=False)["input_ids"] == ours.encode(text).tolist()
    assert (theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (
        None,
        ours.eos,
        ours.vocab_size,
    )


def test_a_pattern_that_is_read_otherwise_is_not_exported(tmp_path: Path) -> None:
    """In Hugging Face's library every line begins as a text does."""
    values = {"path": tiktoken_file(tmp_path), "pattern": r"^\p{L}+|[\s\S]"}
    with pytest.raises(
        DataError, match="splits texts otherwise in Hugging Face's library than in tiktoken"
    ):
        hf_tokenizer_files(TokenizerSection.model_validate(STATED | values), max_length=64)


@pytest.mark.parametrize("content", ["", "[", "{}", '{"model": {"vocab": {}}}', "[" * 100_000])
def test_a_damaged_tokenizer_json_is_not_passed_over(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert detect_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text(content)
    assert detect_tokenizer(tmp_path) == ("huggingface", tmp_path)


def test_the_byte_tokenizer_json_has_only_bytes_and_special_tokens(tmp_path: Path) -> None:
    _, folder = export_tokenizer("byte", tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    assert (len(content["model"]["vocab"]), content["model"]["merges"]) == (256, [])
    assert [token["id"] for token in content["added_tokens"]] == list(range(256, 264))
