"""How long a text may become before its tokens are looked up: a stranger's tokenizer can replace a
letter by a page.

The definition of each step of a normalizer bounds how many characters it makes of one. The product
bounds how much of a text is normalized at once, to measure how long it really gets.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.data.text_chunks import EncodingError
from trainer.errors import DataError

UNICODE_GROWTH = 18
"""Growth of U+FDFA by NFKD: the most that normalization forms, lower case and removal of accents make of
a character, also in turn.
"""
UNICODE_STEPS = frozenset(
    {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Strip", "Nmt"}
)
BERT_GROWTH = 3 * UNICODE_GROWTH  # spaces around Chinese characters
BYTES_GROWTH = 4
PRE_TOKENIZER_GROWTH = {"ByteLevel": BYTES_GROWTH + 1, "Metaspace": 2}
"""A space may stand before each part."""
MAX_GROWTH = 1 << 16
MAX_PRE_TOKENIZER_GROWTH = 32
MEASURED_CHARS = 1 << 22
"""At most, after normalization, at once."""


def definition_growth(definition: Mapping[str, Any]) -> int:
    """The most characters that the normalizer of a tokenizer.json makes of one.

    Raises DataError if they are too many.
    """
    growth = normalizer_growth(_steps(definition.get("normalizer"), "normalizers"))
    _require("normalizer", growth, MAX_GROWTH)
    after = 1
    for step in _steps(definition.get("pre_tokenizer"), "pretokenizers"):
        after *= PRE_TOKENIZER_GROWTH.get(str(step.get("type")), 1)
    _require("pre-tokenizer", after, MAX_PRE_TOKENIZER_GROWTH)
    return growth


def normalizer_growth(steps: Sequence[Mapping[str, Any]]) -> int:
    growth = 1
    is_after_unicode = False
    for step in steps:
        is_unicode = step.get("type") in UNICODE_STEPS
        if not (is_unicode and is_after_unicode):
            growth *= UNICODE_GROWTH if is_unicode else _step_growth(step)
        is_after_unicode = is_unicode
    return growth


def charsmap_growth(charsmap: bytes) -> int:
    """The parts of sentencepiece's table: the bytes of a trie, the trie, and the replacements of its keys, each up
    to a zero byte.
    """
    if len(charsmap) < 4:
        return 1
    (trie_bytes,) = struct.unpack("<I", charsmap[:4])
    return max(
        1,
        *(len(each.decode(errors="replace")) for each in charsmap[4 + trie_bytes :].split(b"\0")),
    )


def require_normalized_length(
    text: str, growth: int, normalize: Callable[[str], str], *, max_chars: int, name: str
) -> None:
    """Raises EncodingError for a text that a normalizer makes longer than `max_chars`, without
    holding all of it.
    """
    if len(text) * growth <= max_chars:
        return
    num_chars = 0
    part = max(1, min(max_chars, MEASURED_CHARS) // growth)
    for start in range(0, len(text), part):
        num_chars += len(normalize(text[start : start + part]))
        if num_chars > max_chars:
            raise EncodingError(
                f"{name}: its normalizer makes more than {max_chars:,} characters of the first {start + part:,} of a text; at "
                f"most {max_chars:,} are encoded at once"
            )


def _step_growth(step: Mapping[str, Any]) -> int:
    kind = step.get("type")
    if kind == "Replace":
        pattern = step.get("pattern")
        content = len(str(step.get("content")))
        literal = pattern.get("String") if isinstance(pattern, dict) else pattern
        # A regular expression may match nothing, before each character and at the end.
        return (
            max(1, -(-content // len(literal)))
            if isinstance(literal, str) and literal
            else 1 + 2 * content
        )
    if kind == "Prepend":
        return 1 + len(str(step.get("prepend")))  # to each part between added tokens
    if kind == "Precompiled":
        return charsmap_growth(_decoded(step.get("precompiled_charsmap")))
    if kind == "BertNormalizer":
        return BERT_GROWTH
    if kind == "ByteLevel":
        return BYTES_GROWTH
    raise DataError(
        f'tokenizer.json has the normalizer "{str(kind)[:80]}", of which is not known how long it makes a text'
    )


def _decoded(charsmap: object) -> bytes:
    try:
        return base64.b64decode(str(charsmap or ""), validate=True)
    except ValueError as error:
        raise DataError(f"tokenizer.json: precompiled_charsmap is not base64: {error}") from None


def _steps(step: object, key: str) -> list[Mapping[str, Any]]:
    """The steps of nested sequences, in order."""
    if not isinstance(step, Mapping):
        return []
    if step.get("type") != "Sequence":
        return [step]
    inner = step.get(key)
    return [
        each for item in (inner if isinstance(inner, list) else ()) for each in _steps(item, key)
    ]


def _require(name: str, growth: int, most: int) -> None:
    if growth > most:
        shown = f"{growth:,}" if growth < 10**18 else "10^18"
        raise DataError(
            f"tokenizer.json: its {name} may make {shown} characters of one, more than {most:,}"
        )
