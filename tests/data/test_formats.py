import gzip
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainer.config.source import CorpusSpec
from trainer.data.corpus import Corpus
from trainer.data.formats import BLOCK, InputSplit, count_lines_before
from trainer.errors import DataError

Make = Callable[..., CorpusSpec]
Documents = Callable[[CorpusSpec], list[str]]
TEXTS = [f"text {n} é\nof two lines " * (n % 7) + "." for n in range(40)]
LINES = "".join(json.dumps({"text": word, "id": 1}) + "\n" for word in TEXTS)


def zstandard(content: bytes) -> bytes:
    import zstandard as library

    return library.ZstdCompressor(write_checksum=True).compress(content)


def parquet(columns: dict[str, list[Any]], *, rows: int = 100) -> bytes:
    import pyarrow
    from pyarrow import parquet as library

    sink = pyarrow.BufferOutputStream()
    library.write_table(pyarrow.table(columns), sink, row_group_size=rows)
    return bytes(sink.getvalue())


# ---- .jsonl


def test_each_jsonl_line_is_a_document(source: Make, documents: Documents) -> None:
    spec = source({"a.jsonl": '{"text": "one\\n\\u00e9", "id": 1}\n\n{"text": "two"}'})
    assert documents(spec) == ["one\né", "two"]
    assert documents(replace(spec, documents="repository")) == ["one\né\ntwo\n"]


@pytest.mark.parametrize("partition_bytes", [3, 100, 1 << 20])
def test_each_line_is_in_exactly_one_partition(
    partition_bytes: int, source: Make, documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.corpus.PARTITION_BYTES", partition_bytes)
    lines = "".join(LINES.splitlines(keepends=True)[:4])
    spec = source({"a.jsonl": lines, "b.jsonl": "", "c.jsonl": lines[:-1]})
    assert documents(spec) == TEXTS[:4] * 2
    assert (len(Corpus(spec).partitions()) > 2) == (partition_bytes < 1000)


BAD_LINES = {
    '{"text": 3}': 'no string at key "text"',
    '{"text": null}': 'no string at key "text"',
    '{"text": ["a"]}': 'no string at key "text"',
    '{"txt": "a"}': 'no string at key "text"',
    "[1]": "not a JSON object",
    "1": "not a JSON object",
    "null": "not a JSON object",
    '{"text": "a"': "Expecting ',' delimiter at character 13",
    '{"text": "\\ud800"}': "'utf-8' codec can't encode character",
    '{"text": "\xff"}': "'utf-8' codec can't decode byte 0xff in position 10",
    "[" * 5_000: "maximum recursion depth exceeded",
    "\0": "Expecting value at character 0",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
@pytest.mark.parametrize("partition_bytes", [30, 1 << 20])
def test_a_bad_line_is_logged_and_skipped_or_raises(
    line: str,
    partition_bytes: int,
    source: Make,
    documents: Documents,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.data.corpus.PARTITION_BYTES", partition_bytes)
    content = b'{"text": "one"}\n\n' + line.encode("latin-1") + b'\n{"text": "two"}\n'
    spec = source({"a.jsonl": content})
    assert documents(spec) == ["one", "two"]
    assert f"skipped a.jsonl:3: {BAD_LINES[line]}" in caplog.text
    with pytest.raises(
        DataError, match=r'^data.bad_files = "error", and the corpus holds a.jsonl:3: '
    ):
        documents(replace(spec, bad_files="error"))


def test_count_lines_before_counts_line_starts(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"ab\n\nc\nd")
    split = InputSplit(str(path), "lines", 7, root=str(tmp_path))
    counts = [count_lines_before(split._replace(start=start)) for start in range(8)]
    assert counts == [0, 1, 1, 1, 2, 3, 3, 4]


@pytest.mark.parametrize("partition_bytes", [1, 30, 50, 99, 1 << 20])
@pytest.mark.parametrize("block", [1, 7, 1 << 22])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_only_a_line_above_the_limit_is_skipped(
    name: str,
    block: int,
    partition_bytes: int,
    source: Make,
    documents: Documents,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("trainer.data.formats.MAX_RECORD_BYTES", 30)
    monkeypatch.setattr("trainer.data.formats.BLOCK", block)
    monkeypatch.setattr("trainer.data.corpus.PARTITION_BYTES", partition_bytes)
    content = (
        b'{"text": "one"}\n{"text": "'
        + b"x" * 100
        + b'"}\n{"text": "two"}\n{"text": "'
        + b"y" * 30
        + b'"}'
    )
    spec = source({name: gzip.compress(content) if name.endswith(".gz") else content, "b": "B"})
    assert documents(spec) == ["one", "two", "B"]
    skipped = [message for message in caplog.messages if message.startswith("skipped ")]
    assert skipped == [f"skipped {name}:{line}: a line is longer than 30 bytes" for line in (2, 4)]
    with pytest.raises(DataError, match="a line is longer than 30 bytes"):
        documents(replace(spec, bad_files="error"))


GROWTH_OF_MEMORY = """
import resource, sys
from pathlib import Path
from trainer.data.formats import InputSplit, read_texts

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

folder, before = sys.argv[1], peak()
split = InputSplit(f"{folder}/a.jsonl.gz", "a.jsonl.gz", 0, root=folder, kind="lines")
for text in read_texts(split, text_key="text"):
    try:
        print("".join(text.blocks))
    except Exception as error:
        print(error)
print(peak() - before)
"""


def test_a_small_file_with_one_long_line_takes_little_memory(tmp_path: Path) -> None:
    many = gzip.compress(b"x" * (1 << 24)) * 24  # 384 MiB
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress(b'{"text": "') + many + gzip.compress(b'"}\n{"text": "after"}\n')
    )
    command = [sys.executable, "-c", GROWTH_OF_MEMORY, str(tmp_path)]
    problem, after, mib = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert problem == "a.jsonl.gz:1: a line is longer than 67,108,864 bytes"
    assert after == "after"
    assert int(mib) < 250


def test_a_cell_above_the_limit_is_skipped(
    source: Make,
    documents: Documents,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("trainer.data.formats.MAX_RECORD_BYTES", 30)
    spec = source({"a.parquet": parquet({"text": ["one", "x" * 31, "y" * 30, "z" * 99]})})
    assert documents(spec) == ["one", "y" * 30]
    assert "skipped a.parquet: row 2: a text is longer than 30 bytes" in caplog.text


def test_a_long_file_of_a_document_of_several_is_skipped(
    source: Make,
    documents: Documents,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("trainer.data.prepare.tokenize.MAX_RECORD_BYTES", 30)
    spec = source(
        {"r/a.txt": "one", "r/b.txt": "x" * 99, "r/c.txt": "two"}, documents="repository"
    )
    (document,) = documents(spec)
    assert "one" in document and "two" in document and "x" not in document.replace("txt", "")
    assert (
        "skipped r/b.txt: longer than 30 characters, in a document of several files" in caplog.text
    )


# ---- text_key, tables, compression


def test_text_key_selects_the_key_or_column(source: Make, documents: Documents) -> None:
    files: dict[str, str | bytes] = {
        "a.jsonl": '{"text": "a", "body": "b"}',
        "b.parquet": parquet({"body": ["c"]}),
    }
    assert documents(source(files, text_key="body")) == ["b", "c"]


@pytest.mark.parametrize("partition_bytes", [1, 1 << 20])
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_each_row_of_a_table_is_a_document(
    rows: int,
    partition_bytes: int,
    source: Make,
    documents: Documents,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.data.corpus.PARTITION_BYTES", partition_bytes)
    spec = source({"a.parquet": parquet({"id": list(range(40)), "text": TEXTS}, rows=rows)})
    assert documents(spec) == TEXTS
    assert len(Corpus(spec).partitions()) == (-(-40 // rows) if partition_bytes == 1 else 1)


def test_bad_rows_and_damaged_tables_are_logged(
    source: Make, documents: Documents, caplog: pytest.LogCaptureFixture
) -> None:
    files: dict[str, str | bytes] = {
        "a.parquet": parquet({"text": ["a", None, "b"]}, rows=1),
        "c.parquet": parquet({"text": [1, 2]}),
        "d.parquet": parquet({"text": TEXTS})[:-100],
        "e.parquet": b"",
    }
    assert documents(source(files)) == ["a", "b"]
    for spec in (
        'a.parquet: row 2: no string at key "text"',
        'c.parquet: row 2: no string at key "text"',
        "d.parquet: ",
        "e.parquet: Parquet file size is 0 bytes",
    ):
        assert f"skipped {spec}" in caplog.text


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_files_are_decompressed(
    suffix: str, source: Make, documents: Documents
) -> None:
    pack = gzip.compress if suffix == "gz" else zstandard
    long = "a line\n" * (BLOCK // 4)
    spec = source(
        {
            f"a.jsonl.{suffix}": pack(LINES[:200].encode()) + pack(LINES[200:].encode()),
            f"b.txt.{suffix}": pack(long.encode()),
            f"c.{suffix}": pack(b"C"),
            f"d.{suffix}": pack(b""),
        }
    )
    assert documents(spec) == [*TEXTS, long, "C"]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("damage", ["cut", "torn head", "changed", "followed"])
def test_damaged_compressed_files_are_logged_and_contribute_no_partial_text(
    damage: str, suffix: str, source: Make, documents: Documents, caplog: pytest.LogCaptureFixture
) -> None:
    pack = gzip.compress if suffix == "gz" else zstandard
    compressed = pack("".join(f"{n * n} " for n in range(100_000)).encode())
    damaged = {
        "cut": compressed[: len(compressed) // 2],
        "torn head": compressed[:3],
        "changed": compressed[:100] + b"\0" * 300 + compressed[400:],
        "followed": compressed + b"something else",
    }[damage]
    spec = source({"a": "A", f"b.txt.{suffix}": damaged, "c": "C"})
    assert documents(spec) == ["A", "C"]
    assert f"skipped b.txt.{suffix}: " in caplog.text


def test_a_truncated_jsonl_gz_keeps_its_complete_lines(
    source: Make, documents: Documents, caplog: pytest.LogCaptureFixture
) -> None:
    spec = source({"a.jsonl.gz": gzip.compress(LINES.encode())[:-20], "b": "B"})
    found = documents(spec)
    assert found[:-1] == TEXTS[: len(found) - 1]
    assert "skipped a.jsonl.gz: Compressed file ended before" in caplog.text


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("a.txt.zst", "pyarrow")])
def test_a_missing_package_raises_with_the_install_command(
    name: str, package: str, source: Make, documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        DataError,
        match=re.escape(f"{name} needs {package}: {sys.executable} -m pip install {package}"),
    ):
        documents(source({name: b"x"}))


# ---- datasets


def saved(folder: Path, *, split: str | None = None) -> Path:
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(40))})
    (datasets.DatasetDict({split: rows}) if split else rows).save_to_disk(folder)
    return folder


@pytest.mark.parametrize("partition_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("split", [None, "train"])
def test_each_row_of_a_saved_dataset_is_a_document(
    split: str | None,
    partition_bytes: int,
    tmp_path: Path,
    documents: Documents,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.data.corpus.PARTITION_BYTES", partition_bytes)
    folder = saved(tmp_path / "set", split=split)
    spec = CorpusSpec(corpus=str(folder), cache_dir=tmp_path / "cache")
    assert documents(spec) == TEXTS
    assert documents(replace(spec, corpus=f"hf:{folder},split=train")) == TEXTS


def test_a_streamed_dataset_has_one_partition_per_file_and_its_identity_changes_with_them(
    tmp_path: Path, documents: Documents
) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(LINES)
    corpus = f"hf:json,data_files={tmp_path}/*.jsonl"
    spec = CorpusSpec(corpus=corpus, cache_dir=tmp_path / "cache")
    assert documents(spec) == TEXTS * 2
    assert len(Corpus(spec).partitions()) == 2
    before = Corpus(spec).identity
    (tmp_path / "a.jsonl").write_text(LINES + LINES)
    from trainer.data.hf_datasets import open_dataset

    open_dataset.cache_clear()
    assert Corpus(spec).identity != before


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ("hf:", r"must be hf:NAME\[,option=value\]"),
        ("hf:json,data=x", "options: config, split, data_files, revision, not data"),
        ("hf:json,split", "must be hf:NAME"),
        ("hf:json,data_files=/nowhere/x.jsonl", "cannot be opened: FileNotFoundError"),
        ("hf:SAVED,split=test", "cannot be opened: KeyError: 'test'"),
    ],
)
def test_an_invalid_or_missing_dataset_raises(
    corpus: str, message: str, tmp_path: Path, documents: Documents
) -> None:
    corpus = corpus.replace(
        "SAVED", str(saved(tmp_path / "set", split="train")) if "SAVED" in corpus else ""
    )
    with pytest.raises(DataError, match=message):
        documents(CorpusSpec(corpus=corpus, cache_dir=tmp_path / "cache"))


def test_a_dataset_without_the_text_column_raises(tmp_path: Path, documents: Documents) -> None:
    spec = CorpusSpec(
        corpus=str(saved(tmp_path / "set")), text_key="body", cache_dir=tmp_path / "cache"
    )
    with pytest.raises(DataError, match='has no column "body"; its columns are text, id'):
        documents(spec)
