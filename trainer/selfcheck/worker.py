"""One rank of a self-check: trains the reduced run and compares its tensors with the reference."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from parallelisms.collectives import full_tensor
from trainer.config.job_config import Config
from trainer.data.datasets import build_train_dataset
from trainer.data.prepare import prepare_datasets
from trainer.distributed import single_host_process_group
from trainer.hardware.device import AsyncHostCopy
from trainer.selfcheck.comparison import StepDifference
from trainer.trainer import Trainer

NamedTensors = dict[str, Tensor]


def run_and_compare(
    config: Config, *, rank: int, world_size: int, store: Path, reference: Path
) -> list[StepDifference]:
    """Trains on rank `rank` of `world_size` with the file store `store`; compares with the file `reference`.

    If `reference` does not exist, this run is the reference and writes it.
    """
    torch.set_num_threads(1)
    # aot_eager still checks for graph breaks; generating kernels takes a C++ compiler and a minute.
    torch.compiler.set_stance("default", force_backend="aot_eager")
    step_metrics: list[dict[str, list[float]]] = []
    step_tensors: list[NamedTensors] = []
    with single_host_process_group(config.distributed, rank=rank, size=world_size, store=store) as world:
        trainer = Trainer(config, world, build_train_dataset(config, prepare_datasets(config)))
        with closing(trainer.loader.steps(start_sequence=0)) as batches:
            for _ in range(config.training.steps):
                vector = trainer.accumulate_gradients(next(batches))
                step_gradients = full_gradients(trainer)
                vector = trainer.optimizer_step(vector, config.optimizer.lr)
                step_metrics.append(trainer.accumulator.layout.split(AsyncHostCopy(vector).read()))
                step_tensors.append(step_gradients | full_weights(trainer))
    if not reference.exists():
        torch.save(step_tensors, reference)
    reference_tensors: list[NamedTensors] = torch.load(reference, weights_only=True)
    return [
        StepDifference(
            loss=parts["loss"][0] / parts["targets"][0],
            grad_norm=parts["grad_norm"][0],
            tensor_errors={name: max_relative_error(tensor, expected.get(name)) for name, tensor in actual.items()},
        )
        for parts, actual, expected in zip(step_metrics, step_tensors, reference_tensors, strict=True)
    ]


def full_gradients(trainer: Trainer) -> NamedTensors:
    """The full gradient of every parameter of this rank's pipeline stages. Collective."""
    named = trainer.optimizer.parameters_by_name.items()
    grads = {name: torch.zeros_like(weight) if weight.grad is None else weight.grad for name, weight in named}
    # Copies: unsharded gradients are clipped in place by the optimizer step.
    return {f"gradient of {name}": full_tensor(grad).clone() for name, grad in grads.items()}


def full_weights(trainer: Trainer) -> NamedTensors:
    """The full weights after all deferred updates. Collective."""
    trainer.optimizer.flush_deferred_updates()
    return {name: full_tensor(weight.detach()).clone() for name, weight in trainer.optimizer.parameters_by_name.items()}


def max_relative_error(actual: Tensor, expected: Tensor | None) -> float:
    """The largest difference over the largest value of `expected`; infinite if not finite or not comparable."""
    if expected is None or actual.shape != expected.shape:
        return math.inf
    if torch.equal(actual, expected):
        return 0.0
    error = float((actual - expected).abs().max() / expected.abs().max())
    return error if math.isfinite(error) else math.inf
