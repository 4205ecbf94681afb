"""Tokenizers: bytes, a tiktoken BPE file, a sentencepiece model, a Hugging Face folder, and those
of extensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from models.files import MAX_TOKENIZER_BYTES, read_regular
from trainer.config import extension
from trainer.config.data import TokenizerSection
from trainer.config.job_config import BYTE_VOCAB_SIZE
from trainer.config.sections import remote_url
from trainer.data.sentencepiece_tokenizer import SentencePieceTokenizer
from trainer.data.tiktoken_tokenizer import TiktokenTokenizer
from trainer.data.tokenizer_file_types import SENTENCEPIECE, TIKTOKEN, detect_file_type
from trainer.errors import DataError
from trainer.storage.remote_models import fetch_tokenizer


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
        """[tokens] of any integer type: the ids of one call of the library.

        The name of a special token in the text is encoded as text. Raises DataError for a text
        that is too long.
        """

    def encode_blocks(self, blocks: Iterable[str]) -> Iterator[Tensor]:
        """The ids of a text that comes in blocks, which may begin and end anywhere, in parts:
        those of `encode`.
        """

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Each UTF-8 byte is a token; 8 special tokens follow the 256."""

    vocab_size = BYTE_VOCAB_SIZE
    bos = 256
    eos = 257
    stop_tokens = frozenset({257})
    special_tokens: Mapping[str, int] = {
        f"<|reserved_special_token_{n}|>": 258 + n for n in range(6)
    }
    fingerprint = "byte-264"

    def encode(self, text: str) -> Tensor:
        # torch.frombuffer warns of a buffer that cannot be written, and refuses an empty one.
        data = bytearray(text, "utf-8")
        return (
            torch.frombuffer(data, dtype=torch.uint8)
            if data
            else torch.empty(0, dtype=torch.uint8)
        )

    def encode_blocks(self, blocks: Iterable[str]) -> Iterator[Tensor]:
        # Characters are encoded one by one, so that blocks may be cut anywhere.
        return map(self.encode, blocks)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", "replace")


def _open_byte(_: TokenizerSection) -> Tokenizer:
    return ByteTokenizer()


def _open_huggingface(stated: TokenizerSection) -> Tokenizer:
    from trainer.data.huggingface_tokenizer import load_huggingface_tokenizer

    return load_huggingface_tokenizer(_path_of(stated))


def _open_tiktoken(stated: TokenizerSection) -> Tokenizer:
    return _open_file(stated, TIKTOKEN, lambda content: TiktokenTokenizer(content, stated))


def _open_sentencepiece(stated: TokenizerSection) -> Tokenizer:
    return _open_file(stated, SENTENCEPIECE, SentencePieceTokenizer)


KINDS: dict[str, Callable[[TokenizerSection], Tokenizer]] = {
    "byte": _open_byte,
    "tiktoken": _open_tiktoken,
    "sentencepiece": _open_sentencepiece,
    "huggingface": _open_huggingface,
}
"""Built-in tokenizers by `tokenizer.kind`, which `trainer.config.extension.BUILT_IN_TOKENIZERS`
lists.
"""


def local_section(stated: TokenizerSection) -> TokenizerSection:
    """`[tokenizer]` with a local path, downloaded if it is a URL.

    Raises as `trainer.storage.remote_models.fetch_tokenizer`.
    """
    url = remote_url(stated.path)
    return stated if url is None else stated.model_copy(update={"path": fetch_tokenizer(url)})


def open_tokenizer(stated: TokenizerSection) -> Tokenizer:
    """The tokenizer of `[tokenizer]`.

    Raises DataError with the file type that the content suggests, and as `local_section`.
    """
    stated = local_section(stated)
    known = KINDS.copy()
    for each in extension.installed():
        known.update(each.extension.tokenizers)
    if stated.kind not in known:
        raise DataError(
            f'tokenizer.kind = "{stated.kind}" is unknown; there are {", ".join(known)}'
        )
    if stated.kind in KINDS:
        return KINDS[stated.kind](stated)
    try:
        return known[stated.kind](stated)
    except Exception as error:
        if isinstance(error, DataError) or (problem := extension.describe_error(error)) is None:
            raise
        raise DataError(f'tokenizer.kind = "{stated.kind}": {problem}') from error


def _path_of(stated: TokenizerSection) -> Path:
    if stated.path is None:
        raise DataError(f'tokenizer.kind = "{stated.kind}" needs tokenizer.path')
    return stated.path


def _open_file(
    stated: TokenizerSection, expected: str, read: Callable[[bytes], Tokenizer]
) -> Tokenizer:
    """The tokenizer of a file whose content must look like what is expected."""
    kind = stated.kind
    path = _path_of(stated)
    try:
        content = read_regular(path, max_bytes=MAX_TOKENIZER_BYTES)
    except OSError as error:
        raise DataError(f'tokenizer.path = "{path}" cannot be read: {error.strerror}') from error
    detected = detect_file_type(content)
    if detected != expected:
        raise DataError(
            f'tokenizer.kind = "{kind}" needs {expected}, but tokenizer.path = "{path}" looks like {detected}'
        )
    try:
        return read(content)
    except DataError as error:
        raise DataError(f'tokenizer.path = "{path}": {error}') from error
    except (ValueError, RuntimeError, OSError) as error:
        raise DataError(
            f'tokenizer.path = "{path}" looks like {detected}, but is damaged: {error}'
        ) from error


def load_tokenizer(kind: str, path: Path | None) -> Tokenizer:
    """The tokenizer of a kind, of whose file nothing else is stated.

    Raises as `open_tokenizer`.
    """
    return open_tokenizer(TokenizerSection.model_validate({"kind": kind, "path": path}))
