"""Opens a file of a corpus by the one door, `models.files`, and decompresses it.

Only this module imports pyarrow.
"""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import Any

from models.files import MAX_RECORD_BYTES, open_beneath
from trainer.data.contents import HEAD_BYTES, LFS_POINTER, compression_suffix, is_lfs_pointer
from trainer.errors import CorpusRefusedError, missing_package

READ_ERRORS = (OSError, EOFError, ValueError, RecursionError, NotImplementedError, zlib.error)


def open_data(root: str, path: str, name: str) -> BufferedReader:
    """Opens as `open_beneath` does. Raises CorpusRefusedError for a Git LFS pointer."""
    file = open_beneath(root, path)
    if is_lfs_pointer(file.peek(1)):
        file.close()
        raise CorpusRefusedError(f"{name}: {LFS_POINTER}")
    return file


@contextmanager
def open_decompressed(root: str, path: str, name: str) -> Iterator[BufferedReader | gzip.GzipFile]:
    """Opens as `open_data` does; the suffix of `name` says how the file is compressed.

    Raises DataError without pyarrow.
    """
    suffix = compression_suffix(name)
    pyarrow = import_pyarrow(name) if suffix == ".zst" else None
    with open_data(root, path, name) as file:
        if pyarrow is not None:
            yield BufferedReader(pyarrow.input_stream(file, compression="zstd"))
        else:
            yield gzip.GzipFile(fileobj=file) if suffix == ".gz" else file


def read_head(root: str, path: str, name: str) -> tuple[bytes, bool]:
    """First bytes, decompressed, and whether they are all. What may be a JSON record is read to
    the end of its line.

    Raises CorpusRefusedError for a Git LFS pointer, DataError without pyarrow, and READ_ERRORS.
    """
    with open_decompressed(root, path, name) as opened:
        head = opened.read(HEAD_BYTES)
        # Keys of a record are known once its line is complete.
        if b"\n" not in head and head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
            head += opened.readline(MAX_RECORD_BYTES)
        return head, not opened.read(1)


@contextmanager
def open_parquet(root: str, path: str, name: str, *, buffer_bytes: int) -> Iterator[Any]:
    """Opens as `open_data` does. Raises DataError without pyarrow."""
    parquet = import_pyarrow(name).parquet
    with (
        open_data(root, path, name) as file,
        parquet.ParquetFile(file, pre_buffer=False, buffer_size=buffer_bytes) as table,
    ):
        yield table


def import_pyarrow(name: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise missing_package("pyarrow", name) from error
    return pyarrow
