import json
import logging
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from trainer.config import DataSection
from trainer.data import DataError
from trainer.data.corpus import BLOCK, PYTHON_STDLIB, Corpus

Section = Callable[..., DataSection]


def documents(corpus: str, **options: Any) -> list[str]:
    """The text of every document, in order."""
    found: list[tuple[str, str]] = []
    bad: list[str] = []
    read = Corpus(Source(corpus=corpus, **options))
    for unit in (unit for piece in read.pieces() for unit in piece):
        for blocks in texts(unit, text_key=options.get("text_key", "text")):
            try:
                found.append((unit.document, "".join(blocks)))
            except BadText as error:
                bad.append(str(error))
def test_a_folder_is_its_files_in_path_order_whatever_their_extension(section: Section) -> None:
    data = section({"b.md": "B", "a/z.txt": "AZ", "a/c": "AC\r\n", "empty.txt": ""})
    assert list(documents(data.corpus).items()) == [("a/c", "AC\r\n"), ("a/z.txt", "AZ"), ("b.md", "B")]


def test_a_repository_is_a_top_level_folder_with_its_files_named(section: Section) -> None:
    data = section({"b.md": "B", "a.md": "A\n", "r/y/1.py": "y = 1\n", "r/x.py": "x = 1", "q/x.py": "", "c": "C"})
    assert documents(data.corpus, as_what="repository") == {
        ".": "# a.md\nA\n# b.md\nB\n# c\nC\n",
        "q": "# q/x.py\n",
        "r": "# r/x.py\nx = 1\n# r/y/1.py\ny = 1\n",
    }


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "book.anything"
    path.write_bytes(b"\xef\xbb\xbfonce\n")
    assert documents(str(path)) == {"book.anything": "once\n"}


def test_a_line_of_jsonl_is_a_document(section: Section) -> None:
    data = section({"a.jsonl": '{"text": "one\\n\\u00e9", "id": 1}\n\n{"text": "two"}'})
    assert documents(data.corpus) == {"a.jsonl:1": "one\né", "a.jsonl:3": "two"}
    assert documents(data.corpus, as_what="repository") == {".": "one\né\ntwo\n"}


BAD_LINES = ['{"text": 3}', '{"txt": "a"}', "[1]", '{"text": "a"', '{"text": "\\ud800"}', "[" * 100_000]


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_named_and_skipped_or_refused(
    line: str, section: Section, caplog: pytest.LogCaptureFixture
) -> None:
    data = section({"a.jsonl": '{"text": "one"}\n' + line + '\n{"text": "two"}\n'})
    assert list(documents(data.corpus).values()) == ["one", "two"]
    assert "skipped a.jsonl:2: " in caplog.text
    with pytest.raises(DataError, match=r'^data.bad_files = "refuse", and \S*corpus holds a.jsonl:2: '):
        documents(data.corpus, bad_files="refuse")


BAD_FILES = {
    "bad.txt": (b"good until here \xff", "bad.txt: not UTF-8 text: byte 0xff at offset 16"),
    "cut.txt": (b"half a character \xc3", "cut.txt: not UTF-8 text: byte 0xc3 at offset 17"),
    "weights.bin": (b"PK\0\0", "weights.bin: not text: it holds a zero byte"),
    ".hidden": (b"text", ".hidden: a hidden file"),
    ".git/config": (b"text", ".git: a hidden folder"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named_and_skipped_or_refused(
    name: str, section: Section, caplog: pytest.LogCaptureFixture
) -> None:
    content, message = BAD_FILES[name]
    data = section({"a.txt": "A", name: content, "z.txt": "Z"})
    assert documents(data.corpus) == {"a.txt": "A", "z.txt": "Z"}
    assert f"skipped {message}" in caplog.text
    with pytest.raises(DataError, match=f"corpus holds {message}"):
        documents(data.corpus, bad_files="refuse")


def test_a_link_is_read_if_it_leads_to_a_file_and_named_otherwise(section: Section, tmp_path: Path) -> None:
    data = section({"a/a.txt": "A"})
    root = Path(data.corpus)
    (root / "b.txt").symlink_to(root / "a" / "a.txt")
    (root / "again").symlink_to(root / "a")
    (root / "nowhere.txt").symlink_to(tmp_path / "none")
    assert documents(data.corpus) == {"a/a.txt": "A", "b.txt": "A"}
    corpus = Corpus(data.corpus, documents="file", bad_files="skip")
    assert corpus.skipped == ["again: a link to a folder", "nowhere.txt: No such file or directory"]


def test_a_large_file_comes_in_blocks_that_end_with_a_line(section: Section) -> None:
    line = "a line with é in it\n"
    data = section({"large.txt": line * (2 * BLOCK // len(line))})
    parts = list(Corpus(data.corpus, documents="file", bad_files="refuse").parts())
    assert len(parts) > 1
    assert all(part.text.endswith("\n") for part in parts)
    assert "".join(part.text for part in parts) == line * (2 * BLOCK // len(line))


def test_a_bad_byte_at_the_end_leaves_nothing_of_a_large_file(section: Section) -> None:
    data = section({"a.txt": "A", "large.txt": b"x\n" * BLOCK + b"\xff"})
    assert documents(data.corpus) == {"a.txt": "A"}


@pytest.mark.parametrize("files", [{}, {".hidden": "x"}])
def test_a_folder_without_text_is_an_error(files: dict[str, str], section: Section, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    with pytest.raises(DataError, match=r'data.corpus = ".*corpus": there is no text file'):
        Corpus(section(files).corpus, documents="file", bad_files="skip")


def test_the_standard_library_is_read_without_packages_and_unicode_tables(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    corpus = Corpus(PYTHON_STDLIB, documents="repository", bad_files="refuse")
    names = [file.name for file in corpus.files]
    assert "json/decoder.py" in names
    assert not any(name.startswith(("site-packages/", "encodings/")) or "__pycache__" in name for name in names)
    first = next(corpus.parts())
    assert first.document == "."
    source = Path(sysconfig.get_paths()["stdlib"], first.file).read_bytes().decode()
    assert first.text == f"# {first.file}\n{source}"
    assert json.dumps(names[:1]) == json.dumps(["__future__.py"])
