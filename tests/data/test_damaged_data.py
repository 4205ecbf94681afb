"""Damaged files raise a clear error or are skipped and counted; they never change other text."""

import gzip
import io
import json
import multiprocessing
import tempfile
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.source import CorpusSpec
from trainer.data.formats import BLOCK
from trainer.data.prepare import prepare
from trainer.data.prepare.report import verify_checksums
from trainer.data.token_dataset import TokenDataset
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import DataError

Make = Callable[..., CorpusSpec]
Documents = Callable[[CorpusSpec], list[str]]
WORDS = [f"text {n} é\n" * (n % 5 + 1) for n in range(12)]


def valid(name: str) -> bytes:
    lines = "".join(
        json.dumps({"text": word}) + "\n" if "json" in name else word for word in WORDS
    ).encode()
    if name == "parquet":
        import pyarrow
        from pyarrow import parquet

        sink = io.BytesIO()
        parquet.write_table(pyarrow.table({"text": WORDS}), sink, row_group_size=5)
        return sink.getvalue()
    if name.endswith("zst"):
        import zstandard

        return zstandard.ZstdCompressor().compress(lines)
    return gzip.compress(lines, mtime=0) if name.endswith("gz") else lines


VALID = {
    name: valid(name)
    for name in ("txt", "jsonl", "jsonl.gz", "jsonl.zst", "txt.gz", "txt.zst", "parquet")
}


def damaged(content: bytes, at: float, put: bytes, *, keep: bool) -> bytes:
    """Overwrites bytes at the relative position `at` with `put`; truncates after them unless
    `keep`.
    """
    place = int(at * len(content))
    return content[:place] + put + (content[place + len(put) :] if keep else b"")


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    kind=st.sampled_from(sorted(VALID)),
    at=st.floats(0, 1),
    put=st.binary(max_size=6),
    keep=st.booleans(),
    documents=st.sampled_from(["file", "repository"]),
)
def test_a_damaged_file_does_not_affect_its_neighbors(
    *, kind: str, at: float, put: bytes, keep: bool, documents: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "corpus")
        root.mkdir()
        (root / "a.txt").write_text("before")
        (root / f"b.{kind}").write_bytes(damaged(VALID[kind], at, put, keep=keep))
        (root / "c.txt").write_text("after")
        given = CorpusSpec(corpus=str(root), cache_dir=Path(folder, "cache"), documents=documents)  # type: ignore[arg-type]
        dataset = prepare(given, ByteTokenizer())
        text = ByteTokenizer().decode(dataset.read(0, dataset.num_tokens).tolist())
        title = "" if documents == "file" else "# c.txt\n"
        assert text.removeprefix("# a.txt\n").startswith("before")
        assert text.rstrip("\n").endswith(f"{title}after")
        assert "\0" not in text or kind.startswith(("parquet", "jsonl"))
        assert "\ufffd" not in text


# ---- modified prepared files


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    name=st.sampled_from(["shard-00000.bin", "shard-00000.idx", "meta.json"]),
    at=st.floats(0, 0.999),
    put=st.binary(min_size=1, max_size=9),
    keep=st.booleans(),
)
def test_a_modified_prepared_file_raises_or_changes_nothing(
    *, name: str, at: float, put: bytes, keep: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a.jsonl").write_bytes(VALID["jsonl"])
        dataset = prepare(
            CorpusSpec(corpus=f"{folder}/a.jsonl", cache_dir=Path(folder)), ByteTokenizer()
        )
        path = dataset.folder / name
        before = path.read_bytes()
        after = damaged(before, at, put, keep=keep)
        path.write_bytes(after)
        try:
            reopened = TokenDataset(dataset.folder)
            if name == "shard-00000.bin":
                verify_checksums(reopened)
        except DataError as error:
            assert str(dataset.folder) in str(error)
        else:
            assert name == "meta.json" or before == after
            assert reopened.meta == dataset.meta


def test_a_modified_field_of_meta_json_raises(source: Make) -> None:
    spec = source({"a": "some text"})
    path = prepare(spec, ByteTokenizer()).folder / "meta.json"
    written = path.read_text()
    meta = json.loads(written)
    for key, value in {
        "eos": 258,
        "vocab_size": 65_000,
        "skipped": 1,
        "longest": 3,
        "tokenizer": "x",
    }.items():
        path.write_text(json.dumps(meta | {"content": meta["content"] | {key: value}}))
        with pytest.raises(
            DataError, match=r"meta.json is damaged: it does not match its own checksum; delete"
        ):
            prepare(spec, ByteTokenizer())
    path.write_text(written)
    prepare(spec, ByteTokenizer())


class Other(ByteTokenizer):
    fingerprint = "other"


def test_a_prepared_folder_is_a_corpus_for_its_tokenizer_and_options_only(source: Make) -> None:
    dataset = prepare(source({"a": "some text", "b": "more"}), ByteTokenizer())
    reopened = prepare(CorpusSpec(corpus=str(dataset.folder)), ByteTokenizer())
    assert (reopened.folder, reopened.fingerprint) == (dataset.folder, dataset.fingerprint)
    with pytest.raises(
        DataError, match=r"was prepared with the tokenizer byte-264, and \[tokenizer\] is other"
    ):
        prepare(CorpusSpec(corpus=str(dataset.folder)), Other())
    with pytest.raises(
        DataError, match=r"max_document = 5, and .* was prepared with documents of up to 11 tokens"
    ):
        prepare(CorpusSpec(corpus=str(dataset.folder), max_document=5), ByteTokenizer())
    with pytest.raises(
        DataError, match=r'was prepared with data.separators = "bos_eos", and it is "eos" now'
    ):
        prepare(CorpusSpec(corpus=str(dataset.folder), separators="eos"), ByteTokenizer())


def test_a_prepared_folder_without_its_shards_is_not_read_as_text(source: Make) -> None:
    folder = prepare(source({"a": "some text"}), ByteTokenizer()).folder
    (folder / "shard-00000.idx").unlink()
    with pytest.raises(DataError, match=r"shard-00000.idx cannot be read"):
        prepare(CorpusSpec(corpus=str(folder)), ByteTokenizer())


def test_an_unrelated_meta_json_is_no_prepared_folder(source: Make, documents: Documents) -> None:
    spec = source({"meta.json": '{"license": "none"}', "a": "A"})
    assert documents(replace(spec, text_key="license")) == ["A", "none"]


# ---- large inputs


def test_a_million_spaces_are_one_document(source: Make, documents: Documents) -> None:
    assert (
        documents(source({"a": " " * 1_000_000, "b.jsonl": json.dumps({"text": " " * 1_000_000})}))
        == [" " * 1_000_000] * 2
    )


def _peak(connection: Connection, given: CorpusSpec) -> None:
    def high() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) >> 10

    import pyarrow.parquet  # noqa: F401 - its own memory does not count

    before = high()
    dataset = prepare(given, ByteTokenizer())
    connection.send((high() - before, dataset.num_tokens))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "mib"),
    [
        ("txt", 90),
        pytest.param("txt.gz", 90, marks=pytest.mark.slow),
        pytest.param("jsonl", 350, marks=pytest.mark.slow),
        pytest.param("parquet", 90, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("shared_server")
def test_memory_is_bounded_by_the_longest_line_not_the_file(
    kind: str, mib: int, tmp_path: Path
) -> None:
    size = 50_000_000
    path = tmp_path / f"corpus.{kind}"
    if kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        rows = [f"{n:06d}" + "x" * (size // 1000 - 6) for n in range(1000)]
        parquet.write_table(pyarrow.table({"text": rows}), path, write_batch_size=16)
    else:
        line = b'{"text": "%s"}' % (b"x" * size) if kind == "jsonl" else b"x" * size
        path.write_bytes(gzip.compress(line, 1) if kind.endswith("gz") else line)
    context = multiprocessing.get_context("forkserver")
    parent_end, child_end = context.Pipe()
    given = CorpusSpec(corpus=str(path), cache_dir=tmp_path)
    process = context.Process(target=_peak, args=(child_end, given))
    process.start()
    assert parent_end.poll(60)
    growth_mib, tokens = parent_end.recv()
    process.join()
    assert tokens == size + (2000 if kind == "parquet" else 2)
    assert growth_mib < mib


def test_a_text_without_line_breaks_survives_the_split_into_blocks(
    source: Make, documents: Documents
) -> None:
    long = "x" * (2 * BLOCK + 5)
    assert documents(source({"a": long, "b.jsonl": json.dumps({"text": long})})) == [long, long]
