"""What is read of a corpus, in lines for the log: before the first token is written, and after the last one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice

from trainer.data.contents import Kind
from trainer.data.corpus import Corpus
from trainer.data.corpus_files import by_suffix, escaped, list_names
from trainer.data.formats import BadText, InputSplit, read_texts
from trainer.data.token_dataset import TextCounts

PREVIEW_CHARS = 80
PREVIEW_TEXTS = 100
"""That are tried until one is not empty."""


def describe_reading(corpus: Corpus) -> Iterator[str]:
    """A line for each suffix: files, bytes, how they are read, the first characters. Reads one text of each."""
    key = corpus.spec.text_key
    if corpus.dataset is not None:
        first = first_characters(corpus.splits(), key)
        yield f'{corpus.name}: reading {corpus.dataset}, each row a text, from its column "{key}"; {first}'
        return
    groups = by_suffix(corpus.files)
    total = count(len(corpus.files), "file")
    yield f"{corpus.name}: reading {total}, {format_bytes(corpus.size)}, from {corpus.spec.corpus}"
    for suffix, files in sorted(groups.items(), key=lambda group: -sum(file.size for file in group[1])):
        splits = chain.from_iterable(map(corpus.split_file, files))
        first_split = next(splits)
        how = describe_kind(first_split.kind, corpus, documents=len({split_key(corpus, file.name) for file in files}))
        size = format_bytes(sum(file.size for file in files))
        first = first_characters(chain([first_split], splits), key)
        yield f"{corpus.name}: {name_suffix(suffix)}: {count(len(files), 'file')}, {size}, {how}; {first}"


def split_key(corpus: Corpus, name: str) -> str:
    return corpus.document_key(name) or name


def describe_left_out(corpus: Corpus) -> Iterator[str]:
    """A line for each reason."""
    if corpus.found is None:
        return
    for reason, names in corpus.found.left_out.items():
        yield f"{corpus.name}: left out {list_names(names)}: {reason}"
    if corpus.found.num_unstated:
        yield f"{corpus.name}: left out {count(corpus.found.num_unstated, 'file')} that data.files does not name"
    if corpus.found.inner_links:
        yield f"{corpus.name}: {list_names(corpus.found.inner_links)}: links to files of the corpus, read once more"


def describe_counts(name: str, counts: Mapping[str, TextCounts]) -> Iterator[str]:
    for suffix, each in sorted(counts.items()):
        yield f"{name}: {name_suffix(suffix)}: {count(each.texts, 'text')}, {each.empty:,} empty, {each.skipped:,} skipped"


def describe_kind(kind: Kind, corpus: Corpus, *, documents: int) -> str:
    key = corpus.spec.text_key
    unit = (
        f"each one part of a {corpus.spec.documents}'s document"
        if corpus.spec.documents != "file"
        else "each a document"
    )
    if kind == "lines":
        return f'JSON lines, {unit}, from their key "{key}"'
    if kind == "table":
        return f'rows of a table, {unit}, from their column "{key}"'
    return f"text, {count(documents, 'document')}"


def first_characters(splits: Iterator[InputSplit], key: str) -> str:
    """Of the first text that is not empty, escaped; or what is wrong with the first."""
    problems: list[str] = []
    texts = chain.from_iterable(read_texts(split, text_key=key) for split in splits)
    for blocks in islice(texts, PREVIEW_TEXTS):
        try:
            if text := next(blocks, ""):
                return f'the first begins "{escaped(text[:PREVIEW_CHARS])}"'
        except BadText as problem:
            problems.append(str(problem))
    return f"the first cannot be read: {problems[0]}" if problems else "the first are empty"


def name_suffix(suffix: str) -> str:
    return suffix or "files without a suffix"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_bytes(number: int) -> str:
    value, units = float(number), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{number:,} bytes" if units[0] == "bytes" else f"{value:.1f} {units[0]}"
