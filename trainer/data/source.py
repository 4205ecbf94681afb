"""A corpus and how it is read: what `[data]`, `[data.sources]` and the command line of `prepare` come down to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.config.data import DEFAULT_SOURCE, DataSection
from trainer.config.job_config import Config

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
    """Key of a line of `.jsonl`, or column of a table, that holds the text."""
    cache_dir: Path = Path("prepared")


def corpus_spec(data: DataSection, name: str) -> CorpusSpec:
    """The source of this name; keys that it does not set are those of `[data]`."""
    given = {} if name == DEFAULT_SOURCE else data.sources[name].model_dump(exclude_none=True)
    inherited = ("documents", "max_document", "bad_files", "separators", "text_key", "cache_dir")
    values = {key: getattr(data, key) for key in inherited} | given
    return CorpusSpec(corpus=values.pop("path", data.corpus), **values)


def corpus_specs(config: Config) -> dict[str, CorpusSpec]:
    """The corpora that a run reads, in any of its stages, by name; none for the synthetic corpus."""
    stages = [stage.config for stage in config.training_stages]
    names = {item.source for stage in stages if not stage.is_synthetic for item in stage.data.effective_mix}
    return {name: corpus_spec(config.data, name) for name in sorted(names | config.validation.sources)}
