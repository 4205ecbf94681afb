import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sentencepiece_model import train_sentencepiece
from trainer.config.data import TokenizerSection
from trainer.data import tiktoken_tokenizer
from trainer.data.text_chunks import EncodingError, encode_parts
from trainer.data.tokenizer import Tokenizer, load_tokenizer, open_tokenizer
from trainer.errors import DataError
from trainer.evaluation.needle import PasskeySentences

TEXT = "def f(x):\n    return 'naïve 中文 🙂' + x  # <|end_of_text|>\n\n\tdone \n"
MERGES = [b"  ", b"    ", b"        ", b"aa", b"aaaa", b"re", b"ret", b"de", b"def", b"\n\n"]


@pytest.fixture(scope="module")
def tiktoken_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiktoken") / "tokenizer.model"
    tokens = [bytes([byte]) for byte in range(256)] + MERGES
    path.write_bytes(
        b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    )
    return path


@pytest.fixture(scope="module", params=["newline", "llama2"])
def sentencepiece_file(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """A model with a line break piece, and one that prepends a space to every text, as Llama 2's
    does.
    """
    has_newline_piece = request.param == "newline"
    return train_sentencepiece(
        tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model",
        [line for line in Path(__file__).read_text().splitlines() if line] * 2,
        vocab_size=400,
        add_dummy_prefix=not has_newline_piece,
        user_defined_symbols=["\n"] if has_newline_piece else [],
        split_digits=False,
        split_by_whitespace=True,
    )


def open_ranks(path: Path, pattern: str = "llama3", **keys: Any) -> Tokenizer:
    return open_tokenizer(TokenizerSection(kind="tiktoken", path=path, pattern=pattern, **keys))


def round_trip(tokenizer: Tokenizer, text: str) -> str:
    ids = tokenizer.encode(text)
    assert int(ids.max()) < tokenizer.vocab_size
    assert tokenizer.eos not in ids.tolist()
    assert tokenizer.bos not in ids.tolist()
    return tokenizer.decode(ids.tolist())


def test_byte_ids_are_bytes_and_eight_special_tokens_follow() -> None:
    tokenizer = load_tokenizer("byte", None)
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.vocab_size == 264
    assert 256 <= tokenizer.eos < 264
    assert round_trip(tokenizer, TEXT) == TEXT


def test_a_tiktoken_file_gives_its_ranks_and_the_special_tokens_of_llama_3(
    tiktoken_file: Path,
) -> None:
    tokenizer = open_ranks(tiktoken_file)
    ranks = 256 + len(MERGES)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos) == (ranks + 256, ranks, ranks + 1)
    assert tokenizer.encode("def aa").tolist() == [
        256 + MERGES.index(b"def"),
        32,
        256 + MERGES.index(b"aa"),
    ]
    assert tokenizer.decode([ranks, ranks + 1]) == "<|begin_of_text|><|end_of_text|>"
    assert round_trip(tokenizer, TEXT) == TEXT


def test_a_sentencepiece_model_round_trips_line_breaks_and_runs_of_spaces(
    sentencepiece_file: Path,
) -> None:
    tokenizer = load_tokenizer("sentencepiece", sentencepiece_file)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos) == (400, 1, 2)
    assert round_trip(tokenizer, TEXT) == TEXT


def test_a_model_trained_with_the_recommended_options_is_lossless(tmp_path: Path) -> None:
    lines = Path(__file__).read_text().splitlines()
    tokenizer = load_tokenizer(
        "sentencepiece", train_sentencepiece(tmp_path / "my.model", lines, vocab_size=400)
    )
    for text in (TEXT, "  \n\n \n   x\t\n", "a" * 50_000, "", "\r\n\r", "</s><unk>\n<s>"):
        assert tokenizer.decode(tokenizer.encode(text).tolist()) == text
    assert len({*tokenizer.encode("12345").tolist()}) == 5, "every digit is a token"


def test_encoding_line_by_line_changes_no_sentencepiece_id(sentencepiece_file: Path) -> None:
    import sentencepiece

    text = Path(__file__).read_text()
    whole = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file)).encode(text)
    assert load_tokenizer("sentencepiece", sentencepiece_file).encode(text).tolist() == whole


@pytest.mark.parametrize(
    "character", [" ", *(pytest.param(each, marks=pytest.mark.slow) for each in ("a", "\n", "中"))]
)
def test_a_million_equal_characters_round_trip(character: str, tiktoken_file: Path) -> None:
    text = "x" + character * 1_000_000 + "y"
    tokenizer = open_ranks(tiktoken_file)
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def test_a_panic_raises_with_its_offset_and_an_interrupt_propagates() -> None:
    class Panic(BaseException):
        """Like pyo3's PanicException, not an Exception."""

    def encode(chunk: str) -> list[int]:
        if "!" in chunk:
            raise Panic("stack overflow")
        if "^C" in chunk:
            raise KeyboardInterrupt
        return [0]

    with pytest.raises(EncodingError, match="failed within 2 characters at 10: stack overflow"):
        [*encode_parts(["some text\n", "!\n"], encode)]
    with pytest.raises(KeyboardInterrupt):
        [*encode_parts(["^C"], encode)]


def test_fingerprints_depend_on_the_content_not_on_the_path(
    tiktoken_file: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.model"
    other = tmp_path / "other.model"
    copy.write_bytes(tiktoken_file.read_bytes())
    other.write_bytes(b"".join(tiktoken_file.read_bytes().splitlines(keepends=True)[:-1]))
    fingerprint = open_ranks(tiktoken_file).fingerprint
    assert open_ranks(copy).fingerprint == fingerprint
    assert open_ranks(other).fingerprint != fingerprint


def test_ranks_that_are_not_llama_3s_must_state_how_they_are_read(
    tiktoken_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = r"is not Llama 3's file of ranks, .*: set tokenizer.pattern to gpt2, llama3, qwen2, o200k or a regular"
    with pytest.raises(DataError, match=expected):
        load_tokenizer("tiktoken", tiktoken_file)
    # As many ranks as Llama 3's, but others.
    longer = tmp_path / "longer"
    tokens = [
        *(bytes([byte]) for byte in range(256)),
        *(b"%06d" % number for number in range(128_000 - 256)),
    ]
    longer.write_bytes(
        b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    )
    with pytest.raises(DataError, match=expected):
        load_tokenizer("tiktoken", longer)
    monkeypatch.setattr(
        tiktoken_tokenizer, "LLAMA3_SHA256", hashlib.sha256(tiktoken_file.read_bytes()).hexdigest()
    )
    assert (
        load_tokenizer("tiktoken", tiktoken_file).fingerprint
        == open_ranks(tiktoken_file).fingerprint
    )


def test_stated_special_tokens_follow_the_ranks(tiktoken_file: Path) -> None:
    ranks = 256 + len(MERGES)
    names = ("<start>", "<end>", "<call>")
    tokenizer = open_ranks(tiktoken_file, "qwen2", special_tokens=names, eos="<end>")
    assert tokenizer.special_tokens == {"<start>": ranks, "<end>": ranks + 1, "<call>": ranks + 2}
    assert (tokenizer.bos, tokenizer.eos, tokenizer.vocab_size) == (None, ranks + 1, ranks + 3)
    assert len(tokenizer.encode("1234")) == 4
    assert tokenizer.decode(tokenizer.encode("<end>").tolist()) == "<end>"
    others = (
        open_ranks(tiktoken_file, "llama3", special_tokens=names, eos="<end>"),
        open_ranks(tiktoken_file, "qwen2", special_tokens=names, eos="<call>"),
        open_ranks(tiktoken_file, "qwen2", special_tokens=names, eos="<end>", bos="<start>"),
        open_ranks(tiktoken_file, "qwen2", special_tokens=names[:2], eos="<end>"),
    )
    assert len({tokenizer.fingerprint, *(each.fingerprint for each in others)}) == 5


def test_the_fingerprint_of_llama_3s_parts_is_that_of_earlier_releases(
    tiktoken_file: Path,
) -> None:
    assert open_ranks(tiktoken_file).fingerprint == "tiktoken-a6ba37b5538d521250394a76f552f63d"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pattern": "gpt2"}, "tokenizer.eos must name the special token that ends documents"),
        (
            {"pattern": "gpt2", "eos": "<e>"},
            'tokenizer.eos = "<e>" must be one of tokenizer.special_tokens',
        ),
        (
            {"special_tokens": ("<e>", "<e>"), "eos": "<e>"},
            "tokenizer.special_tokens names a token twice",
        ),
        (
            {"bos": "<b>"},
            r'tokenizer.bos = "<b>" must be one of tokenizer.special_tokens: <\|begin_of_text',
        ),
        (
            {"pattern": "(", "special_tokens": ("<e>",), "eos": "<e>"},
            r'tokenizer.pattern = "\(" is not a pattern',
        ),
        (
            {"pattern": "cl100k_base", "special_tokens": ("<e>",), "eos": "<e>"},
            'tokenizer.pattern = "cl100k_base" is none of gpt2, llama3, qwen2, o200k, and as a regular expression',
        ),
        (
            {"pattern": r"\w+", "special_tokens": ("<e>",), "eos": "<e>"},
            r"loses what it does not match, such as ' ' in 'The quick bro'",
        ),
        (
            {"pattern": ".", "special_tokens": ("<e>",), "eos": "<e>"},
            r"such as '\\n' in ' a/b//c !\\n/ ",
        ),
        ({"pattern": "a*", "special_tokens": ("<e>",), "eos": "<e>"}, "does not split texts"),
    ],
)
def test_what_is_stated_wrongly_is_named(
    keys: dict[str, Any], message: str, tiktoken_file: Path
) -> None:
    with pytest.raises(DataError, match=message):
        open_ranks(tiktoken_file, **keys)


def test_a_sentencepiece_model_given_as_tiktoken_is_detected(sentencepiece_file: Path) -> None:
    with pytest.raises(
        DataError,
        match=r'tokenizer.kind = "tiktoken" needs a tiktoken.* looks like a sentencepiece',
    ):
        load_tokenizer("tiktoken", sentencepiece_file)


def test_a_tiktoken_file_given_as_sentencepiece_is_detected(tiktoken_file: Path) -> None:
    with pytest.raises(
        DataError,
        match=r'tokenizer.kind = "sentencepiece" needs .* looks like a tiktoken BPE file',
    ):
        load_tokenizer("sentencepiece", tiktoken_file)


@pytest.mark.parametrize("kind", ["tiktoken", "sentencepiece"])
@pytest.mark.parametrize(
    ("content", "file_type"),
    [
        (b"", "an empty file"),
        (b"\x93\x00\xff\x81" * 200, "binary data"),
        (b'{"model": {}}', "JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
        (b"<!DOCTYPE html><html></html>", "a web page"),
        (b"\x1f\x8b\x08\x00", "a compressed file"),
        (b"\n\n\n\nhello world\n", "plain text"),
    ],
)
def test_the_error_for_a_wrong_file_names_its_type(
    kind: str, content: bytes, file_type: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(
        DataError, match=rf'tokenizer.path = ".*tokenizer.model" looks like {file_type}'
    ):
        load_tokenizer(kind, path)


@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_a_truncated_sentencepiece_model_raises(
    keep: float, sentencepiece_file: Path, tmp_path: Path
) -> None:
    content = sentencepiece_file.read_bytes()
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(DataError, match="damaged"):
        load_tokenizer("sentencepiece", path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda lines: lines[:100],
            "156 of the 256 single bytes have no rank, for example byte 100",
        ),
        (lambda lines: [*lines, b"half a line"], 'line 267 is not "base64 rank"'),
        (lambda lines: [*lines, lines[-1]], "line 267 repeats a token or breaks the order"),
        (lambda lines: [*lines, b"!!!! 266"], 'line 267 is not "base64 rank"'),
    ],
)
def test_a_damaged_tiktoken_file_names_the_line(
    damage: Callable[[list[bytes]], list[bytes]], message: str, tiktoken_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"\n".join(damage(tiktoken_file.read_bytes().splitlines())))
    with pytest.raises(DataError, match=message):
        load_tokenizer("tiktoken", path)


def test_a_missing_file_raises(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r'tokenizer.path = ".*none.model" cannot be read: No such file'
    ):
        load_tokenizer("tiktoken", tmp_path / "none.model")


def test_a_passkey_has_the_same_tokens_in_the_haystack_and_the_question(
    tiktoken_file: Path, sentencepiece_file: Path
) -> None:
    others = (load_tokenizer("byte", None), load_tokenizer("sentencepiece", sentencepiece_file))
    for tokenizer in (open_ranks(tiktoken_file), *others):
        for trial in range(3):
            question, hidden, number = PasskeySentences(tokenizer).passkey(trial)
            assert hidden[: len(question) + len(number)] == [*question, *number]
            digits = tokenizer.decode(number).strip()
            assert len(digits) == 5
            assert digits.isdigit()
            assert "The secret number is" in tokenizer.decode(hidden)
            assert max(hidden) < tokenizer.vocab_size
