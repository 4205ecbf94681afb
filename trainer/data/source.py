"""Which corpus to read and how: the common form of `[data]`, `[data.sources]` and `prepare --corpus`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Documents = Literal["file", "folder", "repository"]


@dataclass(frozen=True, kw_only=True)
class CorpusSpec:
    corpus: str
    """Text, or a folder of prepared tokens."""
    documents: Documents = "file"
    max_document: int | None = None
    """Tokens of the longest document; longer ones are cut. None: no limit."""
    bad_files: Literal["skip", "refuse"] = "skip"
    separators: str = "bos_eos"
    """`bos_eos`, `eos`, `none`, or the name of the special token that ends a document."""
    text_key: str = "text"
    """Of a line of `.jsonl`, or a column of a table: where its text is."""
    cache_dir: Path = Path("prepared")
