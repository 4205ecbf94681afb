"""What packing and dealing change in runs: the time of a step, and what a model learns.

    python -m benchmarks.packing_runs time CHECKOUT [--rounds 2] [--ranks 4]    gloo ranks here and in CHECKOUT, alternating
    python -m benchmarks.packing_runs loss [--steps 150]            the same short training with both packings

`time`: documents of log-normal length (median 400 bytes, sigma 1.8), sequences of 8192, 16
sequences a step over dp_shard, a model so narrow that attention takes most of the time. `loss`:
the standard library by files, sequences of 8192; held-out files in three classes of length, and
the loss by position in the document.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median

from benchmarks.cpu_step import ROOT, cpu_seconds, tree

MODEL = {
    "num_layers": 2,
    "dim": 64,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 32,
    "ffn_dim": 128,
}
COMMON = {
    "training.seq_len": 8192,
    "training.dtype": "float32",
    "training.micro_batch_size": 1,
    "memory.recompute": "none",
    "data.packing": "best_fit",
    "checkpoint.enabled": "false",
    "metrics.tensorboard": "false",
    "metrics.log_interval": 1,
    **{f"model.{key}": value for key, value in MODEL.items()},
}
CLASSES = {"short": (0, 4_000), "middle": (4_000, 16_000), "long": (16_000, 10**9)}
"""Bytes of held-out files."""


def options(values: dict[str, object]) -> list[str]:
    return [f"--{key}={value}" for key, value in values.items()]


def run(
    checkout: Path, folder: Path, values: dict[str, object], ranks: int
) -> tuple[list[dict[str, float]], float]:
    """The run's metrics, and its CPU-seconds from the end of the second step on."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "NGPU": str(ranks), "OMP_NUM_THREADS": "1"}
    command = [
        str(checkout.resolve() / "run_train.sh"),
        *options({**COMMON, **values, "job.output_dir": folder}),
    ]
    metrics = folder / "metrics.jsonl"
    log = folder.with_suffix(".log")
    first = 0.0
    last = 0.0
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None:
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if lines >= 2 and (spent := sum(map(cpu_seconds, tree(process.pid)))) > last:
                first = first or spent
                last = spent
            with_delay(process)
    if process.returncode:
        sys.exit(f"{command} failed:\n{log.read_text()[-2000:]}")
    return [json.loads(line) for line in metrics.read_text().splitlines()], last - first


def with_delay(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(0.02)
    except subprocess.TimeoutExpired:
        return


# ---- time


def write_documents(path: Path, count: int = 6000) -> None:
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            length = min(60_000, max(16, int(rng.lognormvariate(6.0, 1.8))))
            file.write(json.dumps({"text": rng.randbytes(length // 2 + 1).hex()[:length]}) + "\n")


def time_runs(checkout: Path, rounds: int, steps: int, ranks: int) -> Iterator[str]:
    found: dict[str, list[tuple[float, float]]] = {"before": [], "after": []}
    with tempfile.TemporaryDirectory() as root:
        write_documents(Path(root, "corpus.jsonl"))
        values: dict[str, object] = {
            "data.corpus": f"{root}/corpus.jsonl",
            "data.cache_dir": f"{root}/cache",
        }
        values |= {"training.global_batch_size": 16, "training.steps": steps}
        for number in range(rounds):
            for name, place in (("before", checkout), ("after", ROOT)):
                metrics, cpu = run(place, Path(root, f"{name}-{number}"), values, ranks=ranks)
                wall = mean(line["step_seconds"] for line in metrics[2:])
                found[name].append((wall, cpu / (len(metrics) - 2)))
                sys.stderr.write(
                    f"{name}: {wall:.2f} s, {cpu / (len(metrics) - 2):.2f} CPU-s per step\n"
                )
    yield "| | wall s per step | CPU-s per step |\n|---|---|---|"
    for name, pairs in found.items():
        wall, cpu = (median(column) for column in zip(*pairs, strict=True))
        yield f"| {name} | {wall:.2f} | {cpu:.2f} |"


# ---- loss


def split_files(root: Path) -> None:
    """Hard copies of the standard library's modules: nine tenths to train on, the rest by
    length.
    """
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")) + sorted(
        Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*/*.py")
    )
    for number, path in enumerate(files):
        content = path.read_bytes()
        name = next(name for name, (low, high) in CLASSES.items() if low <= len(content) < high)
        folder = root / (name if number % 10 == 0 else "train")
        folder.mkdir(exist_ok=True)
        (folder / f"{number:05d}.py").write_bytes(content)


def loss_runs(steps: int) -> Iterator[str]:
    rows = dict[str, dict[str, float]]()
    with tempfile.TemporaryDirectory() as root:
        split_files(Path(root))
        sets = "".join(
            f'[data.sources.{name}]\npath = "{root}/{name}"\n'
            f'[validation.sets.{name}]\nsource = "{name}"\nseq_len = 8192\nrows = 16\n'
            for name in CLASSES
        )
        config = Path(root, "loss.toml")
        config.write_text(f"[validation]\ninterval = {steps}\n{sets}")
        for version in (1, 2):
            values: dict[str, object] = {"config": config, "data.corpus": f"{root}/train"}
            values |= {"data.cache_dir": f"{root}/cache", "data.packing_version": version}
            values |= {
                "training.global_batch_size": 4,
                "training.steps": steps,
                "optimizer.lr": 3e-3,
            }
            folder = Path(root, f"version-{version}")
            run(ROOT, folder, values, ranks=1)
            events = [
                json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()
            ]
            last = {each["set"]: each for each in events if "by_position" in each}
            rows[f"version {version}"] = {
                **{f"files: {name}": last[name]["loss"] for name in CLASSES},
                **{
                    f"position {bucket}": loss
                    for bucket, loss in last["long"]["by_position"].items()
                    if loss is not None
                },
            }
    columns = [*rows["version 1"]]
    yield f"| packing | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}"
    for name, row in rows.items():
        yield f"| {name} | {' | '.join(f'{row[column]:.3f}' for column in columns)} |"


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    timing = commands.add_parser("time")
    timing.add_argument("checkout", type=Path)
    timing.add_argument("--rounds", type=int, default=2)
    timing.add_argument("--steps", type=int, default=12)
    timing.add_argument("--ranks", type=int, default=4)
    commands.add_parser("loss").add_argument("--steps", type=int, default=150)
    chosen = parser.parse_args(argv)
    is_time = chosen.command == "time"
    lines = (
        time_runs(chosen.checkout, chosen.rounds, chosen.steps, chosen.ranks)
        if is_time
        else loss_runs(chosen.steps)
    )
    for line in lines:
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
