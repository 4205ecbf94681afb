"""Log lines on what is read of a corpus: before the first token is written, and after the last
one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice

from trainer.config import extension
from trainer.config.data import FileKind
from trainer.data.contents import full_suffix, text_suffix
from trainer.data.corpus import Corpus
from trainer.data.corpus_files import CorpusFile, list_names
from trainer.data.formats import FORMATS, BadText, InputSplit, read_texts
from trainer.data.token_dataset import TextCounts
from trainer.errors import in_one_line

LISTED_SUFFIXES = 20
PREVIEW_CHARS = 80
PREVIEW_TEXTS = 100
"""Texts that are tried until one is not empty."""


def describe_reading(corpus: Corpus) -> Iterator[str]:
    """A line for each suffix: files, bytes, how they are read, the first characters.

    Reads one text of each.
    """
    key = corpus.spec.text_key
    if corpus.dataset is not None:
        first = first_characters(corpus.splits(), key)
        yield f'{corpus.name}: reading {corpus.dataset}, each row a text, from its column "{key}"; {first}'
        return
    total = count(len(corpus.files), "file")
    yield f"{corpus.name}: reading {total}, {format_bytes(corpus.size)}, from {in_one_line(corpus.spec.corpus)}"
    groups = sorted(by_suffix_and_kind(corpus).items(), key=lambda group: -num_bytes(group[1]))
    for (suffix, kind), files in groups[:LISTED_SUFFIXES]:
        splits = chain.from_iterable(map(corpus.split_file, files))
        first = first_characters(splits, key)
        how = describe_kind(kind, corpus, files)
        size = f"{count(len(files), 'file')}, {format_bytes(num_bytes(files))}"
        yield f"{corpus.name}: {name_suffix(suffix)}: {size}, {how}; {first}"
    if others := groups[LISTED_SUFFIXES:]:
        rest = [file for _, files in others for file in files]
        size = f"{count(len(rest), 'file')}, {format_bytes(num_bytes(rest))}"
        yield f"{corpus.name}: {count(len(others), 'other suffix', 'es')}: {size}: {list_names([file.name for file in rest])}"


def describe_left_out(corpus: Corpus) -> Iterator[str]:
    """A line for each reason why files are left out."""
    if corpus.found is None:
        return
    for reason, names in corpus.found.left_out.items():
        yield f"{corpus.name}: left out {list_names(names)}: {reason}"
    if corpus.found.num_unstated:
        yield f"{corpus.name}: left out {count(corpus.found.num_unstated, 'file')} by data.files"
    if corpus.found.inner_links:
        yield f"{corpus.name}: {list_names(corpus.found.inner_links)}: links to files of the corpus, read once more"


def describe_counts(name: str, counts: Mapping[str, TextCounts]) -> Iterator[str]:
    """A line for each suffix; those with few texts share one."""
    by_texts = sorted(counts.items(), key=lambda item: -item[1].texts)
    lines = [(name_suffix(suffix), counted) for suffix, counted in by_texts[:LISTED_SUFFIXES]]
    if others := by_texts[LISTED_SUFFIXES:]:
        lines.append(
            (
                count(len(others), "other suffix", "es"),
                sum((each for _, each in others), TextCounts()),
            )
        )
    for what, each in lines:
        yield f"{name}: {what}: {count(each.texts, 'text')}, {each.empty:,} empty, {each.skipped:,} skipped"


def by_suffix_and_kind(corpus: Corpus) -> dict[tuple[str, FileKind], list[CorpusFile]]:
    """Files by suffix and kind: of one suffix, some may be lines of JSON and others text."""
    found: dict[tuple[str, FileKind], list[CorpusFile]] = {}
    for file in corpus.files:
        found.setdefault((full_suffix(file.name), corpus.kind(file)), []).append(file)
    return found


def describe_kind(kind: FileKind, corpus: Corpus, files: Sequence[CorpusFile]) -> str:
    documents = corpus.spec.documents
    key = corpus.spec.text_key
    unit = (
        "each a document" if documents == "file" else f"joined to a document for each {documents}"
    )
    if kind in FORMATS:
        found = FORMATS[kind]
        return f'{found.records}, {unit}, from their {found.key} "{key}"'
    if kind == "added" and (added := extension.added_source(text_suffix(files[0].name))):
        return f'texts that extension "{added.extension.name}" reads, {unit}'
    return f"text, {count(len({corpus.document_key(file.name) or file.name for file in files}), 'document')}"


def first_characters(splits: Iterator[InputSplit], key: str) -> str:
    """First characters of the first text that is not empty, escaped; or what is wrong with the
    first.
    """
    problems: list[str] = []
    # Lazy: only as much of the corpus is opened as the first text needs.
    texts = chain.from_iterable(read_texts(split, text_key=key) for split in splits)
    for found in islice(texts, PREVIEW_TEXTS):
        text = ""
        try:
            while len(text) < PREVIEW_CHARS and (block := next(found.blocks, "")):
                text += block
            if text:
                return f'the first begins "{in_one_line(text[:PREVIEW_CHARS])}"'
        except BadText as problem:
            problems.append(str(problem))
    return f"the first cannot be read: {problems[0]}" if problems else "the first are empty"


def name_suffix(suffix: str) -> str:
    return suffix or "files without a suffix"


def num_bytes(files: Sequence[CorpusFile]) -> int:
    return sum(file.size for file in files)


def count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def format_bytes(number: int) -> str:
    value = float(number)
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value = value / 1000
        units = units[1:]
    return f"{number:,} bytes" if units[0] == "bytes" else f"{value:.1f} {units[0]}"
