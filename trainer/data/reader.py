"""Reads micro-batches through torchdata's StatefulDataLoader, here or in worker processes.

StatefulDataLoader only reads. Its own state holds for one number of ranks and workers, so a
position is the number of a sequence instead, which holds for all.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from models.batch import Batch
from trainer.data.sequences import BlendedDataset, SequenceShard
from trainer.errors import DataError, RankFailedError
from trainer.resilience.signals import STOP_SIGNALS, die_with_parent

Indices = list[int | None]
"""Indices of a micro-batch's sequences; None: a sequence of padding only."""


class DealtMicroBatch(NamedTuple):
    """A rank's sequences in one micro-batch, and the work of all ranks in (query, key) pairs."""

    indices: Indices
    busiest_pairs: float
    mean_pairs: float


class MicroBatchDataset:
    """A map-style dataset whose keys are dealt micro-batches."""

    def __init__(self, dataset: BlendedDataset, shard: SequenceShard) -> None:
        self._dataset = dataset
        self._shard = shard

    def __getitem__(self, dealt: DealtMicroBatch) -> tuple[Indices, Batch | Exception]:
        """The micro-batch or, as a value, the error that names its sequences.

        StatefulDataLoader would replace the text of an error that a worker raises by that of a
        traceback.
        """
        try:
            batch = self._dataset.read(dealt.indices, self._shard)
        except BaseException as error:  # noqa: BLE001 - raised again where the batch is taken
            return dealt.indices, named_failure(dealt.indices, error)
        return dealt.indices, replace(
            batch, busiest_pairs=dealt.busiest_pairs, mean_pairs=dealt.mean_pairs
        )


def named_failure(indices: Indices | str, error: BaseException) -> Exception:
    """The error to raise for sequences that cannot be read."""
    if isinstance(error, DataError):
        return DataError(f"sequences {indices}: {error}")
    if isinstance(error, RankFailedError):  # A store that does not answer.
        return RankFailedError(error.status, f"sequences {indices}: {error}")
    return RuntimeError(f"sequences {indices} cannot be read: {type(error).__name__}: {error}")


@contextmanager
def quiet_torchdata() -> Iterator[None]:
    """Within this context a StatefulDataLoader is made without a warning of torch 2.13 that is
    meant for torchdata's authors.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        yield


class Reader:
    """Reads dealt micro-batches in their order.

    Worker processes live from the first `next` until `close` or, if that is not called, until the
    thread ends that called it.
    """

    def __init__(
        self, dataset: MicroBatchDataset, dealt: Iterable[DealtMicroBatch], *, num_workers: int
    ) -> None:
        options: dict[str, Any] = {"collate_fn": _unchanged}
        # A daemonic process, such as a rank of the self-check, cannot start children.
        if num_workers and not multiprocessing.current_process().daemon:
            options = {
                "num_workers": num_workers,
                "collate_fn": _join,
                # Shares the mapped corpus, its offsets and the packing plan, which may be larger
                # than all else. Workers use no device and no thread of the rank.
                "multiprocessing_context": "fork",
                "worker_init_fn": partial(_prepare_worker, os.getpid()),
                # The step that is read ahead is waiting to be taken; workers need hold no more
                # than one micro-batch each.
                "prefetch_factor": 1,
            }
        with quiet_torchdata():
            self._loader = StatefulDataLoader(
                dataset,
                batch_size=None,
                sampler=dealt,
                # Otherwise a seed for workers would be drawn from the generator of training.
                generator=torch.Generator(),
                snapshot_every_n_steps=None,
                **options,
            )
        self._iterator: Iterator[tuple[Indices, Any]] | None = None

    def next(self) -> tuple[Indices, Batch]:
        """The next micro-batch, and the indices of its sequences.

        Raises DataError or RuntimeError.
        """
        try:
            if self._iterator is None:
                self._iterator = iter(self._loader)
            indices, batch = next(self._iterator)
        except Exception as error:
            # Of a deal, or of a worker that could not be started or was killed.
            raise named_failure("of a step", error) from error
        if isinstance(batch, Exception):
            raise batch
        return indices, batch if isinstance(batch, Batch) else _split(*batch)

    def close(self) -> None:
        """Ends the workers, after the micro-batches that they are reading."""
        shut_down = getattr(self._iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()


PER_TOKEN = ("tokens", "labels", "positions", "document_ids")
"""Fields of a batch that are int64 [sequences, tokens]."""


def _unchanged(item: Any) -> Any:
    return item


def _join(item: tuple[Indices, Batch | Exception]) -> tuple[Indices, Any]:
    """A batch whose tensors are one: each that a worker sends costs a connection."""
    indices, batch = item
    if isinstance(batch, Exception):
        return item
    fields = dict(vars(batch))
    joined = torch.stack([fields.pop(name) for name in PER_TOKEN])
    fields["boundaries"] = batch.boundaries.tolist()
    return indices, (joined, fields)


def _split(joined: Tensor, fields: dict[str, Any]) -> Batch:
    """The batch that a worker joined."""
    fields["boundaries"] = torch.tensor(fields["boundaries"], dtype=torch.int32)
    fields.update(zip(PER_TOKEN, joined.unbind(), strict=True))
    return Batch(**fields)


def _prepare_worker(rank_pid: int, _: int) -> None:
    # A scheduler signals every process of a job. The rank decides when reading ends: after the
    # step that it finishes first.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(rank_pid)
