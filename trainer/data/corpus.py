"""The texts of a corpus, in partitions that do not depend on the number of workers."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePath

from trainer.config.data import HF_PREFIX, STDLIB_CORPUS, FileKind
from trainer.config.source import CorpusSpec
from trainer.data.contents import compression_suffix, is_read_as_before, kind_of
from trainer.data.corpus_files import CorpusFile, CorpusFiles, list_names
from trainer.data.formats import InputSplit, row_group_sizes
from trainer.data.hf_datasets import is_saved_dataset, open_dataset
from trainer.data.open_file import READ_ERRORS
from trainer.errors import CorpusRefusedError

# work that an interruption repeats, and the unit of work of a worker
PARTITION_BYTES = 1 << 23
# each becomes at least one file that every rank maps into memory
MAX_PARTITIONS = 1000


class Corpus:
    """The standard library, a file or folder of text, or a dataset.

    Raises CorpusRefusedError if it is not text.
    """

    def __init__(self, spec: CorpusSpec) -> None:
        corpus = spec.corpus
        self.is_stdlib = corpus == STDLIB_CORPUS
        self.spec = spec
        dataset = f"{HF_PREFIX}{corpus}" if is_saved_dataset(Path(corpus)) else corpus
        self.dataset = dataset if dataset.startswith(HF_PREFIX) else None
        name = (
            self.dataset.removeprefix(HF_PREFIX).partition(",")[0]
            if self.dataset
            else Path(corpus).resolve()
        )
        self.name = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(name).name) or "root"
        self.found = None if self.dataset else CorpusFiles(spec)
        self.files: list[CorpusFile] = []
        if self.found is not None:
            self.require_readable(thoroughly=False)
            self.files = self._in_order(self.found.files)

    def require_readable(self, *, thoroughly: bool) -> None:
        """Raises CorpusRefusedError if names and first bytes, of a sample of the files or of all,
        show that the corpus is not text.
        """
        if self.found is not None:
            self.found.examine(thoroughly=thoroughly)
            if problems := self.found.problems():
                raise CorpusRefusedError(*problems)

    def require_lines_by_suffix(self, folder: Path) -> None:
        """Raises CorpusRefusedError if files are lines of JSON by their content, which `folder`
        holds as text.
        """
        names = [file.name for file in self.files if self.kind(file) != kind_of(file.name)]
        if names:
            raise CorpusRefusedError(
                f"{folder} was prepared when {list_names(names)} was read as text; delete it"
            )

    @property
    def log_level(self) -> int:
        """Log level of lines on what is not read: the standard library's tests hold such files on
        purpose.
        """
        return logging.INFO if self.is_stdlib else logging.WARNING

    @property
    def size(self) -> int:
        """Bytes of the corpus on disk; 0 where unknown."""
        return (
            open_dataset(self.dataset).num_bytes
            if self.dataset
            else sum(file.size for file in self.files)
        )

    @property
    def identity(self) -> list[object]:
        """Values that change with the text: file names, sizes and modification times, or the
        dataset's fingerprint.

        A corpus that was read otherwise, before JSON was read as lines by any name, has another
        one.
        """
        if self.found is None:
            return [open_dataset(self.dataset or "").version]
        files = (
            self._in_order([*self.files, *self.found.binary]) if self.found.binary else self.files
        )
        identity: list[object] = [
            self.is_stdlib,
            *((file.name, file.size, file.mtime_ns) for file in files),
        ]
        if self.found.is_stated:  # Once all of it was text.
            return ["json lines by content", *identity]
        return (
            identity
            if all(is_read_as_before(file.name) for file in files)
            else ["json lines", *identity]
        )

    def _in_order(self, files: list[CorpusFile]) -> list[CorpusFile]:
        # Files of a document stand together, because tokenizing joins neighbours only.
        return sorted(files, key=lambda file: (self.document_key(file.name), file.name))

    def partitions(self) -> list[list[InputSplit]]:
        """Groups of whole documents, at least PARTITION_BYTES each; a function of the corpus
        alone.
        """
        min_bytes = max(PARTITION_BYTES, self.size // MAX_PARTITIONS)
        partitions: list[list[InputSplit]] = []
        num_bytes = min_bytes
        document = ""
        for split in self.splits(min_bytes):
            # A partition never ends inside a document: each one is tokenized by itself.
            if num_bytes >= min_bytes and not (
                split.document_key and split.document_key == document
            ):
                partitions.append([])
                num_bytes = 0
            partitions[-1].append(split)
            num_bytes = num_bytes + split.size
            document = split.document_key
        return partitions

    def splits(self, min_bytes: int = PARTITION_BYTES) -> Iterator[InputSplit]:
        """Files and parts of files, in the order of the corpus."""
        if self.dataset:
            dataset = open_dataset(self.dataset)
            # The rows of a saved dataset are similar in size. The sizes of streamed files are
            # unknown.
            step = (
                max(1, min_bytes * dataset.num_parts // dataset.num_bytes)
                if dataset.num_bytes
                else 1
            )
            for start in range(0, dataset.num_parts, step):
                stop = min(start + step, dataset.num_parts)
                size = (
                    (stop - start) * dataset.num_bytes // dataset.num_parts
                    if dataset.num_bytes
                    else min_bytes
                )
                yield InputSplit(self.dataset, self.name, size, start=start, stop=stop)
        for file in self.files:
            yield from self.split_file(file, min_bytes)

    def split_file(
        self, file: CorpusFile, min_bytes: int = PARTITION_BYTES
    ) -> Iterator[InputSplit]:
        split = self._whole(file)
        if split.kind == "table":
            # Row groups state uncompressed sizes, but progress counts bytes of the file.
            sizes = [0]
            with suppress(*READ_ERRORS):  # read_parquet reports the damage.
                sizes = row_group_sizes(split) or sizes
            compression_ratio = file.size / max(1, sum(sizes))
            for number, size in enumerate(sizes):
                yield split._replace(
                    size=int(size * compression_ratio), start=number, stop=number + 1
                )
        elif split.kind == "lines" and not compression_suffix(file.name):
            # Any byte may begin a range, whose reader takes the lines that start in it. A
            # compressed file cannot be entered in the middle.
            for start in range(0, max(1, file.size), min_bytes):
                size = min(min_bytes, file.size - start)
                yield split._replace(size=size, start=start, stop=start + size)
        else:
            yield split

    def _whole(self, file: CorpusFile) -> InputSplit:
        key = self.document_key(file.name)
        kind = self.kind(file)
        return InputSplit(
            file.path,
            file.name,
            file.size,
            document_key=key,
            header=f"# {file.name}\n" if kind == "text" and (key or self.is_stdlib) else "",
            mtime_ns=file.mtime_ns,
            root=file.root,
            kind=kind,
            is_library=self.is_stdlib,
        )

    def kind(self, file: CorpusFile) -> FileKind:
        """The kind of the file, by its suffix and its first bytes."""
        return kind_of(file.name) if self.found is None else self.found.examine_file(file).kind

    def document_key(self, name: str) -> str:
        """The folder that is one document ("." for top-level files); "" if every text is a
        document.
        """
        if self.spec.documents == "file":
            return ""
        folder = str(PurePath(name).parent)
        return folder.partition("/")[0] if self.spec.documents == "repository" else folder
