"""From row numbers to this rank's micro-batches, read ahead by a thread. Only this file imports torchdata."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from models.batch import Batch
from trainer.data.errors import DataError
from trainer.data.sequences import WHOLE, Share


class Readable(Protocol):
    """What a loader reads from: `trainer.data.sequences.Rows`."""

    def read(self, numbers: Sequence[int | None], share: Share) -> Batch: ...


class Loader:
    """The micro-batches of data rank `rank` of `ranks`.

    Update u takes global rows u * global_batch_size and following, whatever the number of ranks:

        global_batch_size 6, micro_batch_size 1, 4 ranks     micro-batch 0     rank 0..3 reads row 0 1 2 3
                                                             micro-batch 1                         4 5 - -

    `share` says which part of each row this rank holds, where several ranks share rows.
    """

    def __init__(
        self,
        rows: Readable,
        *,
        rank: int,
        ranks: int,
        global_batch_size: int,
        micro_batch_size: int,
        share: Share = WHOLE,
        pin_memory: bool = False,
    ) -> None:
        self._rows = rows
        self._rank = rank
        self._ranks = ranks
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._share = share
        self._pin_memory = pin_memory
        self.num_micro_batches = -(-global_batch_size // (ranks * micro_batch_size))

    def updates(self, start_row: int) -> Generator[list[Batch], None, None]:
        """The micro-batches of each update, for ever, from the update that begins at `start_row`.

        There is no other state. About one update is read ahead, by a thread that ends with the generator. Raises
        DataError or RuntimeError naming the rows.
        """
        from torchdata.nodes import IterableWrapper, Mapper, Prefetcher

        wanted = IterableWrapper(self._numbers(start_row))
        node = Prefetcher(Mapper(wanted, self._read), prefetch_factor=self.num_micro_batches)
        node.reset()
        try:
            while True:
                yield [self._take(next(node)) for _ in range(self.num_micro_batches)]
        finally:
            # Its thread ends with it: here, and not when the traceback of a failed read lets go, which may be at exit.
            del node

    def _numbers(self, start_row: int) -> Iterator[list[int | None]]:
        """Row numbers of each micro-batch of this rank; None where the update has no more rows."""
        size = self._micro_batch_size
        while True:
            end = start_row + self._global_batch_size
            for micro_batch in range(self.num_micro_batches):
                first = start_row + (micro_batch * self._ranks + self._rank) * size
                yield [number if number < end else None for number in range(first, first + size)]
            start_row = end

    def _read(self, numbers: list[int | None]) -> Batch | Exception:
        try:
            batch = self._rows.read(numbers, self._share)
            return pinned(batch) if self._pin_memory else batch
        except DataError as error:
            return DataError(f"rows {numbers}: {error}")
        except BaseException as error:  # noqa: BLE001 - it would end the thread, and the loop would wait for ever
            failure = RuntimeError(f"rows {numbers} cannot be read: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return failure

    @staticmethod
    def _take(item: Batch | Exception) -> Batch:
        if not isinstance(item, Exception):
            return item
        try:
            raise item
        finally:
            # Else the traceback keeps this frame, and so the node and its thread, alive until the process ends.
            del item


def pinned(batch: Batch) -> Batch:
    """The same batch with its per-token tensors where a device can fetch them; boundaries stay on the host anyway."""
    return replace(
        batch,
        tokens=batch.tokens.pin_memory(),
        labels=batch.labels.pin_memory(),
        positions=batch.positions.pin_memory(),
        documents=batch.documents.pin_memory(),
    )
