"""Micro-batches of a rank, prefetched by a thread."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from models.batch import Batch
from trainer.data.sequences import FULL_SEQUENCE, BlendedDataset, SequenceShard
from trainer.errors import DataError


class MicroBatchLoader:
    """The micro-batches of data-parallel rank `dp_rank`.

    Step n reads the global sequences from n * global_batch_size on, for every dp_size:

        global_batch_size 6, micro_batch_size 1, dp_size 4    micro-batch 0    dp_rank 0..3 reads 0 1 2 3
                                                              micro-batch 1                       4 5 - -

    `shard` selects the part of each sequence that this rank holds under context parallelism.
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
        pin_memory: bool = False,
    ) -> None:
        self._dataset = dataset
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._shard = shard
        self._pin_memory = pin_memory
        self.num_micro_batches = -(-global_batch_size // (dp_size * micro_batch_size))

    def steps(self, start_sequence: int) -> Generator[list[Batch], None, None]:
        """Yields the micro-batches of each step without end, from the step that begins at `start_sequence`.

        The loader has no other state. A thread, which ends with the generator, reads one step ahead. Raises DataError
        or RuntimeError with the indices of the sequences.
        """
        pool = ThreadPoolExecutor(1)
        try:
            reading = self._start_reading(pool, start_sequence)
            while True:
                start_sequence += self._global_batch_size
                current, reading = reading, self._start_reading(pool, start_sequence)
                yield [micro_batch.result() for micro_batch in current]
        finally:
            pool.shutdown(cancel_futures=True)

    def _start_reading(self, pool: ThreadPoolExecutor, start_sequence: int) -> list[Future[Batch]]:
        return [pool.submit(self._read, indices) for indices in self._micro_batch_indices(start_sequence)]

    def _micro_batch_indices(self, start_sequence: int) -> Iterator[list[int | None]]:
        """Global sequence indices of each micro-batch of this rank in a step; None past the end of the step."""
        size, end = self._micro_batch_size, start_sequence + self._global_batch_size
        for micro_batch in range(self.num_micro_batches):
            first = start_sequence + (micro_batch * self._dp_size + self._dp_rank) * size
            yield [index if index < end else None for index in range(first, first + size)]

    def _read(self, indices: list[int | None]) -> Batch:
        try:
            batch = self._dataset.read(indices, self._shard)
            return batch.pin_memory() if self._pin_memory else batch
        except DataError as error:
            raise DataError(f"sequences {indices}: {error}") from error
        except BaseException as error:
            raise RuntimeError(f"sequences {indices} cannot be read: {type(error).__name__}: {error}") from error
