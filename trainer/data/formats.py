"""Reads text from plain, compressed, JSON and Parquet files, and from datasets."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, BinaryIO, NamedTuple, cast

from models.files import MAX_RECORD_BYTES, open_beneath
from trainer.config import extension
from trainer.config.data import HF_PREFIX, FileKind
from trainer.data.contents import HEAD_BYTES, describe_bytes, parse_json, text_suffix
from trainer.data.corpus_files import error_message
from trainer.data.hf_datasets import read_dataset
from trainer.data.open_file import READ_ERRORS, open_decompressed, open_parquet
from trainer.errors import DataError

BLOCK = 1 << 22  # bytes


class InputSplit(NamedTuple):
    """A unit of reading: a file, or a range of its bytes, row groups or rows.

    Adjacent splits with the same `document_key` form one document. If the key is empty, every text
    is a document.
    """

    path: str
    """The path without links, or the `hf:` name of a dataset."""
    name: str
    size: int
    """Bytes; an estimate for datasets and row groups."""
    document_key: str = ""
    header: str = ""
    """Prepended to the text of a file."""
    start: int = 0
    stop: int = sys.maxsize
    mtime_ns: int = 0
    root: str = ""
    """The folder that the file is opened beneath."""
    kind: FileKind = "text"
    is_library: bool = False
    """Whether it belongs to the standard library, whose tests hold files that are not text on
    purpose.
    """

    @property
    def place(self) -> tuple[str, str, str]:
        """The arguments that open the file."""
        return self.root, self.path, self.name


class BadText(Exception):  # noqa: N818 - it discards one text, and reading continues
    """Names a text that cannot be read, and the reason."""


class Text(NamedTuple):
    """A text of a split. Its blocks may end anywhere, and any of them may raise BadText."""

    split: InputSplit
    number: int
    """Row or line of the text, as in `Record`."""
    blocks: Iterator[str]

    @property
    def name(self) -> str:
        return f"{self.split.name}{location(self.split, self.number)}"


def read_texts(split: InputSplit, *, text_key: str) -> Iterator[Text]:
    """Every text of a split, to be read in order."""
    try:
        for number, blocks in read_records(split, text_key):
            yield Text(split, number, document_blocks(split, blocks, number))
    # A DataError is a ValueError, too, but concerns the whole corpus, not one file.
    except DataError:
        raise
    except READ_ERRORS as error:
        yield Text(split, 0, raise_bad_text(f"{split.name}: {error_message(error)}"))


Record = tuple[int, Iterator[str]]
"""The blocks of a text, and its row, or its line in the split, from 1; 0 for the text of a whole
file.
"""


def read_records(split: InputSplit, key: str) -> Iterator[Record]:
    if split.path.startswith(HF_PREFIX):
        for row, value in read_dataset(split.path, split.start, split.stop, key):
            yield row, text_blocks(value, key)
    elif split.kind in FORMATS:
        yield from FORMATS[split.kind].read(split, key)
    elif split.kind == "added":
        yield from read_added(split, key)
    else:
        yield 0, read_blocks(split)


def require_text(split: InputSplit, head: bytes) -> None:
    """Raises ValueError if a file's first bytes are not text."""
    if (problem := describe_bytes(head)) and not split.is_library:
        raise ValueError(f"not text: {problem}")


def document_blocks(split: InputSplit, blocks: Iterator[str], number: int) -> Iterator[str]:
    """Prepends the header.

    Ends the text with a line break if the document may continue in the next text.
    """
    try:
        # One block is read ahead, because only the last one may need a line break.
        text = split.header + next(blocks, "")
        while text:
            next_text = next(blocks, "")
            yield (
                text if next_text or not split.document_key or text.endswith("\n") else f"{text}\n"
            )
            text = next_text
    except DataError:
        raise
    except READ_ERRORS as error:
        raise BadText(f"{split.name}{location(split, number)}: {error_message(error)}") from error


def location(split: InputSplit, number: int) -> str:
    """Suffix of a file's name in messages: the place of the record of this number."""
    if split.path.startswith(HF_PREFIX) or split.kind == "table":
        return f": row {number}"
    if split.kind == "added":
        return f": text {number}" if number else ""
    return f":{number + count_lines_before(split)}" if number else ""


def raise_bad_text(problem: str) -> Iterator[str]:
    raise BadText(problem)
    yield


def raise_too_long(what: str, most: int, unit: str) -> Iterator[str]:
    raise ValueError(f"{what} is longer than {most:,} {unit}")
    yield


# ---- plain text


def read_blocks(split: InputSplit) -> Iterator[str]:
    """The text of a file.

    Raises ValueError at the first byte that is not text, possibly after valid blocks.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    offset = 0
    final = False
    with open_decompressed(*split.place) as file:
        while not final:
            data = file.read(BLOCK)
            final = not data
            if not offset:
                require_text(split, data[:HEAD_BYTES])
            offset += len(data)
            try:
                text = decoder.decode(data, final)
            except UnicodeDecodeError as error:
                # `error.object` begins with bytes of a character that the previous block left
                # incomplete.
                byte_offset = offset - len(error.object) + error.start
                raise ValueError(
                    f"not UTF-8 text: byte {error.object[error.start]:#04x} at offset {byte_offset}"
                ) from error
            if "\0" in text:
                raise ValueError("not text: contains a zero byte")
            if text:
                yield text


def text_blocks(value: object, key: str) -> Iterator[str]:
    """The text of a record. Raises ValueError if it is not a string or has lone surrogates."""
    if not isinstance(value, str):
        raise ValueError(f'no string at key "{key}"')  # noqa: TRY004
    if len(value) > MAX_RECORD_BYTES:
        yield from raise_too_long("a text", MAX_RECORD_BYTES, "characters")
    if not value.isascii():
        value.encode()  # JSON can escape a lone surrogate
    yield from (value[start : start + BLOCK] for start in range(0, len(value), BLOCK))


# ---- what an extension reads


def read_added(split: InputSplit, key: str) -> Iterator[Record]:
    """The texts that an extension reads from a file.

    Its READ_ERRORS mean a damaged file, as ours do; whatever else it raises ends the preparation.
    """
    suffix = text_suffix(split.name)
    added = extension.added_source(suffix)
    if added is None:
        raise DataError(f"{split.name}: no extension reads {suffix}")
    try:
        with open_decompressed(*split.place) as file:
            for number, text in enumerate(
                added.extension.sources[suffix](cast(BinaryIO, file), key), 1
            ):
                if not isinstance(text, str):
                    raise TypeError(f"sources {suffix} gave {type(text).__name__}, not text")
                yield number, text_blocks(text, key)
    except DataError:
        raise
    except Exception as error:
        problem = (
            extension.describe_error(error)
            or f'extension "{added.extension.name}": {error_message(error)}'
        )
        kind = ValueError if isinstance(error, READ_ERRORS) else DataError
        raise kind(problem if kind is ValueError else f"{split.name}: {problem}") from error


# ---- lines of JSON


def read_jsonl(split: InputSplit, key: str) -> Iterator[Record]:
    """The lines that start within the byte range."""
    with open_decompressed(*split.place) as file:
        number = offset = 0
        if split.start:
            # The line that holds the byte before `start` belongs to the previous range. If that
            # byte is a line break, the first line of this range begins exactly at `start`.
            file.seek(split.start - 1)
            offset = split.start - 1 + pass_line(file, split.stop - split.start + 1)
        while offset < split.stop and (line := file.readline(MAX_RECORD_BYTES + 1)):
            offset = offset + len(line)
            number = number + 1
            if len(line) > MAX_RECORD_BYTES:
                line = b""
                yield number, raise_too_long("a line", MAX_RECORD_BYTES, "bytes")
                offset += pass_line(file, split.stop - offset)
            elif not line.isspace():
                yield number, parse_json_line(line, key)


def pass_line(file: Any, max_bytes: int) -> int:
    """Reads to the end of a line, or past `max_bytes`, in blocks; returns the number of bytes."""
    passed = 0
    while passed < max_bytes and (block := file.readline(BLOCK)):
        passed += len(block)
        if block.endswith(b"\n"):
            break
    return passed


def parse_json_line(line: bytes, key: str) -> Iterator[str]:
    try:
        # Where files were concatenated, a byte order mark may begin any line.
        record = parse_json(line.removeprefix(codecs.BOM_UTF8).decode())
    except json.JSONDecodeError as error:
        # str(error) adds a line number, which is always 1.
        raise ValueError(f"{error.msg} at character {error.pos}") from error
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004
    yield from text_blocks(record.get(key), key)


def count_lines_before(split: InputSplit) -> int:
    """Number of lines that start before a split.

    Reads the file up to there, so it is called for bad lines only.
    """
    # Lines that start before the range: the first of the file, and one after each line break up to
    # two bytes before `start`.
    count = int(split.start > 0)
    with open_beneath(split.root, split.path) as file:
        remaining = split.start - 1
        while remaining > 0 and (data := file.read(min(remaining, BLOCK))):
            remaining -= len(data)
            count += data.count(b"\n")
    return count


# ---- tables


def row_group_sizes(split: InputSplit) -> list[int]:
    """Uncompressed bytes of each row group. Raises DataError without pyarrow, and READ_ERRORS."""
    with open_parquet(*split.place, buffer_bytes=BLOCK) as table:
        return [
            table.metadata.row_group(group).total_byte_size
            for group in range(table.num_row_groups)
        ]


def read_parquet(split: InputSplit, key: str) -> Iterator[Record]:
    """The rows of a range of row groups."""
    with open_parquet(*split.place, buffer_bytes=BLOCK) as table:
        if key not in table.schema_arrow.names:
            raise ValueError(
                f'no column "{key}"; its columns are {", ".join(table.schema_arrow.names)}'
            )
        groups = range(split.start, min(split.stop, table.num_row_groups))
        first_row = 1 + sum(
            table.metadata.row_group(group).num_rows for group in range(split.start)
        )
        # One row at a time: the entries of a small file's dictionary may be large, and stand in
        # every row.
        batches = table.iter_batches(1, row_groups=groups, columns=[key], use_threads=False)
        cells = chain.from_iterable(batch.column(0) for batch in batches)
        yield from ((row, cell_text(cell, key)) for row, cell in enumerate(cells, first_row))


def cell_text(cell: Any, key: str) -> Iterator[str]:
    content = cell.as_buffer() if hasattr(cell, "as_buffer") else None
    if content is not None and content.size > MAX_RECORD_BYTES:
        yield from raise_too_long("a text", MAX_RECORD_BYTES, "bytes")
    yield from text_blocks(cell.as_py(), key)


class Format(NamedTuple):
    """Files of several texts."""

    read: Callable[[InputSplit, str], Iterator[Record]]
    """Yields the texts that stand under a key."""
    records: str
    """Names what the texts are in."""
    key: str
    """Names what `data.text_key` is of a record."""


FORMATS: dict[FileKind, Format] = {
    "lines": Format(read_jsonl, "JSON lines", "key"),
    "table": Format(read_parquet, "rows of a table", "column"),
}
"""How files are read, by `trainer.config.data.FILE_KINDS`; a text is read as a whole."""
