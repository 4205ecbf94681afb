"""Trains small sentencepiece models, with the options that docs/data.md recommends."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sentencepiece

LOSSLESS: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "split_digits": True,
    "split_by_whitespace": False,
    "allow_whitespace_only_pieces": True,
    "user_defined_symbols": ["\n"],
}


def train_sentencepiece(
    path: Path, lines: Iterable[str], *, vocab_size: int, **options: Any
) -> Path:
    """Writes the model to `path`. `options` replace those of LOSSLESS."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=vocab_size,
        num_threads=1,
        minloglevel=2,
        **LOSSLESS | options,
    )
    path.write_bytes(model.getvalue())
    return path
