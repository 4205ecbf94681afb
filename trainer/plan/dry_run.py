"""A dry run: the real trainer on one rank of a world that is not there, its updates counted instead of computed.

It takes over the process group of this process, and tells what a CPU would do: kernels are the CPU's, blocks are not
compiled, and collectives are of their nominal size. Nothing of it is estimated; what closed formulas say
(`trainer.memory.estimator`, `trainer.plan.comm_volume`, `trainer.plan.flops`) can be held against it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from models.batch import Batch
from models.transformer import Transformer
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.data.sequences import Rows
from trainer.distributed import World
from trainer.errors import BAD_CONFIGURATION, DONE, ConfigError
from trainer.memory.estimator import GIB
from trainer.plan.comm_volume import Message
from trainer.plan.op_counter import HOST, Counting, made_up_ranks
from trainer.trainer import Trainer

USAGE = """\
python -m trainer.plan.dry_run [--config NAME|PATH] [--world-size N] [--rank R] [--updates N] [--json]
                              [--section.key VALUE]...

Builds the model of one rank as training would, and runs updates on tensors without memory: what is
alive, multiplied and sent is counted. Rows are one document each. Needs no other process and no GPU.

  --world-size N  ranks of the run; default: the product of the degrees that the configuration states
  --rank R        which of them, default 0; the pipeline's last are the last N / pp
  --updates N     updates, the last of which is counted; default 1
  --json          one JSON object for each stage instead of a table
"""
NUMBERS = {"--world-size": 0, "--rank": 0, "--updates": 1}


@dataclass(frozen=True, kw_only=True)
class Dry:
    """What a rank does in one update, counted."""

    rank: int
    world_size: int
    place: int
    """Among the ranks of the pipeline."""
    states: int
    """Bytes before the first update: parameters and optimizer states, wherever they are kept."""
    peak: int
    """The most bytes at once of everything but `on_host`."""
    moment: str
    """When that was: phase and operation."""
    fullest: Mapping[str, int]
    """What was there, in bytes, by the phase in which it was allocated."""
    on_host: int
    """The most bytes at once of what blocks keep in host memory."""
    matmul: Mapping[str, int]
    """FLOPs of matrix products in `forward`, `head` (of both passes) and `backward` (with what is computed again)."""
    attention: Mapping[str, int]
    """FLOPs of kernels in `forward`, `backward`, and again."""
    sent: tuple[Message, ...]
    """By this rank; what is computed again is within `backward`."""
    small: tuple[Message, ...]
    """What is too small to be counted: `bytes` is 0."""
    operations: int
    """How many torch was asked for."""


class Arriving(Batch):
    """A batch that is allocated when it gets to the device."""

    allocate: Callable[[Tensor], Tensor]

    def to(self, device: torch.device) -> Batch:
        del device
        tokens, labels, positions, documents = (self.allocate(self.tokens) for _ in range(4))
        return replace(self, tokens=tokens, labels=labels, positions=positions, documents=documents)


def dry_run(
    config: Config, world_size: int, *, rank: int = 0, updates: int = 1, documents: Sequence[int] | None = None
) -> Dry:
    """The last of so many updates on `rank` of `world_size`.

    `documents` are the lengths of those of each row; left out, rows are one. Raises ConfigError for a configuration
    that cannot run, and where `memory.recompute` is still "auto".
    """
    problems = config.shape_problems(world_size)
    if config.memory.recompute == "auto":
        problems.append('memory.recompute = "auto" is settled on the machine; a dry run needs what it would take')
    if not 0 <= rank < world_size:
        problems.append(f"rank {rank} is not one of {world_size}, counted from 0")
    lengths = list(documents or [config.training.seq_len])
    if sum(lengths) != config.training.seq_len:
        problems.append(f"documents have {sum(lengths)} tokens together, training.seq_len = {config.training.seq_len}")
    if problems:
        raise ConfigError(problems)
    counting = Counting()
    with made_up_ranks(rank, world_size), counting.counted():
        nodes = max(1, world_size // config.parallelism.node_ranks)
        world = World(rank, world_size, torch.device("cpu"), nodes)
        trainer = Trainer(_dry(config), world, cast(Rows, NoRows()))
        states = counting.alive.device
        for part in trainer.parts.values():
            _tell_phases(part, counting)
        for _ in range(updates):
            counting.phase = "update"
            counting.begin()
            trainer.step += 1
            numbers = trainer.accumulate(_micro_batches(trainer, counting, lengths))
            counting.phase = "update"
            trainer.update(numbers, config.optimizer.lr)
            del numbers
    return _told(counting, trainer, states)


class NoRows:
    """Of which a trainer asks the names of their sources only, as long as it reads none."""

    names = ("made up",)


def _dry(config: Config) -> Config:
    """Without what needs a device or a compiler, and without drawing weights."""
    changes: dict[str, dict[str, Any]] = {
        "training": {"compile": False, "deterministic": False, "attention": "auto"},
        "parallelism": {"async_tp": False},
        "checkpoint": {"initial": "not drawn"},
    }
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    return config.model_copy(update=sections)


def _micro_batches(trainer: Trainer, counting: Counting, lengths: Sequence[int]) -> list[Batch]:
    """Those of an update, all alike; on the host, where they are not counted."""
    training, plan = trainer.config.training, trainer.config.context_plan()
    rows, tokens = training.micro_batch_size, plan.padded(training.seq_len)
    starts = sorted({0, *accumulate(lengths), tokens})
    pairs = rows * sum(length * (length + 1) // 2 for length in lengths)
    tokens_BS = counting.integers(rows, tokens // plan.cp, counted=False)
    batch = Arriving(
        tokens=tokens_BS,
        labels=tokens_BS,
        positions=tokens_BS,
        documents=tokens_BS,
        boundaries=torch.tensor([starts] * rows, dtype=torch.int32),
        num_tokens=rows * training.seq_len,
        num_pairs=pairs,
        attended=pairs // plan.cp,
        sources=((0, training.seq_len),) * rows,
    )
    Arriving.allocate = staticmethod(lambda x: counting.integers(*x.shape))
    return [batch] * trainer.loader.num_micro_batches


def _tell_phases(part: Transformer, counting: Counting) -> None:
    """A part of the model runs forward, and in it the head, or else backward."""

    def now(phase: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counting.phase = phase

        return hook

    part.register_forward_pre_hook(now("forward"), prepend=True)
    part.register_forward_hook(now("backward"))
    if part.head is not None:
        part.head.register_forward_pre_hook(now("head"), prepend=True)
        part.head.register_forward_hook(now("forward"))


def _told(counting: Counting, trainer: Trainer, states: int) -> Dry:
    alive = counting.alive
    sent, small = (
        tuple(
            Message(channel=channel, kind=kind, phase=cast(Any, phase), what="", bytes=counting.bytes[key], calls=calls)
            for key, calls in sorted(counts.items())
            for channel, kind, phase in [key]
        )
        for counts in (counting.calls, counting.small)
    )
    return Dry(
        rank=trainer.world.rank,
        world_size=trainer.world.size,
        place=trainer.mesh.place["pp"],
        states=states,
        peak=alive.peak,
        moment=alive.moment,
        fullest={phase: size for phase, size in alive.fullest.items() if phase != HOST},
        on_host=alive.most_on_host,
        matmul=dict(counting.matmul),
        attention=dict(counting.attention),
        sent=sent,
        small=small,
        operations=counting.operations,
    )


# ---- the command


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"}.intersection(words):
        say(USAGE.rstrip())
        return DONE
    try:
        argv, numbers, as_json = _split(words)
        for stage in load(argv).stages:
            config = stage.config
            world_size = numbers["--world-size"] or prod(config.parallelism.degrees(1).values())
            found = dry_run(config, world_size, rank=numbers["--rank"], updates=numbers["--updates"])
            say(*([json.dumps(asdict(found))] if as_json else table(found)))
    except ConfigError as error:
        sys.stderr.write("".join(f"error: {problem}\n" for problem in error.problems))
        return BAD_CONFIGURATION
    return DONE


def table(found: Dry) -> list[str]:
    """A few lines."""
    there = ", ".join(f"{phase} {size / GIB:.2f}" for phase, size in found.fullest.items())
    lines = [
        f"rank {found.rank} of {found.world_size}, place {found.place} of the pipeline: {found.operations:,} operations",
        f"states    {found.states / GIB:.2f} GiB",
        f"at most   {found.peak / GIB:.2f} GiB, at {found.moment}; allocated in: {there}",
        f"on host   {found.on_host / GIB:.2f} GiB",
    ]
    for name, flops in (("products", found.matmul), ("attention", found.attention)):
        told = ", ".join(f"{phase} {count / 1e12:.3f}" for phase, count in flops.items())
        lines.append(f"{name:<10}{sum(flops.values()) / 1e12:.3f} TFLOP: {told}")
    for message in found.sent:
        where = f"{message.channel} {message.kind}, {message.phase}"
        lines.append(f"sent      {message.bytes / GIB:>10.3f} GiB in {message.calls:>7,} calls: {where}")
    lines.append(f"small     {sum(message.calls for message in found.small):,} calls")
    return lines


def _split(words: Sequence[str]) -> tuple[list[str], dict[str, int], bool]:
    """What describes the configuration, the numbers of the dry run, and whether it is told in JSON."""
    rest, numbers, given = list[str](), dict(NUMBERS), iter(words)
    for word in given:
        option, equals, value = word.partition("=")
        if option not in NUMBERS:
            rest.append(word)
            continue
        value = value if equals else next(given, "")
        least = 0 if option == "--rank" else 1
        if not value.isdecimal() or int(value) < least:
            raise ConfigError([f"command line: {option} {value} must be an integer, at least {least}"])
        numbers[option] = int(value)
    return [word for word in rest if word != "--json"], numbers, "--json" in rest


def say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
