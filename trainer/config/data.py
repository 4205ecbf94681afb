"""The sections of training data: tokenizer, corpora and their mix. Imports no torch."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from trainer.config.sections import NonEmptyPath, PositiveFloat, PositiveInt, Section, path_exists, require_non_empty

STDLIB_CORPUS = "python-stdlib"  # the standard library of the interpreter: trainer/data/corpus.py
COPY_CORPUS = "copy"  # the synthetic corpus: trainer/data/copy_task.py
HF_PREFIX = "hf:"  # precedes the name of a Hugging Face dataset
DEFAULT_SOURCE = "corpus"  # the name of data.corpus among the sources


class TokenizerSection(Section):
    kind: Literal["byte", "tiktoken", "sentencepiece"] = "byte"
    """`byte` needs no file; `tiktoken` reads a BPE file (Llama 3's `tokenizer.model`), `sentencepiece` a model file."""
    path: NonEmptyPath | None = None
    """The tokenizer's file; none for `byte`."""

    def problems(self) -> list[str]:
        if self.kind == "byte":
            return [
                f'tokenizer.path = "{self.path}" is not used by tokenizer.kind = "byte"; '
                'set tokenizer.kind to "tiktoken" or "sentencepiece"'
            ] * (self.path is not None)
        if self.path is None:
            return [f'tokenizer.kind = "{self.kind}" needs tokenizer.path, the tokenizer\'s file']
        if not (path_exists(self.path) and self.path.is_file()):
            return [f'tokenizer.path = "{self.path}" is not a file']
        return []


class SourceSection(Section):
    """A named corpus. Keys that are left out are as in [data]."""

    path: Annotated[str, BeforeValidator(require_non_empty)]
    """As `data.corpus`: a file, a folder, a dataset, or the output of `trainer.data.prepare`."""
    documents: Literal["file", "folder", "repository"] | None = None
    """What counts as one document."""
    max_document: Annotated[int, Field(ge=3)] | None = None
    """Maximum document length in tokens."""
    separators: Annotated[str, BeforeValidator(require_non_empty)] | None = None
    """Tokens at the start and end of documents."""
    text_key: str | None = None
    """Field of a `.jsonl` line, or column of a table, that holds the text."""


class MixSection(Section):
    """One entry of the mix; a source may occur several times with different filters."""

    source: str
    """A name in [data.sources], or `corpus` for the corpus of [data]."""
    weight: PositiveFloat = 1.0
    """Relative share of tokens, exact after every sequence."""
    min_length: PositiveInt | None = None
    """Only documents of at least this many tokens."""
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Only documents of fewer tokens than this."""
    max_len: Annotated[int, Field(ge=2)] | None = None
    """Documents are split into segments of at most this many tokens, which share sequences and do not attend to each other."""

    @property
    def label(self) -> str:
        """The source and its filters, as metrics and checkpoints name it."""
        comparisons = (("min_length", ">="), ("max_length", "<"), ("max_len", "|"))
        return self.source + "".join(
            f"{sign}{value}" for key, sign in comparisons if (value := getattr(self, key)) is not None
        )


class DataSection(Section):
    corpus: Annotated[str, BeforeValidator(require_non_empty)] = "python-stdlib"
    """`python-stdlib` (the interpreter's standard library), `copy` (synthetic sequences that repeat random tokens, without text or tokenizer), a file of text, `.jsonl` or `.parquet`, a folder of them, `hf:NAME`, or a folder made by `trainer.data.prepare`."""
    sources: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], SourceSection] = Field({})
    """Corpora by name, for `mix`."""
    mix: tuple[MixSection, ...] = ()
    """Sources that sequences are drawn from. Left out: `corpus` alone."""
    copy_period: PositiveInt | None = None
    """`copy` corpus: period of the repetition in tokens. Left out: half of training.seq_len."""
    documents: Literal["file", "folder", "repository"] = "file"
    """What counts as one document: a file (or a line of `.jsonl`), or all files of one folder, or of one top-level folder, in path order."""
    text_key: Annotated[str, BeforeValidator(require_non_empty)] = "text"
    """Field of a `.jsonl` line, or column of a table, that holds the text."""
    max_document: Annotated[int, Field(ge=3)] | None = None
    """Maximum document length in tokens, special tokens included; longer documents are split. Left out: never split."""
    separators: Annotated[str, BeforeValidator(require_non_empty)] = "bos_eos"
    """Tokens at the start and end of documents: `bos_eos`, the tokenizer's BOS and EOS; `eos`; `none`; or the name of a special token at the end."""
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the documents of every training source that is held out for [validation]."""
    packing: Literal["best_fit", "concat", "single"] = "best_fit"
    """How documents fill sequences: best-fit packing, concatenation, or one document per sequence."""
    mask: Literal["document", "none"] = "document"
    """Whether attention is confined to each document."""
    bad_files: Literal["skip", "error"] = "skip"
    """What to do about files that are not readable as text: `skip` them with a warning, or stop with an `error`."""
    cache_dir: NonEmptyPath = Path("prepared")
    """Folder of tokenized corpora."""

    @property
    def effective_mix(self) -> tuple[MixSection, ...]:
        """The mix, or its default of one corpus."""
        return self.mix or (MixSection(source=DEFAULT_SOURCE),)

    def document_settings(self, name: str) -> dict[str, object]:
        """The settings that determine the documents of a source."""
        overrides = {} if name == DEFAULT_SOURCE else self.sources[name].model_dump(exclude_none=True)
        defaults = {"path": self.corpus} | {
            key: getattr(self, key) for key in ("documents", "max_document", "text_key")
        }
        return defaults | {key: value for key, value in overrides.items() if key in defaults}

    def path_problems(self, validation_sources: Set[str] = frozenset()) -> list[str]:
        """Problems of corpora that training or validation reads, which may be on another machine."""
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
        known = [DEFAULT_SOURCE, *self.sources]
        labels = [item.label for item in self.mix]
        weights = [item.weight for item in self.mix]
        problems = [f"data.mix: weights {weights} must not differ by more than a factor of 1000"] * (
            bool(weights) and max(weights) > 1000 * min(weights)
        )
        if self.corpus == COPY_CORPUS and any(item.source == DEFAULT_SOURCE for item in self.mix):
            problems.append(f'data.corpus = "{COPY_CORPUS}" cannot be part of data.mix')
        problems += [
            f'data.mix: source = "{item.source}" is not one of {", ".join(known)}'
            for item in self.mix
            if item.source not in known
        ]
        problems += [
            f"data.mix: max_length = {item.max_length} must be above min_length = {item.min_length}"
            for item in self.mix
            if item.max_length is not None and item.min_length is not None and item.max_length <= item.min_length
        ]
        problems += [f"data.mix: {label} occurs twice" for label in sorted({x for x in labels if labels.count(x) > 1})]
        if DEFAULT_SOURCE in self.sources:
            problems.append(f"data.sources.{DEFAULT_SOURCE} is reserved for data.corpus; choose another name")
        max_lengths = {"data.max_document": self.max_document} | {
            f"data.sources.{name}.max_document": source.max_document for name, source in self.sources.items()
        }
        problems += [
            f"data.holdout = {self.holdout} with {key} = {limit} would split documents between training and validation; "
            "split them with max_len in data.mix"
            for key, limit in max_lengths.items()
            if limit is not None and self.holdout
        ]
        problems += [
            f'data.sources.{name}.path = "{COPY_CORPUS}" can only be used as data.corpus'
            for name, source in self.sources.items()
            if source.path == COPY_CORPUS
        ]
        if (
            self.holdout
            and self.corpus == COPY_CORPUS
            and all(item.source == DEFAULT_SOURCE for item in self.effective_mix)
        ):
            problems.append(f'data.holdout = {self.holdout} needs documents; data.corpus = "{COPY_CORPUS}" has none')
        if self.copy_period is not None and self.corpus != COPY_CORPUS:
            problems.append(
                f'data.copy_period = {self.copy_period} is only used with data.corpus = "{COPY_CORPUS}", not "{self.corpus}"'
            )
        return problems
