"""Reads text from plain, compressed, .jsonl and .parquet files. Only this module imports pyarrow and zstandard."""

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

from trainer.config.data import HF_PREFIX
from trainer.data.hf_datasets import read_dataset
from trainer.data.tokenizer import last_safe_split
from trainer.errors import DataError, missing_package

BLOCK = 1 << 22  # bytes
COMPRESSED_BLOCK = 1 << 12  # small: the decompressed size of a block has no bound
LONGEST_LINE = 1 << 30  # bytes
BATCH_ROWS = 64  # rows of a table in memory
READ_ERRORS = (OSError, EOFError, ValueError, RecursionError, NotImplementedError, zlib.error)


class InputSplit(NamedTuple):
    """A unit of reading: a file, or a range of its bytes, row groups or rows.

    Adjacent splits with the same `document_key` form one document. If the key is empty, every text is a document.
    """

    path: str
    name: str
    size: int
    """Bytes; an estimate for datasets and row groups."""
    document_key: str = ""
    header: str = ""
    """Prepended to the text of a file."""
    start: int = 0
    stop: int = sys.maxsize
    mtime_ns: int = 0


class BadText(Exception):  # noqa: N818 - it discards one text, and reading continues
    """Names a text that cannot be read, and the reason."""


def read_texts(split: InputSplit, *, text_key: str) -> Iterator[Iterator[str]]:
    """Yields each text of a split as blocks, cut at line ends where possible. Any block may raise BadText."""
    try:
        if split.path.startswith(HF_PREFIX):
            for row, record_text in read_dataset(split.path, split.start, split.stop, text_key):
                yield document_blocks(split, text_blocks(record_text, text_key), lambda row=row: f": row {row}")  # type: ignore[misc]
        elif uncompressed_suffix(split.name) == ".parquet":
            yield from read_parquet(split, text_key)
        elif uncompressed_suffix(split.name) == ".jsonl":
            yield from read_jsonl(split, text_key)
        else:
            yield document_blocks(split, read_blocks(Path(split.path)), str)
    except DataError:
        raise
    except READ_ERRORS as error:
        yield raise_bad_text(f"{split.name}: {error_message(error)}")


def uncompressed_suffix(name: str) -> str:
    """The suffix before `.gz` and `.zst`."""
    return Path(name.removesuffix(".gz").removesuffix(".zst")).suffix


def document_blocks(split: InputSplit, blocks: Iterator[str], location: Callable[[], str]) -> Iterator[str]:
    """Prepends the header. Ends the text with a line break if the document may continue in the next text."""
    try:
        text = split.header + next(blocks, "")
        while text:
            next_text = next(blocks, "")
            yield text if next_text or not split.document_key or text.endswith("\n") else f"{text}\n"
            text = next_text
    except READ_ERRORS as error:
        raise BadText(f"{split.name}{location()}: {error_message(error)}") from error


def raise_bad_text(problem: str) -> Iterator[str]:
    raise BadText(problem)
    yield


def error_message(error: BaseException) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


# ---- plain text


def read_blocks(path: Path) -> Iterator[str]:
    """The text of a file. Raises ValueError at the first byte that is not text, possibly after valid blocks."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    remainder, offset, final = "", 0, False
    with open_decompressed(path) as file:
        while not final:
            data = file.read(BLOCK)
            final = not data
            offset += len(data)
            try:
                text = remainder + decoder.decode(data, final)
            except UnicodeDecodeError as error:
                byte_offset = offset - len(error.object) + error.start
                raise ValueError(
                    f"not UTF-8 text: byte {error.object[error.start]:#04x} at offset {byte_offset}"
                ) from error
            if "\0" in text:
                raise ValueError("not text: contains a zero byte")
            split_at = len(text) if final else last_safe_split(text, 0, len(text))
            if split_at:
                yield text[:split_at]
            remainder = text[split_at:]


def text_blocks(value: object, key: str) -> Iterator[str]:
    """The text of a record. Raises ValueError if it is not a string or has lone surrogates."""
    if not isinstance(value, str):
        raise ValueError(f'no string at key "{key}"')  # noqa: TRY004
    value.encode()  # JSON can escape a lone surrogate
    start = 0
    while start < len(value):
        stop = start + BLOCK
        stop = len(value) if stop >= len(value) else last_safe_split(value, start, stop)
        yield value[start:stop]
        start = stop


# ---- lines of JSON


def read_jsonl(split: InputSplit, key: str) -> Iterator[Iterator[str]]:
    """The lines that start within the byte range."""
    path = Path(split.path)
    with open_decompressed(path) as file:
        number = offset = 0
        if split.start:
            file.seek(split.start - 1)
            offset = split.start - 1 + len(file.readline())
        while offset < split.stop and (line := file.readline(LONGEST_LINE)):
            offset, number = offset + len(line), number + 1
            if len(line) == LONGEST_LINE:
                raise ValueError(f"a line is longer than {LONGEST_LINE:,} bytes")
            if not line.isspace():
                location = lambda number=number: f":{number + count_lines_before(path, split.start)}"  # noqa: E731
                yield document_blocks(split, parse_json_line(line, key), location)


def parse_json_line(line: bytes, key: str) -> Iterator[str]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:  # str(error) adds a line number, which is always 1.
        raise ValueError(f"{error.msg} at character {error.pos}") from error
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004
    yield from text_blocks(record.get(key), key)


def count_lines_before(path: Path, start: int) -> int:
    """Number of lines that start before a byte offset. Reads the file up to there, so it is called for bad lines only."""
    count = int(start > 0)
    with path.open("rb") as file:
        remaining = start - 1
        while remaining > 0 and (data := file.read(min(remaining, BLOCK))):
            remaining -= len(data)
            count += data.count(b"\n")
    return count


# ---- tables


def row_group_sizes(path: Path) -> list[int]:
    """Uncompressed bytes of each row group. Raises DataError without pyarrow, and READ_ERRORS."""
    with open_parquet(path) as table:
        return [table.metadata.row_group(group).total_byte_size for group in range(table.num_row_groups)]


def read_parquet(split: InputSplit, key: str) -> Iterator[Iterator[str]]:
    """The rows of a range of row groups."""
    with open_parquet(Path(split.path)) as table:
        if key not in table.schema_arrow.names:
            raise ValueError(f'no column "{key}"; its columns are {", ".join(table.schema_arrow.names)}')
        groups = range(split.start, min(split.stop, table.num_row_groups))
        row = sum(table.metadata.row_group(group).num_rows for group in range(split.start))
        for batch in table.iter_batches(BATCH_ROWS, row_groups=groups, columns=[key], use_threads=False):
            for cell in batch.column(0):
                row += 1
                yield document_blocks(split, cell_text(cell, key), lambda row=row: f": row {row}")  # type: ignore[misc]


def cell_text(cell: Any, key: str) -> Iterator[str]:
    yield from text_blocks(cell.as_py(), key)


def open_parquet(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise missing_package("pyarrow", path) from error
    return parquet.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK)


# ---- compressed files


def open_decompressed(path: Path) -> IO[bytes] | gzip.GzipFile:
    if path.suffix == ".gz":
        return gzip.open(path)
    return io.BufferedReader(IteratorIO(decompress_zstd(path)), BLOCK) if path.suffix == ".zst" else path.open("rb")


def decompress_zstd(path: Path) -> Iterator[bytes]:
    """Raises EOFError for a truncated file, which the reader of `zstandard` accepts."""
    try:
        import zstandard
    except ImportError as error:
        raise missing_package("zstandard", path) from error
    frame = None
    with path.open("rb") as file:
        while compressed := file.read(COMPRESSED_BLOCK):
            while compressed:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(compressed)
                except zstandard.ZstdError as error:
                    raise ValueError(str(error)) from error
                compressed = frame.unused_data
                frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the compressed file ends too early")


class IteratorIO(io.RawIOBase):
    """A readable file over an iterator of bytes."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._remainder = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._remainder and (chunk := next(self._chunks, None)) is not None:
            self._remainder = chunk
        size = min(len(buffer), len(self._remainder))
        buffer[:size], self._remainder = self._remainder[:size], self._remainder[size:]
        return size
