"""Tokenizers as transformers reads them: the ids of training, and the text back."""

from __future__ import annotations

import base64
import io
import json
import re
import sysconfig
import warnings
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from trainer.data.tokenizer import Tokenizer
from trainer.export.hf_tokenizer import META_TOKENIZER_PATH, detect_tokenizer, hf_tokenizer_files

ODD = (
    "  two  spaces\t\ttabs\r\n\n\n naïve ﬁ 中文字符 🙂🙂 e\u0301 I'LL we've 1234567 a_b.c=='d'\u00a0\u2003x\n"
    "        indented\n \n</ s> ▁ end  "
)


def corpus(size: int) -> str:
    """Sources of the interpreter's library, and what is odd."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = (path.read_text("utf-8", "ignore") for path in sorted(folder.glob("[a-f]*.py")))
    return (ODD + "".join(files))[:size]


TEXT = corpus(300_000)


def trained_ranks(text: str, merges: int) -> list[bytes]:
    """Byte pairs as tiktoken's learner finds them, within words."""
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
                split[word] = joined(parts, left, right)
    return tokens


def joined(parts: list[bytes], left: bytes, right: bytes) -> list[bytes]:
    out: list[bytes] = []
    for part in parts:
        if out and part == right and out[-1] == left:
            out[-1] = left + right
        else:
            out.append(part)
    return out


def tiktoken_file(folder: Path) -> Path:
    path = folder / "bpe"
    # The last is a token of no other two, which only a word as a whole becomes.
    tokens = [*trained_ranks(TEXT[:30_000], 250), b" indented"]
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)))
    return path


def sentencepiece_file(folder: Path, *, house: bool) -> Path:
    """As it is trained here, or, as Llama 2's, with a space before every text."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=islice((line for line in TEXT.split("\n") if line), 3000),
        model_writer=model,
        vocab_size=500,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        add_dummy_prefix=not house,
        user_defined_symbols=["\n"] if house else [],
        num_threads=1,
        minloglevel=2,
    )
    path = folder / "sp"
    path.write_bytes(model.getvalue())
    return path


def made(kind: str, folder: Path) -> tuple[Tokenizer, Path]:
    """Our tokenizer, and the folder of its files."""
    path = None
    if kind == "tiktoken":
        path = tiktoken_file(folder)
    elif kind != "byte":
        path = sentencepiece_file(folder, house=kind == "sentencepiece")
    tokenizer, files = hf_tokenizer_files("sentencepiece" if "sentence" in kind else kind, path, max_length=64)
    for name, content in {**files, Path("config.json"): b'{"model_type": "llama"}'}.items():
        (folder / "hf" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "hf" / name).write_bytes(content)
    return tokenizer, folder / "hf"


def theirs(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        # Of the bindings of sentencepiece and protobuf.
        warnings.simplefilter("ignore", DeprecationWarning)
        return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["byte", "tiktoken", "sentencepiece", "sentencepiece with a space before"])
def test_transformers_gives_the_ids_of_training_and_the_text_back(kind: str, tmp_path: Path) -> None:
    ours, folder = made(kind, tmp_path)
    there = theirs(folder)
    assert there.is_fast
    text = TEXT.lstrip() if "before" in kind else TEXT  # transformers 5 puts no space before another.
    expected = ours.encode(text).tolist()
    found = there(text, add_special_tokens=False, verbose=False)["input_ids"]
    assert len(expected) < len(text) * 1.1
    assert found == expected
    assert there.decode(found) == ours.decode(expected)
    assert ours.decode(expected) == text.replace("▁", " ") if "sentence" in kind else text
    assert (there.bos_token_id, there.eos_token_id) == (ours.bos, ours.eos)
    assert there("a b")["input_ids"] == [ours.bos, *ours.encode("a b").tolist()]
    assert len(there) == ours.vocab_size
    assert there.model_max_length == 64
    assert there("a").keys() == {"input_ids", "attention_mask"}


@pytest.mark.parametrize(
    ("kind", "name"), [("byte", None), ("tiktoken", META_TOKENIZER_PATH), ("sentencepiece", "tokenizer.model")]
)
def test_what_is_written_is_known_again(kind: str, name: str | Path | None, tmp_path: Path) -> None:
    ours, folder = made(kind, tmp_path)
    found = detect_tokenizer(folder)
    assert found == (kind, None if name is None else folder / name)
    again, _ = hf_tokenizer_files(*found, max_length=64)
    assert again.fingerprint == ours.fingerprint


@pytest.mark.parametrize("content", ["", "[", "{}", '{"model": {"vocab": {}}}', "[" * 100_000])
def test_another_tokenizer_is_none_of_ours(content: str, tmp_path: Path) -> None:
    assert detect_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "tokenizer.model").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert detect_tokenizer(tmp_path) is None


def test_a_tokenizer_json_holds_no_more_than_bytes_and_special_tokens(tmp_path: Path) -> None:
    _, folder = made("byte", tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    assert (len(content["model"]["vocab"]), content["model"]["merges"]) == (256, [])
    assert [token["id"] for token in content["added_tokens"]] == list(range(256, 264))
