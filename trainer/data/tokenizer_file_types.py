"""Detects the type of a tokenizer's file by its content."""

from __future__ import annotations

import hashlib
import re

TIKTOKEN = "a tiktoken BPE file"
SENTENCEPIECE = "a sentencepiece model"
HUGGING_FACE = "JSON, as Hugging Face's tokenizer.json"
FILE_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (rb"\Z", "an empty file"),
    (rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|\Z)", TIKTOKEN),
    # protobuf: the first piece (field 1) starts with its text (field 1) and its score (field 2, a
    # float).
    (rb"(?s)\n.{1,2}\n.{1,60}\x15", SENTENCEPIECE),
    (rb"version https://git-lfs", "a Git LFS pointer, not the file itself"),
    (rb"\s*<(!DOCTYPE|html)", "a web page"),
    (rb"\s*[{\[]", HUGGING_FACE),
    (rb"(?s)\x1f\x8b|PK\x03\x04|\x28\xb5\x2f\xfd|BZh|\xfd7zXZ", "a compressed file"),
    (rb"[\t\n\r\x20-\x7e]+\Z", "plain text"),
)


def detect_file_type(content: bytes) -> str:
    """The type that the first bytes suggest."""
    head = content[:512]
    return next(
        (name for pattern, name in FILE_SIGNATURES if re.match(pattern, head)),
        "binary data of an unknown kind",
    )


def sha256_of(content: object) -> str:
    return hashlib.sha256(repr(content).encode("utf-8", "backslashreplace")).hexdigest()[:32]
