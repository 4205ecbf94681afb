import threading
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch

from models.batch import IGNORE_INDEX, Batch
from tests.datasets import build_blended_dataset
from trainer.config.job_config import DataSection
from trainer.data.loader import BatchReader, MicroBatchLoader
from trainer.data.packing import PackedDataset
from trainer.data.sequences import BlendedDataset, FullSequence, SequenceShard
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import DataError

SEQ_LEN = 8


@pytest.fixture
def rows(section: Callable[..., DataSection]) -> BlendedDataset:
    texts = {f"{n:02}": f"text {n} of {n * n * n}" for n in range(15)}
    return build_blended_dataset(section(texts), ByteTokenizer(), seq_len=SEQ_LEN, seed=1)


def packed(rows: BlendedDataset) -> PackedDataset:
    assert isinstance(rows.sources[0], PackedDataset)
    return rows.sources[0]


class Numbers:
    """Rows that hold their own number, and what was asked for."""

    def __init__(self, failing: BaseException | None = None) -> None:
        self.read_so_far: list[int | None] = []
        self._failing = failing

    def read(self, indices: Sequence[int | None], shard: SequenceShard) -> Batch:
        del shard
        self.read_so_far += indices
        if self._failing and 7 in indices:
            raise self._failing
        filled = torch.tensor([-1 if number is None else number for number in indices])
        column = filled[:, None].expand(-1, SEQ_LEN)
        return Batch(column, column, column, column, torch.zeros(len(indices), 2, dtype=torch.int32), 0, 0, 0)


def loader(rows: BatchReader, *, rank: int = 0, ranks: int = 1, rows_a_step: int, micro: int = 1) -> MicroBatchLoader:
    return MicroBatchLoader(rows, dp_rank=rank, dp_size=ranks, global_batch_size=rows_a_step, micro_batch_size=micro)


def numbers_of(loader: MicroBatchLoader, *, start_row: int, updates: int) -> list[list[list[int]]]:
    """Row numbers by update and micro-batch; -1 is an empty row."""
    taken = islice(loader.steps(start_row), updates)
    return [[batch.tokens[:, 0].tolist() for batch in batches] for batches in taken]


def test_micro_batches_alternate_between_ranks() -> None:
    first, second = (loader(Numbers(), rank=rank, ranks=2, rows_a_step=8, micro=2) for rank in range(2))
    assert numbers_of(first, start_row=0, updates=2) == [[[0, 1], [4, 5]], [[8, 9], [12, 13]]]
    assert numbers_of(second, start_row=0, updates=2) == [[[2, 3], [6, 7]], [[10, 11], [14, 15]]]


def test_slots_past_the_global_batch_are_empty() -> None:
    loaders = [loader(Numbers(), rank=rank, ranks=4, rows_a_step=6) for rank in range(4)]
    taken = [numbers_of(each, start_row=6, updates=1)[0] for each in loaders]
    assert taken == [[[6], [10]], [[7], [11]], [[8], [-1]], [[9], [-1]]]


def rows_by_update(rows: BlendedDataset, *, ranks: int, micro: int) -> list[list[tuple[list[int], list[int]]]]:
    """(tokens, labels) of the rows of six updates, of all ranks together, sorted, empty rows left out."""
    loaders = [loader(rows, rank=rank, ranks=ranks, rows_a_step=6, micro=micro).steps(0) for rank in range(ranks)]
    found = []
    for _ in range(6):
        batches = [batch for each in loaders for batch in next(each)]
        pairs = [(b.tolist(), c.tolist()) for batch in batches for b, c in zip(batch.tokens, batch.labels, strict=True)]
        found.append(sorted(pair for pair in pairs if set(pair[1]) != {IGNORE_INDEX}))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro", [1, 2])
def test_a_step_reads_the_same_sequences_at_any_dp_size(ranks: int, micro: int, rows: BlendedDataset) -> None:
    assert packed(rows).num_sequences < 6 * 6
    assert rows_by_update(rows, ranks=ranks, micro=micro) == rows_by_update(rows, ranks=1, micro=6)


def test_a_resumed_loader_continues_the_uninterrupted_one(rows: BlendedDataset) -> None:
    whole = list(islice(loader(rows, rank=1, ranks=2, rows_a_step=5).steps(0), 9))
    tail = list(islice(loader(rows, rank=1, ranks=2, rows_a_step=5).steps(4 * 5), 5))
    for expected, resumed in zip(whole[4:], tail, strict=True):
        for one, other in zip(expected, resumed, strict=True):
            assert torch.equal(one.tokens, other.tokens)
            assert torch.equal(one.labels, other.labels)
            assert torch.equal(one.boundaries, other.boundaries)


class SecondHalf(FullSequence):
    """The last tokens of every row, if they divide."""

    def __init__(self) -> None:
        self.asked_by: list[threading.Thread] = []

    def spans(self, boundaries: tuple[int, ...]) -> Sequence[tuple[int, int]]:
        self.asked_by.append(threading.current_thread())
        if boundaries[-1] % 2:
            raise ValueError(f"{boundaries[-1]} tokens do not divide")
        return [(boundaries[-1] // 2, boundaries[-1] // 2)]

    def attention_pairs(self, boundaries_per_sequence: Sequence[tuple[int, ...]]) -> int:
        return 7 * len(boundaries_per_sequence)


def test_a_thread_reads_only_the_shard_of_the_rank(rows: BlendedDataset) -> None:
    share = SecondHalf()
    reading = MicroBatchLoader(rows, dp_rank=0, dp_size=1, global_batch_size=4, micro_batch_size=2, shard=share)
    parts, whole = (next(each.steps(0)) for each in (reading, loader(rows, rows_a_step=4, micro=2)))
    for part, batch in zip(parts, whole, strict=True):
        assert torch.equal(part.tokens, batch.tokens[:, SEQ_LEN // 2 :])
        assert torch.equal(part.labels, batch.labels[:, SEQ_LEN // 2 :])
        assert (part.num_computed_pairs, part.num_tokens) == (14, batch.num_tokens)
    assert threading.current_thread() not in share.asked_by, "the loop would wait for it"


def test_an_error_of_the_shard_names_the_sequences(section: Callable[..., DataSection]) -> None:
    odd = build_blended_dataset(section({"a": "text"}), ByteTokenizer(), seq_len=7, seed=1)
    reading = MicroBatchLoader(odd, dp_rank=0, dp_size=1, global_batch_size=2, micro_batch_size=2, shard=SecondHalf())
    with pytest.raises(RuntimeError, match=r"sequences \[4, 5\] cannot be read: ValueError: 7 tokens do not divide"):
        next(reading.steps(4))


def test_two_iterators_of_one_loader_are_independent(rows: BlendedDataset) -> None:
    one = loader(rows, rows_a_step=2, micro=2)
    first, second = one.steps(0), one.steps(0)
    for _ in range(4):
        assert torch.equal(next(first)[0].tokens, next(second)[0].tokens)


def test_one_step_is_prefetched() -> None:
    numbers = Numbers()
    updates = loader(numbers, rows_a_step=4).steps(0)
    next(updates)
    deadline = time.monotonic() + 5
    while len(numbers.read_so_far) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert numbers.read_so_far == list(range(8))


def test_closing_an_iterator_ends_its_thread() -> None:
    before = threading.active_count()
    updates = loader(Numbers(), rows_a_step=4).steps(0)
    next(updates)
    assert threading.active_count() == before + 1
    updates.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("failure", [OSError("disk gone"), SystemExit(1), KeyboardInterrupt()])
def test_a_failing_read_raises_with_its_sequences(failure: BaseException) -> None:
    updates = loader(Numbers(failure), rows_a_step=4, micro=2).steps(0)
    next(updates)
    raised: list[Exception] = []

    def take() -> None:
        try:
            next(updates)
        except RuntimeError as error:
            raised.append(error)

    # In a thread, because a loader without this promise waits for ever.
    waiting = threading.Thread(target=take, daemon=True)
    waiting.start()
    waiting.join(timeout=5)
    assert [str(error) for error in raised] == [f"sequences [6, 7] cannot be read: {type(failure).__name__}: {failure}"]


def test_damaged_data_raises_a_data_error(rows: BlendedDataset) -> None:
    tokens: Path = packed(rows).token_dataset.folder / "shard-00000.bin"
    tokens.write_bytes(array("H", [9999] * packed(rows).token_dataset.num_tokens).tobytes())
    updates = loader(rows, rows_a_step=1).steps(3)
    with pytest.raises(DataError, match=r"sequences \[3\]: .*shard-00000.bin is damaged: token \d+ is 9999"):
        next(updates)
