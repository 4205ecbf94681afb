"""Any number of workers and any interruption give the bytes that one undisturbed process writes."""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.data import corpus
from trainer.data.prepare import prepare
from trainer.data.source import CorpusSpec
from trainer.data.token_dataset import TokenDataset
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import DataError, RankFailedError

Make = Callable[..., CorpusSpec]
FILES = {f"{folder}/{n}.txt": f"{n} of {folder}\n" * (n * 7 % 11) for folder in "abc" for n in range(6)}
STEPS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
PIECE = 60


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PARTITION_BYTES", PIECE)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["trainer.data.prepare"])


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def texts(prepared: TokenDataset) -> Iterator[str]:
    for start, length in zip(prepared.document_starts.tolist(), prepared.document_lengths.tolist(), strict=False):
        yield ByteTokenizer().decode(prepared.read(start, start + length).tolist())


def interrupted(work: Callable[[], object], step: int) -> bool:
    """Whether `work`, in another process, was killed before it changed the file system for the step-th time."""
    process = multiprocessing.get_context("forkserver").Process(target=_killed, args=(work, step))
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def _killed(work: Callable[[], object], step: int) -> None:
    left = step

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        reading = event == "open" and (len(arguments) < 3 or not int(str(arguments[2])) & (os.O_WRONLY | os.O_RDWR))
        left -= event in STEPS and not reading
        if left < 0 and event in STEPS:
            os.kill(os.getpid(), signal.SIGKILL)

    vars(os)["fsync"] = int
    sys.addaudithook(count)
    work()


class Preparing:
    """A call of `prepare` that another process can make."""

    def __init__(self, source: CorpusSpec, workers: int = 1) -> None:
        self.source, self.workers = source, workers

    def __call__(self) -> None:
        corpus.PARTITION_BYTES = PIECE
        prepare(self.source, ByteTokenizer(), workers=self.workers, shard_tokens=150)


# ---- killed


def test_a_kill_before_any_file_operation_resumes_to_the_same_bytes(source: Make, tmp_path: Path) -> None:
    kept = source(FILES)
    whole = content(prepare(kept, ByteTokenizer(), shard_tokens=150).folder)
    assert len(whole) > 10
    step = 0
    while True:
        cut = replace(kept, cache_dir=tmp_path / str(step))
        if not interrupted(Preparing(cut), step):
            break
        resumed = prepare(cut, ByteTokenizer(), shard_tokens=150)
        assert content(resumed.folder) == whole, f"killed before step {step}"
        assert [path for path in cut.cache_dir.iterdir() if path.suffix != ".lock"] == [resumed.folder]
        step += 7 if step > 24 else 1
    assert step > 60


def test_repeated_kills_still_make_progress(source: Make, tmp_path: Path) -> None:
    kept = source(FILES)
    cut = replace(kept, cache_dir=tmp_path / "again")
    times = next(times for times in range(100) if not interrupted(Preparing(cut), 17))
    assert times > 3
    assert content(prepare(cut, ByteTokenizer(), shard_tokens=150).folder) == content(
        prepare(kept, ByteTokenizer(), shard_tokens=150).folder
    )


class Counting(ByteTokenizer):
    def __init__(self) -> None:
        self.calls = 0

    def encode(self, text: str) -> Tensor:
        self.calls += 1
        return super().encode(text)


class Fatal(ByteTokenizer):
    """Dies, or lets the process die that it works for, or stops, where a text is met."""

    def __init__(self, text: str, whom: str) -> None:
        self.text, self.whom = text, whom

    def encode(self, text: str) -> Tensor:
        parent = multiprocessing.parent_process()
        if text.startswith(self.text):
            if self.whom == "error":
                raise DataError("no such text")
            if self.whom == "bug":
                raise ZeroDivisionError("a bug")
            assert parent is not None
            os.kill(int(parent.pid or 0) if self.whom == "parent" else os.getpid(), signal.SIGKILL)
        return super().encode(text)


def test_finished_partitions_are_not_tokenized_again(source: Make) -> None:
    kept = source(FILES)
    with pytest.raises(DataError, match=r"c/3.txt: no such text"):
        prepare(kept, Fatal("3 of c", "error"))
    tokenizer = Counting()
    prepare(kept, tokenizer)
    assert 0 < tokenizer.calls < 16


def test_a_partial_partition_of_a_killed_process_is_removed(source: Make) -> None:
    kept = source(FILES)
    for _ in range(2):
        with pytest.raises(DataError, match=r"c/3.txt: no such text"):
            prepare(kept, Fatal("3 of c", "error"))
        [work] = kept.cache_dir.glob("*.tmp")
        assert [path for path in (work / "pieces").iterdir() if path.is_dir()] == []
        (work / "pieces" / "00001-17").mkdir()


def test_leftovers_of_a_changed_corpus_are_not_used(source: Make, documents: Callable[..., list[str]]) -> None:
    kept = source(FILES)
    with pytest.raises(DataError):
        prepare(kept, Fatal("3 of c", "error"))
    changed = source({"a/0.txt": "changed", "a/1.txt": "also changed"})
    texts = [text for name, text in sorted((FILES | {"a/0.txt": "changed", "a/1.txt": "also changed"}).items()) if text]
    assert documents(changed) == texts


def test_a_file_that_changes_during_tokenization_raises(source: Make) -> None:
    kept = source(FILES)

    class Changing(ByteTokenizer):
        def encode(self, text: str) -> Tensor:
            Path(kept.corpus, "b/3.txt").write_text("3 of b, and longer than before\n")
            return super().encode(text)

    with pytest.raises(DataError, match=r"b/3.txt changed while the corpus was read"):
        prepare(kept, Changing())


@pytest.mark.parametrize("damage", ["gone", "short", "no record"])
def test_a_finished_partition_with_damaged_files_is_tokenized_again(damage: str, source: Make, tmp_path: Path) -> None:
    kept = source(FILES)
    with pytest.raises(DataError):
        prepare(kept, Fatal("3 of c", "error"))
    [work] = kept.cache_dir.glob("*.tmp")
    shard = work / "shard-00001.bin"
    if damage == "gone":
        shard.unlink()
    elif damage == "short":
        shard.write_bytes(shard.read_bytes()[:-2])
    else:
        (work / "pieces" / "00001.json").write_text("{")
    other = replace(kept, cache_dir=tmp_path / "other")
    assert content(prepare(kept, ByteTokenizer()).folder) == content(prepare(other, ByteTokenizer()).folder)


# ---- workers


@pytest.mark.ranks
@pytest.mark.parametrize("documents", ["file", "repository"])
def test_any_number_of_workers_writes_the_same_bytes(documents: str, source: Make, tmp_path: Path) -> None:
    # More than a pipe holds, so that a worker has to be listened to.
    kept = source(FILES | {f"d/{n}": "some text\n" * 20_000 for n in range(4)}, documents=documents)
    whole = content(prepare(kept, ByteTokenizer(), shard_tokens=150).folder)
    for workers in (2, 3, 50):
        cut = replace(kept, cache_dir=tmp_path / str(workers))
        assert content(prepare(cut, ByteTokenizer(), workers=workers, shard_tokens=150).folder) == whole


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("whom", "kind", "message"),
    [
        ("error", DataError, r"c/3.txt: no such text"),
        ("bug", RuntimeError, r"ZeroDivisionError: a bug"),
        ("worker", RankFailedError, r"a worker ended \(killed by SIGKILL\); run the same command again"),
    ],
)
def test_a_worker_failure_ends_all_workers_and_can_resume(
    whom: str, kind: type[Exception], message: str, source: Make
) -> None:
    kept = source(FILES)
    with pytest.raises(kind, match=message):
        prepare(kept, Fatal("3 of c", whom), workers=2)
    assert multiprocessing.active_children() == []
    tokenizer = Counting()
    assert list(texts(prepare(kept, tokenizer))) == [text for _, text in sorted(FILES.items()) if text]
    assert 0 < tokenizer.calls < 16


class Doomed(Preparing):
    def __call__(self) -> None:
        corpus.PARTITION_BYTES = PIECE
        prepare(self.source, Fatal("3 of c", "parent"), workers=2, shard_tokens=150)


@pytest.mark.ranks
def test_workers_of_a_killed_parent_do_not_disturb_the_next_launch(source: Make, tmp_path: Path) -> None:
    kept = source(FILES)
    process = multiprocessing.get_context("forkserver").Process(target=Doomed(kept))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    resumed = prepare(kept, ByteTokenizer(), shard_tokens=150)
    other = replace(kept, cache_dir=tmp_path / "other")
    assert content(resumed.folder) == content(prepare(other, ByteTokenizer(), shard_tokens=150).folder)


@pytest.mark.ranks
def test_a_daemonic_process_prepares_without_workers(source: Make) -> None:
    kept = source(FILES)
    process = multiprocessing.get_context("forkserver").Process(target=Preparing(kept, workers=2), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 0


# ---- any documents


class Stopping(Counting):
    """Is interrupted at its n-th text."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def encode(self, text: str) -> Tensor:
        if self.calls == self.at:
            raise KeyboardInterrupt
        return super().encode(text)


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60)


@pytest.mark.ranks
@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    written=st.lists(TEXT, min_size=1, max_size=12),
    lines=st.booleans(),
    shard_tokens=st.integers(1, 200),
    piece=st.integers(1, 120),
    stops=st.lists(st.integers(0, 8), max_size=3),
    workers=st.sampled_from([1, 1, 1, 2]),
)
def test_documents_round_trip(
    *, written: list[str], lines: bool, shard_tokens: int, piece: int, stops: list[int], workers: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(corpus, "PARTITION_BYTES", piece)
        root = Path(folder, "corpus")
        root.mkdir()
        for number, text in enumerate(written):
            if lines:
                with (root / "a.jsonl").open("a") as file:
                    file.write(json.dumps({"text": text}, ensure_ascii=number % 2 == 0) + "\n")
            else:
                (root / f"{number:03d}").write_bytes(text.encode())
        # A byte order mark at the start of a file says how it is encoded, and is no text.
        wanted = [text for text in (text if lines else text.removeprefix("\ufeff") for text in written) if text]
        kept = CorpusSpec(corpus=str(root), cache_dir=Path(folder, "cache"))
        for stop in stops:
            with suppress(KeyboardInterrupt, DataError):
                prepare(kept, Stopping(stop), shard_tokens=shard_tokens)
        if not wanted:
            with pytest.raises(DataError, match="the corpus has no text"):
                prepare(kept, ByteTokenizer(), workers=workers, shard_tokens=shard_tokens)
            return
        prepared = prepare(kept, ByteTokenizer(), workers=workers, shard_tokens=shard_tokens)
        assert list(texts(prepared)) == wanted
        again = prepare(replace(kept, cache_dir=Path(folder, "again")), ByteTokenizer(), shard_tokens=shard_tokens)
        assert content(prepared.folder) == content(again.folder)
