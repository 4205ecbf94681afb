"""What longer context is worth, in minutes on one CPU core: python -m benchmarks.long_context
[--steps N] [--svg FILE]

Trains a small model on the sources of Python's library, a package at a time, on bytes, and the
copy task; then draws loss by position, loss of the same targets by length of context, and the copy
task's loss. Runs start as a user starts them.

Shape suffixes: B rows, S tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from models.batch import IGNORE_INDEX, Batch
from tests.build_datasets import build_validation_sets
from trainer.evaluation.load_checkpoint import load_parallel_model, resolve_checkpoint
from trainer.run.validation import eval_batches

ROOT = Path(__file__).resolve().parents[1]
LENGTH = 1024
TAIL = 64
EDGES = [0, *(1 << power for power in range(3, 11))]
TEXT = f"""
[job]
name = "long-context"
[model]
size = "debug"
dim = 128
num_layers = 2
num_heads = 4
num_kv_heads = 4
head_dim = 32
ffn_dim = 352
rope.theta = 100.0
[data]
corpus = "python-stdlib"
documents = "repository"
holdout = 0.2
[training]
seq_len = {LENGTH}
global_batch_size = 4
dtype = "float32"
[memory]
recompute = "none"
[optimizer]
lr = 6e-3
[schedule]
warmup_steps = 20
min_lr_factor = 0.02
[validation]
interval = 1000
[validation.sets.position]
seq_len = {LENGTH}
rows = 48
[validation.sets.context]
seq_len = [64, 128, 256, 512, 1024]
rows = 96
tail = {TAIL}
"""
COPY = """
[job]
name = "long-context-copy"
[model]
size = "debug"
vocab_size = 64
num_layers = 2
dim = 128
num_heads = 2
num_kv_heads = 2
head_dim = 64
ffn_dim = 64
rope.theta = 30.0
[data]
corpus = "copy"
[training]
seq_len = 512
global_batch_size = 8
steps = 140
dtype = "float32"
seed = 1
[memory]
recompute = "none"
[optimizer]
lr = 1e-2
weight_decay = 0.0
[schedule]
kind = "linear"
warmup_steps = 10
min_lr_factor = 0.02
[metrics]
log_interval = 2
"""
WIDTH = 300
HEIGHT = 240
LEFT = 40
BOTTOM = 44
TOP = 30
Point = tuple[str, float]


def trained(text: str, folder: Path, *options: str) -> Path:
    """The run folder of a configuration, trained on one process, or resumed."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder.with_suffix(".toml")
    config.write_text(text)
    command = [
        sys.executable,
        "-P",
        "-m",
        "trainer.launch",
        "--config",
        str(config.resolve()),
        *options,
    ]
    environment = os.environ | {"NGPU": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, f"--job.output_dir={folder}"], env=environment, check=True)
    return folder


def cpu_seconds() -> float:
    """Of this process and of the runs that it started."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def by_position(folder: Path) -> list[Point]:
    """Mean loss of the held-out rows' targets, in finer steps than a run reports."""
    found = resolve_checkpoint(folder)
    held = build_validation_sets(found.config)[0]
    sums = torch.zeros(2, len(EDGES), dtype=torch.float64)

    def record(losses_BS: Tensor, hits_BS: Tensor, batch: Batch) -> None:
        del hits_BS
        bucket = torch.bucketize(batch.positions.flatten(), torch.tensor(EDGES), right=True) - 1
        for row, values_BS in zip(sums, (losses_BS, batch.labels != IGNORE_INDEX), strict=True):
            row.index_add_(0, bucket, values_BS.double().flatten())

    with load_parallel_model(found) as (placed, _):
        placed.evaluate(
            eval_batches(held.datasets[0], held.num_sequences, placed, max_tokens=LENGTH), record
        )
    names = [f"{low}-" for low, _ in pairwise([*EDGES, LENGTH])]
    return [
        (name, float(loss / count))
        for name, loss, count in zip(names, *sums, strict=True)
        if count
    ]


def by_context(folder: Path) -> list[Point]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    last = [event for event in events if event.get("set") == "context"][-1]
    return [(length, loss) for length, loss in last["by_context"].items()]


def copied(folder: Path) -> list[Point]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(str(line["step"]), line["loss"]) for line in lines]


def panel(
    left: int, title: str, below: str, points: list[Point], *, low: float | None = None
) -> str:
    """A curve over names that stand at equal distances."""
    values = [value for _, value in points]
    floor = math.floor(min(values) * 10 - 1) / 10 if low is None else low
    high = math.ceil(max(values) * 10) / 10

    def x(index: float) -> float:
        return left + LEFT + (WIDTH - LEFT - 16) * index / max(1, len(points) - 1)

    def y(value: float) -> float:
        return TOP + (HEIGHT - BOTTOM - TOP) * (1 - (value - floor) / (high - floor))

    marks = [floor + (high - floor) * part / 4 for part in range(5)]
    grid = "".join(
        f'<line x1="{left + LEFT}" x2="{left + WIDTH - 16}" y1="{y(mark):.1f}" y2="{y(mark):.1f}" stroke="#ddd"/>'
        f'<text x="{left + LEFT - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:.2f}</text>'
        for mark in marks
    )
    every = max(1, len(points) // 8)
    ticks = "".join(
        f'<text x="{x(index):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{name}</text>'
        for index, (name, _) in enumerate(points)
        if index % every == 0
    )
    curve = " ".join(f"{x(index):.1f},{y(value):.1f}" for index, value in enumerate(values))
    return (
        f'{grid}{ticks}<polyline points="{curve}" fill="none" stroke="#2463a8" stroke-width="1.6"/>'
        f'<text x="{left + LEFT}" y="16" font-weight="bold">{title}</text>'
        f'<text x="{left + WIDTH - 16}" y="{HEIGHT - 10}" text-anchor="end">{below}</text>'
    )


def drawn(panels: list[str], caption: str) -> str:
    width = WIDTH * len(panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT + 24}" font-family="sans-serif" '
        f'font-size="11" fill="#444"><rect width="{width}" height="{HEIGHT + 24}" fill="#fff"/>{"".join(panels)}'
        f'<text x="{LEFT}" y="{HEIGHT + 14}">{caption}</text></svg>\n'
    )


def processor() -> str:
    """Its name, where the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--copy-steps", type=int, default=140)
    parser.add_argument("--folder", type=Path, default=Path("outputs"))
    parser.add_argument("--svg", type=Path, default=Path("docs/long_context.svg"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    began = cpu_seconds()
    text = trained(TEXT, asked.folder / "long-context", f"--training.steps={asked.steps}")
    copy = trained(
        COPY, asked.folder / "long-context-copy", f"--training.steps={asked.copy_steps}"
    )
    positions = by_position(text)
    context = by_context(text)
    curve = copied(copy)
    minutes = (cpu_seconds() - began) / 60
    caption = (
        f"{asked.steps} steps of 4 x {LENGTH} bytes of Python's library, {minutes:.1f} CPU-minutes on one core of "
        f"{processor()}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}; held-out packages"
    )
    panels = [
        panel(0, "loss by position (nats a byte)", "bytes before the target, from", positions),
        panel(WIDTH, f"loss of the same {TAIL} targets by context", "bytes fed", context),
        panel(2 * WIDTH, "copy task, 512 tokens, period 256", "step", curve, low=0),
    ]
    asked.svg.write_text(drawn(panels, caption))
    for name, points in (
        ("position", positions),
        ("context", context),
        ("copy", curve[:: max(1, len(curve) // 7)]),
    ):
        sys.stdout.write(f"{name}: {', '.join(f'{at} {value:.3f}' for at, value in points)}\n")
    sys.stdout.write(f"{caption}\n{asked.svg}\n")


if __name__ == "__main__":
    main()
