"""Texts out of files: plain or compressed, lines of JSON, tables. Only this file knows pyarrow and zstandard."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from trainer.data.errors import DataError, needs
from trainer.data.hf_datasets import HUB, read_dataset
from trainer.data.tokenizer import last_line

BLOCK = 1 << 22  # bytes
COMPRESSED = 1 << 12  # bytes that are unpacked at once: a few may unpack to very many
LONGEST_LINE = 1 << 30  # bytes
ROWS = 64  # of a table that are in memory at once
BAD = (OSError, EOFError, ValueError, RecursionError, NotImplementedError, zlib.error)


class Unit(NamedTuple):
    """What is read in one go: a file, or a range of its bytes, row groups or rows.

    Texts of neighbours with the same `document` are one document; where it is empty, each text is one.
    """

    path: str
    name: str
    size: int
    """Bytes, as far as they are known."""
    document: str = ""
    title: str = ""
    """What stands before the text of a file."""
    start: int = 0
    stop: int = sys.maxsize
    mtime_ns: int = 0


class BadText(Exception):  # noqa: N818 - it ends a text, and nothing else
    """Which text of which file is none, and why."""


def texts(unit: Unit, *, text_key: str) -> Iterator[Iterator[str]]:
    """The texts of a unit, in blocks that end with a line where possible. Instead of any block, BadText may come."""
    try:
        if unit.path.startswith(HUB):
            for row, value in read_dataset(unit.path, unit.start, unit.stop, text_key):
                yield framed(unit, blocks_of(value, text_key), lambda row=row: f": row {row}")  # type: ignore[misc]
        elif kind_of(unit.name) == ".parquet":
            yield from read_table(unit, text_key)
        elif kind_of(unit.name) == ".jsonl":
            yield from read_lines(unit, text_key)
        else:
            yield framed(unit, read_blocks(Path(unit.path)), str)
    except DataError:
        raise
    except BAD as error:
        yield raising(f"{unit.name}: {explain(error)}")


def kind_of(name: str) -> str:
    """The suffix of a file's name, without what says that it is compressed."""
    return Path(name.removesuffix(".gz").removesuffix(".zst")).suffix


def framed(unit: Unit, blocks: Iterator[str], where: Callable[[], str]) -> Iterator[str]:
    """The blocks, with the title before them and, where the document may go on, a line break after them."""
    try:
        text = unit.title + next(blocks, "")
        while text:
            following = next(blocks, "")
            yield text if following or not unit.document or text.endswith("\n") else f"{text}\n"
            text = following
    except BAD as error:
        raise BadText(f"{unit.name}{where()}: {explain(error)}") from error


def raising(problem: str) -> Iterator[str]:
    raise BadText(problem)
    yield


def explain(error: BaseException) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


# ---- plain text


def read_blocks(path: Path) -> Iterator[str]:
    """The text of a file. Raises ValueError where it turns out to be none, after blocks that were good."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest, offset, final = "", 0, False
    with unpacked(path) as file:
        while not final:
            data = file.read(BLOCK)
            final = not data
            offset += len(data)
            try:
                text = rest + decoder.decode(data, final)
            except UnicodeDecodeError as error:
                at = offset - len(error.object) + error.start
                raise ValueError(f"not UTF-8 text: byte {error.object[error.start]:#04x} at offset {at}") from error
            if "\0" in text:
                raise ValueError("not text: it holds a zero byte")
            cut = len(text) if final else last_line(text, 0, len(text))
            if cut:
                yield text[:cut]
            rest = text[cut:]


def blocks_of(value: object, key: str) -> Iterator[str]:
    """The text of a record. Raises ValueError if it is none."""
    if not isinstance(value, str):
        raise ValueError(f'it has no string at key "{key}"')  # noqa: TRY004
    value.encode()  # JSON can escape half a character, which is no text
    start = 0
    while start < len(value):
        stop = start + BLOCK
        stop = len(value) if stop >= len(value) else last_line(value, start, stop)
        yield value[start:stop]
        start = stop


# ---- lines of JSON


def read_lines(unit: Unit, key: str) -> Iterator[Iterator[str]]:
    """The lines that begin within the range."""
    path = Path(unit.path)
    with unpacked(path) as file:
        number = at = 0
        if unit.start:
            file.seek(unit.start - 1)
            at = unit.start - 1 + len(file.readline())
        while at < unit.stop and (line := file.readline(LONGEST_LINE)):
            at, number = at + len(line), number + 1
            if len(line) == LONGEST_LINE:
                raise ValueError(f"it has a line of more than {LONGEST_LINE:,} bytes")
            if not line.isspace():
                where = lambda number=number: f":{number + lines_before(path, unit.start)}"  # noqa: E731
                yield framed(unit, parsed(line, key), where)


def parsed(line: bytes, key: str) -> Iterator[str]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:  # Its own words name a line, always the first.
        raise ValueError(f"{error.msg} at character {error.pos}") from error
    if not isinstance(record, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004
    yield from blocks_of(record.get(key), key)


def lines_before(path: Path, start: int) -> int:
    """Lines that begin before a byte. It reads all of them, and is asked only where one is bad."""
    found = int(start > 0)
    with path.open("rb") as file:
        left = start - 1
        while left > 0 and (data := file.read(min(left, BLOCK))):
            left -= len(data)
            found += data.count(b"\n")
    return found


# ---- tables


def row_groups(path: Path) -> list[int]:
    """Bytes of each row group. Raises DataError without pyarrow, and one of BAD."""
    with open_table(path) as table:
        return [table.metadata.row_group(group).total_byte_size for group in range(table.num_row_groups)]


def read_table(unit: Unit, key: str) -> Iterator[Iterator[str]]:
    """The rows of the row groups in the range."""
    with open_table(Path(unit.path)) as table:
        if key not in table.schema_arrow.names:
            raise ValueError(f'it has no column "{key}", but {", ".join(table.schema_arrow.names)}')
        groups = range(unit.start, min(unit.stop, table.num_row_groups))
        row = sum(table.metadata.row_group(group).num_rows for group in range(unit.start))
        for batch in table.iter_batches(ROWS, row_groups=groups, columns=[key], use_threads=False):
            for cell in batch.column(0):
                row += 1
                yield framed(unit, cell_text(cell, key), lambda row=row: f": row {row}")  # type: ignore[misc]


def cell_text(cell: Any, key: str) -> Iterator[str]:
    yield from blocks_of(cell.as_py(), key)


def open_table(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise needs("pyarrow", path) from error
    return parquet.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK)


# ---- compressed files


def unpacked(path: Path) -> IO[bytes] | gzip.GzipFile:
    if path.suffix == ".gz":
        return gzip.open(path)
    return io.BufferedReader(Chunks(unpack_zstandard(path)), BLOCK) if path.suffix == ".zst" else path.open("rb")


def unpack_zstandard(path: Path) -> Iterator[bytes]:
    """Unlike the library's own reader, raises EOFError where the file's end is missing."""
    try:
        import zstandard
    except ImportError as error:
        raise needs("zstandard", path) from error
    frame = None
    with path.open("rb") as file:
        while packed := file.read(COMPRESSED):
            while packed:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(packed)
                except zstandard.ZstdError as error:
                    raise ValueError(str(error)) from error
                packed = frame.unused_data
                frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the compressed file ends too early")


class Chunks(io.RawIOBase):
    """Bytes that an iterator gives, as a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest and (chunk := next(self._chunks, None)) is not None:
            self._rest = chunk
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size
