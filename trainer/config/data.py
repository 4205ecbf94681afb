"""The sections that say what a run is trained on: tokenizer, corpora, and how rows are drawn from them.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from trainer.config.sections import Count, Location, Positive, Section, is_there, not_empty

STDLIB = "python-stdlib"  # the sources of the running interpreter's library: trainer/data/corpus.py
COPY = "copy"  # the corpus that is made up: trainer/data/copy_task.py
DATASET = "hf:"  # before the name of a Hugging Face dataset
CORPUS = "corpus"  # the name of data.corpus among the sources


class TokenizerSection(Section):
    kind: Literal["byte", "tiktoken", "sentencepiece"] = "byte"
    """`byte` needs no file; `tiktoken` reads a BPE file (Llama 3's `tokenizer.model`), `sentencepiece` a model."""
    path: Location | None = None
    """The tokenizer's file; none for `byte`."""

    def problems(self) -> list[str]:
        if self.kind == "byte":
            return (
                [] if self.path is None else [f'tokenizer.path = "{self.path}" has no use with tokenizer.kind = "byte"']
            )
        if self.path is None:
            return [f'tokenizer.kind = "{self.kind}" needs tokenizer.path, the file to read']
        if not (is_there(self.path) and self.path.is_file()):
            return [f'tokenizer.path = "{self.path}" is not a file']
        return []


class SourceSection(Section):
    """A corpus by a name of its own. What is left out is as in [data]."""

    path: Annotated[str, BeforeValidator(not_empty)]
    """What `data.corpus` takes: a file, a folder, a dataset, or what `trainer.data.prepare` made of one."""
    documents: Literal["file", "folder", "repository"] | None = None
    """What is one document."""
    max_document: Annotated[int, Field(ge=3)] | None = None
    """Longest document in tokens."""
    separators: Annotated[str, BeforeValidator(not_empty)] | None = None
    """What documents begin and end with."""
    text_key: str | None = None
    """Where the text of a line of `.jsonl` or of a table is."""


class MixSection(Section):
    """A source's share of the tokens; a source may be there several times."""

    source: str
    """A name of [data.sources], or `corpus`: that of [data] itself."""
    weight: Positive = 1.0
    """Its rows in proportion to those of the others, exact after every row."""
    at_least: Count | None = None
    """Only documents of at least so many tokens."""
    below: Annotated[int, Field(ge=2)] | None = None
    """Only documents of fewer tokens than that."""
    max_len: Annotated[int, Field(ge=2)] | None = None
    """Documents are cut into pieces of at most so many tokens, which share the longer rows and do not see each other."""

    @property
    def label(self) -> str:
        """The source and what is taken of it, in metrics."""
        said = (("at_least", ">="), ("below", "<"), ("max_len", "|"))
        return self.source + "".join(
            f"{sign}{value}" for key, sign in said if (value := getattr(self, key)) is not None
        )


class DataSection(Section):
    corpus: Annotated[str, BeforeValidator(not_empty)] = "python-stdlib"
    """`python-stdlib` (the sources of the running interpreter's library), `copy` (rows that repeat random tokens, without text or tokenizer), a file of text, `.jsonl` or `.parquet`, a folder of them, `hf:NAME`, or a folder that `trainer.data.prepare` made."""
    sources: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], SourceSection] = Field({})
    """Corpora by name, for `mix`."""
    mix: tuple[MixSection, ...] = ()
    """Which sources rows are drawn from. Left out: `corpus` alone."""
    copy_period: Count | None = None
    """`copy` corpus: tokens after which a row repeats itself; left out: half of training.seq_len."""
    documents: Literal["file", "folder", "repository"] = "file"
    """What is one document: a file (or a line of `.jsonl`), or all files of one folder, or of one top-level folder, in path order."""
    text_key: Annotated[str, BeforeValidator(not_empty)] = "text"
    """Where the text of a line of `.jsonl` is, or the column of a table."""
    max_document: Annotated[int, Field(ge=3)] | None = None
    """Longest document in tokens, its first and last special ones included; longer ones are cut into several. Left out: uncut."""
    separators: Annotated[str, BeforeValidator(not_empty)] = "bos_eos"
    """What documents begin and end with: `bos_eos`, the tokenizer's first and last token; `eos`; `none`; or by its name the special token that they end with."""
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the documents that training leaves out, for [validation]: of every source that rows are drawn from."""
    packing: Literal["best_fit", "concat", "single"] = "best_fit"
    """How documents fill rows: best-fit, end to end, or one per row."""
    mask: Literal["document", "none"] = "document"
    """Whether attention stays inside a document."""
    bad_files: Literal["skip", "refuse"] = "skip"
    """What to do about a file that cannot be read as text: name and skip it, or name it and stop."""
    cache_dir: Location = Path("prepared")
    """Where tokenized corpora are kept."""

    @property
    def drawn(self) -> tuple[MixSection, ...]:
        """The mix, also where there is one corpus."""
        return self.mix or (MixSection(source=CORPUS),)

    def described(self, name: str) -> dict[str, object]:
        """What makes the documents of a source what they are."""
        given = {} if name == CORPUS else self.sources[name].model_dump(exclude_none=True)
        own = {"path": self.corpus} | {key: getattr(self, key) for key in ("documents", "max_document", "text_key")}
        return own | {key: value for key, value in given.items() if key in own}

    def source_problems(self, validated: Set[str] = frozenset()) -> list[str]:
        """What is wrong with the corpora, which may lie elsewhere; those of these names are validated on."""
        used = validated | {item.source for item in self.drawn}
        paths = {"data.corpus": self.corpus} if CORPUS in used else {}
        paths |= {f"data.sources.{name}.path": source.path for name, source in self.sources.items() if name in used}
        known = f'"{STDLIB}", "{COPY}"'
        return [
            f'{key} = "{path}" is neither {known}, a dataset ("{DATASET}NAME"), nor an existing file or folder'
            for key, path in paths.items()
            if path not in (STDLIB, COPY) and not path.startswith(DATASET) and not is_there(Path(path))
        ]

    def problems(self) -> list[str]:
        """What is wrong with the rest."""
        known = [CORPUS, *self.sources]
        labels = [item.label for item in self.mix]
        weights = [item.weight for item in self.mix]
        found = [f"data.mix: weights {weights} differ by more than a thousand"] * (
            bool(weights) and max(weights) > 1000 * min(weights)
        )
        if self.corpus == COPY and any(item.source == CORPUS for item in self.mix):
            found.append(f'data.corpus = "{COPY}" is not for data.mix')
        found += [
            f'data.mix: source = "{item.source}" is not one of {", ".join(known)}'
            for item in self.mix
            if item.source not in known
        ]
        found += [
            f"data.mix: below = {item.below} leaves nothing at_least = {item.at_least}"
            for item in self.mix
            if item.below is not None and item.at_least is not None and item.below <= item.at_least
        ]
        found += [f"data.mix: {label} is there twice" for label in sorted({x for x in labels if labels.count(x) > 1})]
        if CORPUS in self.sources:
            found.append(f"data.sources.{CORPUS} is the name of data.corpus itself")
        cuts = {"data.max_document": self.max_document} | {
            f"data.sources.{name}.max_document": source.max_document for name, source in self.sources.items()
        }
        found += [
            f"data.holdout = {self.holdout} with {key} = {longest} would part documents that belong together; "
            "data.mix can cut them too (max_len)"
            for key, longest in cuts.items()
            if longest is not None and self.holdout
        ]
        found += [
            f'data.sources.{name}.path = "{COPY}" is for data.corpus only'
            for name, source in self.sources.items()
            if source.path == COPY
        ]
        if self.holdout and self.corpus == COPY and all(item.source == CORPUS for item in self.drawn):
            found.append(f'data.holdout = {self.holdout} has no use with data.corpus = "{COPY}"')
        if self.copy_period is not None and self.corpus != COPY:
            found.append(f'data.copy_period = {self.copy_period} has no use with data.corpus = "{self.corpus}"')
        return found
