"""Dry run: counts memory, FLOPs and communication of the real trainer on one rank, on fake
tensors.

Initializes the process group of this process. Uses CPU kernels without compilation, and nominal
collective sizes. Runs every layer and micro-batch, and so checks the steps that `trainer.trace`
composes of few of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod

from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.errors import EXIT_BAD_CONFIG, EXIT_SUCCESS, ConfigError
from trainer.hardware.host import GIB
from trainer.step.trainer import Trainer
from trainer.trace.inputs import micro_batches
from trainer.trace.operators import OpCounterMode
from trainer.trace.pieces import HOST
from trainer.trace.record import run_step, traced


@dataclass(frozen=True, kw_only=True)
class Message:
    """Messages that are alike."""

    channel: str
    kind: str
    """The collective."""
    phase: str
    bytes: float
    """Sent by this rank in all calls."""
    calls: int


@dataclass(frozen=True, kw_only=True)
class DryRunResult:
    """Counts of one rank in one step."""

    rank: int
    world_size: int
    pp_rank: int
    state_bytes: int
    """Parameters and optimizer state before the first step, on device and host."""
    peak_bytes: int
    """Peak of everything but offloaded activations."""
    peak_moment: str
    """Phase and operation of the peak."""
    bytes_at_peak: Mapping[str, int]
    """Live bytes at the peak, by the phase that allocated them."""
    peak_host_bytes: int
    """Peak of offloaded activations."""
    matmul_flops: Mapping[str, int]
    """By "forward", "head" (forward and backward of the loss head) and "backward" (including
    recomputation).
    """
    attention_flops: Mapping[str, int]
    """By "forward", "backward" and "recompute"."""
    messages: tuple[Message, ...]
    """Sent by this rank; those of recomputation count as "backward"."""
    small_messages: tuple[Message, ...]
    """Messages below MIN_COUNTED_BYTES, with `bytes` 0."""
    num_ops: int
    """Operations dispatched by torch."""

    @property
    def flops(self) -> int:
        return sum(self.matmul_flops.values()) + sum(self.attention_flops.values())


def dry_run(
    config: Config,
    world_size: int,
    *,
    rank: int = 0,
    steps: int = 1,
    documents: Sequence[int] | None = None,
    kernel: str | None = None,
    compiled: bool = False,
) -> DryRunResult:
    """Counts the last of `steps` steps on `rank` of `world_size`.

    `documents` are the document lengths of each sequence; default: one document. `kernel`: runs as
    on a GPU, with attention in this kernel. Raises ConfigError for an invalid configuration, or if
    `memory.recompute` is "auto".
    """
    problems = checks.layout_problems(config, world_size)
    if config.memory.recompute == "auto":
        problems.append(
            'memory.recompute = "auto" depends on the machine: a dry run needs an explicit policy'
        )
    if not 0 <= rank < world_size:
        problems.append(f"--rank {rank} must be at least 0 and below the world size, {world_size}")
    lengths = list(documents or [config.training.seq_len])
    if sum(lengths) != config.training.seq_len:
        problems.append(
            f"documents have {sum(lengths)} tokens in total; training.seq_len is {config.training.seq_len}"
        )
    if problems:
        raise ConfigError(problems)
    counter = OpCounterMode()
    with traced(config, world_size, rank, counter, kernel=kernel, compiled=compiled) as trainer:
        states = counter.storages.device_bytes
        for _ in range(steps):
            counter.reset_counts()
            run_step(trainer, counter, micro_batches(trainer, counter, lengths))
    return _result(counter, trainer, states)


def _result(counter: OpCounterMode, trainer: Trainer, state_bytes: int) -> DryRunResult:
    storages = counter.storages
    messages, small_messages = (
        tuple(
            Message(
                channel=channel,
                kind=kind,
                phase=phase,
                bytes=counter.work.sent_bytes[key],
                calls=calls,
            )
            for key, calls in sorted(counts.items())
            for channel, kind, phase in [key]
        )
        for counts in (counter.work.calls, counter.small_calls)
    )
    return DryRunResult(
        rank=trainer.world.rank,
        world_size=trainer.world.size,
        pp_rank=trainer.mesh.coordinate["pp"],
        state_bytes=state_bytes,
        peak_bytes=storages.peak_bytes,
        peak_moment=storages.peak_moment,
        bytes_at_peak={
            phase: size for phase, size in storages.bytes_at_peak.items() if phase != HOST
        },
        peak_host_bytes=storages.peak_host_bytes,
        matmul_flops=dict(counter.work.matmul_flops),
        attention_flops=dict(counter.work.attention_flops),
        messages=messages,
        small_messages=small_messages,
        num_ops=counter.num_ops,
    )


# ---- the command


def main(argv: Sequence[str]) -> int:
    try:
        args, config_args = build_parser().parse_known_args(argv)
        for stage in load(
            [*(["--config", args.config] if args.config else []), *config_args]
        ).training_stages:
            world_size = args.world_size or prod(stage.config.parallelism.degrees(1).values())
            result = dry_run(stage.config, world_size, rank=args.rank, steps=args.steps)
            sys.stdout.write(
                "\n".join([json.dumps(asdict(result))] if args.json else format_result(result))
                + "\n"
            )
    except ConfigError as error:
        sys.stderr.write("".join(f"error: {problem}\n" for problem in error.problems))
        return EXIT_BAD_CONFIG
    return EXIT_SUCCESS


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dry_run",
        description="Builds one rank's model as training would and counts the memory, FLOPs and communication of a step on "
        "fake tensors, with one document per sequence. Needs no GPU and no other process.",
        epilog="Every configuration key is an option, too.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="NAME|PATH", help="as for trainer.plan")
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="default: the product of the mesh degrees"
    )
    parser.add_argument(
        "--rank",
        type=int,
        default=0,
        metavar="R",
        help="default 0; the last N / pp are the last stage",
    )
    parser.add_argument(
        "--steps", type=int, default=1, metavar="N", help="counts the last of them; default 1"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object per training stage instead of text"
    )
    return parser


def format_result(result: DryRunResult) -> list[str]:
    bytes_by_phase = ", ".join(
        f"{phase} {size / GIB:.2f}" for phase, size in result.bytes_at_peak.items()
    )
    lines = [
        f"rank {result.rank} of {result.world_size}, pp rank {result.pp_rank}: {result.num_ops:,} operations",
        f"state     {result.state_bytes / GIB:.2f} GiB",
        f"peak      {result.peak_bytes / GIB:.2f} GiB at {result.peak_moment}; allocated in: {bytes_by_phase}",
        f"host      {result.peak_host_bytes / GIB:.2f} GiB",
    ]
    for name, flops in (("matmul", result.matmul_flops), ("attention", result.attention_flops)):
        flops_by_phase = ", ".join(f"{phase} {count / 1e12:.3f}" for phase, count in flops.items())
        lines.append(f"{name:<10}{sum(flops.values()) / 1e12:.3f} TFLOP: {flops_by_phase}")
    for message in result.messages:
        message_text = f"{message.channel} {message.kind}, {message.phase}"
        lines.append(
            f"sent      {message.bytes / GIB:>10.3f} GiB in {message.calls:>7,} calls: {message_text}"
        )
    lines.append(f"small     {sum(message.calls for message in result.small_messages):,} calls")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
