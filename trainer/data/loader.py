"""Micro-batches of a rank, prefetched by a thread."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from models.batch import Batch
from trainer.data.deal import Cost, busiest_and_means, deal_sequences
from trainer.data.sequences import FULL_SEQUENCE, BlendedDataset, SequenceShard
from trainer.errors import DataError, RankFailedError

SAMPLED_SEQUENCES = 1024


class DealtMicroBatch(NamedTuple):
    """A rank's sequences in one micro-batch, and the work of all ranks in (query, key) pairs."""

    indices: list[int | None]
    """Indices of sequences; None: a sequence of padding only."""
    busiest_pairs: float
    mean_pairs: float


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
    micro-batch.
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
    ) -> None:
        self._dataset = dataset
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self.global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._shard = shard
        self._plan_attention = plan_attention
        self._pin_memory = pin_memory
        self.num_micro_batches = -(-global_batch_size // (dp_size * micro_batch_size))

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of the whole sequences that a rank takes per step, as if no cp ranks shared them."""
        return self.num_micro_batches * self._micro_batch_size * self._dataset.seq_len

    def steps(self, start_sequence: int) -> Generator[list[Batch], None, None]:
        """Yields the micro-batches of each step without end, from the step that begins at
        `start_sequence`.

        The loader has no other state. A thread, which ends with the generator, reads one step
        ahead. Raises DataError or RuntimeError with the indices of the sequences.
        """
        pool = ThreadPoolExecutor(1)
        try:
            reading = self._start_reading(pool, start_sequence)
            while True:
                start_sequence += self.global_batch_size
                current = reading
                # The next step is queued before this one is handed out, so that reading overlaps
                # training.
                reading = self._start_reading(pool, start_sequence)
                yield [micro_batch.result() for micro_batch in current]
        finally:
            # Runs when the generator is closed, so that no step is read that nobody will train on.
            pool.shutdown(cancel_futures=True)

    def _start_reading(self, pool: ThreadPoolExecutor, start_sequence: int) -> list[Future[Batch]]:
        # The only thread runs its queue in order, so that no read ever waits for the deal before
        # it.
        dealt = pool.submit(self.deal, start_sequence)
        return [pool.submit(self._read, dealt, number) for number in range(self.num_micro_batches)]

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

    def _read(self, dealt: Future[list[DealtMicroBatch]], number: int) -> Batch:
        indices: list[int | None] | str = "of a step"
        try:
            indices, busiest, mean = dealt.result()[number]
            batch = self._dataset.read(indices, self._shard)
            plans = self._plan_attention(batch.boundaries)
            batch = replace(batch, busiest_pairs=busiest, mean_pairs=mean, attention_plans=plans)
            # Pinning copies the batch, so it happens in this thread, not in the training thread.
            return batch.pin_memory() if self._pin_memory else batch
        except DataError as error:
            raise DataError(f"sequences {indices}: {error}") from error
        except RankFailedError as error:  # A store that does not answer.
            raise RankFailedError(error.status, f"sequences {indices}: {error}") from error
        except BaseException as error:
            raise RuntimeError(
                f"sequences {indices} cannot be read: {type(error).__name__}: {error}"
            ) from error
