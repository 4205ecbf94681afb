"""The sections of training data: tokenizer, corpora and their mix. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_serializer

from trainer.config.sections import (
    MAX_SEQ_LEN,
    AsTokens,
    NonEmptyPath,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    remote_url,
    require_location,
    require_non_empty,
    require_path_or_url,
)

# the standard library of the interpreter: trainer/data/corpus.py
STDLIB_CORPUS = "python-stdlib"
# the synthetic corpus: trainer/data/copy_task.py
COPY_CORPUS = "copy"
# precedes the name of a Hugging Face dataset
HF_PREFIX = "hf:"
# the name of data.corpus among the sources
DEFAULT_SOURCE = "corpus"
# in a folder of tokenizer.kind = "huggingface"
TOKENIZER_FILE = "tokenizer.json"
FileKind = Literal["text", "lines", "table", "added"]
"""A text; a JSON record on each line; rows of a Parquet file; what an extension reads."""
FILE_KINDS: dict[str, FileKind] = {
    ".txt": "text",
    ".parquet": "table",
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".jsonlines": "lines",
    ".json": "lines",
}
"""Kinds of a corpus's files by suffix, besides those of extensions; others are text."""
COMPRESSIONS = (".gz", ".zst")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(path: str) -> bool:
    """Whether this looks like the name of a model or dataset on the Hugging Face Hub, and nothing
    of that name is here.
    """
    return HUB_NAME.fullmatch(path) is not None and not Path(path).exists()


def download_hint(path: str) -> str:
    """How to get a model of the Hub, if this is the name of one."""
    return f": hf download {path} --local-dir {path}" if is_hub_name(path) else ""


PACKING_VERSION = 2
"""The newest version of best-fit packing."""


class TokenizerSection(Section):
    kind: str = "byte"
    """`byte` needs no file; `tiktoken` reads a file of ranks (Llama 3's `tokenizer.model`, or
    another whose pattern and special tokens are stated), `sentencepiece` a model file,
    `huggingface` the `tokenizer.json` of a model's folder. Or what an extension adds.
    """
    path: Annotated[Path, BeforeValidator(require_path_or_url)] | None = None
    """The tokenizer's file, for `huggingface` the model's folder, either of which may be at a URL
    as `s3://bucket/models/x`; none for `byte`.
    """
    pattern: Annotated[str, BeforeValidator(require_non_empty)] | None = None
    """`tiktoken`: the pattern that splits texts into words, `gpt2`, `llama3`, `qwen2`, `o200k` or
    a regular expression. Left out: the file must be Llama 3's.
    """
    special_tokens: tuple[Annotated[str, BeforeValidator(require_non_empty)], ...] = ()
    """`tiktoken`: the names of the special tokens, whose ids follow the ranks in this order.

    Left out: those of Llama 3, with its pattern.
    """
    bos: Annotated[str, BeforeValidator(require_non_empty)] | None = None
    """`tiktoken`: the special token that begins documents.

    Left out: Llama 3's with its special tokens, otherwise none.
    """
    eos: Annotated[str, BeforeValidator(require_non_empty)] | None = None
    """`tiktoken`: the special token that ends documents.

    Left out: Llama 3's with its special tokens.
    """

    @field_serializer("path", when_used="json-unless-none")
    def _write_path(self, path: Path) -> str:
        return remote_url(path) or str(path)


def tokenizer_folder(path: Path) -> Path:
    """The folder that `tokenizer.path` names: itself, or that of the tokenizer.json at `path`."""
    return path.parent if path.name == TOKENIZER_FILE else path


def as_tuple(value: object) -> object:
    return (
        # TOML may have a single value without brackets. A list becomes a tuple here, because
        # pydantic's strict mode takes no list for a tuple after a BeforeValidator.
        (value,)
        if isinstance(value, int | str)
        else tuple(value)
        if isinstance(value, list)
        else value
    )


FileGlobs = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(as_tuple), Field(min_length=1)
]


class SourceSection(Section):
    """A named corpus. Keys that are left out are as in [data]."""

    path: Annotated[str, BeforeValidator(require_location)]
    """A corpus as in `data.corpus`: a file, a folder, a dataset, or the output of
    `trainer.data.prepare`, which may be at a URL.
    """
    documents: Literal["file", "folder", "repository"] | None = None
    """The unit that counts as one document."""
    max_document: Annotated[int, Field(ge=3), AsTokens] | None = None
    """Maximum document length in tokens."""
    separators: Annotated[str, BeforeValidator(require_non_empty)] | None = None
    """Tokens at the start and end of documents."""
    text_key: str | None = None
    """Field of a line of JSON, or column of a table, that holds the text."""
    files: FileGlobs | None = None
    """Globs of the files of the folder that are read, as `data.files`; not inherited."""


class MixSection(Section):
    """One entry of the mix; a source may occur several times with different filters."""

    source: str
    """A name in [data.sources], or `corpus` for the corpus of [data]."""
    weight: PositiveFloat = 1.0
    """Relative share of tokens, exact after every sequence."""
    min_length: Annotated[int, Field(ge=1), AsTokens] | None = None
    """Only documents of at least this many tokens."""
    max_length: Annotated[int, Field(ge=2), AsTokens] | None = None
    """Only documents of fewer tokens than this."""
    max_len: Annotated[int, Field(ge=2), AsTokens] | None = None
    """Documents are split into segments of at most this many tokens, which share sequences and do
    not attend to each other.
    """

    @property
    def label(self) -> str:
        """The source and its filters, as metrics and checkpoints name it."""
        comparisons = (("min_length", ">="), ("max_length", "<"), ("max_len", "|"))
        return self.source + "".join(
            f"{sign}{value}"
            for key, sign in comparisons
            if (value := getattr(self, key)) is not None
        )


class DataSection(Section):
    corpus: Annotated[str, BeforeValidator(require_location)] = "python-stdlib"
    """`python-stdlib` (the interpreter's standard library), `copy` (synthetic sequences that
    repeat random tokens, without text or tokenizer), a file of text, lines of JSON or `.parquet`,
    a folder of them, `hf:NAME`, or a folder made by `trainer.data.prepare`, which may be at a URL
    such as `s3://bucket/corpora/books`.
    """
    sources: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], SourceSection] = Field({})
    """Corpora by name, for `mix`."""
    mix: tuple[MixSection, ...] = ()
    """Sources that sequences are drawn from. Left out: `corpus` alone."""
    copy_period: Annotated[int, Field(ge=1), AsTokens] | None = None
    """`copy` corpus: period of the repetition in tokens. Left out: half of training.seq_len."""
    documents: Literal["file", "folder", "repository"] = "file"
    """The unit that counts as one document: a file (or a line of JSON), or all files of one
    folder, or of one top-level folder, in path order.
    """
    text_key: Annotated[str, BeforeValidator(require_non_empty)] = "text"
    """Field of a line of JSON, or column of a table, that holds the text."""
    files: FileGlobs | None = None
    """Globs of the files of `corpus` that are read, relative to its folder: `"*.txt"`,
    `["en/**/*.json.gz"]`. A glob that begins with `!` leaves files out. What the others name is
    text even if it looks like JSON or a dataset card. Left out: all files that are text.
    """
    max_document: Annotated[int, Field(ge=3), AsTokens] | None = None
    """Maximum document length in tokens, special tokens included; longer documents are split.

    Left out: never split.
    """
    separators: Annotated[str, BeforeValidator(require_non_empty)] = "bos_eos"
    """Tokens at the start and end of documents: `bos_eos`, the tokenizer's BOS and EOS; `eos`;
    `none`; or the name of a special token at the end.
    """
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the documents of every training source that is held out for [validation]."""
    packing: Literal["best_fit", "concat", "single"] = "best_fit"
    """How documents fill sequences: best-fit packing, concatenation, or one document per
    sequence.
    """
    packing_version: Annotated[int, Field(ge=1, le=PACKING_VERSION)] | None = None
    """Version of best-fit packing. 1 sorts documents by length over the whole corpus; 2 gives
    every sequence its share of long and short ones. Left out: that of the run's checkpoint, or
    2.
    """
    mask: Literal["document", "none"] = "document"
    """Whether attention is confined to each document."""
    bad_files: Literal["skip", "error"] = "skip"
    """Reaction to files that are not readable as text: `skip` them with a warning, or stop with an
    `error`.
    """
    cache_dir: NonEmptyPath = Path("prepared")
    """Folder of tokenized corpora, and of what is read from URLs."""
    remote_cache_gib: PositiveFloat | None = None
    """Largest size of the cache of each corpus at a URL, in `cache_dir`. Left out: that of the
    corpus, but at most half of the space that is free when it is first read.
    """
    workers: NonNegativeInt = 0
    """Processes per rank that read micro-batches. 0: a thread of the rank, which is enough while
    the data wait of the log is near 0 %. Corpora at URLs need 0.
    """

    @property
    def is_synthetic(self) -> bool:
        """Whether all sequences are of the `copy` corpus, which needs no tokenizer."""
        return self.corpus == COPY_CORPUS and all(
            item.source == DEFAULT_SOURCE for item in self.effective_mix
        )

    @property
    def effective_mix(self) -> tuple[MixSection, ...]:
        """The mix, or its default of one corpus."""
        return self.mix or (MixSection(source=DEFAULT_SOURCE),)


DEFAULT_TAIL_TOKENS = 2048


class ValidationSetSection(Section):
    """A named validation set."""

    source: str = DEFAULT_SOURCE
    """A name in [data.sources], or `corpus` for the corpus of [data].

    Of a training source, only the documents that `data.holdout` leaves out.
    """
    seq_len: Annotated[
        tuple[Annotated[int, Field(ge=2, le=MAX_SEQ_LEN), AsTokens], ...],
        BeforeValidator(as_tuple),
        Field(min_length=1),
    ]
    """Tokens per sequence.

    Several lengths must ascend; all score the same targets at the end of a sequence, with more
    context each.
    """
    rows: PositiveInt = 32
    """Number of sequences, or all if there are fewer."""
    tail: Annotated[int, Field(ge=1), AsTokens] | None = None
    """With several lengths: number of target tokens at the end of a sequence.

    Left out: 2048, or the shortest length.
    """

    @property
    def target_tokens(self) -> int:
        """Number of target tokens: the tail, or its default."""
        return self.tail or min(DEFAULT_TAIL_TOKENS, self.seq_len[0])


class ValidationSection(Section):
    interval: PositiveInt = 500
    """Steps between validations; the first precedes the first step, and one follows the last step
    of each stage.
    """
    sets: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], ValidationSetSection] = Field(
        {}
    )
    """Validation sets by name."""

    @property
    def sources(self) -> set[str]:
        return {each.source for each in self.sets.values()}
