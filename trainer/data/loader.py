"""From row numbers to this rank's micro-batches, read ahead by a thread. Only this file imports torchdata."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from models.batch import Batch
from trainer.data.errors import DataError
from trainer.data.sequences import FULL_SEQUENCE, SequenceShard


class BatchReader(Protocol):
    """What a loader reads from: `trainer.data.sequences.Rows`."""

    def read(self, indices: Sequence[int | None], shard: SequenceShard) -> Batch: ...


class MicroBatchLoader:
    """The micro-batches of data rank `rank` of `ranks`.

    Update u takes global rows u * global_batch_size and following, whatever the number of ranks:

        global_batch_size 6, micro_batch_size 1, 4 ranks     micro-batch 0     rank 0..3 reads row 0 1 2 3
                                                             micro-batch 1                         4 5 - -

    `share` says which part of each row this rank holds, where several ranks share rows.
    """

    def __init__(
        self,
        dataset: BatchReader,
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
        """The micro-batches of each update, for ever, from the update that begins at `start_row`.

        There is no other state. About one update is read ahead, by a thread that ends with the generator. Raises
        DataError or RuntimeError naming the rows.
        """
        from torchdata.nodes import IterableWrapper, Mapper, Prefetcher

        indices = IterableWrapper(self._micro_batch_indices(start_sequence))
        node = Prefetcher(Mapper(indices, self._read), prefetch_factor=self.num_micro_batches)
        node.reset()
        try:
            while True:
                yield [self._raise_if_error(next(node)) for _ in range(self.num_micro_batches)]
        finally:
            # Its thread ends with it: here, and not when the traceback of a failed read lets go, which may be at exit.
            del node

    def _micro_batch_indices(self, start_sequence: int) -> Iterator[list[int | None]]:
        """Row numbers of each micro-batch of this rank; None where the update has no more rows."""
        size = self._micro_batch_size
        while True:
            end = start_sequence + self._global_batch_size
            for micro_batch in range(self.num_micro_batches):
                first = start_sequence + (micro_batch * self._dp_size + self._dp_rank) * size
                yield [number if number < end else None for number in range(first, first + size)]
            start_sequence = end

    def _read(self, indices: list[int | None]) -> Batch | Exception:
        try:
            batch = self._dataset.read(indices, self._shard)
            return pin_batch(batch) if self._pin_memory else batch
        except DataError as error:
            return DataError(f"rows {indices}: {error}")
        except BaseException as error:  # noqa: BLE001 - it would end the thread, and the loop would wait for ever
            failure = RuntimeError(f"rows {indices} cannot be read: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return failure

    @staticmethod
    def _raise_if_error(item: Batch | Exception) -> Batch:
        if not isinstance(item, Exception):
            return item
        try:
            raise item
        finally:
            # Else the traceback keeps this frame, and so the node and its thread, alive until the process ends.
            del item


def pin_batch(batch: Batch) -> Batch:
    """The same batch with its per-token tensors where a device can fetch them; boundaries stay on the host anyway."""
    return replace(
        batch,
        tokens=batch.tokens.pin_memory(),
        labels=batch.labels.pin_memory(),
        positions=batch.positions.pin_memory(),
        document_ids=batch.document_ids.pin_memory(),
    )
