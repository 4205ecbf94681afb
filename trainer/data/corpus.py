"""A corpus as a list of what is to be read, cut into pieces that do not depend on who reads them."""

from __future__ import annotations

import os
import re
import stat
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trainer.data.errors import DataError
from trainer.data.formats import READ_ERRORS, InputSplit, error_message, row_group_sizes, uncompressed_suffix
from trainer.data.hf_datasets import HUB_PREFIX, is_saved_dataset, open_dataset
from trainer.data.source import CorpusSpec

PYTHON_STDLIB = "python-stdlib"
# Installed packages are not the library's; encodings/ are near-equal Unicode tables, which flatter a loss.
STDLIB_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "encodings"}
PARTITION_BYTES = 1 << 23  # bytes: what a killed preparation does again, and what a worker does before it takes more
MAX_PARTITIONS = 1000  # of which each is at least one file that every run maps into memory


class CorpusFile(NamedTuple):
    """A file of a corpus; `name` is its path in the corpus, with slashes."""

    path: Path
    name: str
    size: int
    mtime_ns: int


class Corpus:
    """The standard library, a file or a folder of them, or a data set.

    What is no text is bad: it is named and counted, or refused with a DataError. The standard library, whose tests
    hold such files on purpose, refuses none.
    """

    def __init__(self, source: CorpusSpec) -> None:
        corpus = source.corpus
        self.is_stdlib = corpus == PYTHON_STDLIB
        self.skipped: list[str] = []
        self.fail_on_bad_files = source.bad_files == "refuse" and not self.is_stdlib
        self._documents = source.documents
        self._dataset = (
            corpus
            if corpus.startswith(HUB_PREFIX)
            else f"{HUB_PREFIX}{corpus}"
            if is_saved_dataset(Path(corpus))
            else None
        )
        self._root = Path(sysconfig.get_paths()["stdlib"]) if self.is_stdlib else Path(corpus)
        name = self._dataset.removeprefix(HUB_PREFIX).partition(",")[0] if self._dataset else Path(corpus).resolve()
        self.name = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(name).name) or "root"
        self.files = (
            [] if self._dataset else sorted(self._scan(), key=lambda file: (self._document_key(file.name), file.name))
        )
        if not self._dataset and not self.files:
            advice = "; set data.corpus to a text file or a folder" if self.is_stdlib else ""
            raise DataError(f'data.corpus = "{corpus}": there is no text file in {self._root}{advice}')

    @property
    def size(self) -> int:
        """Bytes, as far as they are known."""
        return open_dataset(self._dataset).num_bytes if self._dataset else sum(file.size for file in self.files)

    @property
    def identity(self) -> list[object]:
        """Equal for equal texts, as far as names, sizes and times tell."""
        if self._dataset:
            return [open_dataset(self._dataset).version]
        return [self.is_stdlib, *((file.name, file.size, file.mtime_ns) for file in self.files)]

    def partitions(self) -> list[list[InputSplit]]:
        """Whole documents of at least about PIECE bytes, which depend on the corpus alone."""
        min_bytes = max(PARTITION_BYTES, self.size // MAX_PARTITIONS)
        partitions: list[list[InputSplit]] = []
        num_bytes, document = min_bytes, ""
        for split in self._splits(min_bytes):
            if num_bytes >= min_bytes and not (split.document_key and split.document_key == document):
                partitions.append([])
                num_bytes = 0
            partitions[-1].append(split)
            num_bytes, document = num_bytes + split.size, split.document_key
        return partitions

    def record_bad_file(self, problem: str) -> None:
        """Counts what is bad, or refuses it."""
        if self.fail_on_bad_files:
            raise DataError(f'data.bad_files = "refuse", and {self._dataset or self._root} holds {problem}')
        self.skipped.append(problem)

    def _splits(self, min_bytes: int) -> Iterator[InputSplit]:
        if self._dataset:
            dataset = open_dataset(self._dataset)
            # Rows of a saved data set are of one kind; the files of a stream are not to be counted on.
            step = max(1, min_bytes * dataset.num_parts // dataset.num_bytes) if dataset.num_bytes else 1
            for start in range(0, dataset.num_parts, step):
                stop = min(start + step, dataset.num_parts)
                size = (stop - start) * dataset.num_bytes // dataset.num_parts if dataset.num_bytes else min_bytes
                yield InputSplit(self._dataset, self.name, size, start=start, stop=stop)
        for file in self.files:
            yield from self._split_file(file, min_bytes)

    def _split_file(self, file: CorpusFile, min_bytes: int) -> Iterator[InputSplit]:
        group, kind = self._document_key(file.name), uncompressed_suffix(file.name)
        full_file = InputSplit(str(file.path), file.name, file.size, group, mtime_ns=file.mtime_ns)
        if kind == ".parquet":
            sizes = [0]
            with suppress(*READ_ERRORS):  # Whoever reads it will say so.
                sizes = row_group_sizes(file.path) or sizes
            compression_ratio = file.size / max(1, sum(sizes))
            for number, size in enumerate(sizes):
                yield full_file._replace(size=int(size * compression_ratio), start=number, stop=number + 1)
        elif file.name.endswith(".jsonl"):
            for start in range(0, max(1, file.size), min_bytes):
                size = min(min_bytes, file.size - start)
                yield full_file._replace(size=size, start=start, stop=start + size)
        elif kind == ".jsonl":
            yield full_file
        else:
            yield full_file._replace(header=f"# {file.name}\n" if group or self.is_stdlib else "")

    def _document_key(self, name: str) -> str:
        """The folder whose files make one document, files outside of all folders one, too; "": each is its own."""
        if self._documents == "file":
            return ""
        return (
            (name.partition("/") if self._documents == "repository" else name.rpartition("/"))[0]
            if "/" in name
            else "."
        )

    def _scan(self) -> Iterator[CorpusFile]:
        if not self._root.is_dir():
            file = self._stat(self._root, self._root.name)
            return iter([file] if file else [])
        return self._scan_folder()

    def _scan_folder(self) -> Iterator[CorpusFile]:
        def unreadable(error: OSError) -> None:
            self.record_bad_file(f"{error.filename}: {error_message(error)}")

        for folder, folders, names in os.walk(self._root, onerror=unreadable):
            folders.sort()
            if self.is_stdlib:
                folders[:] = [name for name in folders if name not in STDLIB_EXCLUDED_FOLDERS]
                names = [name for name in names if name.endswith(".py")]
            for name in list(folders):
                path = Path(folder) / name
                if name.startswith(".") or path.is_symlink():
                    folders.remove(name)
                    kind = "a hidden folder" if name.startswith(".") else "a link to a folder"
                    self.record_bad_file(f"{self._relative_name(path)}: {kind}")
            for name in sorted(names):
                path = Path(folder) / name
                file = self._stat(path, self._relative_name(path))
                if file is not None:
                    yield file

    def _stat(self, path: Path, name: str) -> CorpusFile | None:
        try:
            status = path.stat()
        except OSError as error:
            self.record_bad_file(f"{name}: {error_message(error)}")
            return None
        if stat.S_ISREG(status.st_mode) and (path == self._root or not path.name.startswith(".")):
            return CorpusFile(path, name, status.st_size, status.st_mtime_ns)
        self.record_bad_file(f"{name}: {'a hidden file' if path.name.startswith('.') else 'not a regular file'}")
        return None

    def _relative_name(self, path: Path) -> str:
        return os.fsencode(path.relative_to(self._root).as_posix()).decode("utf-8", "replace")
