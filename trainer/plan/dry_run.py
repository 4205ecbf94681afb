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
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.data.sequences import BlendedDataset
from trainer.distributed import World
from trainer.errors import EXIT_BAD_CONFIG, EXIT_SUCCESS, ConfigError
from trainer.memory.estimator import GIB
from trainer.plan.comm_volume import CommVolume
from trainer.plan.op_counter import HOST, OpCounterMode, fake_process_group
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
INT_OPTIONS = {"--world-size": 0, "--rank": 0, "--updates": 1}


@dataclass(frozen=True, kw_only=True)
class DryRunResult:
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
    sent: tuple[CommVolume, ...]
    """By this rank; what is computed again is within `backward`."""
    small: tuple[CommVolume, ...]
    """What is too small to be counted: `bytes` is 0."""
    operations: int
    """How many torch was asked for."""


class LazyBatch(Batch):
    """A batch that is allocated when it gets to the device."""

    allocate: Callable[[Tensor], Tensor]

    def to(self, device: torch.device) -> Batch:
        del device
        tokens, labels, positions, documents = (self.allocate(self.tokens) for _ in range(4))
        return replace(self, tokens=tokens, labels=labels, positions=positions, document_ids=documents)


def dry_run(
    config: Config, world_size: int, *, rank: int = 0, steps: int = 1, documents: Sequence[int] | None = None
) -> DryRunResult:
    """The last of so many updates on `rank` of `world_size`.

    `documents` are the lengths of those of each row; left out, rows are one. Raises ConfigError for a configuration
    that cannot run, and where `memory.recompute` is still "auto".
    """
    problems = checks.layout_problems(config, world_size)
    if config.memory.recompute == "auto":
        problems.append('memory.recompute = "auto" is settled on the machine; a dry run needs what it would take')
    if not 0 <= rank < world_size:
        problems.append(f"rank {rank} is not one of {world_size}, counted from 0")
    lengths = list(documents or [config.training.seq_len])
    if sum(lengths) != config.training.seq_len:
        problems.append(f"documents have {sum(lengths)} tokens together, training.seq_len = {config.training.seq_len}")
    if problems:
        raise ConfigError(problems)
    counter = OpCounterMode()
    with fake_process_group(rank, world_size), counter.enable():
        nodes = max(1, world_size // config.parallelism.ranks_per_node)
        world = World(rank, world_size, torch.device("cpu"), nodes)
        trainer = Trainer(_dry_run_config(config), world, cast(BlendedDataset, NoData()))
        states = counter.storages.device_bytes
        for model_part in trainer.stage_modules.values():
            _register_phase_hooks(model_part, counter)
        for _ in range(steps):
            counter.phase = "update"
            counter.reset_counts()
            trainer.step += 1
            accumulated = trainer.accumulate_gradients(_micro_batches(trainer, counter, lengths))
            counter.phase = "update"
            trainer.optimizer_step(accumulated, config.optimizer.lr)
            del accumulated
    return _result(counter, trainer, states)


class NoData:
    """Of which a trainer asks the names of their sources only, as long as it reads none."""

    names = ("made up",)


def _dry_run_config(config: Config) -> Config:
    """Without what needs a device or a compiler, and without drawing weights."""
    overrides: dict[str, dict[str, Any]] = {
        "training": {"compile": False, "deterministic": False, "attention": "auto"},
        "parallelism": {"async_tp": False},
        "checkpoint": {"initial_load_path": "not drawn"},
    }
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in overrides.items()}
    return config.model_copy(update=sections)


def _micro_batches(trainer: Trainer, counter: OpCounterMode, lengths: Sequence[int]) -> list[Batch]:
    """Those of an update, all alike; on the host, where they are not counted."""
    training, plan = trainer.config.training, trainer.config.context_plan()
    micro_batch_size, tokens = training.micro_batch_size, plan.padded_length(training.seq_len)
    starts = sorted({0, *accumulate(lengths), tokens})
    pairs = micro_batch_size * sum(length * (length + 1) // 2 for length in lengths)
    tokens_BS = counter.new_int64(micro_batch_size, tokens // plan.cp, track=False)
    batch = LazyBatch(
        tokens=tokens_BS,
        labels=tokens_BS,
        positions=tokens_BS,
        document_ids=tokens_BS,
        boundaries=torch.tensor([starts] * micro_batch_size, dtype=torch.int32),
        num_tokens=micro_batch_size * training.seq_len,
        num_pairs=pairs,
        num_computed_pairs=pairs // plan.cp,
        sequence_sources=((0, training.seq_len),) * micro_batch_size,
    )
    LazyBatch.allocate = staticmethod(lambda x: counter.new_int64(*x.shape))
    return [batch] * trainer.loader.num_micro_batches


def _register_phase_hooks(model_part: Transformer, counter: OpCounterMode) -> None:
    """A part of the model runs forward, and in it the head, or else backward."""

    def set_phase(phase: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counter.phase = phase

        return hook

    model_part.register_forward_pre_hook(set_phase("forward"), prepend=True)
    model_part.register_forward_hook(set_phase("backward"))
    if model_part.head is not None:
        model_part.head.register_forward_pre_hook(set_phase("head"), prepend=True)
        model_part.head.register_forward_hook(set_phase("forward"))


def _result(counter: OpCounterMode, trainer: Trainer, state_bytes: int) -> DryRunResult:
    storages = counter.storages
    sent, small = (
        tuple(
            CommVolume(
                channel=channel, kind=kind, phase=cast(Any, phase), what="", bytes=counter.sent_bytes[key], calls=calls
            )
            for key, calls in sorted(counts.items())
            for channel, kind, phase in [key]
        )
        for counts in (counter.calls, counter.small_calls)
    )
    return DryRunResult(
        rank=trainer.world.rank,
        world_size=trainer.world.size,
        place=trainer.mesh.coordinate["pp"],
        states=state_bytes,
        peak=storages.peak_bytes,
        moment=storages.peak_moment,
        fullest={phase: size for phase, size in storages.bytes_at_peak.items() if phase != HOST},
        on_host=storages.peak_host_bytes,
        matmul=dict(counter.matmul_flops),
        attention=dict(counter.attention_flops),
        sent=sent,
        small=small,
        operations=counter.num_ops,
    )


# ---- the command


def main(argv: Sequence[str]) -> int:
    if {"-h", "--help"}.intersection(argv):
        write_lines(USAGE.rstrip())
        return EXIT_SUCCESS
    try:
        config_args, options, as_json = _parse_args(argv)
        for stage in load(config_args).training_stages:
            config = stage.config
            world_size = options["--world-size"] or prod(config.parallelism.degrees(1).values())
            result = dry_run(config, world_size, rank=options["--rank"], steps=options["--updates"])
            write_lines(*([json.dumps(asdict(result))] if as_json else format_result(result)))
    except ConfigError as error:
        sys.stderr.write("".join(f"error: {problem}\n" for problem in error.problems))
        return EXIT_BAD_CONFIG
    return EXIT_SUCCESS


def format_result(result: DryRunResult) -> list[str]:
    """A few lines."""
    bytes_by_phase = ", ".join(f"{phase} {size / GIB:.2f}" for phase, size in result.fullest.items())
    lines = [
        f"rank {result.rank} of {result.world_size}, place {result.place} of the pipeline: {result.operations:,} operations",
        f"states    {result.states / GIB:.2f} GiB",
        f"at most   {result.peak / GIB:.2f} GiB, at {result.moment}; allocated in: {bytes_by_phase}",
        f"on host   {result.on_host / GIB:.2f} GiB",
    ]
    for name, flops in (("products", result.matmul), ("attention", result.attention)):
        flops_by_phase = ", ".join(f"{phase} {count / 1e12:.3f}" for phase, count in flops.items())
        lines.append(f"{name:<10}{sum(flops.values()) / 1e12:.3f} TFLOP: {flops_by_phase}")
    for message in result.sent:
        message_text = f"{message.channel} {message.kind}, {message.phase}"
        lines.append(f"sent      {message.bytes / GIB:>10.3f} GiB in {message.calls:>7,} calls: {message_text}")
    lines.append(f"small     {sum(message.calls for message in result.small):,} calls")
    return lines


def _parse_args(words: Sequence[str]) -> tuple[list[str], dict[str, int], bool]:
    """What describes the configuration, the numbers of the dry run, and whether it is told in JSON."""
    config_args, numbers, remaining_args = list[str](), dict(INT_OPTIONS), iter(words)
    for word in remaining_args:
        option, equals, value = word.partition("=")
        if option not in INT_OPTIONS:
            config_args.append(word)
            continue
        value = value if equals else next(remaining_args, "")
        minimum = 0 if option == "--rank" else 1
        if not value.isdecimal() or int(value) < minimum:
            raise ConfigError([f"command line: {option} {value} must be an integer, at least {minimum}"])
        numbers[option] = int(value)
    return [word for word in config_args if word != "--json"], numbers, "--json" in config_args


def write_lines(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
