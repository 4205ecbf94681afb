"""Dry run: counts memory, FLOPs and communication of the real trainer on one rank, on fake tensors.

Initializes the process group of this process. Uses CPU kernels without compilation, and nominal collective sizes. An
independent check of the closed formulas in `trainer.memory.estimator`, `trainer.plan.comm_volume` and
`trainer.plan.rank_workload`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from benchmarks.op_counter import HOST, OpCounterMode, fake_process_group
from models.batch import Batch
from models.dispatch import LocalDispatcher, Rows, sort_by_expert
from models.transformer import Transformer
from parallelisms.expert_parallel import RankDispatcher
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.data.sequences import BlendedDataset
from trainer.distributed import World
from trainer.errors import EXIT_BAD_CONFIG, EXIT_SUCCESS, ConfigError
from trainer.hardware.host import GIB
from trainer.plan.comm_volume import CommVolume
from trainer.trainer import Trainer


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
    """By "forward", "head" (forward and backward of the loss head) and "backward" (including recomputation)."""
    attention_flops: Mapping[str, int]
    """By "forward", "backward" and "recompute"."""
    messages: tuple[CommVolume, ...]
    """Sent by this rank; those of recomputation count as "backward"."""
    small_messages: tuple[CommVolume, ...]
    """Messages below MIN_COUNTED_BYTES, with `bytes` 0."""
    num_ops: int
    """Operations dispatched by torch."""


class LazyBatch(Batch):
    """Allocates its tensors when moved to the device."""

    allocate: Callable[[Tensor], Tensor]

    def to(self, device: torch.device) -> Batch:
        del device
        tokens, labels, positions, documents = (self.allocate(self.tokens) for _ in range(4))
        return replace(self, tokens=tokens, labels=labels, positions=positions, document_ids=documents)


def dry_run(
    config: Config, world_size: int, *, rank: int = 0, steps: int = 1, documents: Sequence[int] | None = None
) -> DryRunResult:
    """Counts the last of `steps` steps on `rank` of `world_size`.

    `documents` are the document lengths of each sequence; default: one document. Raises ConfigError for an invalid
    configuration, or if `memory.recompute` is "auto".
    """
    problems = checks.layout_problems(config, world_size)
    if config.memory.recompute == "auto":
        problems.append('memory.recompute = "auto" depends on the machine: a dry run needs an explicit policy')
    if not 0 <= rank < world_size:
        problems.append(f"--rank {rank} must be at least 0 and below the world size, {world_size}")
    lengths = list(documents or [config.training.seq_len])
    if sum(lengths) != config.training.seq_len:
        problems.append(f"documents have {sum(lengths)} tokens in total; training.seq_len is {config.training.seq_len}")
    if problems:
        raise ConfigError(problems)
    counter = OpCounterMode()
    with fake_process_group(rank, world_size), counter.enable(), balanced_experts(counter):
        nodes = max(1, world_size // config.parallelism.ranks_per_node)
        world = World(rank, world_size, torch.device("cpu"), nodes)
        trainer = Trainer(_dry_run_config(config), world, cast(BlendedDataset, NoData()))
        states = counter.storages.device_bytes
        for model_part in trainer.stage_modules.values():
            _register_phase_hooks(model_part, counter)
        for _ in range(steps):
            counter.phase = "step"
            counter.reset_counts()
            trainer.step += 1
            accumulated = trainer.accumulate_gradients(_micro_batches(trainer, counter, lengths))
            counter.phase = "step"
            trainer.optimizer_step(accumulated, config.optimizer.lr)
            del accumulated
    return _result(counter, trainer, states)


@contextmanager
def balanced_experts(counter: OpCounterMode) -> Iterator[None]:
    """Gives every expert as many tokens: fake scores choose none. All compute at once, as in a kernel for groups."""

    def counts_of(experts_NK: Tensor, num_experts: int) -> list[int]:
        size, remainder = divmod(experts_NK.numel(), num_experts)
        return [size + (expert < remainder) for expert in range(num_experts)]

    def rows_of_one(_: Any, experts: Sequence[Tensor], num_experts: int) -> list[Rows]:
        return [sort_by_expert(each, num_experts)[0]._replace(counts=counts_of(each, num_experts)) for each in experts]

    def rows_of_ranks(self: Any, experts: Sequence[Tensor], num_experts: int) -> list[Rows]:
        found = []
        for each, (rows, _) in zip(experts, [sort_by_expert(each, num_experts) for each in experts], strict=True):
            with unset_fake_temporarily():
                groups = [1 if group is None else group.size() for group in (self._gather_group, self._ep_group)]
                counts = torch.tensor(counts_of(each, num_experts)).expand(*groups, -1)
                routed = self._route(rows._replace(slots=torch.empty(0)), counts)
            index = [counter.new_int64(sum(routed.counts)) for _ in range(2)]
            route = routed.route._replace(by_expert=index[0], by_rank=index[1])
            found.append(routed._replace(slots=rows.slots, route=route))
        return found

    with (
        patch.object(LocalDispatcher, "rows", rows_of_one),
        patch.object(RankDispatcher, "rows", rows_of_ranks),
        patch("models.experts.ROWS_AT_ONCE", sys.maxsize),
    ):
        yield


class NoData:
    """Stands in for a dataset of which the trainer only reads the source names."""

    names = ("fake",)


def _dry_run_config(config: Config) -> Config:
    """Without compilation, GPU-only options and weight initialization."""
    overrides: dict[str, dict[str, Any]] = {
        "training": {"compile": False, "deterministic": False, "attention": "auto"},
        "parallelism": {"async_tp": False},
        "checkpoint": {"initial_load_path": "skip initialization"},
    }
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in overrides.items()}
    return config.model_copy(update=sections)


def _micro_batches(trainer: Trainer, counter: OpCounterMode, lengths: Sequence[int]) -> list[Batch]:
    """The identical micro-batches of a step, on the host, where they are not counted."""
    training, plan = trainer.config.training, trainer.config.context_plan()
    micro_batch_size, tokens = training.micro_batch_size, plan.padded_length(training.seq_len)
    starts = sorted({0, *accumulate(lengths), tokens})
    pairs = micro_batch_size * sum(map(trainer.config.model.build().mean_pairs, lengths))
    tokens_BS = counter.new_int64(micro_batch_size, tokens // plan.cp, track=False)
    batch = LazyBatch(
        tokens=tokens_BS,
        labels=tokens_BS,
        positions=tokens_BS,
        document_ids=tokens_BS,
        boundaries=torch.tensor([starts] * micro_batch_size, dtype=torch.int32),
        num_tokens=micro_batch_size * training.seq_len,
        num_pairs=pairs,
        num_computed_pairs=pairs / plan.cp,
        sequence_sources=((0, training.seq_len),) * micro_batch_size,
    )
    LazyBatch.allocate = staticmethod(lambda x: counter.new_int64(*x.shape))
    return [batch] * trainer.loader.num_micro_batches


def _register_phase_hooks(model_part: Transformer, counter: OpCounterMode) -> None:
    """Sets the counter's phase around the forward of a pipeline stage and of its loss head."""

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
    messages, small_messages = (
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
        pp_rank=trainer.mesh.coordinate["pp"],
        state_bytes=state_bytes,
        peak_bytes=storages.peak_bytes,
        peak_moment=storages.peak_moment,
        bytes_at_peak={phase: size for phase, size in storages.bytes_at_peak.items() if phase != HOST},
        peak_host_bytes=storages.peak_host_bytes,
        matmul_flops=dict(counter.matmul_flops),
        attention_flops=dict(counter.attention_flops),
        messages=messages,
        small_messages=small_messages,
        num_ops=counter.num_ops,
    )


# ---- the command


def main(argv: Sequence[str]) -> int:
    try:
        args, config_args = build_parser().parse_known_args(argv)
        for stage in load([*(["--config", args.config] if args.config else []), *config_args]).training_stages:
            world_size = args.world_size or prod(stage.config.parallelism.degrees(1).values())
            result = dry_run(stage.config, world_size, rank=args.rank, steps=args.steps)
            sys.stdout.write("\n".join([json.dumps(asdict(result))] if args.json else format_result(result)) + "\n")
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
    parser.add_argument("--world-size", type=int, metavar="N", help="default: the product of the mesh degrees")
    parser.add_argument(
        "--rank", type=int, default=0, metavar="R", help="default 0; the last N / pp are the last stage"
    )
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="counts the last of them; default 1")
    parser.add_argument("--json", action="store_true", help="one JSON object per training stage instead of text")
    return parser


def format_result(result: DryRunResult) -> list[str]:
    bytes_by_phase = ", ".join(f"{phase} {size / GIB:.2f}" for phase, size in result.bytes_at_peak.items())
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
        lines.append(f"sent      {message.bytes / GIB:>10.3f} GiB in {message.calls:>7,} calls: {message_text}")
    lines.append(f"small     {sum(message.calls for message in result.small_messages):,} calls")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
