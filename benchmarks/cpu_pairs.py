"""CPU-seconds of a step in two checkouts, in pairs that alternate, for every recompute mode.

    python -m benchmarks.cpu_pairs CHECKOUT [--pairs 15] [--only full] [--rehearse]

The workload is that of `benchmarks/cpu_step.py`. Both programs stay alive and take turns, step by
step and first one, then the other, so that a machine whose speed drifts is as fast for either.
Times are those of one thread. A ratio below 1 says that this checkout takes less. Both must know
the options of a mode.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).resolve().parents[1]
WORKLOAD = (
    "model.vocab_size=2048 model.num_layers=6 model.num_kv_heads=8 model.ffn_dim=768 training.seq_len=2048 "
    "training.global_batch_size=2 training.micro_batch_size=2 training.dtype=float32 memory.loss_chunk_mib=8"
)
TINY = "model.num_layers=2 model.vocab_size=264 training.seq_len=64"
KEEP = "memory.recompute=keep_attention"
MODES = {
    "none": "memory.recompute=none",
    "full": "memory.recompute=full",
    "keep_attention": KEEP,
    "2 blocks per checkpoint": f"{KEEP} memory.blocks_per_checkpoint=2",
    "2 head groups": f"{KEEP} memory.head_groups=2",
    "tiles of 1 MiB": f"{KEEP} memory.mlp_tile_mib=1",
}
WARMUP = 2
"""Steps of either program that do not count."""


def work(options: list[str]) -> None:
    """One step for every line of the standard input; its CPU-seconds to the standard output."""
    import torch
    from torch import distributed

    from trainer.config.parse import load
    from trainer.data.copy_task import CopyDataset
    from trainer.data.sequences import BlendedDataset
    from trainer.step.process_group import World
    from trainer.step.trainer import Trainer

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    config = load([f"--{option}" for option in options])
    vocab_size = config.model.build().vocab_size
    length = config.training.seq_len
    copied = CopyDataset(
        vocab_size=vocab_size, period=length // 2, seq_len=length, num_sequences=2, seed=0
    )
    dataset = BlendedDataset([copied], seq_len=length)
    trainer = Trainer(config, World(0, 1, torch.device("cpu")), dataset)
    for _ in sys.stdin:
        trainer.step += 1
        batch = dataset.read([0, 1])
        start = time.process_time()
        trainer.train_step([batch], 1e-3)
        say(str(time.process_time() - start))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Program:
    def __init__(self, checkout: Path, options: list[str]) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(checkout),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        command = [sys.executable, "-P", __file__, str(checkout), "--work", *options]
        self._process = subprocess.Popen(
            command,
            env=environment,
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def step(self) -> float:
        if self._process.stdin is None or self._process.stdout is None:
            raise AssertionError
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            sys.exit("a program ended early")
        return float(line)

    def end(self) -> None:
        self._process.communicate()


def compare(checkout: Path, options: list[str], pairs: int) -> list[tuple[float, float]]:
    """CPU-seconds of this checkout and of the other."""
    programs = [Program(ROOT, options), Program(checkout, options)]
    found = []
    for pair in range(WARMUP + pairs):
        order = programs if pair % 2 else programs[::-1]
        seconds = {program: program.step() for program in order}
        found.append((seconds[programs[0]], seconds[programs[1]]))
    for program in programs:
        program.end()
    return found[WARMUP:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="root of the checkout to compare with")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument(
        "--only", choices=MODES, action="append", help="this mode; may be repeated"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="a tiny model: a test of this script"
    )
    parser.add_argument("--work", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        work(arguments.work)
        return
    say(
        "| `memory` | CPU-s per step | the other checkout | median ratio | quartiles |\n|---|---|---|---|---|"
    )
    for mode in arguments.only or MODES:
        options = f"{WORKLOAD} {TINY * arguments.rehearse} {MODES[mode]}".split()
        found = compare(arguments.checkout.resolve(), options, arguments.pairs)
        ours, theirs = (median(column) for column in zip(*found, strict=True))
        low, middle, high = quantiles([one / other for one, other in found], n=4)
        say(f"| {mode} | {ours:.3f} | {theirs:.3f} | {middle:.3f} | {low:.3f} to {high:.3f} |")


if __name__ == "__main__":
    main()
