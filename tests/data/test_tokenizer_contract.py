"""The ids of any document are those of one call of its library, however it comes and wherever it
is cut; or it is refused.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken

from tests.data.documents import CHINESE, TEXTS, in_blocks, text_of
from tests.huggingface_folders import FAMILIES, write_family
from tests.sentencepiece_model import train_sentencepiece
from trainer.config.data import TokenizerSection
from trainer.config.source import CorpusSpec, Documents
from trainer.data import (
    byte_level_bpe,
    huggingface_tokenizer,
    sentencepiece_tokenizer,
    tiktoken_tokenizer,
)
from trainer.data import prepare as prepare_module
from trainer.data.byte_level_bpe import NAMED_PATTERNS
from trainer.data.corpus import Corpus
from trainer.data.prepare import cache_key, prepare
from trainer.data.text_chunks import EncodingError, cut_nowhere, find_cut, split_text
from trainer.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, open_tokenizer
from trainer.errors import DataError

MODULES = (sentencepiece_tokenizer, tiktoken_tokenizer, huggingface_tokenizer)


def ids_of(tokenizer: Tokenizer, text: str, longest_block: int) -> list[int]:
    return [
        token
        for ids in tokenizer.encode_blocks(in_blocks(text, longest_block))
        for token in ids.tolist()
    ]


def require_one_call(
    tokenizer: Tokenizer, one_call: Callable[[str], list[int]], size: int, names: Any = TEXTS
) -> None:
    for name in names:
        text = text_of(name, size)
        assert ids_of(tokenizer, text, max(30, size // 4)) == one_call(text), name


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        monkeypatch.setattr(module, "PART_CHARS", 7)
    monkeypatch.setattr(huggingface_tokenizer, "TOKEN_CUTS_PART_CHARS", 7)
    monkeypatch.setattr(huggingface_tokenizer, "MIN_TIKTOKEN_CHARS", 1)


def places(tokenizer: Any, text: str) -> int:
    return sum(tokenizer.may_cut(text[at - 1 : at + 1]) for at in range(1, len(text)))


# ---- sentencepiece

GRID = {
    "model_type": ("bpe", "unigram"),
    "normalization_rule_name": ("identity", "nmt_nfkc", "nfkc_cf"),
    "add_dummy_prefix": (True, False),
    "remove_extra_whitespaces": (False, True),
    "byte_fallback": (True, False),
    "user_defined_symbols": ([], ["\n"], ["\n", "\n\n", "▁▁", "step done", "a\nb"]),
    "treat_whitespace_as_suffix": (False, True),
    "split_by_whitespace": (True, False),
}
MODELS = [dict(zip(GRID, values, strict=True)) for values in product(*GRID.values())]
IDENTITY_BPE = {"model_type": "bpe", "normalization_rule_name": "identity"}
LLAMA2: dict[str, Any] = {
    "add_dummy_prefix": True,
    "user_defined_symbols": [],
    "split_by_whitespace": True,
}


def drawn_models(count: int) -> list[dict[str, Any]]:
    """Half of them with proved cuts, which one in twenty-four of the grid has, and those that lack
    one condition for it.
    """
    draw = random.Random(44)
    proved = [options for options in MODELS if has_proved_cuts(options)]
    lacking: list[dict[str, Any]] = [
        {"model_type": "unigram"},
        {"normalization_rule_name": "nmt_nfkc"},
        {"remove_extra_whitespaces": True},
        {"treat_whitespace_as_suffix": True},
    ]
    nearly = [options | each for options, each in zip(proved, lacking, strict=False)]
    return (
        nearly
        + draw.sample(proved, min(count // 2, len(proved)))
        + draw.sample(MODELS, count - count // 2)
    )


def described(options: dict[str, Any]) -> str:
    flags = [name for name, value in options.items() if value is True]
    symbols = [f"{len(options['user_defined_symbols'])} symbols"]
    return ", ".join([options["model_type"], options["normalization_rule_name"], *flags, *symbols])


def has_proved_cuts(options: dict[str, Any]) -> bool:
    is_free = not options["remove_extra_whitespaces"] and not options["treat_whitespace_as_suffix"]
    return is_free and options | IDENTITY_BPE == options


def train(folder: Path, vocab_size: int = 420, **options: Any) -> Path:
    text = "".join(
        text_of(name, 20_000) for name in ("lines", "one_line", "log", "without_spaces")
    )
    # Some characters stay unknown.
    sample = [line[:200] for line in text.split("\n") if line.strip()] + [
        "".join(CHINESE[:20])
    ] * 5
    return train_sentencepiece(
        folder / "tokenizer.model",
        sample,
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=0.98,
        **options,
    )


def check_sentencepiece(path: Path, options: dict[str, Any], size: int) -> None:
    tokenizer = load_tokenizer("sentencepiece", path)
    assert isinstance(tokenizer, sentencepiece_tokenizer.SentencePieceTokenizer)
    assert (tokenizer.may_cut != cut_nowhere) == has_proved_cuts(options)
    if has_proved_cuts(options):
        assert places(tokenizer, text_of("lines", size)) > 10, "the test cuts nothing"
    require_one_call(
        tokenizer, sentencepiece.SentencePieceProcessor(model_file=str(path)).encode, size
    )


@pytest.mark.parametrize("options", drawn_models(20), ids=described)
@pytest.mark.usefixtures("short_parts")
def test_a_sentencepiece_model_gives_the_ids_of_one_call(
    options: dict[str, Any], tmp_path: Path
) -> None:
    check_sentencepiece(train(tmp_path, **options), options, 1500)


@pytest.mark.slow
@pytest.mark.usefixtures("short_parts")
def test_every_sentencepiece_model_of_the_grid_gives_the_ids_of_one_call(tmp_path: Path) -> None:
    for options in drawn_models(160):
        check_sentencepiece(train(tmp_path, **options), options, 2500)


def test_a_sentencepiece_model_that_cannot_be_cut_refuses_a_long_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentencepiece_tokenizer, "MAX_CHARS", 3000)
    monkeypatch.setattr(sentencepiece_tokenizer, "PART_CHARS", 100)
    whole = load_tokenizer("sentencepiece", train(tmp_path, normalization_rule_name="nmt_nfkc"))
    text = text_of("lines", 20_000)
    with pytest.raises(
        EncodingError,
        match=r"has 3,0.. characters or more without a place .* at most 3,000 are encoded",
    ):
        ids_of(whole, text, 100)
    assert ids_of(whole, text[:3000], 100)
    assert ids_of(load_tokenizer("sentencepiece", train(tmp_path, **LLAMA2)), text, 100)


# ---- tiktoken


def write_ranks(folder: Path) -> Path:
    path = folder / "ranks"
    merges = (
        b"  ",
        b"    ",
        b"th",
        b"the",
        b" the",
        b"\n\n",
        b"\r\n",
        b" \n",
        b"/\n",
        b"\n/",
        b"aa",
        b"aaaa",
        b"st",
        b"ep",
        b"step",
        b"e ",
    )
    tokens = [*(bytes([byte]) for byte in range(256)), *merges]
    path.write_bytes(
        b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    )
    return path


def open_pattern(folder: Path, pattern: str) -> tuple[Tokenizer, Callable[[str], list[int]]]:
    stated = TokenizerSection(
        kind="tiktoken",
        path=write_ranks(folder),
        pattern=pattern,
        special_tokens=("<end>",),
        eos="<end>",
    )
    tokenizer = open_tokenizer(stated)
    assert isinstance(tokenizer, tiktoken_tokenizer.TiktokenTokenizer)
    library = tiktoken.Encoding(
        "library",
        pat_str=NAMED_PATTERNS.get(pattern, pattern),
        mergeable_ranks=tokenizer.ranks,
        special_tokens={},
    )
    return tokenizer, library.encode_ordinary


@pytest.mark.parametrize("pattern", [*NAMED_PATTERNS, r"[^\n]+|\n+"])
@pytest.mark.usefixtures("short_parts")
def test_ranks_give_the_ids_of_one_call(pattern: str, tmp_path: Path) -> None:
    tokenizer, one_call = open_pattern(tmp_path, pattern)
    require_one_call(tokenizer, one_call, 4000)
    slashes = (
        "abcde!\n/" * 20
        + "a !\n/ b\n\n/c\n 1\n\n\nd \n\ne\n\u0301f\n²g\n\u0661h \x1f i\x85 j\n" * 20
    )
    assert ids_of(tokenizer, slashes, 30) == one_call(slashes)


def test_whitespace_that_tiktoken_cannot_encode_is_cut_as_llama_3s_tokenizer_cuts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_level_bpe, "MAX_WHITESPACE", 50)
    monkeypatch.setattr(tiktoken_tokenizer, "MAX_WHITESPACE", 50)
    monkeypatch.setattr(tiktoken_tokenizer, "WHITESPACE_PART", 25)
    tokenizer, one_call = open_pattern(tmp_path, "llama3")
    text = "a" * 70 + " " * 60 + "b" + "\n" * 40 + "c"
    expected = (
        one_call("a" * 70 + " " * 25)
        + one_call(" " * 25)
        + one_call(" " * 10 + "b" + "\n" * 40 + "c")
    )
    assert tokenizer.encode(text).tolist() == expected


# ---- Hugging Face


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("short_parts")
def test_a_family_gives_the_ids_of_one_call(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer("huggingface", write_family(tmp_path, name))
    assert isinstance(tokenizer, huggingface_tokenizer.HuggingFaceTokenizer)
    assert (places(tokenizer, text_of("lines", 3000)) > 10) == FAMILIES[name].cuts
    require_one_call(tokenizer, tokenizer._encode_with_library, 3000)
    added = (
        "<think> a</think>\n<tool_call>b <table>  c\n|||IP_ADDRESS||| d<|code|>  \n e<unused0>f  <|code|>\ng"
        * 20
    )
    assert ids_of(tokenizer, added, 30) == tokenizer._encode_with_library(added)


def test_a_tokenizer_json_that_cannot_be_cut_refuses_a_long_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_tokenizer, "PART_CHARS", 100)
    monkeypatch.setattr(huggingface_tokenizer, "MAX_CHARS", 3000)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/short.txt").write_text("short")
    (tmp_path / "corpus/long.jsonl").write_text(
        '{"text": "x"}\n\n{"text": "' + "a b " * 1000 + '"}\n'
    )
    spec = CorpusSpec(corpus=str(tmp_path / "corpus"), cache_dir=tmp_path / "prepared")
    expected = r"long.jsonl:3: a text has 4,000 characters or more without a place .* at most 3,000 are encoded at once"
    with pytest.raises(DataError, match=expected):
        prepare(spec, load_tokenizer("huggingface", write_family(tmp_path / "falcon", "falcon")))
    assert (
        prepare(
            spec, load_tokenizer("huggingface", write_family(tmp_path / "qwen2", "qwen2"))
        ).num_documents
        == 3
    )


# ---- documents


def test_a_document_of_several_files_is_one_text(tmp_path: Path) -> None:
    for name, text in (("a", "  first\n"), ("b", "\n second"), ("c", "\xffbad"), ("d", " last\n")):
        path = tmp_path / "corpus/folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))
    path = train(tmp_path, **LLAMA2)
    tokenizer = load_tokenizer("sentencepiece", path)
    spec = CorpusSpec(
        corpus=str(tmp_path / "corpus"), documents="folder", cache_dir=tmp_path / "prepared"
    )
    dataset = prepare(spec, tokenizer)
    header = "".join(
        f"# folder/{name}\n{text}"
        for name, text in (("a", "  first\n"), ("b", "\n second\n"), ("d", " last\n"))
    )
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert dataset.meta.skipped == 1
    assert dataset.read(0, dataset.num_tokens).tolist() == [1, *library.encode(header), 2]


@pytest.mark.parametrize(
    ("kind", "size", "documents", "suffix", "is_found"),
    [
        ("byte", 500_000, "file", ".txt", True),
        ("tiktoken", 24_000, "file", ".txt", True),
        ("tiktoken", 25_000, "file", ".txt", False),
        ("tiktoken", 10, "folder", ".txt", False),
        ("tiktoken", 10, "file", ".txt.gz", False),
        ("huggingface", 390_000, "file", ".jsonl", True),
        ("huggingface", 400_000, "file", ".txt", False),
        ("sentencepiece", 10, "file", ".txt", False),
    ],
)
def test_prepared_folders_are_found_again_where_their_ids_are_the_same(
    kind: str,
    size: int,
    documents: Documents,
    suffix: str,
    is_found: bool,  # noqa: FBT001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Named(ByteTokenizer):
        fingerprint = f"{kind}-x"

    (tmp_path / f"one{suffix}").write_text("x" * size)
    spec = CorpusSpec(corpus=str(tmp_path), documents=documents, cache_dir=tmp_path / "prepared")
    key = cache_key(Corpus(spec), spec, Named(), 100)
    monkeypatch.setattr(prepare_module, "KEY_VERSION", 2)
    assert (key == cache_key(Corpus(spec), spec, Named(), 100)) == is_found


# ---- parts


def test_parts_are_as_long_as_wanted_or_end_at_the_next_place() -> None:
    def may_cut(pair: str) -> bool:
        return pair == "a|"

    text = "a|bca|" + "x" * 20 + "a|yy" + "a|" * 5
    for longest in (1, 3, 50):
        parts = [*split_text(in_blocks(text, longest), may_cut, part_chars=6, max_chars=30)]
        assert "".join(parts) == text
        assert parts == ["a|bca", "|" + "x" * 20 + "a", "|yya|a", "|a|a|a", "|"] or longest < 50
        assert all(part.startswith("|") for part in parts[1:])
    with pytest.raises(EncodingError, match="a text has 22 characters"):
        [*split_text([text], may_cut, part_chars=6, max_chars=21)]
    assert find_cut(text, may_cut, 1, 3) == 1
    assert find_cut("aaaa", may_cut, 1, 2) is None


@pytest.mark.parametrize("longest", [1, 7, 5000])
def test_bytes_are_bytes_however_they_come(longest: int) -> None:
    for name in TEXTS:
        text = text_of(name, 3000)
        assert ids_of(ByteTokenizer(), text, longest) == [*text.encode()]


# ---- sizes

MB = 1_000_000
LARGE = {
    MB: tuple(TEXTS),
    5 * MB: ("lines", "one_line", "chinese"),
    20 * MB: ("lines", "without_spaces"),
}


def sizes(*kinds: str, of_20_mb: tuple[str, ...]) -> pytest.MarkDecorator:
    """Every kind at 1 and 5 MB; at 20 MB, for which a library takes up to a minute, one kind of
    each library.
    """
    cases = [
        (kind, size) for size in LARGE for kind in kinds if size < 20 * MB or kind in of_20_mb
    ]
    return pytest.mark.parametrize(
        ("kind", "size"), cases, ids=[f"{kind}-{size // MB} MB" for kind, size in cases]
    )


@pytest.mark.slow
@sizes("byte", "llama2", "lossless", "nmt_nfkc", "unigram", of_20_mb=("byte", "llama2"))
def test_large_documents_have_the_ids_of_one_call(kind: str, size: int, tmp_path: Path) -> None:
    if kind == "byte":
        require_one_call(ByteTokenizer(), lambda text: [*text.encode()], size, LARGE[size])
        return
    options: dict[str, dict[str, Any]] = {
        "lossless": {},
        "llama2": LLAMA2,
        "unigram": {"model_type": "unigram"},
    }
    path = train(
        tmp_path,
        **options.get(
            kind, {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}
        ),
    )
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    require_one_call(load_tokenizer("sentencepiece", path), library.encode, size, LARGE[size])


@pytest.mark.slow
@sizes("llama3", "gpt2", of_20_mb=("llama3",))
def test_large_documents_have_the_ids_of_one_call_of_tiktoken(
    kind: str, size: int, tmp_path: Path
) -> None:
    tokenizer, one_call = open_pattern(tmp_path, kind)
    panics = ("spaces",)  # a million of them
    require_one_call(
        tokenizer, one_call, size, [name for name in LARGE[size] if name not in panics]
    )


@pytest.mark.slow
@sizes("llama2", "qwen3", "falcon", of_20_mb=("llama2",))
def test_large_documents_have_the_ids_of_one_call_of_tokenizers(
    kind: str, size: int, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer("huggingface", write_family(tmp_path, kind))
    assert isinstance(tokenizer, huggingface_tokenizer.HuggingFaceTokenizer)
    require_one_call(tokenizer, tokenizer._encode_with_library, size, LARGE[size])
