"""What each memory option saves and costs, on one CPU process.

    python -m benchmarks.memory bytes [--longest 32768]      bytes alive at most, by length
    python -m benchmarks.memory seconds [--rounds 2]         CPU-seconds of a step at 32768 tokens
    python -m benchmarks.memory run debug_1m                 two steps of a shipped file, counted and traced
    python -m benchmarks.memory draw docs/memory_ladder.svg  the picture of what `bytes` found

Every number is of a fresh process. Bytes are those that torch's allocator gives out
(`benchmarks/counted.py`), of a model with 32 query and 8 key/value heads in bfloat16; rows are one
row of documents of 512 tokens, because attention takes no other memory in long ones, and all the
time. k is the slope of the peak over the length, in residual streams of two bytes a number: peak =
constant + k x 2 E tokens. Seconds are those of all threads, in float32, of rows that are one
document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from math import prod
from pathlib import Path
from statistics import median

from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.hardware.attention_choice import with_attention_choice
from trainer.trace.answers import traced_rank_steps

KEEP = ["--memory.recompute", "keep_attention"]
TILES = ["--memory.mlp_tile_mib", "4"]
INPUTS = ["--memory.offload", "inputs"]
ALL = ["--memory.offload", "inputs_and_attention"]
LADDER: dict[str, list[str]] = {
    "`none`": ["--memory.recompute", "none"],
    "`full`": ["--memory.recompute", "full"],
    "`keep_attention`": KEEP,
    "+ tiling": [*KEEP, *TILES],
    "+ offload `inputs`": [*KEEP, *TILES, *INPUTS],
    "+ offload `inputs_and_attention`": [*KEEP, *TILES, *ALL],
    "+ 2 head groups": [*KEEP, *TILES, *ALL, "--memory.head_groups", "2"],
    "+ 8 head groups": [*KEEP, *TILES, *ALL, "--memory.head_groups", "8"],
    "+ `blocks_per_checkpoint` 4": [
        *KEEP,
        *TILES,
        *ALL,
        "--memory.head_groups",
        "8",
        "--memory.blocks_per_checkpoint",
        "4",
    ],
}
TIMED = (
    "`none`",
    "`full`",
    "`keep_attention`",
    "+ tiling",
    "+ 8 head groups",
    "+ `blocks_per_checkpoint` 4",
)
ITEM = {
    "data.corpus": "copy",
    "model.vocab_size": "264",
    "model.dim": "256",
    "model.num_layers": "4",
    "model.num_heads": "32",
    "model.num_kv_heads": "8",
    "model.head_dim": "8",
    "model.ffn_dim": "896",
    "memory.loss_chunk_mib": "1",
    "training.steps": "2",
    "training.dtype": "bfloat16",
    "training.global_batch_size": "1",
}
WIDE = {
    "model.num_layers": "2",
    "model.num_heads": "8",
    "model.num_kv_heads": "2",
    "model.head_dim": "32",
    "training.dtype": "float32",
}
FOUND = Path("outputs/memory_ladder.json")
DOCUMENT = 512


def configured(rung: str, tokens: int, item: dict[str, str]) -> Config:
    words = [word for key, value in item.items() for word in (f"--{key}", value)]
    return load([*words, "--training.seq_len", str(tokens), *LADDER[rung]])


# ---- one measurement, in its own process


def one(what: str, rung: str, tokens: int) -> dict[str, float]:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    return alive(rung, tokens) if what == "bytes" else timed(rung, tokens)


def alive(rung: str, tokens: int) -> dict[str, float]:
    from benchmarks.counted import count

    return vars(count(configured(rung, tokens, ITEM), steps=2, documents=DOCUMENT))


def traced_peak(config: Config, world_size: int) -> float:
    """Bytes of the fullest rank, with the kernels of a CPU."""
    steps = traced_rank_steps(with_attention_choice(config), world_size, on_gpu=False)
    return max(step.memory.device_bytes for step in steps)


def timed(rung: str, tokens: int) -> dict[str, float]:
    import torch

    from trainer.data.copy_task import CopyDataset
    from trainer.data.sequences import BlendedDataset
    from trainer.step.process_group import World
    from trainer.step.trainer import Trainer

    config = configured(rung, tokens, ITEM | WIDE)
    model = config.model.build()
    copied = CopyDataset(
        vocab_size=model.vocab_size, period=tokens // 2, seq_len=tokens, num_sequences=1, seed=0
    )
    rows = BlendedDataset([copied], seq_len=tokens)
    trainer = Trainer(config, World(0, 1, torch.device("cpu")), rows)
    batch = rows.read([0])
    trainer.step += 1
    start = time.process_time()
    trainer.train_step([batch], 1e-3)
    return {"seconds": time.process_time() - start}


def of_file(name: str) -> None:
    """On as many processes as the file states degrees for."""
    from torch import multiprocessing

    config = load(["--config", name])
    world_size = prod(config.parallelism.degrees(1).values())
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_on_rank, (name, world_size, Path(folder)), nprocs=world_size)
        found = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(world_size)]
    told = traced_peak(config, world_size)
    peak = max(one["peak"] for one in found)
    say(
        f"{name}: {peak / 2**20:.0f} MiB counted at most, {told / 2**20:.0f} traced: {told / peak - 1:+.1%}"
    )


def _on_rank(rank: int, name: str, world_size: int, folder: Path) -> None:
    import torch

    from benchmarks.counted import count
    from tests.build_datasets import build_train_dataset
    from trainer.step.process_group import destroy_process_group, init_single_host

    torch.set_num_threads(1)
    config = load(["--config", name])
    rows = build_train_dataset(config)
    init_single_host(config.distributed, rank=rank, size=world_size, store=folder / "store")
    (folder / str(rank)).write_text(json.dumps(vars(count(config, steps=2, rows=rows))))
    destroy_process_group()


# ---- many


def measure(what: str, rung: str, tokens: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.memory", "one", what, rung, str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def bytes_table(longest: int) -> None:
    lengths = [tokens for tokens in (4096, 8192, 16384, 32768, 65536, 131072) if tokens <= longest]
    width = 2 * int(ITEM["model.dim"])
    say(
        f"{platform.processor() or platform.machine()}, load {os.getloadavg()[0]:.1f}; MiB alive at most, above states"
    )
    say(
        "| | "
        + " | ".join(f"{tokens // 1024}K" for tokens in lengths)
        + " | k | saved, u | on the host, u | peak, traced |"
    )
    say("|---" * (len(lengths) + 5) + "|")
    ladder: dict[str, dict[str, float]] = {}
    for rung in LADDER:
        found = [measure("bytes", rung, tokens) for tokens in lengths]
        k = slope(lengths, [one["peak"] for one in found]) / width
        last = found[-1]
        u = width * lengths[-1]
        cells = [f"{(one['peak'] - one['states']) / 2**20:.1f}" for one in found]
        held = last["kept"] + last["on_host"]
        cells += [f"{k:.2f}", f"{held / u:.2f}", f"{last['on_host'] / u:.2f}"]
        traced = traced_peak(configured(rung, lengths[-1], ITEM), 1)
        cells.append(f"{traced / last['peak'] - 1:+.1%}")
        say(f"| {rung} | " + " | ".join(cells) + " |")
        ladder[rung] = {"k": k, "kept": last["kept"] / u, "on_host": last["on_host"] / u}
    FOUND.parent.mkdir(exist_ok=True)
    FOUND.write_text(json.dumps(ladder))


def slope(xs: list[int], ys: list[float]) -> float:
    """Of the line nearest to the points, by least squares."""
    x = sum(xs) / len(xs)
    y = sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum(
        (a - x) ** 2 for a in xs
    )


def seconds_table(rounds: int, tokens: int) -> None:
    say(
        f"{platform.processor() or platform.machine()}, load {os.getloadavg()[0]:.1f}; {tokens} tokens, {rounds} rounds"
    )
    found: dict[str, list[float]] = {rung: [] for rung in TIMED}
    for number in range(rounds):
        for rung in TIMED:
            found[rung].append(measure("seconds", rung, tokens)["seconds"])
            sys.stderr.write(f"round {number + 1}: {rung} {found[rung][-1]:.1f}" + "\n")
    full = median(found["`full`"])
    say("| | CPU-s per step | of `full` |\n|---|---|---|")
    for rung, seconds in found.items():
        say(
            f"| {rung} | {median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f}) | {median(seconds) / full:.2f}x |"
        )


def draw(path: Path) -> None:
    """Bars of k; saved activations on the device are dark."""
    ladder: dict[str, dict[str, float]] = json.loads(FOUND.read_text())
    width = 720
    row = 30
    left = 250
    scale = (width - left - 60) / max(found["k"] for found in ladder.values())
    parts = []
    for index, (rung, found) in enumerate(ladder.items()):
        y = 34 + index * row
        name = rung.replace("`", "")
        parts += [
            f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{name}</text>',
            f'<rect x="{left}" y="{y}" width="{found["k"] * scale:.1f}" height="20" fill="#9ecae1"/>',
            f'<rect x="{left}" y="{y}" width="{found["kept"] * scale:.1f}" height="20" fill="#3182bd"/>',
            f'<text x="{left + found["k"] * scale + 6:.1f}" y="{y + 15}">{found["k"]:.1f}</text>',
        ]
    title = "k: device memory per token, in residual streams (dark: saved for the backward pass)"
    height = 44 + len(ladder) * row
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">'
        f'<rect width="{width}" height="{height}" fill="white"/><text x="12" y="20">{title}</text>{"".join(parts)}</svg>\n'
    )


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("bytes").add_argument("--longest", type=int, default=32768)
    seconds = commands.add_parser("seconds")
    seconds.add_argument("--rounds", type=int, default=2)
    seconds.add_argument("--tokens", type=int, default=32768)
    commands.add_parser("run").add_argument("name")
    commands.add_parser("draw").add_argument("path", type=Path)
    commands.add_parser("one").add_argument("arguments", nargs=3)
    asked = parser.parse_args()
    if asked.command == "bytes":
        bytes_table(asked.longest)
    elif asked.command == "seconds":
        seconds_table(asked.rounds, asked.tokens)
    elif asked.command == "run":
        of_file(asked.name)
    elif asked.command == "draw":
        draw(asked.path)
    else:
        what, rung, tokens = asked.arguments
        say(json.dumps(one(what, rung, int(tokens))))


if __name__ == "__main__":
    main()
