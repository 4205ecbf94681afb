"""The files or dataset of a corpus, in partitions that do not depend on the number of workers."""

from __future__ import annotations

import os
import re
import stat
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainer.config.data import HF_PREFIX, STDLIB_CORPUS
from trainer.data.formats import READ_ERRORS, InputSplit, error_message, row_group_sizes, uncompressed_suffix
from trainer.data.hf_datasets import is_saved_dataset, open_dataset
from trainer.data.source import CorpusSpec
from trainer.errors import DataError

# Installed packages are no part of the library; encodings/ holds near-identical Unicode tables, which lower the loss.
STDLIB_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "encodings"}
PARTITION_BYTES = 1 << 23  # work that an interruption repeats, and the unit of work of a worker
MAX_PARTITIONS = 1000  # each becomes at least one file that every rank maps into memory


class Corpus:
    """The standard library, a file or folder of text, or a dataset.

    A file that is not text is logged and counted, or raises DataError, as `bad_files` says.
    """

    def __init__(self, spec: CorpusSpec) -> None:
        corpus = spec.corpus
        self.is_stdlib = corpus == STDLIB_CORPUS
        self.skipped: list[str] = []
        self._spec = spec
        dataset = f"{HF_PREFIX}{corpus}" if is_saved_dataset(Path(corpus)) else corpus
        self._dataset = dataset if dataset.startswith(HF_PREFIX) else None
        self._root = Path(sysconfig.get_paths()["stdlib"]) if self.is_stdlib else Path(corpus)
        name = self._dataset.removeprefix(HF_PREFIX).partition(",")[0] if self._dataset else Path(corpus).resolve()
        self.name = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(name).name) or "root"
        self.files: list[InputSplit] = []
        if self._dataset:
            return
        self._scan()
        self.files.sort(key=lambda file: (file.document_key, file.name))
        if not self.files:
            hint = "; set data.corpus to a text file or a folder" if self.is_stdlib else ""
            raise DataError(f'data.corpus = "{corpus}": no text file in {self._root}{hint}')

    @property
    def size(self) -> int:
        """Bytes on disk; 0 where unknown."""
        return open_dataset(self._dataset).num_bytes if self._dataset else sum(file.size for file in self.files)

    @property
    def identity(self) -> list[object]:
        """Changes with the text, judged by file names, sizes and modification times, or the dataset's fingerprint."""
        if self._dataset:
            return [open_dataset(self._dataset).version]
        return [self.is_stdlib, *((file.name, file.size, file.mtime_ns) for file in self.files)]

    def partitions(self) -> list[list[InputSplit]]:
        """Groups of whole documents, at least PARTITION_BYTES each; a function of the corpus alone."""
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

    def _splits(self, min_bytes: int) -> Iterator[InputSplit]:
        if self._dataset:
            dataset = open_dataset(self._dataset)
            # The rows of a saved dataset are similar in size. The sizes of streamed files are unknown.
            step = max(1, min_bytes * dataset.num_parts // dataset.num_bytes) if dataset.num_bytes else 1
            for start in range(0, dataset.num_parts, step):
                stop = min(start + step, dataset.num_parts)
                size = (stop - start) * dataset.num_bytes // dataset.num_parts if dataset.num_bytes else min_bytes
                yield InputSplit(self._dataset, self.name, size, start=start, stop=stop)
        for file in self.files:
            yield from self._split_file(file, min_bytes)

    def _split_file(self, file: InputSplit, min_bytes: int) -> Iterator[InputSplit]:
        kind = uncompressed_suffix(file.name)
        if kind == ".parquet":
            sizes = [0]
            with suppress(*READ_ERRORS):  # read_parquet reports the damage.
                sizes = row_group_sizes(Path(file.path)) or sizes
            compression_ratio = file.size / max(1, sum(sizes))
            for number, size in enumerate(sizes):
                yield file._replace(size=int(size * compression_ratio), start=number, stop=number + 1)
        elif file.name.endswith(".jsonl"):
            for start in range(0, max(1, file.size), min_bytes):
                size = min(min_bytes, file.size - start)
                yield file._replace(size=size, start=start, stop=start + size)
        elif kind == ".jsonl":
            yield file
        else:
            yield file._replace(header=f"# {file.name}\n" if file.document_key or self.is_stdlib else "")

    def _document_key(self, name: str) -> str:
        """The folder that is one document ("." for top-level files); "" if every text is a document."""
        if self._spec.documents == "file":
            return ""
        folder = str(Path(name).parent)
        return folder.partition("/")[0] if self._spec.documents == "repository" else folder

    def _scan(self) -> None:
        """Finds the files."""
        if not self._root.is_dir():
            self._add_file(self._root)
            return
        for folder, folders, names in os.walk(self._root, onerror=self._record_unreadable):
            folders.sort()
            if self.is_stdlib:
                folders[:] = [name for name in folders if name not in STDLIB_EXCLUDED_FOLDERS]
                names = [name for name in names if name.endswith(".py")]
            for path in [Path(folder, name) for name in folders]:
                if path.name.startswith(".") or path.is_symlink():
                    folders.remove(path.name)
                    kind = "a hidden folder" if path.name.startswith(".") else "a symlink to a folder"
                    self._record_bad_file(path, kind)
            for name in sorted(names):
                self._add_file(Path(folder, name))

    def _add_file(self, path: Path) -> None:
        try:
            status = path.stat()
        except OSError as error:
            self._record_bad_file(path, error_message(error))
            return
        if path.name.startswith(".") and path != self._root:
            self._record_bad_file(path, "a hidden file")
        elif not stat.S_ISREG(status.st_mode):
            self._record_bad_file(path, "not a regular file")
        else:
            name = self._relative_name(path)
            key = self._document_key(name)
            self.files.append(InputSplit(str(path), name, status.st_size, key, mtime_ns=status.st_mtime_ns))

    def _record_unreadable(self, error: OSError) -> None:
        self._record_bad_file(Path(error.filename), error_message(error))

    def _record_bad_file(self, path: Path, problem: str) -> None:
        """Raises DataError if bad files are errors."""
        if self._spec.fail_on_bad_files:
            raise DataError(f'data.bad_files = "error", and {self._root} holds {self._relative_name(path)}: {problem}')
        self.skipped.append(f"{self._relative_name(path)}: {problem}")

    def _relative_name(self, path: Path) -> str:
        """Path relative to the corpus, with slashes."""
        root = self._root if path != self._root else self._root.parent
        return os.fsencode(path.relative_to(root).as_posix()).decode("utf-8", "replace")
