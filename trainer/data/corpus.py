"""A corpus as a stream of text that says which document it belongs to."""

from __future__ import annotations

import codecs
import json
import logging
import os
import re
import stat
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from trainer.data.errors import DataError
from trainer.data.source import Documents
from trainer.data.tokenizer import last_line

log = logging.getLogger(__name__)

PYTHON_STDLIB = "python-stdlib"
# Installed packages are not the library's; encodings/ are near-equal Unicode tables, which flatter a loss.
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "encodings"}
BLOCK = 1 << 22  # bytes


class File(NamedTuple):
    """A file of a corpus; `name` is its path in the corpus, with slashes."""

    path: Path
    name: str
    size: int
    mtime_ns: int


class Part(NamedTuple):
    """Text of a document; parts of one document follow each other."""

    document: str
    file: str
    text: str


class Corpus:
    """The standard library, a text or `.jsonl` file, or a folder of such files.

    A file that is no text is bad: it is named and counted, or refused with a DataError. The standard library, whose
    tests hold such files on purpose, refuses none.
    """

    def __init__(self, corpus: str, *, documents: Documents, bad_files: Literal["skip", "refuse"]) -> None:
        self.name = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(corpus).resolve().name) or "root"
        self.is_stdlib = corpus == PYTHON_STDLIB
        self.skipped: list[str] = []
        self._documents = documents
        self._refuse = bad_files == "refuse" and not self.is_stdlib
        self._root = Path(sysconfig.get_paths()["stdlib"]) if self.is_stdlib else Path(corpus)
        self.files = sorted(self._scan(), key=lambda file: (self._repository(file), file.name))
        if not self.files:
            advice = "; set data.corpus to a text file or a folder" if self.is_stdlib else ""
            raise DataError(f'data.corpus = "{corpus}": there is no text file in {self._root}{advice}')

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def parts(self) -> Iterator[Part]:
        """The text of all files in path order; of a large file in blocks that end with a line where possible."""
        for name in self.skipped:
            self._report(name)
        for file in self.files:
            try:
                if file.name.endswith(".jsonl"):
                    yield from self._read_lines(file)
                else:
                    yield from self._read_text(file)
            except DataError:
                raise
            except (OSError, ValueError) as error:
                self._reject(file.name, explain(error))
                self._report(self.skipped[-1])

    def _scan(self) -> Iterator[File]:
        if not self._root.is_dir():
            file = self._stat(self._root, self._root.name)
            return iter([file] if file else [])
        return self._scan_folder()

    def _scan_folder(self) -> Iterator[File]:
        def unreadable(error: OSError) -> None:
            self._reject(str(error.filename), explain(error))

        for where, folders, names in os.walk(self._root, onerror=unreadable):
            folders.sort()
            if self.is_stdlib:
                folders[:] = [name for name in folders if name not in NOT_STDLIB]
                names = [name for name in names if name.endswith(".py")]
            for name in list(folders):
                path = Path(where) / name
                if name.startswith(".") or path.is_symlink():
                    folders.remove(name)
                    self._reject(self._name(path), "a hidden folder" if name.startswith(".") else "a link to a folder")
            for name in sorted(names):
                path = Path(where) / name
                file = self._stat(path, self._name(path))
                if file is not None:
                    yield file

    def _stat(self, path: Path, name: str) -> File | None:
        try:
            status = path.stat()
        except OSError as error:
            self._reject(name, explain(error))
            return None
        if stat.S_ISREG(status.st_mode) and (path == self._root or not path.name.startswith(".")):
            return File(path, name, status.st_size, status.st_mtime_ns)
        self._reject(name, "a hidden file" if path.name.startswith(".") else "not a regular file")
        return None

    def _name(self, path: Path) -> str:
        return os.fsencode(path.relative_to(self._root).as_posix()).decode("utf-8", "replace")

    def _reject(self, name: str, reason: str) -> None:
        self.skipped.append(f"{name}: {reason}")
        if self._refuse:
            raise DataError(f'data.bad_files = "refuse", and {self._root} holds {name}: {reason}')

    def _report(self, skipped: str) -> None:
        log.log(logging.INFO if self.is_stdlib else logging.WARNING, "skipped %s", skipped)

    def _repository(self, file: File) -> str:
        """The top-level folder whose files make one document; files outside of all folders make one, too."""
        if self._documents == "file":
            return ""
        folder, slash, _ = file.name.partition("/")
        return folder if slash else "."

    def _read_text(self, file: File) -> Iterator[Part]:
        document = self._repository(file) or file.name
        blocks = read_blocks(file.path)
        if file.size >= BLOCK:
            # A bad byte at its end must not leave half of a file behind.
            for _ in read_blocks(file.path):
                pass
        text = next(blocks, "")
        if self.is_stdlib or self._documents == "repository":
            text = f"# {file.name}\n{text}"
        while text:
            yield Part(document, file.name, text)
            following = next(blocks, "")
            if not following and self._documents == "repository" and not text.endswith("\n"):
                yield Part(document, file.name, "\n")
            text = following

    def _read_lines(self, file: File) -> Iterator[Part]:
        with file.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                name = f"{file.name}:{number}"
                if not line.strip():
                    continue
                try:
                    text = read_line(line)
                except (ValueError, RecursionError) as error:
                    self._reject(name, explain(error))
                    self._report(self.skipped[-1])
                    continue
                yield Part(self._repository(file) or name, name, text)
                if self._documents == "repository" and not text.endswith("\n"):
                    yield Part(self._repository(file), name, "\n")


def read_blocks(path: Path) -> Iterator[str]:
    """The text of a file; only a file smaller than BLOCK is known to be good before the first block is out."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest, offset, final = "", 0, False
    with path.open("rb") as file:
        while not final:
            data = file.read(BLOCK)
            offset += len(data)
            final = len(data) < BLOCK
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


def read_line(line: bytes) -> str:
    """The text of a line of JSON. Raises ValueError if it is not an object with a string at "text"."""
    record = json.loads(line.decode("utf-8-sig"))
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError('it has no string at key "text"')  # noqa: TRY004
    text.encode()  # JSON can escape half a character, which is no text
    return text


def explain(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
