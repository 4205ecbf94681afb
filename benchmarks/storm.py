"""A storm of faults: does a run that survives it equal one that nothing happened to?

    python -m benchmarks.storm [--faults 120] [--seed 1] [--only TEXT] [--folder DIR] [--nodes] [--write]

A small model on four CPU processes, on three meshes one after the other. Faults of every kind
follow each other a few steps apart: of processes, disks, clocks, leases, nodes, and damage to
every kind of file (`benchmarks/storm_faults.py`). Half of the launches keep in-memory checkpoints.
What the launcher does not restart, the storm starts again with the same command, as a scheduler
would; where an ending needs a person (78 or 2), it restores the damaged file, as that person
would. Then the same steps are trained on the same meshes undisturbed, and every tensor of the last
checkpoint of each mesh, every line of metrics and the position in the data must be equal, bit by
bit. Exits with 1 if not, if a fault ends the run in a class that is not its own, or if a run does
not recover within minutes.

Mounts of small and read-only disks and network namespaces (`--nodes`: another leg on the third
mesh, as two nodes) need root; without it, those faults are left out, which is said.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import storm_faults
from benchmarks.data import machine, say
from benchmarks.faults import wait_for
from benchmarks.pages import replace_block
from benchmarks.storm_faults import Fault, children, is_alive
from models.files import open_regular
from trainer.checkpoint.memory_folder import memory_folder, remove_memory_folder
from trainer.storage.manifest import read_state

ROOT = Path(__file__).resolve().parents[1]
RANKS = 4
PATIENCE_SECONDS = 300.0
"""For a fault to be recovered from: a dead node's lease takes 90."""
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
MESHES = (
    {"dp_shard": 4},
    {"cp": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2},
)
# Python's clock and fsync, as the files `clock` and `slow` in the storm's folder say.
SHIM = """\
import os, time
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
"""


class StormError(Exception):
    pass


@dataclass
class Recovery:
    fault: str
    ending: str
    seconds: float
    """From the fault to the first step that the run had not reached before."""
    repeated: int
    """Steps."""


@dataclass
class Run:
    """A run folder, and the processes that train in it: one launcher, or one per node."""

    root: Path
    mesh: dict[str, int] = field(default_factory=dict)
    nodes: Sequence[list[str]] = field(default_factory=lambda: [[]])
    """What to put before the command of each node's launcher."""
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
        environment |= {"OMP_NUM_THREADS": "1", "NGPU": str(RANKS // len(self.nodes))}
        with self.log.open("ab") as log:
            for index, prefix in enumerate(self.nodes):
                place = (
                    {"NNODES": str(len(self.nodes)), "NODE_RANK": str(index)}
                    if len(self.nodes) > 1
                    else {}
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


class Storm:
    def __init__(self, root: Path, seed: int) -> None:
        self.run = Run(root)
        self.draw = random.Random(seed)
        self.recoveries: list[Recovery] = []
        self.ends: list[int] = []
        """Last step on each mesh."""

    def pass_over(
        self, mesh: dict[str, int], faults: Sequence[Fault], nodes: Sequence[list[str]]
    ) -> None:
        """Trains on a mesh until all faults have struck and were recovered from."""
        self.run.mesh = mesh
        self.run.nodes = nodes
        self.start()
        for fault in faults:
            target = self.run.step() + self.draw.randint(2, 9)
            self.recover(target, None, "")
            if fault.needs_two_checkpoints:
                wait_for(lambda: len(self.run.checkpoints()) > 1)
            self.suffer(fault)
        while not self.is_stopped():
            self.recover(self.run.step() + 2, None, "the end of a mesh")
            self.run.launchers[0].terminate()
            wait_for(lambda: self.run.ending() is not None)
        self.ends.append(self.run.step())
        self.run.keep(self.ends[-1])

    def is_stopped(self) -> bool:
        """Whether the run was saved: a signal before the first step of a launch ends it with 1."""
        return bool(self.run.launchers) and set(self.run.ending() or (1,)) == {0}

    def start(self, *options: str) -> None:
        self.run.launchers.clear()
        self.run.start(*(options or self.draw.choice(((), ("--checkpoint.memory_interval", "3")))))

    def suffer(self, fault: Fault) -> None:
        began = time.monotonic()
        reached = self.run.step()
        last_start = self.last_start()
        restore = fault.strike(self.run, self.draw)
        if fault.launches:
            began = time.monotonic()
            reached = self.run.step()
            last_start = self.last_start()
        if not self.run.launchers:
            self.start(*("--checkpoint.memory_interval", "1") * fault.launches)
        restore_by_person = restore if fault.needs_person else None
        ending = self.recover(
            reached + 1, restore_by_person, fault.name, None if fault.goes_on else last_start
        )
        seconds = time.monotonic() - began
        repeated = 0 if fault.goes_on else max(0, reached - self.last_start()["step"])
        self.recoveries.append(Recovery(fault.name, ending, seconds, repeated))
        say(
            f"{len(self.recoveries):4}  {fault.name}: {ending}, {seconds:.1f} s, {repeated} steps repeated"
        )
        if restore is not None:
            # Of damage that this launch had no reason to notice.
            restore()

    def recover(
        self,
        target: int,
        restore: Callable[[], None] | None,
        fault: str,
        last_start: dict[str, Any] | None = None,
    ) -> str:
        """Starts again what ended, until the step is reached, by another launch than `last_start`;
        returns the ending.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        ending = "trains on" if last_start is None else "restarted"
        while self.run.step() < target or self.last_start() == last_start:
            if time.monotonic() > deadline:
                raise StormError(
                    f"{fault}: no recovery within {PATIENCE_SECONDS:.0f} s; see {self.run.log}"
                )
            if (codes := self.run.ending()) is not None:
                ending = (
                    f"exit {max(codes)}" if len(set(codes)) == 1 or max(codes) > 1 else "exit 1"
                )
                if any(code in (2, 78) for code in codes):
                    if restore is None:
                        raise StormError(
                            f"{fault}: ended with {codes}, which needs a person; see {self.run.log}"
                        )
                    restore()
                    restore = None
                    ending += ", restored by a person"
                self.start()
            time.sleep(0.02)
        return ending

    def last_start(self) -> dict[str, Any]:
        """The event; of a damaged file, what is left."""
        path = self.run.folder / "events.jsonl"
        found = {"step": 0}
        for line in path.read_bytes().splitlines() if path.is_file() else ():
            with suppress(ValueError, TypeError):
                event = json.loads(line)
                found = event if event["event"] == "start" else found
        return found


# ---- comparison


def train_undisturbed(root: Path, meshes: Sequence[dict[str, int]], ends: Sequence[int]) -> Run:
    run = Run(root)
    for mesh, end in zip(meshes, ends, strict=True):
        run.mesh = mesh
        run.launchers.clear()
        run.start("--training.steps", str(end))
        wait_for(lambda: run.ending() is not None, 1200)
        if run.ending() != [0]:
            raise StormError(f"the undisturbed run fails; see {run.log}")
        run.keep(end)
    return run


def differences(storm: Run, whole: Run, ends: Sequence[int]) -> list[str]:
    """What differs between the runs, by checkpoint and by line of metrics."""
    found = []
    for end in ends:
        one, other = (run.root / "ends" / f"step-{end}" for run in (storm, whole))
        if digests_of(one) != digests_of(other):
            found.append(f"tensors of step {end}")
        states = [read_state(each) for each in (one, other)]
        if (
            len(
                {
                    (state.trainer.next_sequence, state.trainer.tokens, str(state.trainer.sources))
                    for state in states
                }
            )
            > 1
        ):
            found.append(f"position in the data at step {end}")
    keys = ("step", "loss", "grad_norm", "lr", "tokens")
    lines = [
        [tuple(line[key] for key in keys) for line in run.metrics()] for run in (storm, whole)
    ]
    if [line[0] for line in lines[0]] != [*range(1, ends[-1] + 1)]:
        found.append("not every step is logged once")
    found += [
        f"metrics of step {one[0]}" for one, other in zip(*lines, strict=False) if one != other
    ]
    return found


def digests_of(checkpoint: Path) -> dict[str, str]:
    from trainer.checkpoint.load import CheckpointReader, read_full_tensor  # Imports torch.

    reader = CheckpointReader(checkpoint)
    tensors = {name: read_full_tensor(reader, name) for name in reader.tensor_metadata}
    return {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def table(recoveries: Sequence[Recovery]) -> list[str]:
    lines = [
        "| fault | times | endings | median s | longest s | most steps repeated |",
        "|---|---|---|---|---|---|",
    ]
    for name in sorted({each.fault for each in recoveries}, key=str.lower):
        of_kind = [each for each in recoveries if each.fault == name]
        endings = ", ".join(sorted({each.ending for each in of_kind}))
        seconds = [each.seconds for each in of_kind]
        numbers = f"{median(seconds):.1f} | {max(seconds):.1f} | {max(each.repeated for each in of_kind)}"
        lines.append(f"| {name} | {len(of_kind)} | {endings} | {numbers} |")
    return lines


def campaign(
    root: Path, faults: int, seed: int, only: str, *, nodes: bool
) -> tuple[list[Recovery], list[str]]:
    """Prints what happens; returns the recoveries, and what differs.

    Fewer faults than meshes: as many meshes.
    """
    meshes = MESHES[:faults]
    kinds = [fault for fault in storm_faults.every_fault() if only in fault.name]
    draw = random.Random(seed)
    storm = Storm(root / "storm", seed)
    may_mount = storm_faults.mount_disk(storm.run.folder)
    missing = [] if may_mount else [fault.name for fault in kinds if fault.needs_root]
    for name in missing:
        say(f"left out, needs root: {name}")
    kinds = [fault for fault in kinds if fault.name not in missing]
    elsewhere = [fault for fault in kinds if not fault.needs_nodes]
    shuffled = chain.from_iterable(draw.sample(elsewhere, len(elsewhere)) for _ in cycle((0,)))
    shares = [
        faults * (index + 1) // len(meshes) - faults * index // len(meshes)
        for index in range(len(meshes))
    ]
    legs = [
        (mesh, [*islice(shuffled, share)], 1) for mesh, share in zip(meshes, shares, strict=True)
    ]
    if nodes and not missing:
        pairs = zip(
            (fault for fault in kinds if fault.needs_nodes),
            (fault for fault in kinds if fault.fits_nodes),
            strict=False,
        )
        legs.append((meshes[-1], [fault for pair in pairs for fault in pair] * 2, 2))
    say(
        f"{machine()}; {RANKS} ranks, {sum(len(leg[1]) for leg in legs)} faults of {len(kinds)} kinds, seed {seed}\n"
    )
    try:
        for mesh, share, num_nodes in legs:
            say(f"mesh {mesh}, {num_nodes} nodes")
            storm.pass_over(mesh, share, storm_faults.connect_nodes(2) if num_nodes > 1 else [[]])
        say(
            f"\n{len(storm.recoveries)} faults in {storm.ends[-1]} steps; training {storm.ends} undisturbed"
        )
        whole = train_undisturbed(root / "whole", [leg[0] for leg in legs], storm.ends)
        return storm.recoveries, differences(storm.run, whole, storm.ends)
    finally:
        storm.run.kill()
        storm_faults.disconnect_nodes()
        if storm.run.folder.exists():
            remove_memory_folder(memory_folder(storm.run.folder))
        storm_faults.unmount_disk(storm.run.folder)
        say("\n" + "\n".join(table(storm.recoveries)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="kinds whose name has this text"
    )
    parser.add_argument(
        "--folder", type=Path, help="where the runs are kept; left out: a temporary folder"
    )
    parser.add_argument(
        "--nodes",
        action="store_true",
        help="another leg on the third mesh, as two nodes in network namespaces",
    )
    parser.add_argument(
        "--write", action="store_true", help="write the table to docs/reliability.md"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = options.folder or Path(temporary)
        recoveries, found = campaign(
            root.absolute(), options.faults, options.seed, options.only, nodes=options.nodes
        )
    say("\nbitwise equal to the undisturbed run" if not found else f"\nDIFFERENT: {found[:10]}")
    if options.write and not found:
        page = ROOT / "docs" / "reliability.md"
        page.write_text(replace_block(page.read_text(), "storm", table(recoveries)))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
