import json
import logging
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.config.data import STDLIB_CORPUS
from trainer.config.source import CorpusSpec
from trainer.data.corpus import Corpus
from trainer.data.formats import BLOCK, read_texts
from trainer.data.prepare import prepare
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import DataError

Make = Callable[..., CorpusSpec]
Documents = Callable[[CorpusSpec], list[str]]


def test_a_folder_is_read_in_path_order_with_any_extension(
    source: Make, documents: Documents
) -> None:
    spec = source({"b.md": "B", "a/z.txt": "AZ", "a/c": "AC\r\n", "empty.txt": ""})
    assert documents(spec) == ["AC\r\n", "AZ", "B"]


FILES = {
    "b.md": "B",
    "a.md": "A\n",
    "r/y/1.py": "y = 1\n",
    "r/x.py": "x = 1",
    "r/z.py": "z",
    "q/x.py": "",
    "c": "C",
}


def test_a_repository_is_one_document_with_a_header_per_file(
    source: Make, documents: Documents
) -> None:
    assert documents(source(FILES, documents="repository")) == [
        "# a.md\nA\n# b.md\nB\n# c\nC\n",
        "# q/x.py\n",
        "# r/x.py\nx = 1\n# r/y/1.py\ny = 1\n# r/z.py\nz\n",
    ]


def test_documents_folder_joins_the_files_of_one_folder_without_its_subfolders(
    source: Make, documents: Documents
) -> None:
    assert documents(source(FILES, documents="folder")) == [
        "# a.md\nA\n# b.md\nB\n# c\nC\n",
        "# q/x.py\n",
        "# r/x.py\nx = 1\n# r/z.py\nz\n",
        "# r/y/1.py\ny = 1\n",
    ]


def test_a_text_file_is_one_document(tmp_path: Path, documents: Documents) -> None:
    path = tmp_path / "book.anything"
    path.write_bytes(b"\xef\xbb\xbfonce\n")
    assert documents(CorpusSpec(corpus=str(path), cache_dir=tmp_path / "cache")) == ["once\n"]


BAD_FILES = {
    "bad.txt": (b"good until here \xff", "bad.txt: not UTF-8 text: byte 0xff at offset 16"),
    "cut.txt": (b"half a character \xc3", "cut.txt: not UTF-8 text: byte 0xc3 at offset 17"),
    "weights.bin": (b"PK\0\0", "weights.bin: not text: contains a zero byte"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_logged_and_skipped_or_raises(
    name: str, source: Make, documents: Documents, caplog: pytest.LogCaptureFixture
) -> None:
    content, message = BAD_FILES[name]
    spec = source({"a.txt": "A", name: content, "z.txt": "Z"})
    assert documents(spec) == ["A", "Z"]
    assert f"skipped {message}" in caplog.text
    with pytest.raises(DataError, match=message):
        documents(replace(spec, bad_files="error"))


@pytest.mark.parametrize(
    ("name", "message"),
    [(".hidden", ".hidden: a hidden file"), (".git/x", ".git: a hidden folder")],
)
def test_a_hidden_file_is_left_out_or_raises(
    name: str, message: str, source: Make, documents: Documents, caplog: pytest.LogCaptureFixture
) -> None:
    spec = source({"a.txt": "A", name: "text"})
    assert documents(spec) == ["A"]
    assert f"left out {message}" in caplog.text
    with pytest.raises(DataError, match=rf'corpus": {message}, and data.bad_files = "error"$'):
        documents(replace(spec, bad_files="error"))


def test_a_bad_file_does_not_affect_other_files_of_its_repository(
    source: Make, documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.formats.BLOCK", 4)
    spec = source(
        {"r/a": "A", "r/b": b"B" * 40 + b"\xff", "r/c": "C", "s": "S"}, documents="repository"
    )
    assert documents(spec) == ["# s\nS\n", "# r/a\nA\n# r/c\nC\n"]
    assert documents(replace(spec, max_document=7)) == [
        "# s\nS",
        "\n",
        "# r/a",
        "\nA\n# ",
        "r/c\nC",
        "\n",
    ]


def test_a_symlink_is_followed_to_a_file_and_skipped_otherwise(
    source: Make, documents: Documents, tmp_path: Path
) -> None:
    spec = source({"a/a.txt": "A"})
    root = Path(spec.corpus)
    (root / "b.txt").symlink_to(root / "a" / "a.txt")
    (root / "again").symlink_to(root / "a")
    (root / "nowhere.txt").symlink_to(tmp_path / "none")
    assert documents(spec) == ["A", "A"]
    found = Corpus(spec).found
    assert found is not None
    assert found.left_out == {
        "a link to a folder": ["again"],
        "a link to nothing: No such file or directory": ["nowhere.txt"],
    }


def test_a_large_file_is_read_in_blocks(source: Make) -> None:
    line = "a line with é in it\n"
    spec = source({"large.txt": line * (2 * BLOCK // len(line))})
    [[split]] = Corpus(spec).partitions()
    blocks = [block for text in read_texts(split, text_key="text") for block in text.blocks]
    assert len(blocks) > 1
    assert max(map(len, blocks)) <= BLOCK
    assert "".join(blocks) == line * (2 * BLOCK // len(line))


def test_a_bad_byte_at_the_end_discards_the_whole_file(source: Make, documents: Documents) -> None:
    assert documents(
        source({"a.txt": "A", "large.txt": b"x\n" * (2 * BLOCK) + b"\xff", "z.txt": "Z"})
    ) == ["A", "Z"]


@pytest.mark.parametrize("files", [{}, {".hidden": "x"}])
def test_a_folder_without_text_raises(files: dict[str, str], source: Make, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    with pytest.raises(DataError, match=r'data.corpus = ".*corpus": no text file in'):
        Corpus(source(files))


def test_partitions_hold_whole_documents_of_any_size(
    source: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.corpus.PARTITION_BYTES", 10)
    spec = source(
        {"a/1": "x" * 8, "a/2": "x" * 8, "a/3": "x" * 8, "b/1": "x" * 3, "b/2": "", "c/1": "x" * 9}
    )
    assert [
        [split.name for split in piece]
        for piece in Corpus(replace(spec, documents="repository")).partitions()
    ] == [
        ["a/1", "a/2", "a/3"],
        ["b/1", "b/2", "c/1"],
    ]
    assert [len(piece) for piece in Corpus(spec).partitions()] == [2, 2, 2]


def test_the_standard_library_excludes_packages_and_unicode_tables(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    corpus = Corpus(CorpusSpec(corpus=STDLIB_CORPUS, documents="repository", bad_files="error"))
    names = [file.name for file in corpus.files]
    assert "json/decoder.py" in names
    assert not any(
        name.startswith(("site-packages/", "encodings/")) or "__pycache__" in name
        for name in names
    )
    first = corpus.partitions()[0][0]
    assert first.document_key == "."
    source = Path(sysconfig.get_paths()["stdlib"], first.name).read_bytes().decode()
    assert "".join(next(read_texts(first, text_key="text")).blocks) == f"# {first.name}\n{source}"
    assert json.dumps(names[:1]) == json.dumps(["__future__.py"])


def test_bad_files_of_the_standard_library_are_logged_at_info(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "bad.py").write_bytes(b"\xff")
    (tmp_path / "lib" / "good.py").write_text("pass")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    prepare(CorpusSpec(corpus=STDLIB_CORPUS, cache_dir=tmp_path / "cache"), ByteTokenizer())
    assert "skipped bad.py: not UTF-8" in caplog.text
    assert "python-stdlib: .py: 1 text, 0 empty, 1 skipped" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
