"""Tokenizers: bytes, a tiktoken BPE file, a sentencepiece model, a Hugging Face folder."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from models.files import read_regular
from trainer.config.job_config import BYTE_VOCAB_SIZE
from trainer.data.byte_level_bpe import LLAMA3_PATTERN
from trainer.data.file_types import SENTENCEPIECE, TIKTOKEN, detect_file_type, sha256_of
from trainer.data.text_chunks import encode_in_chunks
from trainer.errors import DataError

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
        content = read_regular(path)
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
