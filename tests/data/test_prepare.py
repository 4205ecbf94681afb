import hashlib
import json
import os
import resource
import shutil
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.artifacts import content, forge
from tests.build_datasets import build_blended_dataset
from tests.ranks import context
from trainer.config.data import DataSection
from trainer.config.parse import load
from trainer.config.source import CorpusSpec
from trainer.data import prepare as prepare_module
from trainer.data import shard_writer, token_dataset
from trainer.data.corpus_files import CorpusFiles
from trainer.data.packing import PackedDataset
from trainer.data.prepare import prepare, prepare_once
from trainer.data.text_chunks import EncodingError
from trainer.data.token_dataset import TokenDataset
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import DataError
from trainer.launch.cluster import launch_id

Make = Callable[..., CorpusSpec]
BOS = ByteTokenizer.bos
EOS = ByteTokenizer.eos


class Counting(ByteTokenizer):
    """A byte tokenizer that counts its calls."""

    calls = 0

    def encode(self, text: str) -> Tensor:
        self.calls += 1
        return super().encode(text)


class Large(ByteTokenizer):
    """Ids above 16 bits, and no BOS."""

    vocab_size = 70_000
    bos = None  # type: ignore[assignment]
    fingerprint = "large"

    def encode(self, text: str) -> Tensor:
        return super().encode(text).to(torch.int32) + 69_000


def texts(dataset: TokenDataset) -> list[str]:
    documents = []
    for start, stop in pairwise(dataset.document_starts.tolist()):
        ids = dataset.read(start, stop).tolist()
        assert (ids[0], ids[-1]) == (BOS, EOS)
        documents.append(bytes(ids[1:-1]).decode())
    return documents


def cache_entries(source: CorpusSpec) -> list[str]:
    """Entries of the cache without locks."""
    folder = source.cache_dir
    return (
        sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")
        if folder.exists()
        else []
    )


def test_documents_are_enclosed_in_bos_and_eos(source: Make) -> None:
    dataset = prepare(source({"a.txt": "one", "b.txt": "é", "empty": ""}), ByteTokenizer())
    assert dataset.read(0, dataset.num_tokens).tolist() == [
        BOS,
        111,
        110,
        101,
        EOS,
        BOS,
        0xC3,
        0xA9,
        EOS,
    ]
    assert dataset.document_lengths.tolist() == [5, 4]
    assert (dataset.num_tokens, dataset.num_documents, dataset.meta.longest) == (9, 2, 5)


def test_reads_span_shards_and_documents_do_not(source: Make) -> None:
    spec = source({f"{n}.txt": "x" * n + "!" for n in range(1, 9)})
    whole = prepare(spec, ByteTokenizer())
    cut = prepare(spec, ByteTokenizer(), shard_tokens=10)
    assert len(cut.meta.shards) > 2
    stream = whole.read(0, whole.num_tokens)
    for start in range(whole.num_tokens):
        assert torch.equal(cut.read(start, whole.num_tokens), stream[start:])
        assert torch.equal(cut.read(0, start), stream[:start])
    assert torch.equal(cut.document_starts, whole.document_starts)
    assert texts(cut) == texts(whole)


def test_ids_above_16_bits_are_stored_as_int32(source: Make) -> None:
    dataset = prepare(source({"a": "ab"}), Large())
    assert dataset.meta.dtype == "int32"
    assert dataset.read(0, 3).tolist() == [69_097, 69_098, EOS]


def test_max_document_cuts_longer_documents_without_loss(source: Make) -> None:
    spec = source({"a": "abcdefgh", "b": "abc", "c": "abcdef"}, max_document=5)
    dataset = prepare(spec, ByteTokenizer())
    assert texts(dataset) == ["abc", "def", "gh", "abc", "abc", "def"]
    with pytest.raises(ValueError, match="greater than or equal to 3"):  # BOS and EOS take two
        DataSection(max_document=2)


def test_a_second_call_tokenizes_nothing(source: Make) -> None:
    spec = source({"a": "A", "b": "B"})
    tokenizer = Counting()
    first = prepare(spec, tokenizer)
    second = prepare(spec, tokenizer)
    assert tokenizer.calls == 2
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize("change", ["content", "file", "documents", "max_document", "tokenizer"])
def test_a_change_of_text_options_or_tokenizer_prepares_again(change: str, source: Make) -> None:
    spec = source({"a/a": "AAAA", "a/b": "B"})
    tokenizer = ByteTokenizer()
    before = prepare(spec, tokenizer)
    if change == "content":
        Path(spec.corpus, "a", "b").write_text("C")
        os.utime(Path(spec.corpus, "a", "b"), ns=(0, 0))
    elif change == "file":
        Path(spec.corpus, "c").write_text("C")
    elif change == "documents":
        spec = replace(spec, documents="repository")
    elif change == "max_document":
        spec = replace(spec, max_document=4)
    else:
        tokenizer = Large()
    after = prepare(spec, tokenizer)
    assert after.folder != before.folder
    assert after.fingerprint != before.fingerprint


def test_the_fingerprint_depends_on_tokens_not_on_times_and_paths(
    source: Make, tmp_path: Path
) -> None:
    spec = source({"a": "A", "b": "B"})
    first = prepare(spec, ByteTokenizer())
    shutil.copytree(spec.corpus, tmp_path / "elsewhere")
    os.utime(tmp_path / "elsewhere" / "a", ns=(1, 1))
    moved = prepare(replace(spec, corpus=str(tmp_path / "elsewhere")), ByteTokenizer())
    assert moved.folder != first.folder
    assert moved.fingerprint == first.fingerprint


def test_the_fingerprint_depends_on_document_boundaries(source: Make) -> None:
    ends = chr(0x101)  # encoded like EOS

    class Ends(Large):
        def encode(self, text: str) -> Tensor:
            return torch.tensor([ord(character) for character in text], dtype=torch.int32)

    one = prepare(source({"a": f"x{ends}y"}), Ends())
    spec = source({"a": "x", "b": "y"})
    two = prepare(spec, Ends())
    assert torch.equal(one.read(0, 4), two.read(0, 4))
    assert one.fingerprint != two.fingerprint


class Slow(ByteTokenizer):
    def __init__(self, calls: Path) -> None:
        self.calls = calls

    def encode(self, text: str) -> Tensor:
        with self.calls.open("a") as file:
            file.write("x")
        time.sleep(0.05)
        return super().encode(text)


def prepare_slowly(spec: CorpusSpec, calls: Path, number: int) -> None:
    calls.with_suffix(f".{number}").touch()
    while not calls.with_suffix(".go").exists():
        time.sleep(0.001)
    calls.with_suffix(f".{number}").write_text(prepare(spec, Slow(calls)).fingerprint)


@pytest.mark.ranks
def test_one_of_two_processes_tokenizes_and_both_get_the_result(
    source: Make, tmp_path: Path
) -> None:
    spec = source({f"{n}.txt": str(n) for n in range(10)})
    calls = tmp_path / "calls"
    processes = [
        context.Process(target=prepare_slowly, args=(spec, calls, number)) for number in range(2)
    ]
    for process in processes:
        process.start()
    while not all(calls.with_suffix(f".{number}").exists() for number in range(2)):
        assert all(process.is_alive() for process in processes)
    calls.with_suffix(".go").touch()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    printed = [calls.with_suffix(f".{number}").read_text() for number in range(2)]
    assert printed[0] == printed[1] != ""
    assert calls.read_text() == "x" * 10
    assert len(cache_entries(spec)) == 1


@pytest.mark.parametrize("failure", [KeyboardInterrupt, DataError, MemoryError])
def test_a_failure_leaves_no_result_and_can_resume(
    failure: type[BaseException], source: Make
) -> None:
    class Failing(Counting):
        def encode(self, text: str) -> Tensor:
            if text == "B":
                raise failure("failure")
            return super().encode(text)

    spec = source({"a": "A", "b": "B"})
    with pytest.raises(failure):
        prepare(spec, Failing())
    assert [Path(name).suffix for name in cache_entries(spec)] == [".tmp"]
    assert texts(prepare(spec, Counting())) == ["A", "B"]
    assert [Path(name).suffix for name in cache_entries(spec)] == [""]


def test_a_foreign_folder_is_not_overwritten(source: Make) -> None:
    spec = source({"a": "A"})
    folder = prepare(spec, ByteTokenizer()).folder
    (folder / "meta.json").unlink()
    with pytest.raises(DataError, match=r"cannot be written: .*not empty"):
        prepare(spec, ByteTokenizer())


def test_a_tokenizer_error_names_the_file(source: Make) -> None:
    class Refusing(ByteTokenizer):
        def encode(self, text: str) -> Tensor:
            raise EncodingError(f"cannot encode {text}")

    with pytest.raises(DataError, match=r"b.txt: cannot encode B"):
        prepare(source({"b.txt": "B"}), Refusing())


def test_a_corpus_without_tokens_raises_and_leaves_no_files(source: Make) -> None:
    spec = source({"a": "", "b": b"\xff"})
    with pytest.raises(
        DataError, match="has no text: 2 files, 1 empty texts, 1 skipped, the first b: not UTF"
    ):
        prepare(spec, ByteTokenizer())
    assert cache_entries(spec) == []


@contextmanager
def small_files() -> Iterator[None]:
    """Limits files to 20,000 bytes, like an almost full disk.

    Use it only around the call under test: pytest may write longer files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_raises_and_can_resume(source: Make) -> None:
    spec = source({"a": "x" * 15_000})
    message = r'data.cache_dir = ".*cache" cannot be written: .*File too large'
    with small_files(), pytest.raises(DataError, match=message):
        prepare(spec, ByteTokenizer())
    assert texts(prepare(spec, ByteTokenizer())) == ["x" * 15_000]


def test_an_unwritable_cache_raises(source: Make, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, where a folder should be")
    with pytest.raises(DataError, match=r'data.cache_dir = ".*cache" cannot be written'):
        prepare(source({"a": "A"}), ByteTokenizer())


@pytest.mark.parametrize("damage", ["torn", "long", "missing", "offsets", "meta"])
def test_a_damaged_prepared_folder_raises(damage: str, source: Make) -> None:
    spec = source({"a": "A", "b": "B"})
    folder = prepare(spec, ByteTokenizer()).folder
    tokens = folder / "shard-00000.bin"
    offsets = folder / "shard-00000.idx"
    if damage == "missing":
        tokens.unlink()
    elif damage == "offsets":
        offsets.write_bytes(array("q", [0, 7, 6]).tobytes())
    elif damage == "meta":
        (folder / "meta.json").write_text("{")
    else:
        tokens.write_bytes(
            tokens.read_bytes()[:-1] if damage == "torn" else tokens.read_bytes() + b"\0\0"
        )
    message = {
        "torn": "shard-00000.bin is damaged: 11 bytes, meta.json says 12; delete",
        "long": "shard-00000.bin is damaged: 14 bytes, meta.json says 12; delete",
        "missing": "shard-00000.bin cannot be read",
        "offsets": r"shard-00000.idx is damaged: checksum mismatch \(24 bytes\); delete",
        "meta": "meta.json is damaged: Invalid JSON.*; delete",
    }[damage]
    with pytest.raises(DataError, match=message):
        prepare(spec, ByteTokenizer())


def test_a_token_outside_the_vocabulary_raises(source: Make) -> None:
    spec = source({"a": "abc", "b": "def"})
    dataset = prepare(spec, ByteTokenizer(), shard_tokens=4)
    forge(
        dataset.folder / "meta.json", lambda meta: meta.update(vocab_size=ord("c"), bos=0, eos=1)
    )
    again = TokenDataset(dataset.folder)
    assert again.read(1, 3).tolist() == dataset.read(1, 3).tolist() == [ord("a"), ord("b")]
    with pytest.raises(
        DataError, match=r"shard-00000.bin is damaged: token 3 is 99, but vocab_size = 99"
    ):
        again.read(1, 4)


def test_a_token_is_hashed_before_it_is_read(
    source: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (token_dataset, shard_writer, prepare_module):
        monkeypatch.setattr(module, "BLOCK_BYTES", 16)
    folder = prepare(
        source({"a": "abcdefghijklmnopqrstuvwxyz", "b": "0123456789"}), ByteTokenizer()
    ).folder
    whole = TokenDataset(folder)
    path = folder / "shard-00000.bin"
    expected = whole.read(0, whole.num_tokens).tolist()
    data = path.read_bytes()
    for offset in range(len(data)):
        path.write_bytes(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :])
        first = offset // 16 * 8
        damaged = TokenDataset(folder)
        last = min(first + 8, len(expected))
        assert damaged.read(0, first).tolist() == expected[:first]
        assert damaged.read(last, len(expected)).tolist() == expected[last:]
        block = f"bytes {16 * (offset // 16)} to {min(16 * (offset // 16 + 1), len(data))}"
        for start, stop in ((first, first + 1), (last - 1, last), (0, len(expected))):
            with pytest.raises(
                DataError,
                match=rf"shard-00000.bin is damaged: checksum mismatch in {block}; delete",
            ):
                damaged.read(start, stop)


def test_a_corpus_of_before_blocks_were_hashed_is_read(source: Make) -> None:
    dataset = prepare(source({"a": "abc", "b": "def"}), ByteTokenizer())
    path = dataset.folder / "meta.json"
    values = content(path)
    del values["block_bytes"], values["counts"]
    for shard in values["shards"]:
        del shard["blocks_sha256"]
        (dataset.folder / f"{shard['name']}.blocks").unlink()
    old = {"version": 2} | values
    digest = hashlib.sha256(json.dumps(old, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps(old | {"sha256": digest}, indent=2))
    again = TokenDataset(dataset.folder)
    assert again.fingerprint == dataset.fingerprint
    assert again.read(0, again.num_tokens).tolist() == dataset.read(0, dataset.num_tokens).tolist()
    tokens = dataset.folder / "shard-00000.bin"
    tokens.write_bytes(bytes([tokens.read_bytes()[0] ^ 1]) + tokens.read_bytes()[1:])
    with pytest.raises(
        DataError, match=r"shard-00000.bin is damaged: checksum mismatch in bytes 0 to"
    ):
        TokenDataset(dataset.folder).read(3, 4)


def test_the_standard_library_is_packed_into_sequences(tmp_path: Path) -> None:
    data = DataSection(cache_dir=tmp_path)
    blended = build_blended_dataset(data, ByteTokenizer(), seq_len=512, seed=0)
    assert blended.read([0, 1]).tokens.shape == (2, 512)
    (source,) = blended.sources
    assert isinstance(source, PackedDataset)
    assert source.num_sequences * 512 >= source.token_dataset.num_tokens
    assert [path.name for path in source.token_dataset.folder.glob("*.plan")] == [
        "best_fit-512-version-2-seed-0.plan"
    ]


# ---- one process of a launch looks at the corpora


def test_processes_of_a_launch_look_at_a_corpus_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("some text")
    config = load(
        [f"--data.corpus={tmp_path / 'corpus'}", f"--data.cache_dir={tmp_path / 'cache'}"]
    )
    scans = list[Path]()
    walk = CorpusFiles._walk

    def counted(found: CorpusFiles) -> None:
        scans.append(found.root)
        walk(found)

    monkeypatch.setattr(CorpusFiles, "_walk", counted)
    first = prepare_once(config, "launch-1")
    assert prepare_once(config, "launch-1") == first
    assert len(scans) == 1
    # Another launch looks again, and finds what has changed; one whose cache was emptied prepares.
    (tmp_path / "corpus/b.txt").write_text("more")
    second = prepare_once(config, "launch-2")
    assert second != first
    shutil.rmtree(second["corpus"])
    assert prepare_once(config, "launch-2") == second
    assert [path.name for path in (tmp_path / "cache").glob(".launch-*.json")] == [
        ".launch-2.json"
    ]
    assert prepare_once(config, None) == second
    assert len(scans) == 4


def test_a_launch_of_srun_has_an_id_of_its_own() -> None:
    slurm = {"SLURM_STEP_ID": "3", "SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"}
    assert launch_id(slurm) == "launch-17-3-1"
    assert launch_id({"TORCHELASTIC_RUN_ID": "100", "TORCHELASTIC_RESTART_COUNT": "0"}) is None
