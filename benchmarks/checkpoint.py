"""What a checkpoint costs: save time, how long training blocks, hashing, and loading.

    python benchmarks/checkpoint.py [--ranks 2] [--params-millions 64] [--saves 3] [--folder /tmp]

A Llama of about that many parameters, float32 with AdamW, 12 bytes each, sharded over processes of
this machine that train on short sequences. Saves follow each other, with as many steps between
them as one lasts, in the foreground and in the background; the first of each kind also allocates,
and is left out. Files are in the page cache when they are hashed and read. Prints a table in
Markdown.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from math import isnan
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.config.job_config import Config
    from trainer.step.process_group import World

ROOT = Path(__file__).resolve().parents[1]
LAYERS = 4


def options(asked: argparse.Namespace, folder: Path, *, asynchronous: bool) -> list[str]:
    # 12 dim^2 of a block, with what surrounds it: near enough.
    dim = 64 * max(1, round((asked.params_millions * 1e6 / (13 * LAYERS)) ** 0.5 / 64))
    values = {
        "job.output_dir": folder / ("background" if asynchronous else "foreground"),
        "model.dim": dim,
        "model.num_layers": LAYERS,
        "model.ffn_dim": 3 * dim,
        "model.head_dim": dim // 8,
        "training.seq_len": 64,
        "training.global_batch_size": asked.ranks,
        "training.dtype": "float32",
        "training.steps": 100_000,
        "data.cache_dir": folder / "prepared",
        "checkpoint.async": str(asynchronous).lower(),
        "checkpoint.keep": 1,
    }
    return ["--config", "debug", *(f"--{key}={value}" for key, value in values.items())]


def rank_main(asked: argparse.Namespace) -> None:
    sys.path.insert(0, str(ROOT))
    from trainer.config.parse import load
    from trainer.step.process_group import process_group

    folder = Path(asked.worker)
    configs = [load(options(asked, folder, asynchronous=kind)) for kind in (False, True)]
    with process_group(configs[0].distributed) as world:
        rows = [measure(config, world, asked.saves) for config in configs]
    if world.rank == 0:
        report(asked, rows)


def measure(config: Config, world: World, saves: int) -> dict[str, float]:
    """Medians of one kind of save, in seconds."""
    from tests.build_datasets import build_train_dataset
    from trainer.checkpoint.manager import CheckpointManager
    from trainer.checkpoint.resume import require_verified
    from trainer.step.trainer import Trainer
    from trainer.storage import manifest
    from trainer.storage.run_dir import RunDir

    trainer = Trainer(config, world, build_train_dataset(config))
    folder = RunDir(config.output_dir)
    folder.create()
    found = []
    quiet = list[float]()
    during_save = list[float]()
    with CheckpointManager(config, folder, world) as checkpoints:
        steps = trainer.train_steps()
        next(steps)
        for _ in range(saves + 1):
            quiet += [timed(steps) for _ in range(3)]
            checkpoints.save(trainer)
            # As many on every rank; a rank that asks may hear later than another.
            during_save += (
                [timed(steps) for _ in range(6)] if config.checkpoint.asynchronous else []
            )
            ended = checkpoints.wait() if not config.checkpoint.asynchronous else None
            while ended is None and not (collected := checkpoints.pop_finished()):
                time.sleep(0.01)
            found.append(ended or collected[0])
        del steps
    last = found[-1].path
    if last is None:
        raise RuntimeError(f"a save failed: {found[-1].problem}")
    started = time.perf_counter()
    require_verified(last, None)
    verified = time.perf_counter() - started
    del trainer
    gc.collect()
    fresh = Trainer(config, world, build_train_dataset(config))
    started = time.perf_counter()
    CheckpointManager(config, folder, world).resume(fresh)
    resumed = time.perf_counter() - started
    mine = last / f"__{world.rank}_0.distcp"
    started = time.perf_counter()
    size, _ = manifest.hash_file(mine)
    hashing = size / (time.perf_counter() - started)
    return {
        "bytes": found[-1].bytes,
        "seconds": median(saved.seconds for saved in found[1:]),
        "blocked": median(saved.blocked_seconds for saved in found[1:]),
        "first": found[0].seconds,
        "first blocked": found[0].blocked_seconds,
        "step": median(quiet),
        "step during save": median(during_save) if during_save else float("nan"),
        "verify": verified,
        "resume": resumed,
        "hashing": hashing,
    }


def timed(steps: Iterator[object]) -> float:
    started = time.perf_counter()
    next(steps)
    return time.perf_counter() - started


def report(asked: argparse.Namespace, rows: list[dict[str, float]]) -> None:
    foreground, background = rows
    cores = len(os.sched_getaffinity(0))
    lines = [
        f"{platform.processor() or platform.machine()}, {cores} cores, {asked.ranks} ranks, {Path(asked.worker).parent}; "
        f"{datetime.now(UTC):%Y-%m-%d}",
        "",
        f"| {foreground['bytes'] / 2**30:.2f} GiB | `checkpoint.async = false` | `true` |",
        "|---|---|---|",
        *(
            f"| {label} | {seconds(foreground[key])} | {seconds(background[key])} |"
            for label, key in (
                ("a save", "seconds"),
                ("training blocked", "blocked"),
                ("the first save", "first"),
                ("training blocked by the first", "first blocked"),
                ("a step", "step"),
                ("a step during a save", "step during save"),
                ("verifying all files", "verify"),
                ("resuming: verifying and loading", "resume"),
            )
        ),
        f"| hashing, each rank | {foreground['hashing'] / 1e9:.2f} GB/s | {background['hashing'] / 1e9:.2f} GB/s |",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def seconds(number: float) -> str:
    return "" if isnan(number) else f"{number:.2f} s"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--params-millions", type=float, default=64)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        rank_main(asked)
        return 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path(tempfile.mkdtemp(dir=asked.folder))
    place = {"WORLD_SIZE": asked.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = (
        os.environ | {key: str(value) for key, value in place.items()} | {"OMP_NUM_THREADS": "1"}
    )
    try:
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--worker", str(folder)],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(asked.ranks)
        ]
        return max(abs(process.wait()) for process in processes)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
