"""A file of ranks for tiktoken: Llama 3's own, or one whose split pattern and special tokens are
stated.

A document's ids are those of one call of tiktoken, in parts only where its pattern is known to end
a word. The exception is what tiktoken cannot encode: a run of about a million whitespace
characters is cut as Llama 3's own tokenizer cuts it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from torch import Tensor

from trainer.config.data import TokenizerSection
from trainer.data.byte_level_bpe import (
    LLAMA3_PATTERN,
    MAX_WHITESPACE,
    NAMED_PATTERNS,
    PROBE,
    cuts_of_pattern,
    longest_whitespace,
)
from trainer.data.text_chunks import encode_parts, joined, split_text
from trainer.data.tokenizer_file_types import sha256_of
from trainer.errors import DataError

if TYPE_CHECKING:
    from tiktoken import Encoding

PART_CHARS = 400_000
MAX_CHARS = 1 << 25
"""Most characters in one call of tiktoken, which takes about 100 bytes of memory for each, and the
ids.
"""
WHITESPACE_PART = 25_000  # as in Llama 3's tokenizer
REGULAR_EXPRESSION = frozenset(r"\.^$*+?{}[]|()")
"""Characters with a meaning in regular expressions. A pattern without them is rather a misspelled
name.
"""

LLAMA3_SHA256 = "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"
"""Digest of the ranks in `original/tokenizer.model` of Llama 3, 3.1, 3.2 and 3.3."""
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


class TiktokenTokenizer:
    """Ranks from lines of `base64 rank`, and the special tokens that follow them.

    Raises DataError.
    """

    def __init__(self, content: bytes, stated: TokenizerSection) -> None:
        import tiktoken

        self.ranks = read_ranks(content)
        self.pattern, self.special_token_names, self.bos_name, self.eos_name = stated_parts(
            content, stated
        )
        first = len(self.ranks)
        self.special_tokens = {
            name: first + index for index, name in enumerate(self.special_token_names)
        }
        try:
            self._encoding = tiktoken.Encoding(
                "stated",
                pat_str=self.pattern,
                mergeable_ranks=self.ranks,
                special_tokens=self.special_tokens,
            )
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise DataError(
                f'tokenizer.pattern = "{stated.pattern}" is not a pattern for tiktoken: {error}'
            ) from error
        require_whole_texts(self._encoding, stated.pattern)
        self.vocab_size = first + len(self.special_tokens)
        self.bos: int | None = self.special_tokens[self.bos_name] if self.bos_name else None
        self.eos: int = self.special_tokens[self.eos_name]
        self.stop_tokens = frozenset({self.eos})
        ends = (self.bos_name, self.eos_name)
        identity = (
            self.pattern,
            self.special_token_names,
            sorted(self.ranks.items(), key=lambda item: item[1]),
        )
        # Nothing for Llama 3's own: folders that were prepared before ends could be stated keep
        # their key.
        other_ends = () if ends == LLAMA3_SPECIAL_TOKENS[:2] else ends
        self.fingerprint = "tiktoken-" + sha256_of((*identity, *other_ends))

    def encode(self, text: str) -> Tensor:
        return joined(self.encode_blocks([text]))

    def encode_blocks(self, blocks: Iterable[str]) -> Iterator[Tensor]:
        may_cut = cuts_of_pattern(self.pattern)
        parts = split_text(blocks, may_cut, part_chars=PART_CHARS, max_chars=MAX_CHARS)
        return encode_parts(parts, self._encode_part)

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode(list(ids))

    def _encode_part(self, part: str) -> list[int]:
        pieces = [part] if longest_whitespace(part) <= MAX_WHITESPACE else split_whitespace(part)
        return [*chain.from_iterable(map(self._encoding.encode_ordinary, pieces))]


def stated_parts(
    content: bytes, stated: TokenizerSection
) -> tuple[str, tuple[str, ...], str | None, str]:
    """Pattern, special tokens, and the names of the first and the last token of documents.

    Raises DataError.
    """
    if stated.pattern is None and hashlib.sha256(content).hexdigest() != LLAMA3_SHA256:
        raise DataError(
            "is not Llama 3's file of ranks, and does not say how texts are split and which tokens are special: set "
            f"tokenizer.pattern to {', '.join(NAMED_PATTERNS)} or a regular expression, and tokenizer.special_tokens, "
            'tokenizer.eos and tokenizer.bos; pattern = "llama3" alone means all of Llama 3'
        )
    pattern = NAMED_PATTERNS.get(stated.pattern or "llama3", stated.pattern or "")
    names = stated.special_tokens
    bos = stated.bos
    eos = stated.eos
    if not names and pattern == LLAMA3_PATTERN:
        names = LLAMA3_SPECIAL_TOKENS
        bos = bos or names[0]
        eos = eos or names[1]
    if eos is None:
        raise DataError("tokenizer.eos must name the special token that ends documents")
    if len({*names}) < len(names):
        raise DataError("tokenizer.special_tokens names a token twice")
    for key, name in (("bos", bos), ("eos", eos)):
        if name is not None and name not in names:
            raise DataError(
                f'tokenizer.{key} = "{name}" must be one of tokenizer.special_tokens: {", ".join(names[:8])}'
            )
    return pattern, names, bos, eos


def require_whole_texts(encoding: Encoding, pattern: str | None) -> None:
    """Raises DataError for a pattern that does not match all of a text: tiktoken drops the rest
    silently.
    """
    try:
        kept = encoding.decode(encoding.encode_ordinary(PROBE))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # tiktoken panics at matches of no character
        raise DataError(
            f'tokenizer.pattern = "{pattern}" does not split texts: {error}'
        ) from error
    if kept == PROBE:
        return
    if pattern is not None and REGULAR_EXPRESSION.isdisjoint(pattern):
        raise DataError(
            f'tokenizer.pattern = "{pattern}" is none of {", ".join(NAMED_PATTERNS)}, and as a regular expression it '
            "loses what it does not match"
        )
    at = next(at for at in range(len(PROBE)) if kept[: at + 1] != PROBE[: at + 1])
    raise DataError(
        f'tokenizer.pattern = "{pattern}" loses what it does not match, such as {PROBE[at]!r} in '
        f"{PROBE[max(at - 9, 0) : at + 10]!r}; append |[\\s\\S] for all of that"
    )


def split_whitespace(text: str) -> Iterator[str]:
    """The text in pieces that hold at most WHITESPACE_PART of a run of whitespace."""
    start = 0
    for run in re.finditer(r"\s+", text):
        if run.end() - run.start() > MAX_WHITESPACE:
            for place in range(run.start() + WHITESPACE_PART, run.end(), WHITESPACE_PART):
                yield text[start:place]
                start = place
    yield text[start:]


def read_ranks(content: bytes) -> dict[bytes, int]:
    """Byte sequences and their ranks.

    Raises DataError unless ranks count from 0 and include every single byte.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise DataError(f'line {number} is not "base64 rank": {line[:40]!r}') from error
        if int(rank) != number - 1 or len(ranks) != number:
            raise DataError(
                f"line {number} repeats a token or breaks the order of ranks: {line[:40]!r}"
            )
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(
            f"{len(missing)} of the 256 single bytes have no rank, for example byte {missing[0]}"
        )
    return ranks
