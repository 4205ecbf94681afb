"""Prepared corpora for the training loop of others: a StatefulDataLoader whose position any number
of ranks and workers continues.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from models.batch import Batch
from trainer.command_table import typed
from trainer.config.parse import ConfigSource, merge_sources
from trainer.config.training_stages import Recipe
from trainer.data.datasets import build_blended_dataset
from trainer.data.loader import MicroBatchLoader
from trainer.data.own_files import is_token_dataset
from trainer.data.reader import DealtMicroBatch, Indices, MicroBatchDataset, quiet_torchdata
from trainer.data.sequences import FULL_SEQUENCE, BlendedDataset
from trainer.errors import ConfigError, DataError


def open_packed(
    *folders: str | Path,
    seq_len: int | str,
    weights: Sequence[float] = (),
    seed: int = 0,
    packing: Literal["best_fit", "concat", "single"] = "best_fit",
    mask: Literal["document", "none"] = "document",
) -> BlendedDataset:
    """The packed sequences of folders that `longhaul prepare` made: without end, reshuffled every
    epoch.

    Args:
        folders: The folders, in the order of their weights.
        seq_len: Tokens of a sequence; `"128K"` and `"1M"` are multiples of 1024.
        weights: The folders' shares of tokens; left out, equal shares.
        seed: The seed of the order.
        packing: As `data.packing`: how documents fill sequences.
        mask: As `data.mask`: whether positions and boundaries are those of documents.

    Raises:
        DataError: A folder is damaged, or not one that `longhaul prepare` made.
        ValueError: There is no folder, another number of weights, or a value that its key of the
            configuration does not take.

    """
    if not folders or (weights and len(weights) != len(folders)):
        raise ValueError(f"{len(weights)} weights for {len(folders)} folders")
    for folder in folders:
        if not is_token_dataset(Path(folder)):
            raise DataError(f"{folder} is no prepared folder: run {typed('prepare')} first")
    paths = {f"source{number}": Path(folder) for number, folder in enumerate(folders)}
    mix = [
        {"source": name, "weight": weight}
        for name, weight in zip(paths, weights or [1.0] * len(paths), strict=True)
    ]
    sources = {name: {"path": str(path)} for name, path in paths.items()}
    values = {
        "data": {"sources": sources, "mix": mix, "packing": packing, "mask": mask},
        "training": {"seq_len": seq_len, "seed": seed},
    }
    try:
        given = merge_sources([ConfigSource(name="open_packed", values=values, typed=True)], [])
    except ConfigError as error:
        raise ValueError("; ".join(error.problems)) from None
    config = Recipe.model_validate(given)
    training = config.training
    return build_blended_dataset(config.data, paths, seq_len=training.seq_len, seed=training.seed)


def model_inputs(batch: Batch) -> dict[str, Any]:
    """A micro-batch by the names that transformers has, tensors [sequences, seq_len].

    `shift_labels` are the next tokens already. `boundaries` are the starts of documents, then
    seq_len, for attention that is confined to them.
    """
    return {
        "input_ids": batch.tokens,
        "shift_labels": batch.labels,
        "position_ids": batch.positions,
        "boundaries": batch.boundaries,
    }


class PackedDataLoader(StatefulDataLoader):  # type: ignore[misc]  # torchdata has no types
    """The micro-batches of one data-parallel rank, without end.

    The ranks' micro-batches of a step are `global_batch_size` sequences, the same for any number
    of ranks. `state_dict()` is the number of the next one, the same on all ranks: load it with
    another `dp_size`, `micro_batch_size` or `num_workers`, and the run continues with the next
    sequence.
    """

    def __init__(
        self,
        dataset: BlendedDataset,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        micro_batch_size: int = 1,
        global_batch_size: int | None = None,
        convert: Callable[[Batch], Any] = model_inputs,
        **options: Any,
    ) -> None:
        """Give ranks that share sequences the same `dp_rank`.

        Args:
            dataset: What `open_packed` returns.
            dp_rank: This rank's place among the data-parallel ranks.
            dp_size: The number of data-parallel ranks.
            micro_batch_size: Sequences of an item.
            global_batch_size: Sequences of a step over all ranks; left out, one item of each rank.
            convert: Makes the items of a loop, in the worker that read the batch.
            options: Those of StatefulDataLoader: `num_workers`, `prefetch_factor`, `pin_memory`.

        Raises:
            ValueError: A number is out of range.

        """
        _require_places(dp_rank, dp_size, micro_batch_size, global_batch_size)
        self._dealer = MicroBatchLoader(
            dataset,
            dp_rank=dp_rank,
            dp_size=dp_size,
            global_batch_size=global_batch_size or dp_size * micro_batch_size,
            micro_batch_size=micro_batch_size,
        )
        self._position = _Position(self._dealer)
        self._mesh = [dp_size, micro_batch_size, self._dealer.global_batch_size]
        self._data = dataset.order
        # Otherwise a seed for workers would be drawn from the generator of training.
        options.setdefault("generator", torch.Generator())
        if options.get("num_workers"):
            # Workers share the mapped corpus.
            options.setdefault("multiprocessing_context", "fork")
        with quiet_torchdata():
            super().__init__(
                MicroBatchDataset(dataset, FULL_SEQUENCE),
                batch_size=None,
                sampler=self._position,
                collate_fn=partial(_convert, convert),
                snapshot_every_n_steps=None,
                **options,
            )

    def __iter__(self) -> Iterator[Any]:
        """Continues after the last item that was taken."""
        for item in super().__iter__():
            if isinstance(item, Exception):
                raise item
            # Before the item is handed out: a state that is taken now has it.
            self._position.advance()
            yield item

    def state_dict(self) -> dict[str, Any]:
        """The position after the items that were taken; those read ahead do not count."""
        return {
            "next_sequence": self._position.next_sequence,
            "micro_batch": self._position.micro_batch,
            "mesh": self._mesh,
            "data": self._data,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues at a position. An empty state leaves the position as it is.

        Raises ValueError for the position of other data, or inside of a step that other ranks
        shared.
        """
        if not state_dict:
            return
        if state_dict["data"] != self._data:
            raise ValueError(
                f"this position is of other tokens, or of another seq_len, packing, mix or seed: {state_dict['data']}, "
                f"not {self._data}"
            )
        micro_batch = int(state_dict["micro_batch"])
        if micro_batch and [*state_dict["mesh"]] != self._mesh:
            raise ValueError(
                f"this position is inside of a step, after micro-batch {micro_batch}, with [dp_size, micro_batch_size, "
                f"global_batch_size] = {[*state_dict['mesh']]}, not {self._mesh}: take states after whole steps"
            )
        self._position.next_sequence = int(state_dict["next_sequence"])
        self._position.micro_batch = micro_batch
        # Read ahead from the old position.
        self._iterator = None


def _require_places(
    dp_rank: int, dp_size: int, micro_batch_size: int, global_batch_size: int | None
) -> None:
    """Raises ValueError for numbers out of range; warns of items that would be empty."""
    is_step = global_batch_size is None or global_batch_size >= 1
    if dp_size < 1 or micro_batch_size < 1 or not is_step:
        raise ValueError(
            f"dp_size = {dp_size}, micro_batch_size = {micro_batch_size} and global_batch_size = "
            f"{global_batch_size} must be at least 1"
        )
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank = {dp_rank} must be at least 0 and below dp_size = {dp_size}")
    at_once = dp_size * micro_batch_size
    if global_batch_size is not None and global_batch_size % at_once:
        warnings.warn(
            f"global_batch_size = {global_batch_size} is no multiple of dp_size x micro_batch_size "
            f"= {at_once}: some sequences of each step are empty, and a mean over their targets is NaN",
            stacklevel=3,
        )


class _Position:
    """The sampler of a `PackedDataLoader`: deals from the position of the loop."""

    def __init__(self, dealer: MicroBatchLoader) -> None:
        self._dealer = dealer
        self.next_sequence = 0
        """First sequence of the current step."""
        self.micro_batch = 0
        """Micro-batches of the current step that were taken."""

    def __iter__(self) -> Iterator[DealtMicroBatch]:
        return islice(self._dealer.deals(self.next_sequence), self.micro_batch, None)

    def advance(self) -> None:
        self.micro_batch += 1
        if self.micro_batch == self._dealer.num_micro_batches:
            self.micro_batch = 0
            self.next_sequence += self._dealer.global_batch_size


def _convert(
    convert: Callable[[Batch], Any], item: tuple[Indices, Batch | Exception]
) -> Any | Exception:
    _, batch = item
    return batch if isinstance(batch, Exception) else convert(batch)
