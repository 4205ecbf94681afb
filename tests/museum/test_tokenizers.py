"""Tokenizers of released models, from packages: our loader gives the ids of each one's own
library.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.museum.packages import FOLDER_ENV, SHIPPED
from trainer.data.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.slow

TEXTS = {
    "empty": "",
    "words": "The quick brown fox doesn't jump, it'll WAIT: 3.14159, 12345678 and x_1.",
    "space first": " a space, and  two ,   three\t\ttabs",
    "lines": "one\ntwo\r\n\r\n\n  three\n\n\n\tfour \n",
    "code": "def f(x):\n    return {'a': [x, 2]}  # done\n\n\nclass A:\n\tpass\n",
    "languages": "naïve Ünï ﬁ 中文字符 日本語 한국어 العربية हिन्दी ไทย עברית ελληνικά",
    "marks": "e\u0301 🙂👩‍🔬🏳️‍🌈 \u00a0\u2003x ▁ \u200d \ufeff ... “quoted”",
    "numbers": "1 22 333 4444 55555 1,000,000 0.0001 1e-9 २०२६ ⅷ",
    "repeated": "a" * 300 + " " * 300 + "=" * 300 + "\n" * 50,
    "Chinese": "长文本没有空格" * 300,
    "library": Path(sysconfig.get_path("stdlib"), "argparse.py").read_text()[:60_000],
}
TRANSFORMERS_5_DIFFERS = {"Llama 2": {"space first"}}
"""transformers 5 puts no space before a text that begins with one; 4 and the library do."""


def folder_of(name: str) -> Path:
    folder = Path(os.environ.get(FOLDER_ENV, "")) / name
    if FOLDER_ENV not in os.environ or not folder.is_dir():
        requirement = SHIPPED[name].requirement
        pytest.skip(
            f"{requirement} is not in ${FOLDER_ENV}: python -m tests.museum.packages FOLDER downloads it"
        )
    return folder


def ours(name: str, folder: Path) -> Tokenizer:
    shipped = SHIPPED[name]
    return load_tokenizer(
        shipped.kind,
        folder if shipped.kind == "huggingface" else folder / Path(shipped.files[0]).name,
    )


def library(name: str, folder: Path) -> Callable[[str], list[int]]:
    """Ids of the library that the file is written for, of the whole text in one call."""
    file = folder / Path(SHIPPED[name].files[0]).name
    if SHIPPED[name].kind == "huggingface":
        from tokenizers import Tokenizer as HuggingFace

        built = HuggingFace.from_file(str(file))
        return lambda text: list(built.encode(text, add_special_tokens=False).ids)
    if SHIPPED[name].kind == "tiktoken":
        import tiktoken
        from tiktoken.load import load_tiktoken_bpe

        source = (folder / "tokenizer.py").read_text()
        (pattern,) = re.findall(r'pat_str = r"(.+)"', source)
        encoding = tiktoken.Encoding(
            "own", pat_str=pattern, mergeable_ranks=load_tiktoken_bpe(str(file)), special_tokens={}
        )
        return encoding.encode_ordinary
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(file))
    return lambda text: list(model.encode(text))


@pytest.mark.parametrize("name", SHIPPED)
def test_ids_are_those_of_the_library(name: str) -> None:
    folder = folder_of(name)
    tokenizer = ours(name, folder)
    encode = library(name, folder)
    different = [
        title for title, text in TEXTS.items() if tokenizer.encode(text).tolist() != encode(text)
    ]
    assert different == []
    assert tokenizer.eos < tokenizer.vocab_size


@pytest.mark.parametrize(
    "name", [name for name, shipped in SHIPPED.items() if shipped.kind == "huggingface"]
)
def test_ids_are_those_of_transformers(name: str) -> None:
    folder = folder_of(name)
    transformers: Any = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = ours(name, folder)
    different = {
        title
        for title, text in TEXTS.items()
        if tokenizer.encode(text).tolist() != theirs.encode(text, add_special_tokens=False)
    }
    known = (
        TRANSFORMERS_5_DIFFERS.get(name, set())
        if transformers.__version__.startswith("5.")
        else set()
    )
    assert different == known
