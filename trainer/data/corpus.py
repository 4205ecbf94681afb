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
from trainer.data.formats import BAD, Unit, explain, kind_of, row_groups
from trainer.data.hf_datasets import HUB, is_saved, open_dataset
from trainer.data.source import Source

PYTHON_STDLIB = "python-stdlib"
# Installed packages are not the library's; encodings/ are near-equal Unicode tables, which flatter a loss.
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "encodings"}
PIECE = 1 << 23  # bytes: what a killed preparation does again, and what a worker does before it takes more
MOST_PIECES = 1000  # of which each is at least one file that every run maps into memory


class File(NamedTuple):
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

    def __init__(self, source: Source) -> None:
        corpus = source.corpus
        self.is_stdlib = corpus == PYTHON_STDLIB
        self.skipped: list[str] = []
        self.refuses = source.bad_files == "refuse" and not self.is_stdlib
        self._documents = source.documents
        self._dataset = corpus if corpus.startswith(HUB) else f"{HUB}{corpus}" if is_saved(Path(corpus)) else None
        self._root = Path(sysconfig.get_paths()["stdlib"]) if self.is_stdlib else Path(corpus)
        name = self._dataset.removeprefix(HUB).partition(",")[0] if self._dataset else Path(corpus).resolve()
        self.name = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(name).name) or "root"
        self.files = [] if self._dataset else sorted(self._scan(), key=lambda file: (self._group(file.name), file.name))
        if not self._dataset and not self.files:
            advice = "; set data.corpus to a text file or a folder" if self.is_stdlib else ""
            raise DataError(f'data.corpus = "{corpus}": there is no text file in {self._root}{advice}')

    @property
    def size(self) -> int:
        """Bytes, as far as they are known."""
        return open_dataset(self._dataset).size if self._dataset else sum(file.size for file in self.files)

    @property
    def identity(self) -> list[object]:
        """Equal for equal texts, as far as names, sizes and times tell."""
        if self._dataset:
            return [open_dataset(self._dataset).version]
        return [self.is_stdlib, *((file.name, file.size, file.mtime_ns) for file in self.files)]

    def pieces(self) -> list[list[Unit]]:
        """Whole documents of at least about PIECE bytes, which depend on the corpus alone."""
        least = max(PIECE, self.size // MOST_PIECES)
        pieces: list[list[Unit]] = []
        filled, document = least, ""
        for unit in self._units(least):
            if filled >= least and not (unit.document and unit.document == document):
                pieces.append([])
                filled = 0
            pieces[-1].append(unit)
            filled, document = filled + unit.size, unit.document
        return pieces

    def reject(self, problem: str) -> None:
        """Counts what is bad, or refuses it."""
        if self.refuses:
            raise DataError(f'data.bad_files = "refuse", and {self._dataset or self._root} holds {problem}')
        self.skipped.append(problem)

    def _units(self, least: int) -> Iterator[Unit]:
        if self._dataset:
            opened = open_dataset(self._dataset)
            # Rows of a saved data set are of one kind; the files of a stream are not to be counted on.
            step = max(1, least * opened.parts // opened.size) if opened.size else 1
            for start in range(0, opened.parts, step):
                stop = min(start + step, opened.parts)
                size = (stop - start) * opened.size // opened.parts if opened.size else least
                yield Unit(self._dataset, self.name, size, start=start, stop=stop)
        for file in self.files:
            yield from self._cut(file, least)

    def _cut(self, file: File, least: int) -> Iterator[Unit]:
        group, kind = self._group(file.name), kind_of(file.name)
        whole = Unit(str(file.path), file.name, file.size, group, mtime_ns=file.mtime_ns)
        if kind == ".parquet":
            sizes = [0]
            with suppress(*BAD):  # Whoever reads it will say so.
                sizes = row_groups(file.path) or sizes
            share = file.size / max(1, sum(sizes))
            for number, size in enumerate(sizes):
                yield whole._replace(size=int(size * share), start=number, stop=number + 1)
        elif file.name.endswith(".jsonl"):
            for start in range(0, max(1, file.size), least):
                size = min(least, file.size - start)
                yield whole._replace(size=size, start=start, stop=start + size)
        elif kind == ".jsonl":
            yield whole
        else:
            yield whole._replace(title=f"# {file.name}\n" if group or self.is_stdlib else "")

    def _group(self, name: str) -> str:
        """The folder whose files make one document, files outside of all folders one, too; "": each is its own."""
        if self._documents == "file":
            return ""
        return (
            (name.partition("/") if self._documents == "repository" else name.rpartition("/"))[0]
            if "/" in name
            else "."
        )

    def _scan(self) -> Iterator[File]:
        if not self._root.is_dir():
            file = self._stat(self._root, self._root.name)
            return iter([file] if file else [])
        return self._scan_folder()

    def _scan_folder(self) -> Iterator[File]:
        def unreadable(error: OSError) -> None:
            self.reject(f"{error.filename}: {explain(error)}")

        for where, folders, names in os.walk(self._root, onerror=unreadable):
            folders.sort()
            if self.is_stdlib:
                folders[:] = [name for name in folders if name not in NOT_STDLIB]
                names = [name for name in names if name.endswith(".py")]
            for name in list(folders):
                path = Path(where) / name
                if name.startswith(".") or path.is_symlink():
                    folders.remove(name)
                    kind = "a hidden folder" if name.startswith(".") else "a link to a folder"
                    self.reject(f"{self._name(path)}: {kind}")
            for name in sorted(names):
                path = Path(where) / name
                file = self._stat(path, self._name(path))
                if file is not None:
                    yield file

    def _stat(self, path: Path, name: str) -> File | None:
        try:
            status = path.stat()
        except OSError as error:
            self.reject(f"{name}: {explain(error)}")
            return None
        if stat.S_ISREG(status.st_mode) and (path == self._root or not path.name.startswith(".")):
            return File(path, name, status.st_size, status.st_mtime_ns)
        self.reject(f"{name}: {'a hidden file' if path.name.startswith('.') else 'not a regular file'}")
        return None

    def _name(self, path: Path) -> str:
        return os.fsencode(path.relative_to(self._root).as_posix()).decode("utf-8", "replace")
