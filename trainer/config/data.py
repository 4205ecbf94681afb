"""The sections that say what a run is trained on: tokenizer, corpora, and how rows are drawn from them.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from trainer.config.sections import NonEmptyPath, PositiveFloat, PositiveInt, Section, path_exists, require_non_empty

STDLIB_CORPUS = "python-stdlib"  # the sources of the running interpreter's library: trainer/data/corpus.py
COPY_CORPUS = "copy"  # the corpus that is made up: trainer/data/copy_task.py
HF_PREFIX = "hf:"  # before the name of a Hugging Face dataset
DEFAULT_SOURCE = "corpus"  # the name of data.corpus among the sources


class TokenizerSection(Section):
    kind: Literal["byte", "tiktoken", "sentencepiece"] = "byte"
    """`byte` needs no file; `tiktoken` reads a BPE file (Llama 3's `tokenizer.model`), `sentencepiece` a model."""
    path: NonEmptyPath | None = None
    """The tokenizer's file; none for `byte`."""

    def problems(self) -> list[str]:
        if self.kind == "byte":
            return (
                [] if self.path is None else [f'tokenizer.path = "{self.path}" has no use with tokenizer.kind = "byte"']
            )
        if self.path is None:
            return [f'tokenizer.kind = "{self.kind}" needs tokenizer.path, the file to read']
        if not (path_exists(self.path) and self.path.is_file()):
            return [f'tokenizer.path = "{self.path}" is not a file']
        return []


class SourceSection(Section):
    """A corpus by a name of its own. What is left out is as in [data]."""

    path: Annotated[str, BeforeValidator(require_non_empty)]
    """What `data.corpus` takes: a file, a folder, a dataset, or what `trainer.data.prepare` made of one."""
    documents: Literal["file", "folder", "repository"] | None = None
    """What is one document."""
    max_document: Annotated[int, Field(ge=3)] | None = None
    """Longest document in tokens."""
    separators: Annotated[str, BeforeValidator(require_non_empty)] | None = None
    """What documents begin and end with."""
    text_key: str | None = None
    """Where the text of a line of `.jsonl` or of a table is."""


class MixSection(Section):
    """A source's share of the tokens; a source may be there several times."""

    source: str
    """A name of [data.sources], or `corpus`: that of [data] itself."""
    weight: PositiveFloat = 1.0
    """Its rows in proportion to those of the others, exact after every row."""
    min_length: PositiveInt | None = None
    """Only documents of at least so many tokens."""
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Only documents of fewer tokens than that."""
    max_len: Annotated[int, Field(ge=2)] | None = None
    """Documents are cut into pieces of at most so many tokens, which share the longer rows and do not see each other."""

    @property
    def label(self) -> str:
        """The source and what is taken of it, in metrics."""
        comparisons = (("min_length", ">="), ("max_length", "<"), ("max_len", "|"))
        return self.source + "".join(
            f"{sign}{value}" for key, sign in comparisons if (value := getattr(self, key)) is not None
        )


class DataSection(Section):
    corpus: Annotated[str, BeforeValidator(require_non_empty)] = "python-stdlib"
    """`python-stdlib` (the sources of the running interpreter's library), `copy` (rows that repeat random tokens, without text or tokenizer), a file of text, `.jsonl` or `.parquet`, a folder of them, `hf:NAME`, or a folder that `trainer.data.prepare` made."""
    sources: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], SourceSection] = Field({})
    """Corpora by name, for `mix`."""
    mix: tuple[MixSection, ...] = ()
    """Which sources rows are drawn from. Left out: `corpus` alone."""
    copy_period: PositiveInt | None = None
    """`copy` corpus: tokens after which a row repeats itself; left out: half of training.seq_len."""
    documents: Literal["file", "folder", "repository"] = "file"
    """What is one document: a file (or a line of `.jsonl`), or all files of one folder, or of one top-level folder, in path order."""
    text_key: Annotated[str, BeforeValidator(require_non_empty)] = "text"
    """Where the text of a line of `.jsonl` is, or the column of a table."""
    max_document: Annotated[int, Field(ge=3)] | None = None
    """Longest document in tokens, its first and last special ones included; longer ones are cut into several. Left out: uncut."""
    separators: Annotated[str, BeforeValidator(require_non_empty)] = "bos_eos"
    """What documents begin and end with: `bos_eos`, the tokenizer's first and last token; `eos`; `none`; or by its name the special token that they end with."""
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the documents that training leaves out, for [validation]: of every source that rows are drawn from."""
    packing: Literal["best_fit", "concat", "single"] = "best_fit"
    """How documents fill rows: best-fit, end to end, or one per row."""
    mask: Literal["document", "none"] = "document"
    """Whether attention stays inside a document."""
    bad_files: Literal["skip", "refuse"] = "skip"
    """What to do about a file that cannot be read as text: name and skip it, or name it and stop."""
    cache_dir: NonEmptyPath = Path("prepared")
    """Where tokenized corpora are kept."""

    @property
    def effective_mix(self) -> tuple[MixSection, ...]:
        """The mix, also where there is one corpus."""
        return self.mix or (MixSection(source=DEFAULT_SOURCE),)

    def document_settings(self, name: str) -> dict[str, object]:
        """What makes the documents of a source what they are."""
        overrides = {} if name == DEFAULT_SOURCE else self.sources[name].model_dump(exclude_none=True)
        defaults = {"path": self.corpus} | {
            key: getattr(self, key) for key in ("documents", "max_document", "text_key")
        }
        return defaults | {key: value for key, value in overrides.items() if key in defaults}

    def path_problems(self, validation_sources: Set[str] = frozenset()) -> list[str]:
        """What is wrong with the corpora, which may lie elsewhere; those of these names are validated on."""
        used = validation_sources | {item.source for item in self.effective_mix}
        paths = {"data.corpus": self.corpus} if DEFAULT_SOURCE in used else {}
        paths |= {f"data.sources.{name}.path": source.path for name, source in self.sources.items() if name in used}
        known = f'"{STDLIB_CORPUS}", "{COPY_CORPUS}"'
        return [
            f'{key} = "{path}" is neither {known}, a dataset ("{HF_PREFIX}NAME"), nor an existing file or folder'
            for key, path in paths.items()
            if path not in (STDLIB_CORPUS, COPY_CORPUS)
            and not path.startswith(HF_PREFIX)
            and not path_exists(Path(path))
        ]

    def problems(self) -> list[str]:
        """What is wrong with the rest."""
        known = [DEFAULT_SOURCE, *self.sources]
        labels = [item.label for item in self.mix]
        weights = [item.weight for item in self.mix]
        problems = [f"data.mix: weights {weights} differ by more than a thousand"] * (
            bool(weights) and max(weights) > 1000 * min(weights)
        )
        if self.corpus == COPY_CORPUS and any(item.source == DEFAULT_SOURCE for item in self.mix):
            problems.append(f'data.corpus = "{COPY_CORPUS}" is not for data.mix')
        problems += [
            f'data.mix: source = "{item.source}" is not one of {", ".join(known)}'
            for item in self.mix
            if item.source not in known
        ]
        problems += [
            f"data.mix: max_length = {item.max_length} leaves nothing min_length = {item.min_length}"
            for item in self.mix
            if item.max_length is not None and item.min_length is not None and item.max_length <= item.min_length
        ]
        problems += [
            f"data.mix: {label} is there twice" for label in sorted({x for x in labels if labels.count(x) > 1})
        ]
        if DEFAULT_SOURCE in self.sources:
            problems.append(f"data.sources.{DEFAULT_SOURCE} is the name of data.corpus itself")
        max_lengths = {"data.max_document": self.max_document} | {
            f"data.sources.{name}.max_document": source.max_document for name, source in self.sources.items()
        }
        problems += [
            f"data.holdout = {self.holdout} with {key} = {limit} would part documents that belong together; "
            "data.mix can cut them too (max_len)"
            for key, limit in max_lengths.items()
            if limit is not None and self.holdout
        ]
        problems += [
            f'data.sources.{name}.path = "{COPY_CORPUS}" is for data.corpus only'
            for name, source in self.sources.items()
            if source.path == COPY_CORPUS
        ]
        if (
            self.holdout
            and self.corpus == COPY_CORPUS
            and all(item.source == DEFAULT_SOURCE for item in self.effective_mix)
        ):
            problems.append(f'data.holdout = {self.holdout} has no use with data.corpus = "{COPY_CORPUS}"')
        if self.copy_period is not None and self.corpus != COPY_CORPUS:
            problems.append(f'data.copy_period = {self.copy_period} has no use with data.corpus = "{self.corpus}"')
        return problems
