"""Which corpus to read and how: the common form of `[data]`, `[data.sources]` and `prepare
--corpus`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.config.data import DEFAULT_SOURCE, STDLIB_CORPUS, DataSection
from trainer.config.job_config import Config

Documents = Literal["file", "folder", "repository"]


@dataclass(frozen=True, kw_only=True)
class CorpusSpec:
    corpus: str
    """Text, or a folder of prepared tokens."""
    documents: Documents = "file"
    max_document: int | None = None
    """Tokens of the longest document; longer ones are cut. None: no limit."""
    bad_files: Literal["skip", "error"] = "skip"
    separators: str = "bos_eos"
    """`bos_eos`, `eos`, `none`, or the name of the special token that ends a document."""
    text_key: str = "text"
    """Key of a line of JSON, or column of a table, that holds the text."""
    files: tuple[str, ...] | None = None
    """Globs: the files of the folder that are read. None: all that are text."""
    cache_dir: Path = Path("prepared")
    remote_cache_gib: float | None = None
    """Size of the cache of a corpus at a URL. None: as free space allows."""
    key: str = "data.corpus"
    """The key of the configuration that names the corpus."""

    @property
    def document_settings(self) -> tuple[object, ...]:
        """The settings that decide where documents of the corpus begin and end."""
        return self.documents, self.max_document, self.text_key

    @property
    def fail_on_bad_files(self) -> bool:
        """Never for the standard library: its tests contain such files on purpose."""
        return self.bad_files == "error" and self.corpus != STDLIB_CORPUS


def corpus_spec(data: DataSection, name: str) -> CorpusSpec:
    """The source of this name; keys that it does not set are those of `[data]`."""
    # Globs belong to one folder, so `files` is not among the inherited keys.
    given: dict[str, Any] = {"files": data.files}
    key = "data.corpus"
    if name != DEFAULT_SOURCE:
        given = data.sources[name].model_dump(exclude_none=True)
        key = f"data.sources.{name}.path"
    inherited = (
        *("documents", "max_document", "bad_files", "separators", "text_key"),
        *("cache_dir", "remote_cache_gib"),
    )
    values = {each: getattr(data, each) for each in inherited} | given
    return CorpusSpec(corpus=values.pop("path", data.corpus), key=key, **values)


def corpus_specs(config: Config) -> dict[str, CorpusSpec]:
    """The corpora that a run reads, in any of its stages, by name; none for the synthetic
    corpus.
    """
    stages = [stage.config for stage in config.training_stages]
    names = {
        item.source
        for stage in stages
        if not stage.data.is_synthetic
        for item in stage.data.effective_mix
    }
    return {
        name: corpus_spec(config.data, name) for name in sorted(names | config.validation.sources)
    }
