"""Validation: what the model makes of rows that stay the same, over all ranks, without a trace in the training.

Shape suffixes: B rows, S tokens on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from models.batch import Batch
from trainer.build import Placed
from trainer.data.holdout import HeldOut
from trainer.data.sequences import Rows
from trainer.hardware.device import Numbers
from trainer.metrics.loggers import or_dash
from trainer.metrics.step_metrics import Tally, finite, means, position_names
from trainer.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What rows of one length gave, over all ranks."""

    loss: float
    """Mean over all targets; NaN without any."""
    accuracy: float
    """Part of the targets that were the most likely token."""
    targets: int
    by_position: list[float | None]


@dataclass(frozen=True)
class Result:
    """What a set gave after an update, by length, ascending."""

    name: str
    step: int
    seen: Mapping[int, Seen]

    @property
    def longest(self) -> Seen:
        return [*self.seen.values()][-1]

    @property
    def by_context(self) -> dict[int, float]:
        """The loss of the same targets by length of what they are fed with; empty for a set of one length."""
        return {length: seen.loss for length, seen in self.seen.items()} if len(self.seen) > 1 else {}

    def event(self, first: float | None) -> dict[str, Any]:
        """For events.jsonl; `first` is the first loss of this set in the run, if there was one."""
        losses = self.by_context
        shortest = next(iter(losses.values()), None)
        loss = self.longest.loss
        positions = dict(zip(position_names(), map(finite, self.longest.by_position), strict=True))
        return {
            "set": self.name,
            "step": self.step,
            "loss": finite(loss),
            "accuracy": finite(self.longest.accuracy),
            "targets": self.longest.targets,
            "by_position": None if losses else positions,
            "by_context": {str(length): finite(each) for length, each in losses.items()} or None,
            "gain": None if shortest is None else finite(shortest - loss),
            "regression": finite(loss - (loss if first is None else first)),
        }

    def tags(self) -> dict[str, float | None]:
        """For TensorBoard."""
        by_context: dict[str, float | None] = {
            f"validation_context/{self.name}/{length}": loss for length, loss in self.by_context.items()
        }
        return {f"validation/{self.name}": self.longest.loss} | by_context


class Validation:
    """The validation of a run by its sets."""

    def __init__(self, trainer: Trainer, sets: Sequence[HeldOut]) -> None:
        self._trainer, self._sets = trainer, sets
        self._interval = trainer.config.validation.interval

    def due(self, step: int) -> bool:
        return step % self._interval == 0 or step == self._trainer.stage.last_step

    def run(self) -> Iterator[Result]:
        """What each set gives now, one after the other. Collective, and waits for the device."""
        training, step = self._trainer.config.training, self._trainer.step
        most = training.micro_batch_size * training.seq_len
        for each in self._sets:
            yield Result(each.name, step, see(each, self._trainer.placed, most=most))


def see(held: HeldOut, placed: Placed, *, most: int) -> dict[int, Seen]:
    """What a set's rows give at each length, where a rank carries about so many tokens at once. Collective."""
    return {rows.seq_len: see_rows(rows, held.num_rows, placed, most=most) for rows in held.rows}


def see_rows(rows: Rows, num_rows: int, placed: Placed, *, most: int) -> Seen:
    tally = Tally(placed.mesh, placed.device)
    losses, hits = tally.begin(), tally.begin()

    def record(losses_BS: Tensor, hits_BS: Tensor, batch: Batch) -> None:
        tally.add(losses, losses_BS, batch)
        tally.add(hits, hits_BS, batch)

    placed.judge(batches(rows, num_rows, placed, most=most), record)
    for vector in (losses, hits):
        tally.sum_over_ranks(vector)
    found, hit = (tally.slots.parts(Numbers(vector).read()) for vector in (losses, hits))
    (loss,), (accuracy,) = (means(parts["loss"], parts["targets"]) for parts in (found, hit))
    return Seen(
        loss=math.nan if loss is None else loss,
        accuracy=math.nan if accuracy is None else accuracy,
        targets=int(found["targets"][0]),
        by_position=means(found["loss_by_position"], found["targets_by_position"]),
    )


def batches(rows: Rows, num_rows: int, placed: Placed, *, most: int) -> Iterator[Batch]:
    """What a rank reads of so many first rows, about so many tokens at once."""
    for numbers in shared_out(num_rows, placed, size=max(1, most // rows.seq_len)):
        yield rows.read(numbers, placed.share)


def shared_out(num_rows: int, placed: Placed, *, size: int) -> Iterator[list[int | None]]:
    """Numbers of the rows of each batch of this rank, as many on every rank; None, which is padding, fills them up."""
    rank, ranks = placed.mesh.data_rank, placed.mesh.data_ranks
    each = -(-num_rows // ranks)
    size = min(each, size)
    for first in range(0, each, size):
        numbers = range(first * ranks + rank, (first + size) * ranks, ranks)
        yield [number if number < num_rows else None for number in numbers]


def sentence(event: Mapping[str, Any]) -> str:
    """A line for people: `validation long after update 500: loss 3.2100 (+0.0100)  accuracy 31.0%  by context ...`."""
    parts = [
        f"validation {event['set']} after update {event['step']}: loss {or_dash(event['loss'], '.4f')} "
        f"({or_dash(event['regression'], '+.4f')} since the first)",
        f"accuracy {or_dash(event['accuracy'], '.1%')}",
    ]
    if event["by_context"]:
        each = " ".join(f"{length}: {or_dash(loss, '.4f')}" for length, loss in event["by_context"].items())
        parts.append(f"by context {each}, gain {or_dash(event['gain'], '+.4f')}")
    return "  ".join(parts)
