"""Micro-batches of a rank, prefetched by a thread."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from torch import Tensor

from models.batch import Batch
from trainer.data.deal import Cost, busiest_and_means, deal_sequences
from trainer.data.reader import DealtMicroBatch, MicroBatchDataset, Reader, named_failure
from trainer.data.sequences import FULL_SEQUENCE, BlendedDataset, SequenceShard

SAMPLED_SEQUENCES = 1024


class StepWork(NamedTuple):
    """(query, key) pairs of a data-parallel rank, per step: the mean over steps and layers."""

    steps: int
    """Number of steps in the sample."""
    busiest_pairs: float
    """Pairs of the busiest rank of each micro-batch, summed over the step."""
    mean_pairs: float
    tokens: int
    """Tokens of a rank in a step, padding included."""

    def imbalance(self, cost: Cost) -> float:
        """Work of the busiest rank over the mean."""
        return cost.imbalance(
            busiest_pairs=self.busiest_pairs, mean_pairs=self.mean_pairs, tokens=self.tokens
        )


class MicroBatchLoader:
    """The micro-batches of data-parallel rank `dp_rank`.

    Step n reads the global sequences from n * global_batch_size on, for every dp_size, and deals
    them to ranks and micro-batches by their (query, key) pairs. With equal pairs, that is by
    number:

        global_batch_size 6, micro_batch_size 1, dp_size 4    micro-batch 0    dp_rank 0..3 reads 0 1 2 3
                                                              micro-batch 1                       4 5 - -

    `shard` selects the part of each sequence that this rank holds under context parallelism;
    `plan_attention` computes what attention needs of the host, given the document boundaries of a
    micro-batch. `num_workers` processes read; 0: the thread that reads ahead.
    """

    def __init__(
        self,
        dataset: BlendedDataset,
        *,
        dp_rank: int,
        dp_size: int,
        global_batch_size: int,
        micro_batch_size: int,
        shard: SequenceShard = FULL_SEQUENCE,
        plan_attention: Callable[[Tensor], tuple[object, ...]] = lambda _: (),
        pin_memory: bool = False,
        num_workers: int = 0,
    ) -> None:
        self._dataset = dataset
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self.global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._shard = shard
        self._plan_attention = plan_attention
        self._pin_memory = pin_memory
        self.num_workers = num_workers
        self.num_micro_batches = -(-global_batch_size // (dp_size * micro_batch_size))

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of the whole sequences that a rank takes per step, as if no cp ranks shared them."""
        return self.num_micro_batches * self._micro_batch_size * self._dataset.seq_len

    def steps(self, start_sequence: int) -> Generator[list[Batch], None, None]:
        """Yields the micro-batches of each step without end, from the step that begins at
        `start_sequence`.

        The loader has no other state. A thread, which ends with the generator, keeps one step
        ahead. Raises DataError or RuntimeError with the indices of the sequences.
        """
        dataset = MicroBatchDataset(self._dataset, self._shard)
        reader = Reader(dataset, self.deals(start_sequence), num_workers=self.num_workers)
        pool = ThreadPoolExecutor(1)
        reading = self._start_reading(pool, reader)
        try:
            while True:
                current = reading
                # The next step is queued before this one is handed out, so that reading overlaps
                # training.
                reading = self._start_reading(pool, reader)
                yield [micro_batch.result() for micro_batch in current]
        finally:
            # Runs when the generator is closed, so that no step is read that nobody will train on.
            for micro_batch in reading:
                micro_batch.cancel()
            pool.submit(reader.close)
            pool.shutdown()

    def _start_reading(self, pool: ThreadPoolExecutor, reader: Reader) -> list[Future[Batch]]:
        # The only thread runs its queue in order, so that no read ever waits for the one before.
        return [pool.submit(self._read, reader) for _ in range(self.num_micro_batches)]

    def deals(self, start_sequence: int) -> Iterator[DealtMicroBatch]:
        """The rank's micro-batches without end, from the step that begins at `start_sequence`."""
        for first in count(start_sequence, self.global_batch_size):
            yield from self.deal(first)

    def deal(self, start_sequence: int) -> list[DealtMicroBatch]:
        """The rank's micro-batches of the step that begins at `start_sequence`."""
        step = range(start_sequence, start_sequence + self.global_batch_size)
        # Every rank runs the same number of micro-batches, because collectives need all ranks.
        # Places beyond the global batch are padding.
        num_places = self.num_micro_batches * self._dp_size * self._micro_batch_size
        indices: list[int | None] = [*step, *[None] * (num_places - len(step))]
        pairs = [self._dataset.computed_pairs(index) for index in indices]
        dealt = deal_sequences(
            pairs, dp_size=self._dp_size, micro_batch_size=self._micro_batch_size
        )
        return [
            DealtMicroBatch([indices[place] for place in ranks[self._dp_rank]], busiest, mean)
            for ranks, (busiest, mean) in zip(dealt, busiest_and_means(pairs, dealt), strict=True)
        ]

    def next_steps(self, first: int, *, max_steps: int) -> StepWork:
        """The work of steps from the global sequence `first` on, as many as a sample needs."""
        steps = max(1, min(SAMPLED_SEQUENCES // self.global_batch_size, max_steps))
        dealt = [
            part
            for step in range(steps)
            for part in self.deal(first + step * self.global_batch_size)
        ]
        busiest, mean = (
            sum(pairs) / steps for pairs in zip(*(part[1:] for part in dealt), strict=True)
        )
        return StepWork(steps, busiest, mean, self.tokens_per_rank)

    def _read(self, reader: Reader) -> Batch:
        indices, batch = reader.next()
        try:
            # Plans are cached where attention asks for them: in this process.
            plans = self._plan_attention(batch.boundaries)
            batch = replace(batch, attention_plans=plans)
            # Pinning copies the batch, so it happens in this thread, not in the training thread.
            return batch.pin_memory() if self._pin_memory else batch
        except BaseException as error:
            raise named_failure(indices, error) from error
