"""Finds the files of a corpus, and says of every other one why it is none. Imports no torch.

A file is *left out* with a line, or the corpus is *refused* because of it. What would be read as
what it is not is refused: JSON as text, pointers of Git LFS, UTF-16, links that lead out.
`data.bad_files = "error"` refuses what is left out too, except for what the project itself wrote.
"""

from __future__ import annotations

import os
import re
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from models.files import hub_repository, is_beneath
from trainer.config.data import HF_PREFIX, STDLIB_CORPUS
from trainer.config.source import CorpusSpec
from trainer.data import contents
from trainer.data.contents import Contents, examine
from trainer.data.hf_datasets import is_saved_dataset
from trainer.data.open_file import READ_ERRORS, open_parquet, read_head
from trainer.data.own_files import A_MODEL, describe_own_folder, is_token_dataset
from trainer.errors import CorpusRefusedError, DataError, in_one_line

# Installed packages are no part of the library; encodings/ holds near-identical Unicode tables,
# which lower the loss.
STDLIB_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "encodings"}
EXAMINED_FILES = 64
"""Files of each suffix that are examined at first; the others are examined before the first token
is written.
"""
SMALL_FILE = 200
"""Size in bytes below which a file of data is always examined: it may be a pointer of Git LFS."""
LISTED_NAMES = 3
GLOB_HINT = (
    "only *, ? and **/ are patterns; braces, brackets and .. are not, and commas separate globs"
)


class CorpusFile(NamedTuple):
    name: str
    """The name relative to the corpus, with slashes; a link's own, not its target's."""
    root: str
    """The folder that it is opened beneath."""
    path: str
    """The path without links."""
    size: int
    mtime_ns: int

    @property
    def place(self) -> tuple[str, str, str]:
        """The arguments that open the file."""
        return self.root, self.path, self.name


class CorpusFiles:
    """The files of a file or folder of text, in no particular order.

    Nothing is raised: `refused` has what is wrong.
    """

    def __init__(self, spec: CorpusSpec) -> None:
        self.files: list[CorpusFile] = []
        self.binary: list[CorpusFile] = []
        """Files left out by their suffix."""
        self.left_out: dict[str, list[str]] = {}
        """The names of files and folders, by the reason."""
        self.refused: dict[str, list[str]] = {}
        self.inner_links: list[str] = []
        """Links to other places of the corpus; what they lead to is read twice if it is found
        there too.
        """
        self.num_unstated = 0
        """Files that data.files leaves out."""
        self._spec = spec
        self._is_stdlib = spec.corpus == STDLIB_CORPUS
        self._patterns = [
            (pattern, glob_regex(pattern.removeprefix("!"))) for pattern in spec.files or ()
        ]
        self._matched: set[str] = set()
        self._examined: dict[str, Contents] = {}
        # The cache may lie inside the corpus, and prepared tokens must not be read as text.
        self._cache = os.path.realpath(spec.cache_dir)
        given = Path(sysconfig.get_paths()["stdlib"]) if self._is_stdlib else Path(spec.corpus)
        self.root = Path(os.path.realpath(given))
        """The folder of the corpus, without links: that itself is one is the user's word."""
        if self.root.is_dir():
            self._walk()
        else:
            path = str(self.root)
            self.root = self.root.parent
            self._add(path, decoded(given.name))
        for pattern, _ in self._patterns:
            if pattern not in self._matched:
                hint = f"; {GLOB_HINT}" if set(pattern) & set("{}[]") or ".." in pattern else ""
                self._refuse(f'data.files = "{pattern}"', f"matches no file{hint}")

    @property
    def is_stated(self) -> bool:
        """Whether the user has said which files are text, rather than only which are not."""
        return any(not pattern.startswith("!") for pattern, _ in self._patterns)

    def problems(self) -> list[str]:
        """The reasons why the corpus is refused, one line each."""
        corpus = f'{self._spec.key} = "{self._spec.corpus}"'
        found = [
            f"{corpus}: {list_names(names)}: {in_one_line(reason)}"
            for reason, names in self.refused.items()
        ]
        if not self.files and not found:
            aside = [f"{list_names(names)}: {reason}" for reason, names in self.left_out.items()]
            hint = "; set data.corpus to a text file or a folder" if self._is_stdlib else ""
            left_out = f"; left out: {'; '.join(aside)}" if aside else ""
            found = [f"{corpus}: no text file in {self.root}{left_out}{hint}"]
        return found

    # ---- finding

    def _walk(self) -> None:
        for folder, folders, names in os.walk(self.root, onerror=self._leave_out_unreadable):
            # os.walk enters what remains of this list, in its order.
            folders.sort()
            if self._is_stdlib:
                folders[:] = [name for name in folders if name not in STDLIB_EXCLUDED_FOLDERS]
                names = [name for name in names if name.endswith(".py")]
            elif self._is_own(folder, folders, names):
                folders.clear()
                continue
            folders[:] = [name for name in folders if self._enters(Path(folder, name))]
            for name in sorted(names):
                path = f"{folder.rstrip('/')}/{name}"
                self._add(path, self._relative_name(path), is_hidden=name.startswith("."))

    def _is_own(self, folder: str, folders: Sequence[str], names: Sequence[str]) -> bool:
        """Whether the project itself wrote the folder. Records the reason why it is left out."""
        what = describe_own_folder(Path(folder), folders, names)
        # The user named this folder, so only what can be no corpus is refused.
        if folder == str(self.root):
            if what in ("a run folder", "an unfinished preparation") and not self.is_stated:
                self._refuse(".", f"{what}, not text; name the files to read in data.files")
            return False
        if what == A_MODEL and self.is_stated:
            return False
        if folder == self._cache:
            what = "data.cache_dir"
        if what:
            self._leave_out(
                self._relative_name(folder), f"{what}, which no corpus holds", is_bad=False
            )
        return bool(what)

    def _enters(self, path: Path) -> bool:
        name = self._relative_name(str(path))
        if self.is_stated and (path.name.startswith(".") or path.is_symlink()):
            self.num_unstated += 1
        elif path.name.startswith("."):
            self._leave_out(name, "a hidden folder")
        elif not path.is_symlink():
            return True
        elif self._is_stdlib or self._is_inside(os.path.realpath(path)):
            self._leave_out(name, "a link to a folder")
        else:
            self._refuse(name, contents.OUTSIDE_LINK)
        return False

    def _add(self, path: str, name: str, *, is_hidden: bool = False) -> None:
        if not self._is_wanted(name):
            self.num_unstated += 1
            return
        target = path
        problem = ""
        try:
            # A link keeps its name but is opened by its target, since `open_beneath` follows no
            # links.
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                problem = "a link to nothing: "
                target = os.path.realpath(path)
                status = Path(target).stat()
        except OSError as error:
            self._leave_out(name, problem + error_message(error))
            return
        root = self._root_of(path, target)
        if is_hidden:
            self._leave_out(name, "a hidden file")
        elif root is None:
            self._refuse(name, contents.OUTSIDE_LINK)
        elif not stat.S_ISREG(status.st_mode):
            self._leave_out(
                name,
                "a link to a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file",
            )
        else:
            if target != path and root == str(self.root):
                self.inner_links.append(name)
            self._add_regular(CorpusFile(name, root, target, status.st_size, status.st_mtime_ns))

    def _add_regular(self, file: CorpusFile) -> None:
        if self.is_stated or self._is_stdlib:
            self.files.append(file)
        elif contents.has_unread_compression(file.name):
            self._refuse(file.name, contents.NOT_READ)
        elif what := contents.describe_binary(file.name):
            self._leave_out(file.name, f"{what}, by its suffix")
            self.binary.append(file)
        elif what := self._describe_metadata(file):
            self._leave_out(file.name, what, is_bad=False)
        else:
            self.files.append(file)

    def _describe_metadata(self, file: CorpusFile) -> str:
        if not contents.may_be_metadata(file.name):
            return ""
        head = b""
        with suppress(DataError, *READ_ERRORS):  # Reading it reports the same.
            head, _ = read_head(*file.place)
        return contents.describe_metadata(file.name, head)

    def _root_of(self, path: str, target: str) -> str | None:
        """The folder that a file is opened beneath; None if a link leads out of the corpus."""
        if self._is_inside(target):
            return str(self.root)
        if self._is_stdlib:  # Debian keeps sitecustomize.py in /etc.
            return str(Path(target).parent)
        return hub_repository(path, target)

    def _is_inside(self, target: str) -> bool:
        return is_beneath(str(self.root), target)

    def _is_wanted(self, name: str) -> bool:
        """Whether a glob matches and none that begins with "!" does."""
        matching = {pattern for pattern, regex in self._patterns if regex.fullmatch(name)}
        self._matched |= matching
        is_excluded = any(pattern.startswith("!") for pattern in matching)
        return not is_excluded and (bool(matching) or not self.is_stated)

    def _leave_out_unreadable(self, error: OSError) -> None:
        self._leave_out(self._relative_name(error.filename), error_message(error))

    def _leave_out(self, name: str, reason: str, *, is_bad: bool = True) -> None:
        if is_bad and self._spec.fail_on_bad_files:
            self._refuse(name, f'{reason}, and data.bad_files = "error"')
        else:
            self.left_out.setdefault(reason, []).append(name)

    def _refuse(self, name: str, reason: str) -> None:
        self.refused.setdefault(reason, []).append(name)

    def _relative_name(self, path: str) -> str:
        """Path relative to the corpus, with slashes."""
        return decoded(path.removeprefix(str(self.root)).lstrip("/")) or "."

    # ---- looking at first bytes

    def examine(self, *, thoroughly: bool = False) -> None:
        """Refuses files whose first bytes contradict how they would be read: in a sample of each
        suffix, or in all files.
        """
        if self._is_stdlib:
            return
        for files in by_suffix(self.files).values():
            found = [
                (file, self.examine_file(file))
                for file in (files if thoroughly else self._sample(files))
            ]
            if any(each.refusal for _, each in found):  # Then all of them are named.
                found = [(file, self.examine_file(file)) for file in files]
            for file, each in found:
                if each.refusal:
                    self._refuse(file.name, each.refusal)
                elif each.not_text and self._spec.fail_on_bad_files:
                    self._leave_out(file.name, each.not_text)

    def _sample(self, files: Sequence[CorpusFile]) -> Iterator[CorpusFile]:
        """Evenly spaced files, and every small file of data."""
        # Small files of data are examined beside the sample: any of them may be a Git LFS pointer.
        step = -(-len(files) // EXAMINED_FILES)
        for number, file in enumerate(files):
            if number % step == 0 or (
                file.size < SMALL_FILE and contents.kind_of(file.name) != "text"
            ):
                yield file

    def examine_file(self, file: CorpusFile) -> Contents:
        """The file's contents by its first bytes, which are read once."""
        if file.name not in self._examined:
            kind = contents.kind_of(file.name)
            look = {
                "text": self._examine_text,
                "lines": self._examine_text,
                "table": self._examine_table,
            }.get(kind, self._examine_format)
            try:
                self._examined[file.name] = look(file)
            except CorpusRefusedError:
                self._examined[file.name] = Contents(kind, refusal=contents.LFS_POINTER)
            except (DataError, *READ_ERRORS):  # Reading it reports the same.
                self._examined[file.name] = Contents(kind)
        return self._examined[file.name]

    def _examine_table(self, file: CorpusFile) -> Contents:
        with open_parquet(*file.place, buffer_bytes=contents.HEAD_BYTES) as table:
            return contents.examine_columns(table.schema_arrow.names, key=self._spec.text_key)

    def _examine_format(self, file: CorpusFile) -> Contents:
        """The contents of a file whose reader may find anything at its beginning."""
        # Only for its error: a Git LFS pointer is refused whatever the suffix.
        read_head(*file.place)
        return Contents(contents.kind_of(file.name))

    def _examine_text(self, file: CorpusFile) -> Contents:
        if self._is_stdlib:
            return Contents("text")
        head, is_whole = read_head(*file.place)
        return examine(
            file.name, head, key=self._spec.text_key, is_whole=is_whole, is_stated=self.is_stated
        )


def is_local_text(spec: CorpusSpec) -> bool:
    """Whether the corpus is text on this machine: no dataset, no prepared folder, not absent."""
    path = Path(spec.corpus)
    is_dataset = (
        spec.corpus.startswith(HF_PREFIX) or is_token_dataset(path) or is_saved_dataset(path)
    )
    return not is_dataset and (path.exists() or spec.corpus == STDLIB_CORPUS)


def corpus_problems(spec: CorpusSpec) -> list[str]:
    """The reasons why this corpus cannot be read, as far as names and first bytes say.

    No reasons are given for corpora other than text on this machine.
    """
    if not is_local_text(spec):
        return []
    found = CorpusFiles(spec)
    found.examine()
    return found.problems()


def by_suffix(files: Iterable[CorpusFile]) -> dict[str, list[CorpusFile]]:
    found: dict[str, list[CorpusFile]] = {}
    for file in files:
        found.setdefault(contents.full_suffix(file.name), []).append(file)
    return found


FOLDER = r"(?!\.)[^/]+/"


def glob_regex(pattern: str) -> re.Pattern[str]:
    """`*` and `?` match neither "/" nor the dot of a hidden name, and `**/` matches any folders.

    What stands between two wildcards is matched where it is found first, and never tried again:
    that is enough, since the second matches any rest. Otherwise the time is exponential in the
    number of wildcards.
    """
    # `**` at the end of a pattern means every file below.
    runs = re.split(r"(?:^|(?<=/))(?:\*\*/)+", re.sub(r"(?:^|(?<=/))\*\*$", "**/*", pattern))
    return re.compile(
        join_wildcards(
            f"(?:{FOLDER})", ["/".join(map(segment_regex, run.split("/"))) for run in runs]
        )
    )


def segment_regex(segment: str) -> str:
    """A regular expression of names that a glob without "/" matches."""
    fixed = [
        "".join("[^/]" if each == "?" else re.escape(each) for each in part)
        for part in re.split(r"\*+", segment)
    ]
    may_be_hidden = segment.startswith(("*", "?"))
    return (r"(?!\.)" if may_be_hidden else "") + join_wildcards("[^/]", fixed)


def join_wildcards(repeated: str, parts: Sequence[str]) -> str:
    """`parts`, with any number of `repeated` between two of them."""
    first, *between = parts
    # Only the last part may be matched later than at its first place: it has to reach the end.
    last = f"{repeated}*{between.pop()}" if between else ""
    return first + "".join(f"(?>{repeated}*?{part})" for part in between) + last


def list_names(names: Sequence[str]) -> str:
    """The first names, escaped, and how many more there are."""
    listed = ", ".join(map(in_one_line, names[:LISTED_NAMES]))
    return (
        f"{listed} and {len(names) - LISTED_NAMES:,} more" if len(names) > LISTED_NAMES else listed
    )


def decoded(path: str) -> str:
    """A path with slashes; bytes that are not UTF-8 are escaped, so that other paths stay other
    paths.
    """
    return os.fsencode(path.replace(os.sep, "/")).decode("utf-8", "backslashreplace")


def error_message(error: BaseException) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
