"""A corpus and how it is read: what `[data]`, `[data.sources]` and the command line of `prepare` come down to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Documents = Literal["file", "folder", "repository"]


@dataclass(frozen=True, kw_only=True)
class CorpusSpec:
    """Text, or tokens that `prepare` wrote."""

    corpus: str
    documents: Documents = "file"
    max_document: int | None = None
    """Longest document in tokens; None: uncut."""
    bad_files: Literal["skip", "refuse"] = "skip"
    separators: str = "bos_eos"
    """What documents begin and end with: `bos_eos`, `eos`, `none`, or the special token that they end with."""
    text_key: str = "text"
    """Of a line of `.jsonl`, or a column of a table: where its text is."""
    cache_dir: Path = Path("prepared")
