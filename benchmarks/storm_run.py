"""The run that the storm strikes (benchmarks/storm.py): its folder, its processes, and what they
have reached.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults import wait_for
from benchmarks.storm_faults import children, is_alive
from benchmarks.storm_nodes import Node
from models.files import open_regular

ROOT = Path(__file__).resolve().parents[1]
RANKS = 4
CONFIG = """\
[model]
family = "llama3"
size = "debug"
num_layers = 2
dim = 64
num_heads = 4
num_kv_heads = 2
head_dim = 16
ffn_dim = 96
[tokenizer]
kind = "byte"
[data]
corpus = "{root}/corpus"
cache_dir = "{root}/prepared"
[training]
seq_len = 512
global_batch_size = 4
steps = 1_000_000
[optimizer]
lr = 1e-3
[schedule]
kind = "constant"
warmup_steps = 0
[checkpoint]
interval = 7
[metrics]
log_interval = 1
tensorboard = false
[distributed]
restart_seconds = 0
hang_minutes = 0.1
"""
# Python's clock and fsync, as the files `clock` and `slow` in the storm's folder say; `drift-R`
# changes a weight of rank R, once.
SHIM = """\
import os, sys, threading, time
_root, _time, _fsync = os.environ["STORM"], time.time, os.fsync
def _offset():
    try:
        return float(open(_root + "/clock").read())
    except (OSError, ValueError):
        return 0.0
time.time = lambda: _time() + _offset()
def fsync(descriptor):
    if os.path.exists(_root + "/slow"):
        time.sleep(0.3)
    _fsync(descriptor)
os.fsync = fsync

def _watch(path):
    while not (os.path.exists(path) and "trainer.step.optimizer" in sys.modules):
        time.sleep(0.05)
    optimizer = sys.modules["trainer.step.optimizer"].Optimizer
    whole_step = optimizer.step
    def drifted_step(self, *args, **options):
        optimizer.step = whole_step
        result = whole_step(self, *args, **options)
        self.flush_deferred_updates()
        weight = max(self.parameters_by_name.values(), key=lambda each: each.numel())
        weight.detach().to_local().view(-1)[:1].add_(1e-3)
        os.unlink(path)
        return result
    optimizer.step = drifted_step
if "RANK" in os.environ:
    threading.Thread(target=_watch, args=(_root + "/drift-" + os.environ["RANK"],), daemon=True).start()
"""


@dataclass
class Run:
    """A run folder, and the processes that train in it: one launcher, or one per node."""

    root: Path
    mesh: dict[str, int] = field(default_factory=dict)
    nodes: Sequence[Node] = ()
    """Without any, it trains on this machine as a whole."""
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder = self.root / "run"
        self.log = self.root / "log"
        (self.root / "shim").mkdir(parents=True, exist_ok=True)
        (self.root / "shim" / "sitecustomize.py").write_text(SHIM)
        (self.root / "run.toml").write_text(CONFIG.format(root=self.root))
        write_corpus(self.root / "corpus")

    def start(self, *options: str) -> None:
        """On the present mesh. `options` come last."""
        mesh = [
            word
            for axis, size in self.mesh.items()
            for word in (f"--parallelism.{axis}", str(size))
        ]
        command = [
            sys.executable,
            "-P",
            "-m",
            "trainer.launch",
            "--config",
            str(self.root / "run.toml"),
        ]
        command += ["--job.output_dir", str(self.folder), *mesh, *options]
        environment = os.environ | {
            "PYTHONPATH": f"{self.root / 'shim'}:{ROOT}",
            "STORM": str(self.root),
        }
        environment |= {"OMP_NUM_THREADS": "1", "NGPU": str(RANKS // max(len(self.nodes), 1))}
        with self.log.open("ab") as log:
            for index, prefix in enumerate([node.prefix for node in self.nodes] or [[]]):
                place = (
                    {"NNODES": str(len(self.nodes)), "NODE_RANK": str(index)} if self.nodes else {}
                )
                place |= (
                    {"MASTER_ADDR": "10.98.0.1", "GLOO_SOCKET_IFNAME": "eth0"} if place else {}
                )
                self.launchers.append(
                    subprocess.Popen(
                        [*prefix, *command], env=environment | place, stdout=log, stderr=log
                    )
                )

    def workers(self) -> list[int]:
        return [
            pid for each in self.launchers if each.poll() is None for pid in children(each.pid)
        ]

    def kill(self) -> None:
        """Everything at once; returns when all are gone."""
        pids = self.workers()
        for each in self.launchers:
            each.kill()
        for each in self.launchers:
            each.wait()
        wait_for(lambda: not any(map(is_alive, pids)))
        self.launchers.clear()

    def ending(self) -> list[int] | None:
        """Exit codes, once all launchers have ended."""
        codes = [each.poll() for each in self.launchers]
        return None if None in codes else [code for code in codes if code is not None]

    def step(self) -> int:
        """Of the last line of metrics."""
        try:
            with open_regular(self.folder / "metrics.jsonl") as file:
                file.seek(-min(8192, file.seek(0, os.SEEK_END)), os.SEEK_END)
                whole = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
            return int(json.loads(whole)["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def checkpoints(self) -> list[Path]:
        found = (self.folder / "checkpoints").glob("step-*")
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))

    def keep(self, step: int) -> None:
        """Copies a checkpoint to `ends`, where no fault strikes."""
        name = f"step-{step}"
        shutil.copytree(self.folder / "checkpoints" / name, self.root / "ends" / name)

    def metrics(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (self.folder / "metrics.jsonl").read_bytes().splitlines()
        ]


def write_corpus(folder: Path) -> None:
    draw = random.Random(0)
    folder.mkdir(exist_ok=True)
    for number in range(200):
        words = (
            draw.choice(("river", "stone", "over", "under", "light", "a", "the"))
            for _ in range(draw.randint(20, 800))
        )
        (folder / f"{number:03}.txt").write_text(" ".join(words))
