"""Tokenizers: bytes, a tiktoken BPE file, a sentencepiece model, a Hugging Face folder."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from trainer.config.job_config import BYTE_VOCAB_SIZE
from trainer.errors import DataError

# tiktoken panics on about a million equal whitespace characters; these are the limits of Llama 3's tokenizer.
MAX_CHUNK_CHARS = 400_000
MAX_RUN_CHARS = 25_000

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{n}|>" for n in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
    *(f"<|reserved_special_token_{n}|>" for n in range(5, 251)),
)

TIKTOKEN = "a tiktoken BPE file"
SENTENCEPIECE = "a sentencepiece model"
HUGGING_FACE = "JSON, as Hugging Face's tokenizer.json"
FILE_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (rb"\Z", "an empty file"),
    (rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|\Z)", TIKTOKEN),
    # protobuf: the first piece (field 1) starts with its text (field 1) and its score (field 2, a float).
    (rb"(?s)\n.{1,2}\n.{1,60}\x15", SENTENCEPIECE),
    (rb"version https://git-lfs", "a Git LFS pointer, not the file itself"),
    (rb"\s*<(!DOCTYPE|html)", "a web page"),
    (rb"\s*[{\[]", HUGGING_FACE),
    (rb"(?s)\x1f\x8b|PK\x03\x04|\x28\xb5\x2f\xfd|BZh|\xfd7zXZ", "a compressed file"),
    (rb"[\t\n\r\x20-\x7e]+\Z", "plain text"),
)


class Tokenizer(Protocol):
    """Ids are below `vocab_size`; `encode` adds neither `bos` nor `eos`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos(self) -> int | None: ...
    @property
    def eos(self) -> int: ...
    @property
    def stop_tokens(self) -> frozenset[int]:
        """Ids that end a generated text, `eos` among them."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids that `encode` never returns, by name."""
        ...

    @property
    def fingerprint(self) -> str:
        """Depends on the ids that `encode` returns, not on the path of the file."""

    def encode(self, text: str) -> Tensor:
        """[tokens] of any integer type. The name of a special token in the text is encoded as text."""

    def encode_continuation(self, text: str) -> Tensor:
        """As `encode`, for a text that was split from the one before at a line start."""

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Each UTF-8 byte is a token; 8 special tokens follow the 256."""

    vocab_size = BYTE_VOCAB_SIZE
    bos = 256
    eos = 257
    stop_tokens = frozenset({257})
    special_tokens: Mapping[str, int] = {f"<|reserved_special_token_{n}|>": 258 + n for n in range(6)}
    fingerprint = "byte-264"

    def encode(self, text: str) -> Tensor:
        data = bytearray(text, "utf-8")
        return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

    def encode_continuation(self, text: str) -> Tensor:
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", "replace")


class TiktokenTokenizer:
    """Ranks from lines of `base64 rank`; the split pattern and special tokens of Llama 3."""

    def __init__(self, content: bytes) -> None:
        import tiktoken

        ranks = read_ranks(content)
        self.special_tokens = {name: len(ranks) + index for index, name in enumerate(LLAMA3_SPECIAL_TOKENS)}
        self._encoding = tiktoken.Encoding(
            "llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=self.special_tokens
        )
        self.vocab_size = len(ranks) + len(self.special_tokens)
        self.bos = self.special_tokens["<|begin_of_text|>"]
        self.eos = self.special_tokens["<|end_of_text|>"]
        self.stop_tokens = frozenset({self.eos})
        identity = (LLAMA3_PATTERN, LLAMA3_SPECIAL_TOKENS, sorted(ranks.items(), key=lambda item: item[1]))
        self.fingerprint = "tiktoken-" + sha256_of(identity)

    def encode(self, text: str) -> Tensor:
        return encode_in_chunks(text, self._encoding.encode_ordinary)

    def encode_continuation(self, text: str) -> Tensor:
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode(list(ids))


class SentencePieceTokenizer:
    def __init__(self, content: bytes) -> None:
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_proto=content)
        if model.eos_id() < 0:
            raise DataError("no end-of-sentence piece, which must end every document")
        self._model = model
        self.vocab_size: int = model.get_piece_size()
        self.bos: int | None = model.bos_id() if model.bos_id() >= 0 else None
        self.eos: int = model.eos_id()
        self.stop_tokens = frozenset({self.eos})
        specials = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
        self.special_token_names: dict[str, str] = {
            role: model.id_to_piece(token) for role, token in specials.items() if token >= 0
        }
        self.special_tokens: dict[str, int] = {
            model.id_to_piece(token): token for token in range(self.vocab_size) if model.is_control(token)
        }
        self.add_dummy_prefix: bool = model.encode("a", out_type=str)[0] != "a"
        """Whether the model prepends a space to every text."""
        # The pieces and a probe of the normalization. The file also holds paths of the machine it was trained on.
        pieces = [(model.id_to_piece(n), model.get_score(n), model.is_control(n)) for n in range(self.vocab_size)]
        self.fingerprint = "sentencepiece-" + sha256_of((pieces, model.encode(" a  b\tC\n\n \uff21\u00e9e\u0301 ")))
        # Encoding lines is several times faster, and exact if line breaks end pieces and no prefix is added.
        first, second = "a b\n", "\n  cd"
        self._splits_at_newlines: bool = model.encode(first) + model.encode(second) == model.encode(first + second)

    def encode(self, text: str) -> Tensor:
        return encode_in_chunks(text, self._encode_chunk)

    def encode_continuation(self, text: str) -> Tensor:
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode(list(ids)))

    def _encode_chunk(self, chunk: str) -> list[int]:
        if not self._splits_at_newlines:
            return list(self._model.encode(chunk))
        lines = re.findall(r"[^\n]*\n|[^\n]+", chunk)
        return [token for line in self._model.encode(lines, num_threads=1) for token in line]


def load_tokenizer(kind: str, path: Path | None) -> Tokenizer:
    """The tokenizer of `[tokenizer]`. Raises DataError with the file type that the content suggests."""
    if kind == "byte":
        return ByteTokenizer()
    if kind == "huggingface" and path is not None:
        from trainer.data.huggingface_tokenizer import load_huggingface_tokenizer

        return load_huggingface_tokenizer(path)
    kinds: dict[str, tuple[str, Callable[[bytes], Tokenizer]]] = {
        "tiktoken": (TIKTOKEN, TiktokenTokenizer),
        "sentencepiece": (SENTENCEPIECE, SentencePieceTokenizer),
    }
    if kind not in kinds or path is None:
        raise DataError(f'tokenizer.kind = "{kind}" with tokenizer.path = {path} is not a tokenizer')
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f'tokenizer.path = "{path}" cannot be read: {error.strerror}') from error
    expected, factory = kinds[kind]
    detected = detect_file_type(content)
    if detected != expected:
        raise DataError(
            f'tokenizer.kind = "{kind}" needs {expected}, but tokenizer.path = "{path}" looks like {detected}'
        )
    try:
        return factory(content)
    except (ValueError, RuntimeError, OSError) as error:
        raise DataError(f'tokenizer.path = "{path}" looks like {detected}, but is damaged: {error}') from error


def detect_file_type(content: bytes) -> str:
    """The type that the first bytes suggest."""
    head = content[:512]
    return next(
        (name for pattern, name in FILE_SIGNATURES if re.match(pattern, head)), "binary data of an unknown kind"
    )


def read_ranks(content: bytes) -> dict[bytes, int]:
    """Byte sequences and their ranks. Raises DataError unless ranks count from 0 and include every single byte."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise DataError(f'line {number} is not "base64 rank": {line[:40]!r}') from error
        if int(rank) != number - 1 or len(ranks) != number:
            raise DataError(f"line {number} repeats a token or breaks the order of ranks: {line[:40]!r}")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(f"{len(missing)} of the 256 single bytes have no rank, for example byte {missing[0]}")
    return ranks


def sha256_of(content: object) -> str:
    return hashlib.sha256(repr(content).encode("utf-8", "backslashreplace")).hexdigest()[:32]


def encode_in_chunks(text: str, encode: Callable[[str], list[int]]) -> Tensor:
    """[tokens] int32 of a text of any length. Raises DataError where the tokenizer fails."""
    return encode_chunks(chunk_text(text), encode)


def encode_chunks(chunks: Iterable[str], encode: Callable[[str], list[int]]) -> Tensor:
    """[tokens] int32 of consecutive parts of a text. Raises DataError where the tokenizer fails."""
    ids: list[int] = []
    offset = 0
    for chunk in chunks:
        try:
            ids += encode(chunk)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a Rust panic is not an Exception
            raise DataError(f"the tokenizer failed within {len(chunk)} characters at {offset}: {error}") from error
        offset += len(chunk)
    return torch.tensor(ids, dtype=torch.int32)


def chunk_text(text: str) -> Iterator[str]:
    """Chunks of at most MAX_CHUNK_CHARS, with runs of whitespace or non-whitespace of at most MAX_RUN_CHARS."""
    return chain.from_iterable(map(split_long_runs, split_text(text, MAX_CHUNK_CHARS)))


def split_text(text: str, max_chars: int) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = len(text) if len(text) - start <= max_chars else last_safe_split(text, start, start + max_chars)
        yield text[start:stop]
        start = stop


def last_safe_split(text: str, start: int, stop: int) -> int:
    """The last index in (start, stop] where a line starts with a letter or digit, else with another visible character.

    `stop` if there is none. Splitting where a line starts does not change the tokens.
    """
    # Some tokenizers put line breaks and the punctuation after them into one token.
    found = last_line_start(text, start, stop, str.isalnum) or last_line_start(text, start, stop, is_visible)
    return found or stop


def last_line_start(text: str, start: int, stop: int, is_start: Callable[[str], bool]) -> int | None:
    """The last index in (start, stop] after a line break and before such a character."""
    newline = text.rfind("\n", start, stop)
    while newline >= 0 and (newline + 1 == len(text) or not is_start(text[newline + 1])):
        newline = text.rfind("\n", start, newline)
    return newline + 1 if newline >= 0 else None


def is_visible(character: str) -> bool:
    return not character.isspace()


def split_long_runs(text: str) -> Iterator[str]:
    half = MAX_RUN_CHARS // 2
    windows = (text[at : at + half] for at in range(0, len(text) - half + 1, half))
    # Fast path: a run that is too long covers one of these windows.
    if not any(window.isspace() or window.split(maxsplit=1) == [window] for window in windows):
        yield text
        return
    start = 0
    for run in re.finditer(r"\s+|\S+", text):
        while run.end() - max(run.start(), start) > MAX_RUN_CHARS:
            split_at = max(run.start(), start) + MAX_RUN_CHARS
            yield text[start:split_at]
            start = split_at
    yield text[start:]
