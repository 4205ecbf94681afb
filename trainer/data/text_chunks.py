"""Texts of any length, in parts that tokenizers encode alike and without failing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor

from trainer.errors import DataError

# tiktoken panics on about a million equal whitespace characters; these are the limits of Llama 3's tokenizer.
MAX_CHUNK_CHARS = 400_000
MAX_RUN_CHARS = 25_000


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
