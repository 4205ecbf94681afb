"""python -m tests.cuda_host.steps: what training steps ask of a GPU, without one: memory, kernel
launches, waits.

Runs the Trainer for each variant of options, in a process of its own on the stand-in runtime (or
on a GPU, without launches), and prints the table of docs/memory.md; `--record` writes it there.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import prod
from pathlib import Path

import torch
from torch import distributed
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend "fake"

from models import kernels
from tests.cuda_host import build
from tests.cuda_host.cudnn import replace_cudnn_attention
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.data.copy_task import CopyDataset
from trainer.data.sequences import BlendedDataset
from trainer.hardware.attention_choice import with_attention_choice
from trainer.hardware.device import AsyncHostCopy
from trainer.hardware.device_specs import load_device
from trainer.step.process_group import World
from trainer.step.trainer import Trainer
from trainer.trace.answers import traced_rank_steps

PAGE = Path(__file__).resolve().parents[2] / "docs" / "memory.md"
LIMIT = 0.002
STEPS = 4
BLOCKS = 4
MODEL = (
    f"--data.corpus copy --checkpoint.enabled false --training.steps {STEPS} --training.seq_len 16384"
    f" --training.global_batch_size 1 --model.vocab_size 4096 --model.dim 512 --model.num_layers {BLOCKS}"
    " --model.num_heads 16 --model.num_kv_heads 4 --model.head_dim 64 --model.ffn_dim 1024"
    " --memory.loss_chunk_mib 16 --training.dtype bfloat16 --memory.recompute keep_attention"
)
NO_GROUPS = "--model.num_kv_heads 16"
TWO_SEQUENCES = "--training.global_batch_size 4 --training.micro_batch_size 2"
NO_SP = "--parallelism.sequence_parallel false"
CUDNN = "--training.attention cudnn"
DETERMINISTIC = "--training.deterministic true --health.rerun_suspicious false"
COMPILED_WHOLE = "--training.compile true --memory.recompute none"
ON_HOST = "--memory.optimizer_placement host"
RING = "--parallelism.cp 2 --parallelism.cp_method ring"
HYBRID = "--parallelism.cp 4 --parallelism.cp_method hybrid --parallelism.cp_ulysses 2"
OFFLOAD = "--memory.offload inputs_and_attention"
WINDOWS = "--config debug_window"
"""Three layers in four have a window; with sinks. Options override those of the file."""
VARIANTS = (
    "--memory.recompute keep_attention",
    "--memory.recompute none",
    "--memory.recompute none --model.qk_norm true",
    "--memory.recompute full",
    "--memory.head_groups 2",
    "--memory.head_groups 4 --memory.mlp_tile_mib 8",
    "--memory.blocks_per_checkpoint 2",
    f"{OFFLOAD} --memory.mlp_tile_mib 8",
    f"{OFFLOAD} --memory.head_groups 4 --memory.mlp_tile_mib 8 --memory.blocks_per_checkpoint 2",
    ON_HOST,
    "--memory.optimizer_dtype bfloat16",
    DETERMINISTIC,
    TWO_SEQUENCES,
    "--model.head_dim 96",
    NO_GROUPS,
    CUDNN,
    "--training.attention efficient",
    "--training.dtype float32",
    f"--training.dtype float32 {TWO_SEQUENCES}",
    f"--training.dtype float32 {NO_GROUPS}",
    "--training.dtype float64 --training.seq_len 1024",
    "--training.compile true",
    COMPILED_WHOLE,
    "--parallelism.dp_shard 2",
    "--parallelism.dp_replicate 2",
    "--parallelism.dp_replicate 2 --parallelism.dp_shard 2",
    "--parallelism.tp 2",
    f"--parallelism.tp 2 {NO_SP}",
    RING,
    "--parallelism.cp 2 --parallelism.cp_method allgather",
    "--parallelism.cp 2 --parallelism.cp_method ulysses",
    HYBRID,
    "--parallelism.pp 2 --training.global_batch_size 4",
    "--parallelism.dp_shard 2 --parallelism.cp 2 --parallelism.tp 2 --training.global_batch_size 2",
    WINDOWS,
    f"{WINDOWS} --memory.recompute full",
    f"{WINDOWS} --training.attention efficient",
    f"{WINDOWS} --parallelism.cp 2 --parallelism.cp_method allgather",
    f"{WINDOWS} {RING}",
    f"{WINDOWS} --parallelism.cp 2 --parallelism.cp_method ulysses",
)
"""On a mesh this is rank 0, alone: what other ranks would send is never written."""
INEXACT = {
    CUDNN: "the stand-in's cuDNN takes no scratch memory",
    COMPILED_WHOLE: "the compiler of torch 2.11 keeps more of the norms than that of 2.13",
    ON_HOST: "a trace takes gradients to be on the host as soon as they are reduced",
}
"""Why a trace is off by more than LIMIT."""


@dataclass(frozen=True)
class StepsFound:
    """What the steps after the first asked for."""

    requested_bytes: int
    """The most that a step held of what it asked the allocator for."""
    launches_per_block: float | None
    """Kernels that a step launches for one block, matrix products excluded. None on a GPU."""
    waits_per_step: float | None
    copies_to_host_per_step: float | None


def configured(variant: str, *, blocks: int = BLOCKS) -> Config:
    # What was recorded ran in the kernel that takes every length.
    kernel = "auto" if "--training.dtype" in variant else "flash"
    return load(
        [
            *MODEL.split(),
            "--training.attention",
            kernel,
            *variant.split(),
            "--model.num_layers",
            str(blocks),
        ]
    )


def traced_bytes(variant: str) -> float:
    """The peak of a trace, with the kernels of an H100."""
    config = with_attention_choice(configured(variant), load_device("h100-80gb"))
    return traced_rank_steps(config, num_ranks(config))[0].memory.device_bytes


def num_ranks(config: Config) -> int:
    return prod(config.parallelism.degrees(1).values())


class Runtime:
    """Counters of the stand-in. On a GPU they do not exist."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self.is_stand_in = hasattr(self._library, "cuda_host_count")

    def counts(self) -> list[int]:
        """Launches, waits, copies to the host."""
        return (
            [int(self._library.cuda_host_count(index)) for index in range(3)]
            if self.is_stand_in
            else []
        )


def new_trainer(config: Config, world: World) -> Trainer:
    training = config.training
    vocabulary = config.model.build().vocab_size
    sequences = CopyDataset(
        vocab_size=vocabulary,
        period=training.seq_len // 2,
        seq_len=training.seq_len,
        num_sequences=training.global_batch_size * training.steps,
        seed=0,
    )
    dataset = BlendedDataset([sequences], seq_len=training.seq_len)
    queries = torch.empty(0, dtype=getattr(torch, training.dtype), device=world.device)
    # Not verified: nothing may be computed.
    kernel = kernels.select_kernel(queries, training.attention)
    return Trainer(config, world, dataset, kernel=kernel)


def run_steps(config: Config, runtime: Runtime) -> list[float]:
    """Counts per step, and the most bytes requested. torch raises at the line that waits for the
    device.
    """
    trainer = new_trainer(config, World(0, num_ranks(config), torch.device("cuda:0")))
    batches = trainer.loader.steps(0)

    def step() -> None:
        trainer.step += 1
        AsyncHostCopy(trainer.train_step(next(batches), 1e-3))

    step()
    torch.cuda.reset_peak_memory_stats()
    before = runtime.counts()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(STEPS - 1):
        step()
    torch.cuda.set_sync_debug_mode("default")
    per_step = [
        (after - count) / (STEPS - 1)
        for count, after in zip(before, runtime.counts(), strict=True)
    ]
    peak: int = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    batches.close()
    return [*per_step, peak]


def measure(variant: str) -> StepsFound:
    """In this process. Fewer blocks tell what one of them costs."""
    runtime = Runtime()
    fewer = BLOCKS // 2
    if runtime.is_stand_in:
        replace_cudnn_attention()
    distributed.init_process_group(
        "cpu:fake,cuda:nccl",
        store=distributed.HashStore(),
        rank=0,
        world_size=num_ranks(configured(variant)),
        timeout=timedelta(seconds=60),
    )
    try:
        *counts, peak = run_steps(configured(variant), runtime)
        if not counts:
            return StepsFound(int(peak), None, None, None)
        gc.collect()
        fewer_launches, *_ = run_steps(configured(variant, blocks=fewer), runtime)
    finally:
        distributed.destroy_process_group()
    launches, waits, copies = counts
    return StepsFound(int(peak), (launches - fewer_launches) / (BLOCKS - fewer), waits, copies)


def measure_in_process(variant: str, environment: Mapping[str, str]) -> StepsFound:
    """Raises RuntimeError, with what the process wrote, if a step fails or waits."""
    command = [sys.executable, "-m", "tests.cuda_host.steps", f"--variant={variant}"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{variant} failed: {done.stderr}")
    return StepsFound(**json.loads(done.stdout.splitlines()[-1]))


def table_row(variant: str, found: StepsFound) -> str:
    traced = traced_bytes(variant)
    launches = "" if found.launches_per_block is None else f"{found.launches_per_block:g}"
    mib = [f"{size / 2**20:.1f}" for size in (traced, found.requested_bytes)]
    return f"| {' | '.join((f'`{variant}`', *mib, f'{traced / found.requested_bytes - 1:+.1%}', launches))} |\n"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cuda_host.steps", description=(__doc__ or "").partition(": ")[2]
    )
    parser.add_argument(
        "--variant", help="prints what one variant asked for, measured in this process"
    )
    parser.add_argument(
        "--record", action="store_true", help="writes the table into docs/memory.md"
    )
    options = parser.parse_args(argv)
    if options.variant is not None:
        sys.stdout.write(f"{json.dumps(asdict(measure(options.variant)))}\n")
        sys.stdout.flush()
        # A thread of torch that is not joined may abort the process when the interpreter ends.
        os._exit(0)
    heading = ("options", "traced MiB", "requested MiB", "off by", "launches per block")
    rows = [f"| {' | '.join(heading)} |\n|{'---|' * len(heading)}\n"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {} if torch.cuda.is_available() else build.build(Path(folder))
        for variant in VARIANTS:
            rows.append(table_row(variant, measure_in_process(variant, environment)))
            sys.stdout.write(rows[-1])
            sys.stdout.flush()
    if options.record:
        before, after = (f"<!-- cuda_host:{end} -->\n" for end in ("begin", "end"))
        head, _, rest = PAGE.read_text().partition(before)
        PAGE.write_text("".join((head, before, *rows, after, rest.partition(after)[2])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
