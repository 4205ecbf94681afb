"""CPU-seconds per update, peak memory and time to the first update of a small fixed item, in fresh processes.

    python benchmarks/cpu_step.py [--rounds 5] [--only eager] [--rival 'COMMAND']

The item: a Llama of 6,163,712 parameters (dim 256, 6 layers, 8 heads, SwiGLU 768, vocabulary 2048, untied), rows of
2048 tokens, 2 a step, each attended as one document; float32, AdamW, clipping, no recomputation; one thread; six
updates of the real `train.py`, of which the median of the last four counts. COMMAND is anything that runs the same
item and prints one JSON line {"cpu_s_per_step": s, "peak_rss_mib": m, "first_step_done_s": t}; its runs alternate
with ours, so that the ratios hold on a machine whose speed drifts. Variants of two processes share the same update: CPU-seconds are
their sum, memory and time those of the larger.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
ITEM = """
[job]
name = "cpu_step"
[model]
family = "llama3"
size = "debug"
vocab_size = 2048
num_layers = 6
num_kv_heads = 8
ffn_dim = 768
[data]
packing = "concat"
mask = "none"
[training]
seq_len = 2048
global_batch_size = 2
micro_batch_size = 2
steps = 6
dtype = "float32"
[memory]
recompute = "none"
loss_chunk_mib = 8
[optimizer]
lr = 8e-4
[checkpoint]
enabled = false
[metrics]
log_interval = 1
tensorboard = false
"""
VARIANTS: dict[str, tuple[int, list[str]]] = {
    "eager": (1, []),
    "compiled": (1, ["--training.compile", "true"]),
    "full recompute": (1, ["--memory.recompute", "full"]),
    "dp_shard 2": (2, ["--training.micro_batch_size", "1"]),
    "tp 2": (2, ["--parallelism.tp", "2"]),
    "pp 2": (2, ["--parallelism.pp", "2", "--training.micro_batch_size", "1"]),
    "cp 2": (2, ["--parallelism.cp", "2"]),
}
KEYS = ("cpu_s_per_step", "peak_rss_mib", "first_step_done_s")
TOKENS = 4096


def measure(argv: list[str]) -> None:
    """In a fresh process: runs train.py with its updates timed, and prints one JSON line."""
    sys.path.insert(0, str(ROOT))
    import train
    from trainer.hardware.device import peak_host_memory
    from trainer.trainer import StepResult, Trainer

    ends: list[tuple[float, float]] = []

    class Timed(Trainer):
        def updates(self) -> Iterator[StepResult]:
            ends.append((time.process_time(), 0.0))
            for update in super().train_steps():
                ends.append((time.process_time(), since_start()))
                yield update

    vars(train)["Trainer"] = Timed
    status = train.main(argv)
    seconds = [after[0] - before[0] for before, after in pairwise(ends)]
    result = {
        "cpu_s_per_step": median(seconds[2:]),
        "peak_rss_mib": peak_host_memory() / 2**20,
        "first_step_done_s": ends[1][1],
        "steps": seconds,
    }
    sys.stdout.write(json.dumps(result) + "\n")
    sys.exit(status)


def since_start() -> float:
    """Seconds since this process was created."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def run(command: list[str], processes: int = 1) -> dict[str, float]:
    """What the ranks of a run measured together."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(processes)}
    common = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            command,
            env=common | (meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    said = [rank.communicate() for rank in ranks]
    if failed := [errors for rank, (_, errors) in zip(ranks, said, strict=True) if rank.returncode]:
        sys.exit(f"{shlex.join(command)} failed:\n{failed[0][-2000:]}")
    results: list[dict[str, float]] = [json.loads(output.strip().splitlines()[-1]) for output, _ in said]
    return {key: (sum if key == "cpu_s_per_step" else max)(result[key] for result in results) for key in KEYS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=VARIANTS)
    parser.add_argument("--rival", help="a command that runs the same item and prints the same JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        item = Path(folder, "item.toml")
        item.write_text(ITEM)
        common = ["--config", str(item), "--data.cache_dir", f"{folder}/prepared", "--job.output_dir", f"{folder}/run"]
        ours = [sys.executable, __file__, "--measure", *common]
        wanted = [name for name in VARIANTS if options.only in (None, name)]
        commands = {name: ([*ours, *VARIANTS[name][1]], VARIANTS[name][0]) for name in wanted}
        if options.rival:
            commands["rival"] = (shlex.split(options.rival), 1)
        run([*ours, "--training.steps", "3"])  # Tokenizes the corpus and warms the page cache.
        results: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
        for number in range(options.rounds):
            for name, command in commands.items():
                results[name].append(run(*command))
                shown = "  ".join(f"{key} {results[name][-1][key]:.2f}" for key in KEYS)
                load = os.getloadavg()[0]
                sys.stderr.write(f"round {number + 1}, {name}: {shown}  (load {load:.1f})\n")
    report(results)


def report(results: dict[str, list[dict[str, float]]]) -> None:
    import torch

    write = sys.stdout.write
    write(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}\n\n")
    write(
        "| | CPU-s per update (min) | tokens per CPU-s | peak RSS MiB | first update done s |\n|---|---|---|---|---|\n"
    )
    rival = {key: median(run[key] for run in results["rival"]) for key in KEYS} if "rival" in results else None
    for name, runs in results.items():
        middle = {key: median(run[key] for run in runs) for key in KEYS}
        best = min(run["cpu_s_per_step"] for run in runs)
        ratio = {key: f" ({middle[key] / rival[key]:.2f}x)" if rival else "" for key in KEYS}
        write(
            f"| {name} | {middle['cpu_s_per_step']:.2f} ({best:.2f}){ratio['cpu_s_per_step']} "
            f"| {TOKENS / middle['cpu_s_per_step']:.0f} | {middle['peak_rss_mib']:.0f}{ratio['peak_rss_mib']} "
            f"| {middle['first_step_done_s']:.1f}{ratio['first_step_done_s']} |\n"
        )


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure(sys.argv[2:])
    else:
        main()
