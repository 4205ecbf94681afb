"""A dry run: the real trainer on one rank of a world that is not there, whose updates are counted instead of computed.

    python -m trainer.plan.dryrun --config X [--world-size N] [--rank R]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from models.batch import Batch
from trainer.config import Config
from trainer.distributed import World
from trainer.plan.counting import Counting, made_up_ranks
from trainer.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Dry:
    """What one rank does in an update, counted."""

    rank: int
    world_size: int
    states: int
    """Bytes that are there before the first update: parameters and optimizer states."""
    peak: int
    """The most bytes at once on the device, states on the host among them."""
    moment: str
    by_phase: Mapping[str, int]
    on_host: int
    """The most bytes at once of what blocks keep in host memory."""
    matmul: Mapping[str, int]
    attention: Mapping[str, int]
    bytes: Mapping[tuple[str, str, str], float]
    calls: Mapping[tuple[str, str, str], int]
    small: Mapping[tuple[str, str, str], int]
    operations: int


def dry_run(config: Config, world_size: int, *, rank: int = 0, updates: int = 2) -> Dry:
    config = _without_what_is_not_run(config)
    counting = Counting()
    with made_up_ranks(rank, world_size), counting.counted():
        world = World(rank, world_size, torch.device("cpu"), max(1, world_size // config.parallelism.node_ranks))
        trainer = Trainer(config, world, SimpleNamespace(names=("made up",)))
        states = counting.alive.device
        for part in trainer.parts.values():
            _tell(part, counting)
        for _ in range(updates):
            counting.phase = "update"
            counting.begin()
            trainer.step += 1
            numbers = trainer.accumulate(_micro_batches(trainer, counting))
            counting.phase = "update"
            trainer.update(numbers, 1e-3)
            del numbers
    alive = counting.alive
    return Dry(
        rank=rank, world_size=world_size, states=states, peak=alive.peak, moment=alive.moment, by_phase=dict(alive.fullest),
        on_host=alive.most_on_host, matmul=dict(counting.matmul), attention=dict(counting.attention), bytes=dict(counting.bytes),
        calls=dict(counting.calls), small=dict(counting.small), operations=counting.operations)


class Drawn(Batch):
    """A batch whose tensors are allocated on the device when it gets there."""

    counting: Counting

    def to(self, device):
        fresh = [self.counting.integers(*self.tokens.shape, on_device=True) for _ in range(4)]
        tokens, labels, positions, documents = fresh
        return replace(Batch(**vars(self)), tokens=tokens, labels=labels, positions=positions, documents=documents)


def _micro_batches(trainer: Trainer, counting: Counting) -> list[Batch]:
    training, plan = trainer.config.training, trainer.config.context_plan()
    length = plan.padded(training.seq_len)
    rows = training.micro_batch_size
    ends = sorted({0, training.seq_len, length})
    boundaries = torch.tensor([ends] * rows, dtype=torch.int32)
    pairs = training.seq_len * (training.seq_len + 1) // 2
    tensors = [counting.integers(rows, length // plan.cp, on_device=False) for _ in range(4)]
    batch = Drawn(*tensors, boundaries, rows * training.seq_len, rows * pairs, rows * pairs // plan.cp, ((0, training.seq_len),) * rows)
    Drawn.counting = counting
    return [batch] * trainer.loader.num_micro_batches


def _tell(part: nn.Module, counting: Counting) -> None:
    def phase(name: str):
        def hook(*_: Any) -> None:
            counting.phase = name
        return hook
    part.register_forward_pre_hook(phase("forward"), prepend=True)
    part.register_forward_hook(phase("backward"))
    if part.head is not None:
        part.head.register_forward_pre_hook(phase("head"), prepend=True)
        part.head.register_forward_hook(phase("forward"))


def _without_what_is_not_run(config: Config) -> Config:
    return config.model_copy(
        update={
            "training": config.training.model_copy(update={"compile": False, "deterministic": False, "attention": "auto"}),
            "parallelism": config.parallelism.model_copy(update={"async_tp": False}),
            "checkpoint": config.checkpoint.model_copy(update={"initial": "none"}),
        }
    )


if __name__ == "__main__":
    import sys, time
    from trainer.load import load
    words = sys.argv[1:]
    world, rank = int(words.pop(0)), int(words.pop(0))
    config = load(words)
    t = time.process_time()
    found = dry_run(config, world, rank=rank)
    print(found)
    from trainer.ledger import ledgers
    import resource
    for one in ledgers(_without_what_is_not_run(config), world):
        print(one.place, one.moment, one.device, one.host, one.device / found.peak)
    print(time.process_time() - t, "s", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, "MiB")
