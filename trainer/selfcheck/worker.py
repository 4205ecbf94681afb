"""One rank of a self-check: the updates of a small run, and how far their tensors are from those of one process."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from parallelisms.collectives import whole
from trainer.config.job_config import Config
from trainer.data import rows_of
from trainer.distributed import on_this_machine
from trainer.hardware.device import Numbers
from trainer.selfcheck.comparison import Seen
from trainer.trainer import Trainer

Tensors = dict[str, Tensor]


def measure(config: Config, *, rank: int, size: int, store: Path, reference: Path) -> list[Seen]:
    """The run on rank `rank` of the `size` that meet in `store`, beside the tensors in `reference`.

    If there is no such file, this is the run that others are compared with, and writes it.
    """
    torch.set_num_threads(1)
    # That blocks are whole graphs shows without kernels, which take a C++ compiler and a minute.
    torch.compiler.set_stance("default", force_backend="aot_eager")
    numbers: list[dict[str, list[float]]] = []
    tensors: list[Tensors] = []
    with on_this_machine(config.distributed, rank=rank, size=size, store=store) as world:
        trainer = Trainer(config, world, rows_of(config))
        with closing(trainer.loader.updates(start_row=0)) as batches:
            for _ in range(config.training.steps):
                vector = trainer.accumulate(next(batches))
                found = gradients(trainer)
                vector = trainer.update(vector, config.optimizer.lr)
                numbers.append(trainer.tally.slots.parts(Numbers(vector).read()))
                tensors.append(found | weights(trainer))
    if not reference.exists():
        torch.save(tensors, reference)
    known: list[Tensors] = torch.load(reference, weights_only=True)
    return [
        Seen(
            loss=parts["loss"][0] / parts["targets"][0],
            norm=parts["grad_norm"][0],
            far={name: distance(tensor, theirs.get(name)) for name, tensor in ours.items()},
        )
        for parts, ours, theirs in zip(numbers, tensors, known, strict=True)
    ]


def gradients(trainer: Trainer) -> Tensors:
    """The gradient of every parameter of this rank's stages, whole. Collective."""
    named = trainer.optimizer.named.items()
    grads = {name: torch.zeros_like(weight) if weight.grad is None else weight.grad for name, weight in named}
    # Copies: gradients that are whole already are soon clipped in place.
    return {f"gradient of {name}": whole(grad).clone() for name, grad in grads.items()}


def weights(trainer: Trainer) -> Tensors:
    """The same parameters, whole and up to date. Collective."""
    trainer.optimizer.finish()
    return {name: whole(weight.detach()).clone() for name, weight in trainer.optimizer.named.items()}


def distance(ours: Tensor, theirs: Tensor | None) -> float:
    """The largest difference over the largest value of `theirs`; infinite where it is no number."""
    if theirs is None or ours.shape != theirs.shape:
        return math.inf
    if torch.equal(ours, theirs):
        return 0.0
    far = float((ours - theirs).abs().max() / theirs.abs().max())
    return far if math.isfinite(far) else math.inf
