"""CPU-seconds per step, peak memory and time to the first step of a small fixed workload, in fresh
processes.

    python -m benchmarks.cpu_step [--rounds 5] [--only eager] [--rival 'COMMAND'] [--rehearse]

The workload: a Llama of 6,163,712 parameters (dim 256, 6 layers, 8 heads, SwiGLU 768, vocabulary
2048, untied), 2 sequences of 2048 tokens per step, each attended as one document; float32, AdamW,
clipping, no recomputation; one thread per process; six steps of `./run_train.sh`, of which the
median of the last four counts. Everything is read from outside: a step ends when its line appears
in metrics.jsonl, CPU-seconds are those of all processes of the run between two lines, peak memory
is `rss_gib` of the largest rank, and the first step is timed from the command.

COMMAND is anything that runs the same workload and prints one JSON line {"cpu_s_per_step": s,
"peak_rss_mib": m, "first_step_done_s": t}; its runs alternate with ours, so that ratios hold on a
machine whose speed drifts. Variants on two ranks share the same step. `--host` takes one sequence
of 64 tokens and 300 steps, of which the mean of the last 200 counts: most of such a step is the
host's work. `--long` takes one sequence of 16,384 tokens and two layers under keep_attention; to a
rival, give the same sizes. `--rehearse` takes a tiny model and four steps: a test of this script.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parents[1]
WORKLOAD = """
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
ONE_SEQUENCE = "--training.global_batch_size 1 --training.micro_batch_size 1 --training.seq_len"
SIZES = {
    "rehearse": (
        128,
        "--training.seq_len 64 --training.steps 4 --model.num_layers 2 --model.vocab_size 264",
    ),
    "host": (64, f"{ONE_SEQUENCE} 64 --training.steps 300"),
    "long": (
        16_384,
        f"{ONE_SEQUENCE} 16384 --model.num_layers 2 --memory.recompute keep_attention",
    ),
}
"""Tokens of a step, and options."""
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
WARMUP = 2
"""Steps that do not count."""


def launch(options: Sequence[str], ranks: int, folder: Path) -> dict[str, float]:
    """Run the workload with `./run_train.sh`, and measure it from outside."""
    command = [str(ROOT / "run_train.sh"), "--job.output_dir", str(folder), *options]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    metrics = folder / "metrics.jsonl"
    log = folder.with_suffix(".log")
    ends: list[tuple[float, float]] = []
    began = time.monotonic()
    with log.open("w") as out:
        run = subprocess.Popen(
            command,
            env=os.environ | threads | {"PATH": path, "NGPU": str(ranks)},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        while run.poll() is None:
            cpu = sum(cpu_seconds(pid) for pid in tree(run.pid))
            now = time.monotonic()
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            ends += [(cpu, now)] * (lines - len(ends))
            time.sleep(0.01)
    if run.returncode:
        sys.exit(f"{shlex.join(command)} failed:\n{log.read_text()[-2000:]}")
    seconds = [after[0] - before[0] for before, after in pairwise(ends)]
    last = json.loads(metrics.read_text().splitlines()[-1])
    # Differences start at the end of the first step. The last step is written when the run ends.
    return {
        "cpu_s_per_step": mean(seconds[100:-1])
        if len(seconds) > 100
        else median(seconds[WARMUP - 1 :]),
        "peak_rss_mib": 1024 * last["rss_gib"],
        "first_step_done_s": ends[0][1] - began,
    }


def tree(pid: int) -> Iterator[int]:
    """A process and its descendants, of those that still run."""
    yield pid
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from tree(int(child))


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process; 0 once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_rival(command: Sequence[str]) -> dict[str, float]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed:\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=VARIANTS)
    parser.add_argument(
        "--rival", help="a command that runs the same workload and prints the same JSON"
    )
    sizes = parser.add_mutually_exclusive_group()
    for name in SIZES:
        sizes.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args(argv)
    tokens, size = next((each for name, each in SIZES.items() if vars(options)[name]), (4096, ""))
    wanted = [name for name in VARIANTS if options.only in (None, name)]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in wanted}
    with tempfile.TemporaryDirectory() as root:
        workload = Path(root, "workload.toml")
        workload.write_text(WORKLOAD)
        common = [
            "--config",
            str(workload),
            "--data.cache_dir",
            f"{root}/prepared",
            *size.split(),
        ]
        # Tokenizes the corpus and warms the page cache.
        if not options.rehearse:
            launch([*common, "--training.steps", "4"], 1, Path(root, "warm-up"))
        for number in range(options.rounds):
            for name in wanted:
                ranks, more = VARIANTS[name]
                results[name].append(
                    launch([*common, *more], ranks, Path(root, f"{number} {name}"))
                )
                show(number, name, results[name][-1])
            if options.rival:
                results.setdefault("rival", []).append(run_rival(shlex.split(options.rival)))
                show(number, "rival", results["rival"][-1])
    report(results, tokens)


def show(number: int, name: str, result: dict[str, float]) -> None:
    shown = "  ".join(f"{key} {result[key]:.2f}" for key in KEYS)
    sys.stderr.write(f"round {number + 1}, {name}: {shown}  (load {os.getloadavg()[0]:.1f})\n")


def report(results: dict[str, list[dict[str, float]]], tokens: int) -> None:
    from importlib.metadata import version

    write = sys.stdout.write
    write(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}\n\n"
    )
    write(
        "| | CPU-s per step (min) | tokens per CPU-s | peak RSS MiB | first step done s |\n|---|---|---|---|---|\n"
    )
    rival = (
        {key: median(run[key] for run in results["rival"]) for key in KEYS}
        if "rival" in results
        else None
    )
    for name, runs in results.items():
        middle = {key: median(run[key] for run in runs) for key in KEYS}
        best = min(run["cpu_s_per_step"] for run in runs)
        ratio = {key: f" ({middle[key] / rival[key]:.2f}x)" if rival else "" for key in KEYS}
        write(
            f"| {name} | {middle['cpu_s_per_step']:.3g} ({best:.3g}){ratio['cpu_s_per_step']} "
            f"| {tokens / middle['cpu_s_per_step']:.0f} | {middle['peak_rss_mib']:.0f}{ratio['peak_rss_mib']} "
            f"| {middle['first_step_done_s']:.1f}{ratio['first_step_done_s']} |\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
