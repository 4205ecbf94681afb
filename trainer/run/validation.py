"""Validation on fixed sequences over all ranks, without side effects on training.

Shape suffixes: B sequences, S tokens on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from models.batch import Batch
from trainer.data.holdout import ValidationSet
from trainer.data.sequences import BlendedDataset
from trainer.hardware.device import AsyncHostCopy
from trainer.metrics.accumulator import (
    MetricAccumulator,
    finite_or_none,
    position_bucket_names,
    safe_divide,
)
from trainer.metrics.loggers import format_or_dash
from trainer.step.build import ParallelModel
from trainer.step.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class ValidationMetrics:
    """Metrics of the sequences of one length, over all ranks."""

    loss: float
    """Mean over all targets; NaN if there are none."""
    accuracy: float
    """Fraction of the targets that are the likeliest token."""
    targets: int
    loss_by_position: list[float | None]
    """Mean loss per position bucket; None for a bucket without targets."""


@dataclass(frozen=True)
class ValidationResult:
    """Metrics of one validation set after a step."""

    name: str
    step: int
    metrics_by_length: Mapping[int, ValidationMetrics]
    """Metrics by sequence length, ascending."""

    @property
    def longest_context(self) -> ValidationMetrics:
        return [*self.metrics_by_length.values()][-1]

    @property
    def loss_by_context(self) -> dict[int, float]:
        """Loss of the same targets by context length; empty for a set with one length."""
        losses = {length: metrics.loss for length, metrics in self.metrics_by_length.items()}
        return losses if len(losses) > 1 else {}

    def event(self, first_loss: float | None) -> dict[str, Any]:
        """Fields for events.jsonl. `first_loss` is the run's first loss on this set, if any."""
        metrics = self.longest_context
        by_context = self.loss_by_context
        by_position = zip(
            position_bucket_names(), map(finite_or_none, metrics.loss_by_position), strict=True
        )
        # How much the longest context helps on the same targets.
        gain = (
            None
            if not by_context
            else finite_or_none(next(iter(by_context.values())) - metrics.loss)
        )
        return {
            "set": self.name,
            "step": self.step,
            "loss": finite_or_none(metrics.loss),
            "accuracy": finite_or_none(metrics.accuracy),
            "targets": metrics.targets,
            "by_position": None if by_context else dict(by_position),
            "by_context": {
                str(length): finite_or_none(loss) for length, loss in by_context.items()
            }
            or None,
            "gain": gain,
            "regression": finite_or_none(
                metrics.loss - (metrics.loss if first_loss is None else first_loss)
            ),
        }

    def tracked_values(self) -> dict[str, float | None]:
        by_context: dict[str, float | None] = {
            f"validation_context/{self.name}/{length}": loss
            for length, loss in self.loss_by_context.items()
        }
        return {f"validation/{self.name}": self.longest_context.loss} | by_context


class Validator:
    """Evaluates the validation sets of a run."""

    def __init__(self, trainer: Trainer, validation_sets: Sequence[ValidationSet]) -> None:
        self._trainer = trainer
        self.sets = validation_sets
        self._interval = trainer.config.validation.interval

    def should_validate(self, step: int) -> bool:
        return step % self._interval == 0 or step == self._trainer.stage.end_step

    def validate(self) -> Iterator[ValidationResult]:
        """Yields the result of each set. Collective. Waits for the device."""
        training = self._trainer.config.training
        step = self._trainer.step
        max_tokens = training.micro_batch_size * training.seq_len
        for validation_set in self.sets:
            yield evaluate_set(
                validation_set, self._trainer.parallel_model, step=step, max_tokens=max_tokens
            )


def evaluate_set(
    validation_set: ValidationSet, parallel_model: ParallelModel, *, step: int, max_tokens: int
) -> ValidationResult:
    """Evaluates a set with about `max_tokens` tokens in each batch of a rank. Collective."""
    metrics = {
        dataset.seq_len: evaluate_dataset(
            dataset, validation_set.num_sequences, parallel_model, max_tokens=max_tokens
        )
        for dataset in validation_set.datasets
    }
    return ValidationResult(validation_set.name, step, metrics)


def evaluate_dataset(
    dataset: BlendedDataset, num_sequences: int, parallel_model: ParallelModel, *, max_tokens: int
) -> ValidationMetrics:
    accumulator = MetricAccumulator(parallel_model.mesh, parallel_model.device)
    loss_vector = accumulator.new_vector()
    accuracy_vector = accumulator.new_vector()

    def record(losses_BS: Tensor, correct_BS: Tensor, batch: Batch) -> None:
        accumulator.add(loss_vector, losses_BS, batch)
        accumulator.add(accuracy_vector, correct_BS, batch)

    parallel_model.evaluate(
        eval_batches(dataset, num_sequences, parallel_model, max_tokens=max_tokens), record
    )
    # Accuracy goes through the same sums as a loss: hits in place of losses, over the same
    # targets.
    for vector in (loss_vector, accuracy_vector):
        accumulator.all_reduce(vector)
    loss_sums, accuracy_sums = (
        accumulator.layout.split(AsyncHostCopy(vector).read())
        for vector in (loss_vector, accuracy_vector)
    )
    (loss,), (accuracy,) = (
        safe_divide(sums["loss"], sums["targets"]) for sums in (loss_sums, accuracy_sums)
    )
    return ValidationMetrics(
        loss=math.nan if loss is None else loss,
        accuracy=math.nan if accuracy is None else accuracy,
        targets=int(loss_sums["targets"][0]),
        loss_by_position=safe_divide(
            loss_sums["loss_by_position"], loss_sums["targets_by_position"]
        ),
    )


def eval_batches(
    dataset: BlendedDataset, num_sequences: int, parallel_model: ParallelModel, *, max_tokens: int
) -> Iterator[Batch]:
    """Yields this rank's batches of the first `num_sequences` sequences, each of about
    `max_tokens` tokens.
    """
    for indices in assign_sequences(
        num_sequences, parallel_model, batch_size=max(1, max_tokens // dataset.seq_len)
    ):
        yield dataset.read(indices, parallel_model.sequence_shard)


def assign_sequences(
    num_sequences: int, parallel_model: ParallelModel, *, batch_size: int
) -> Iterator[list[int | None]]:
    """Yields the sequence indices of each batch of this rank.

    None is padding, so that all ranks have equal batches.
    """
    dp_rank = parallel_model.mesh.dp_rank
    dp_size = parallel_model.mesh.dp_degree
    # Rounded up, with padding: forward passes are collective, so every rank needs as many batches.
    sequences_per_rank = -(-num_sequences // dp_size)
    batch_size = min(sequences_per_rank, batch_size)
    for first in range(0, sequences_per_rank, batch_size):
        # Strided over ranks: each batch of the mesh is a contiguous range, whatever its size.
        indices = range(first * dp_size + dp_rank, (first + batch_size) * dp_size, dp_size)
        yield [index if index < num_sequences else None for index in indices]


def format_validation(event: Mapping[str, Any]) -> str:
    """`validation long at step 500: loss 3.2100 (-0.0100 since the first)  accuracy 31.0%  by
    context ...`.
    """
    parts = [
        f"validation {event['set']} at step {event['step']}: loss {format_or_dash(event['loss'], '.4f')} "
        f"({format_or_dash(event['regression'], '+.4f')} since the first)",
        f"accuracy {format_or_dash(event['accuracy'], '.1%')}",
    ]
    if event["by_context"]:
        losses = " ".join(
            f"{length}: {format_or_dash(loss, '.4f')}"
            for length, loss in event["by_context"].items()
        )
        parts.append(f"by context {losses}, gain {format_or_dash(event['gain'], '+.4f')}")
    return "  ".join(parts)
