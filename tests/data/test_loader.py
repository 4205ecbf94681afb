import threading
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.batch import IGNORE_INDEX, Batch
from tests.build_datasets import build_blended_dataset
from trainer.config.data import DataSection
from trainer.data.loader import MicroBatchLoader
from trainer.data.packing import PackedDataset
from trainer.data.sequences import FULL_SEQUENCE, BlendedDataset, FullSequence, SequenceShard
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import DataError

SEQ_LEN = 8


@pytest.fixture
def dataset(section: Callable[..., DataSection]) -> BlendedDataset:
    texts = {f"{n:02}": f"text {n} of {n * n * n}" for n in range(15)}
    return build_blended_dataset(section(texts), ByteTokenizer(), seq_len=SEQ_LEN, seed=1)


def packed(dataset: BlendedDataset) -> PackedDataset:
    assert isinstance(dataset.sources[0], PackedDataset)
    return dataset.sources[0]


class IndexDataset(BlendedDataset):
    """Sequences filled with their index; records what was read."""

    def __init__(
        self, failing: BaseException | None = None, pairs: Sequence[float] = (1,)
    ) -> None:
        self.read_so_far: list[int | None] = []
        self._failing = failing
        self._pairs = pairs
        self.seq_len = SEQ_LEN

    def computed_pairs(self, index: int | None) -> float:
        return 0 if index is None else self._pairs[index % len(self._pairs)]

    def read(self, indices: Sequence[int | None], shard: SequenceShard = FULL_SEQUENCE) -> Batch:
        del shard
        self.read_so_far += indices
        if self._failing and 7 in indices:
            raise self._failing
        filled = torch.tensor([-1 if number is None else number for number in indices])
        column = filled[:, None].expand(-1, SEQ_LEN)
        return Batch(
            column,
            column,
            column,
            column,
            torch.zeros(len(indices), 2, dtype=torch.int32),
            0,
            0,
            0,
        )


def loader(
    dataset: BlendedDataset,
    *,
    rank: int = 0,
    ranks: int = 1,
    global_batch_size: int,
    micro: int = 1,
) -> MicroBatchLoader:
    return MicroBatchLoader(
        dataset,
        dp_rank=rank,
        dp_size=ranks,
        global_batch_size=global_batch_size,
        micro_batch_size=micro,
    )


def indices_of(
    loader: MicroBatchLoader, *, start_sequence: int, steps: int
) -> list[list[list[int]]]:
    """Sequence indices by step and micro-batch; -1 is an empty sequence."""
    taken = islice(loader.steps(start_sequence), steps)
    return [[batch.tokens[:, 0].tolist() for batch in batches] for batches in taken]


def test_without_a_difference_of_work_micro_batches_alternate_between_ranks() -> None:
    first, second = (
        loader(IndexDataset(), rank=rank, ranks=2, global_batch_size=8, micro=2)
        for rank in range(2)
    )
    assert indices_of(first, start_sequence=0, steps=2) == [[[0, 1], [4, 5]], [[8, 9], [12, 13]]]
    assert indices_of(second, start_sequence=0, steps=2) == [
        [[2, 3], [6, 7]],
        [[10, 11], [14, 15]],
    ]


def test_sequences_of_similar_work_share_a_micro_batch_on_every_mesh() -> None:
    pairs = [7, 2, 6, 1, 5, 3]
    by_rank = [
        loader(IndexDataset(pairs=pairs), rank=rank, ranks=2, global_batch_size=6)
        for rank in range(2)
    ]
    assert [indices_of(each, start_sequence=6, steps=1)[0] for each in by_rank] == [
        [[6], [11], [7]],
        [[8], [10], [9]],
    ]
    work = [[part[1:] for part in each.deal(6)] for each in by_rank]
    assert work[0] == work[1] == [(7, 6.5), (5, 4), (2, 1.5)]
    (batch, *_), *_ = islice(by_rank[1].steps(6), 1)
    assert (batch.busiest_pairs, batch.mean_pairs) == (7, 6.5)
    sampled = by_rank[0].next_steps(0, max_steps=3)
    assert sampled == (3, 14, 12, 3 * SEQ_LEN)


def test_slots_past_the_global_batch_are_empty() -> None:
    loaders = [
        loader(IndexDataset(), rank=rank, ranks=4, global_batch_size=6) for rank in range(4)
    ]
    taken = [indices_of(each, start_sequence=6, steps=1)[0] for each in loaders]
    assert taken == [[[6], [10]], [[7], [11]], [[8], [-1]], [[9], [-1]]]


def sequences_by_step(
    dataset: BlendedDataset, *, ranks: int, micro: int
) -> list[list[tuple[list[int], list[int]]]]:
    """(tokens, labels) of the non-empty sequences of six steps, of all ranks, sorted per step."""
    loaders = [
        loader(dataset, rank=rank, ranks=ranks, global_batch_size=6, micro=micro).steps(0)
        for rank in range(ranks)
    ]
    result = []
    for _ in range(6):
        batches = [batch for each in loaders for batch in next(each)]
        pairs = [
            (b.tolist(), c.tolist())
            for batch in batches
            for b, c in zip(batch.tokens, batch.labels, strict=True)
        ]
        result.append(sorted(pair for pair in pairs if set(pair[1]) != {IGNORE_INDEX}))
    return result


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro", [1, 2])
def test_a_step_reads_the_same_sequences_at_any_dp_size(
    ranks: int, micro: int, dataset: BlendedDataset
) -> None:
    assert packed(dataset).num_sequences < 6 * 6
    assert sequences_by_step(dataset, ranks=ranks, micro=micro) == sequences_by_step(
        dataset, ranks=1, micro=6
    )


def test_a_resumed_loader_continues_the_uninterrupted_one(dataset: BlendedDataset) -> None:
    whole = list(islice(loader(dataset, rank=1, ranks=2, global_batch_size=5).steps(0), 9))
    tail = list(islice(loader(dataset, rank=1, ranks=2, global_batch_size=5).steps(4 * 5), 5))
    for expected, resumed in zip(whole[4:], tail, strict=True):
        for one, other in zip(expected, resumed, strict=True):
            assert torch.equal(one.tokens, other.tokens)
            assert torch.equal(one.labels, other.labels)
            assert torch.equal(one.boundaries, other.boundaries)


class SecondHalf(FullSequence):
    """The second half of every sequence; raises for an odd length."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def spans(self, boundaries_D: Tensor) -> tuple[Tensor, Tensor]:
        self.threads.append(threading.current_thread())
        if boundaries_D[-1] % 2:
            raise ValueError(f"{int(boundaries_D[-1])} tokens do not divide")
        half = boundaries_D[-1:].long() // 2
        return half, half

    def attention_pairs(self, boundaries_BD: Tensor, window: int | None) -> int:
        assert window is None
        return 7 * len(boundaries_BD)


def test_a_thread_reads_only_the_shard_of_the_rank(dataset: BlendedDataset) -> None:
    shard = SecondHalf()
    sharded_loader = MicroBatchLoader(
        dataset, dp_rank=0, dp_size=1, global_batch_size=4, micro_batch_size=2, shard=shard
    )
    parts, whole = (
        next(each.steps(0))
        for each in (sharded_loader, loader(dataset, global_batch_size=4, micro=2))
    )
    for part, batch in zip(parts, whole, strict=True):
        assert torch.equal(part.tokens, batch.tokens[:, SEQ_LEN // 2 :])
        assert torch.equal(part.labels, batch.labels[:, SEQ_LEN // 2 :])
        assert (part.num_computed_pairs, part.num_tokens) == (14, batch.num_tokens)
    assert threading.current_thread() not in shard.threads, "reading blocks the training loop"


def test_an_error_of_the_shard_names_the_sequences(section: Callable[..., DataSection]) -> None:
    odd = build_blended_dataset(section({"a": "text"}), ByteTokenizer(), seq_len=7, seed=1)
    sharded_loader = MicroBatchLoader(
        odd, dp_rank=0, dp_size=1, global_batch_size=2, micro_batch_size=2, shard=SecondHalf()
    )
    with pytest.raises(
        RuntimeError,
        match=r"sequences \[4, 5\] cannot be read: ValueError: 7 tokens do not divide",
    ):
        next(sharded_loader.steps(4))


def test_two_iterators_of_one_loader_are_independent(dataset: BlendedDataset) -> None:
    one = loader(dataset, global_batch_size=2, micro=2)
    first = one.steps(0)
    second = one.steps(0)
    for _ in range(4):
        assert torch.equal(next(first)[0].tokens, next(second)[0].tokens)


def test_one_step_is_prefetched() -> None:
    index_dataset = IndexDataset()
    steps = loader(index_dataset, global_batch_size=4).steps(0)
    next(steps)
    deadline = time.monotonic() + 5
    while len(index_dataset.read_so_far) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert index_dataset.read_so_far == list(range(8))


def test_closing_an_iterator_ends_its_thread() -> None:
    before = threading.active_count()
    steps = loader(IndexDataset(), global_batch_size=4).steps(0)
    next(steps)
    assert threading.active_count() == before + 1
    steps.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("failure", [OSError("disk gone"), SystemExit(1), KeyboardInterrupt()])
def test_a_failing_read_raises_with_its_sequences(failure: BaseException) -> None:
    steps = loader(IndexDataset(failure), global_batch_size=4, micro=2).steps(0)
    next(steps)
    raised: list[Exception] = []

    def take() -> None:
        try:
            next(steps)
        except RuntimeError as error:
            raised.append(error)

    # In a thread, because a broken loader would hang.
    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(timeout=5)
    assert [str(error) for error in raised] == [
        f"sequences [6, 7] cannot be read: {type(failure).__name__}: {failure}"
    ]


def test_damaged_data_raises_a_data_error(dataset: BlendedDataset) -> None:
    tokens: Path = packed(dataset).token_dataset.folder / "shard-00000.bin"
    tokens.write_bytes(array("H", [9999] * packed(dataset).token_dataset.num_tokens).tobytes())
    steps = loader(dataset, global_batch_size=1).steps(3)
    with pytest.raises(
        DataError,
        match=r"sequences \[3\]: .*shard-00000.bin is damaged: checksum mismatch in bytes 0 to",
    ):
        next(steps)
