"""Any number of workers and any interruption produce the bytes of one uninterrupted process."""

import json
import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.data.killed import PARTITION_BYTES, Doomed, Fatal, Preparing, killed
from trainer.config.source import CorpusSpec
from trainer.data import corpus
from trainer.data.prepare import prepare
from trainer.data.token_dataset import TokenDataset
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import DataError, RankFailedError

Make = Callable[..., CorpusSpec]
FILES = {
    f"{folder}/{n}.txt": f"{n} of {folder}\n" * (n * 7 % 11) for folder in "abc" for n in range(6)
}


pytestmark = pytest.mark.usefixtures("shared_server")


@pytest.fixture(autouse=True)
def small_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PARTITION_BYTES", PARTITION_BYTES)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def texts(dataset: TokenDataset) -> Iterator[str]:
    for start, length in zip(
        dataset.document_starts.tolist(), dataset.document_lengths.tolist(), strict=False
    ):
        yield ByteTokenizer().decode(dataset.read(start, start + length).tolist())


def interrupted(work: Callable[[], object], step: int) -> bool:
    """Runs `work` in a process that kills itself at its `step`-th file operation; returns whether
    it was killed.
    """
    process = multiprocessing.get_context("forkserver").Process(target=killed, args=(work, step))
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


# ---- killed


def test_a_kill_before_any_file_operation_resumes_to_the_same_bytes(
    source: Make, tmp_path: Path
) -> None:
    spec = source(FILES)
    expected = content(prepare(spec, ByteTokenizer(), shard_tokens=150).folder)
    assert len(expected) > 10
    step = 0
    while True:
        interrupted_spec = replace(spec, cache_dir=tmp_path / str(step))
        if not interrupted(Preparing(interrupted_spec), step):
            break
        resumed = prepare(interrupted_spec, ByteTokenizer(), shard_tokens=150)
        assert content(resumed.folder) == expected, f"killed before step {step}"
        assert [
            path for path in interrupted_spec.cache_dir.iterdir() if path.suffix != ".lock"
        ] == [resumed.folder]
        step += 11 if step > 12 else 1
    assert step > 60


def test_repeated_kills_still_make_progress(source: Make, tmp_path: Path) -> None:
    spec = source(FILES)
    interrupted_spec = replace(spec, cache_dir=tmp_path / "again")
    launches = next(
        launches for launches in range(100) if not interrupted(Preparing(interrupted_spec), 17)
    )
    assert launches > 3
    assert content(prepare(interrupted_spec, ByteTokenizer(), shard_tokens=150).folder) == content(
        prepare(spec, ByteTokenizer(), shard_tokens=150).folder
    )


class Counting(ByteTokenizer):
    def __init__(self) -> None:
        self.calls = 0

    def encode(self, text: str) -> Tensor:
        self.calls += 1
        return super().encode(text)


def test_finished_partitions_are_not_tokenized_again(source: Make) -> None:
    spec = source(FILES)
    with pytest.raises(DataError, match=r"c/3.txt: no such text"):
        prepare(spec, Fatal("3 of c", "error"))
    tokenizer = Counting()
    prepare(spec, tokenizer)
    assert 0 < tokenizer.calls < 16


def test_a_partial_partition_of_a_killed_process_is_removed(source: Make) -> None:
    spec = source(FILES)
    for _ in range(2):
        with pytest.raises(DataError, match=r"c/3.txt: no such text"):
            prepare(spec, Fatal("3 of c", "error"))
        [work] = spec.cache_dir.glob("*.tmp")
        assert [path for path in (work / "pieces").iterdir() if path.is_dir()] == []
        (work / "pieces" / "00001-17").mkdir()


def test_leftovers_of_a_changed_corpus_are_not_used(
    source: Make, documents: Callable[..., list[str]]
) -> None:
    spec = source(FILES)
    with pytest.raises(DataError):
        prepare(spec, Fatal("3 of c", "error"))
    changed = source({"a/0.txt": "changed", "a/1.txt": "also changed"})
    texts = [
        text
        for name, text in sorted(
            (FILES | {"a/0.txt": "changed", "a/1.txt": "also changed"}).items()
        )
        if text
    ]
    assert documents(changed) == texts


def test_a_file_that_changes_during_tokenization_raises(source: Make) -> None:
    spec = source(FILES)

    class Changing(ByteTokenizer):
        def encode(self, text: str) -> Tensor:
            Path(spec.corpus, "b/3.txt").write_text("3 of b, and longer than before\n")
            return super().encode(text)

    with pytest.raises(DataError, match=r"b/3.txt changed while the corpus was read"):
        prepare(spec, Changing())


@pytest.mark.parametrize("damage", ["gone", "short", "no record"])
def test_a_finished_partition_with_damaged_files_is_tokenized_again(
    damage: str, source: Make, tmp_path: Path
) -> None:
    spec = source(FILES)
    with pytest.raises(DataError):
        prepare(spec, Fatal("3 of c", "error"))
    [work] = spec.cache_dir.glob("*.tmp")
    shard = work / "shard-00001.bin"
    if damage == "gone":
        shard.unlink()
    elif damage == "short":
        shard.write_bytes(shard.read_bytes()[:-2])
    else:
        (work / "pieces" / "00001.json").write_text("{")
    other = replace(spec, cache_dir=tmp_path / "other")
    assert content(prepare(spec, ByteTokenizer()).folder) == content(
        prepare(other, ByteTokenizer()).folder
    )


# ---- workers


@pytest.mark.ranks
@pytest.mark.parametrize("documents", ["file", "repository"])
def test_any_number_of_workers_writes_the_same_bytes(
    documents: str, source: Make, tmp_path: Path
) -> None:
    # Progress messages exceed the capacity of a pipe, so the parent must read them.
    spec = source(
        FILES | {f"d/{n}": "some text\n" * 20_000 for n in range(4)}, documents=documents
    )
    expected = content(prepare(spec, ByteTokenizer(), shard_tokens=150).folder)
    for workers in (2, 3, 50):
        interrupted_spec = replace(spec, cache_dir=tmp_path / str(workers))
        assert (
            content(
                prepare(
                    interrupted_spec, ByteTokenizer(), workers=workers, shard_tokens=150
                ).folder
            )
            == expected
        )


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("target", "kind", "message"),
    [
        ("error", DataError, r"c/3.txt: no such text"),
        ("bug", RuntimeError, r"ZeroDivisionError: a bug"),
        (
            "worker",
            RankFailedError,
            r"a worker ended \(killed by SIGKILL\); run the same command again",
        ),
    ],
)
def test_a_worker_failure_ends_all_workers_and_can_resume(
    target: str, kind: type[Exception], message: str, source: Make
) -> None:
    # The ranks of other tests wait in their pool.
    others = set(multiprocessing.active_children())
    spec = source(FILES)
    with pytest.raises(kind, match=message):
        prepare(spec, Fatal("3 of c", target), workers=2)
    assert set(multiprocessing.active_children()) <= others
    tokenizer = Counting()
    assert list(texts(prepare(spec, tokenizer))) == [
        text for _, text in sorted(FILES.items()) if text
    ]
    assert 0 < tokenizer.calls < 16


@pytest.mark.ranks
def test_workers_of_a_killed_parent_do_not_disturb_the_next_launch(
    source: Make, tmp_path: Path
) -> None:
    spec = source(FILES)
    process = multiprocessing.get_context("forkserver").Process(target=Doomed(spec))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    resumed = prepare(spec, ByteTokenizer(), shard_tokens=150)
    other = replace(spec, cache_dir=tmp_path / "other")
    assert content(resumed.folder) == content(
        prepare(other, ByteTokenizer(), shard_tokens=150).folder
    )


@pytest.mark.ranks
def test_a_daemonic_process_prepares_without_workers(source: Make) -> None:
    spec = source(FILES)
    process = multiprocessing.get_context("forkserver").Process(
        target=Preparing(spec, workers=2), daemon=True
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0


# ---- any documents


class Stopping(Counting):
    """Raises KeyboardInterrupt at the call `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def encode(self, text: str) -> Tensor:
        if self.calls == self.at:
            raise KeyboardInterrupt
        return super().encode(text)


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60)


@pytest.mark.ranks
@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    originals=st.lists(TEXT, min_size=1, max_size=12),
    lines=st.booleans(),
    shard_tokens=st.integers(1, 200),
    partition_bytes=st.integers(1, 120),
    interruptions=st.lists(st.integers(0, 8), max_size=3),
    workers=st.sampled_from([1, 1, 1, 2]),
)
def test_documents_round_trip(
    *,
    originals: list[str],
    lines: bool,
    shard_tokens: int,
    partition_bytes: int,
    interruptions: list[int],
    workers: int,
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(corpus, "PARTITION_BYTES", partition_bytes)
        root = Path(folder, "corpus")
        root.mkdir()
        for number, text in enumerate(originals):
            if lines:
                with (root / "a.jsonl").open("a") as file:
                    file.write(json.dumps({"text": text}, ensure_ascii=number % 2 == 0) + "\n")
            else:
                (root / f"{number:03d}").write_bytes(text.encode())
        # A byte order mark at the start of a file is no part of the text.
        expected_texts = [
            text
            for text in (text if lines else text.removeprefix("\ufeff") for text in originals)
            if text
        ]
        spec = CorpusSpec(corpus=str(root), cache_dir=Path(folder, "cache"))
        for stop in interruptions:
            with suppress(KeyboardInterrupt, DataError):
                prepare(spec, Stopping(stop), shard_tokens=shard_tokens)
        if not expected_texts:
            with pytest.raises(DataError, match="has no text"):
                prepare(spec, ByteTokenizer(), workers=workers, shard_tokens=shard_tokens)
            return
        dataset = prepare(spec, ByteTokenizer(), workers=workers, shard_tokens=shard_tokens)
        assert list(texts(dataset)) == expected_texts
        again = prepare(
            replace(spec, cache_dir=Path(folder, "again")),
            ByteTokenizer(),
            shard_tokens=shard_tokens,
        )
        assert content(dataset.folder) == content(again.folder)
