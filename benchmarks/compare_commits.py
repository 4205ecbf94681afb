"""Whether two commits train alike: losses, gradient norms and final weights of twelve runs on
each, on CPU.

    python benchmarks/compare_commits.py OLD NEW [--runs one_process,tp_2] [--keep FOLDER]

For a change that must not change numbers, a rename for instance. Each commit is checked out in a
temporary folder, and its own `./run_train.sh` runs with the packages of the interpreter that runs
this file, one run after the other, one thread per rank. Every step's loss and gradient norm, and
every tensor of the last checkpoint, optimizer state included, are compared bit by bit. The status
is 1 if a run fails, or if something differs: in float64 by more than 1e-13 relative to the largest
element, in other types at all. The table says "no" wherever a bit differs.

Commits may spell keys of the configuration differently: `RENAMED` has those that are used here,
and each commit's `--help` tells which spelling it knows. Nothing of either commit is imported.

With `--keep` what OLD computed is kept in that folder, and taken from there the next time, unless
the run, torch or Python have changed since. NEW always runs. The longest run uses four processes;
kept results take about 1 GB.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-13  # relative, in float64
PATIENCE = 600  # seconds for one run
WORDS = (
    "fox",
    "river",
    "stone",
    "light",
    "bridge",
    "morning",
    "the",
    "a",
    "and",
    "of",
    "under",
    "over",
    "runs",
    "rests",
)

# Keys that are used below and once had another name: the new one and the old one. A run that sets
# a key which is in neither commit's words fails with the launcher's own message.
RENAMED = {
    "memory.blocks_per_checkpoint": "memory.input_every",
    "memory.loss_chunk_mib": "memory.head_chunk_mib",
    "parallelism.cp_outer_method": "parallelism.cp_outer",
}
# What launchers set, which would be taken for a world that exists.
WORLD = (
    "NNODES",
    "NODE_RANK",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTHONPATH",
)

COMMON: dict[str, str | int] = {
    "training.dtype": "float64",
    "checkpoint.interval": 1000,
    "checkpoint.keep": 1,
    "metrics.log_interval": 1,
    "metrics.tensorboard": "false",
    "distributed.restarts": 0,
}
ONE_STAGE: dict[str, str | int] = {
    "training.seq_len": 256,
    "training.global_batch_size": 4,
    "training.steps": 4,
}
STAGES = """\
[model]
family = "llama3"
size = "debug"

[memory]
recompute = "full"

[[stage]]
name = "short"
seq_len = 128
steps = 2
batch_tokens = 512
lr = 2e-3

[[stage]]
name = "long"
seq_len = 256
steps = 2
batch_tokens = 1_024
lr = 1e-3
rope = { theta = 2e6 }
schedule = { kind = "constant" }
parallelism = { cp = 2 }
"""


@dataclass(frozen=True)
class Run:
    """A run: its processes, what it sets beside `COMMON`, and its file, or nothing for
    `train_configs/debug.toml`.
    """

    processes: int = 1
    options: Mapping[str, str | int] = field(default_factory=dict)
    config: str = ""

    @property
    def values(self) -> dict[str, str | int]:
        return {**COMMON, **({} if self.config else ONE_STAGE), **self.options}


def _cp(method: str) -> Run:
    return Run(2, {"parallelism.cp": 2, "parallelism.cp_method": method})


RUNS = {
    "one_process": Run(),
    "dp_shard_2": Run(2, {"parallelism.dp_shard": 2}),
    "cp_2_allgather": _cp("allgather"),
    "cp_2_ring": _cp("ring"),
    "cp_2_alltoall": _cp("alltoall"),
    "cp_2_ulysses": _cp("ulysses"),
    "tp_2": Run(2, {"parallelism.tp": 2}),
    "pp_2": Run(2, {"parallelism.pp": 2}),
    "cp_4_hybrid": Run(
        4,
        {
            "parallelism.cp": 4,
            "parallelism.cp_method": "hybrid",
            "parallelism.cp_ulysses": 2,
            "parallelism.cp_outer_method": "ring",
        },
    ),
    "memory": Run(
        1,
        {
            "training.seq_len": 1024,
            "training.global_batch_size": 2,
            "memory.recompute": "keep_attention",
            "memory.offload": "inputs_and_attention",
            "memory.head_groups": 2,
            "memory.mlp_tile_mib": 1,
            "memory.blocks_per_checkpoint": 2,
            "memory.loss_chunk_mib": 1,
        },
    ),
    "recipe": Run(2, config=STAGES),
    "bfloat16": Run(2, {"training.dtype": "bfloat16"}),
}


class FailedError(Exception):
    """A run that did not end well, in the last lines that it wrote."""


@dataclass(frozen=True)
class Result:
    """What a run computed: a loss and a gradient norm for each step, and the tensors of its last
    checkpoint.
    """

    losses: Tensor
    norms: Tensor
    tensors: dict[str, Tensor]


# ---- running


class Commit:
    """A commit, checked out in a folder of its own, and what it computes."""

    def __init__(self, commit: str, checkout: Path, place: Path) -> None:
        self.commit = commit
        self._checkout = checkout
        self._place = place
        self._corpus = place / "corpus"
        _write_corpus(self._corpus)
        self._keys = set(
            re.findall(r"^ +--([a-z0-9_.]+) ", self._launch(["--help"], processes=1), re.MULTILINE)
        )
        if not self._keys:
            raise FailedError(f"./run_train.sh --help of {commit} names no keys")

    def result(self, name: str) -> Result:
        """Of a run that ends well. Raises `FailedError`."""
        run = RUNS[name]
        folder = self._place / name
        folder.mkdir()
        config = "debug"
        if run.config:
            config = str(folder / "run.toml")
            Path(config).write_text(run.config)
        values = {
            **run.values,
            "data.corpus": self._corpus,
            "data.cache_dir": self._place / "prepared",
            "job.output_dir": folder / "run",
        }
        options = [
            "--config",
            config,
            *(f"--{self._spelled(key)}={value}" for key, value in values.items()),
        ]
        self._launch(options, processes=run.processes)
        steps = [
            json.loads(line)
            for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
        ]
        found = sorted(
            (folder / "run" / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:])
        )
        if not steps or not found:
            raise FailedError(f"{name} wrote no metrics or no checkpoint")
        result = Result(
            losses=torch.tensor([step["loss"] for step in steps], dtype=torch.float64),
            norms=torch.tensor([step["grad_norm"] for step in steps], dtype=torch.float64),
            tensors=_read(found[-1]),
        )
        shutil.rmtree(folder)
        return result

    def _spelled(self, key: str) -> str:
        return key if key in self._keys else RENAMED.get(key, key)

    def _launch(self, options: Sequence[str], *, processes: int) -> str:
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in WORLD and not name.startswith("SLURM_")
        }
        environment |= {
            "NGPU": str(processes),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        command = [str(self._checkout / "run_train.sh"), *options]
        try:
            done = subprocess.run(
                command,
                cwd=self._place,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired:
            raise FailedError(f"{' '.join(command)}\ndid not end in {PATIENCE} s") from None
        if done.returncode:
            last = "\n".join(done.stdout.splitlines()[-20:])
            raise FailedError(f"{' '.join(command)}\nended with status {done.returncode}:\n{last}")
        return done.stdout


@contextmanager
def checked_out(commit: str) -> Iterator[Commit]:
    with tempfile.TemporaryDirectory(prefix="compare_commits_") as folder:
        checkout = Path(folder) / "checkout"
        place = Path(folder) / "runs"
        place.mkdir()
        _git("worktree", "add", "--quiet", "--detach", str(checkout), commit)
        try:
            yield Commit(commit, checkout, place)
        finally:
            _git("worktree", "remove", "--force", str(checkout))


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def _write_corpus(folder: Path) -> None:
    """Documents of many lengths, the same each time."""
    draw = random.Random(0)
    folder.mkdir()
    for number in range(60):
        words = (draw.choice(WORDS) for _ in range(draw.randint(1, 200)))
        (folder / f"{number:02}.txt").write_text(" ".join(words) + "\n")


def _read(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole, whatever ranks wrote it."""
    reader = dcp.FileSystemReader(checkpoint)
    entries: dict[str, Any] = reader.read_metadata().state_dict_metadata
    loaded = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
    }
    with warnings.catch_warnings():
        # That there is no process group is what is asked for.
        warnings.simplefilter("ignore")
        dcp.load(loaded, storage_reader=reader, no_dist=True)
    return loaded


# ---- keeping


def _conditions(name: str) -> str:
    """What a kept result depends on beside the commit."""
    run = RUNS[name]
    # As before any rename.
    values = {RENAMED.get(key, key): value for key, value in run.values.items()}
    asked = {"processes": run.processes, "values": values, "config": run.config}
    return json.dumps(
        asked | {"torch": torch.__version__, "python": platform.python_version()}, sort_keys=True
    )


def _take(folder: Path, name: str) -> Result | None:
    """A result that was kept under the same conditions."""
    path = folder / f"{name}.pt"
    if not path.exists():
        return None
    kept = torch.load(path, weights_only=True)
    if kept.pop("conditions") != _conditions(name):
        return None
    return Result(**kept)


def _put(folder: Path, name: str, result: Result) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"{name}.tmp"
    torch.save({"conditions": _conditions(name), **vars(result)}, written)
    written.rename(folder / f"{name}.pt")


def results(
    commit: str, names: Sequence[str], keep: Path | None
) -> dict[str, Result | FailedError]:
    """What a commit computes, or how its runs failed, by name."""
    folder = None if keep is None else keep / commit
    found: dict[str, Result | FailedError] = {}
    for name in names:
        if folder is not None and (kept := _take(folder, name)) is not None:
            found[name] = kept
            _tell(f"{commit[:12]} {name}: kept from an earlier comparison")
    missing = [name for name in names if name not in found]
    if not missing:
        return found
    with checked_out(commit) as checkout:
        for name in missing:
            began = time.monotonic()
            try:
                found[name] = result = checkout.result(name)
            except FailedError as error:
                found[name] = error
                _tell(f"{commit[:12]} {name}: failed\n{error}")
                continue
            _tell(f"{commit[:12]} {name}: {time.monotonic() - began:.0f} s")
            if folder is not None:
                _put(folder, name, result)
    return found


# ---- comparing


def difference(old: Tensor, new: Tensor) -> float:
    """The largest, relative to the largest element; 0 only if all bits agree, infinite where it
    has no meaning.
    """
    if old.dtype != new.dtype or old.shape != new.shape:
        return math.inf
    if torch.equal(_bits(old), _bits(new)):
        return 0.0
    # 0 and -0 differ in their bits, and NaN has no difference.
    largest = max(float(old.abs().max()), sys.float_info.min)
    apart = float((old.double() - new.double()).abs().max()) / largest
    return math.inf if math.isnan(apart) else max(apart, sys.float_info.min)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def compared(old: Result, new: Result) -> tuple[float, float, float]:
    """The largest difference of losses, of gradient norms and of the checkpoint's tensors."""
    weights = math.inf
    if old.tensors.keys() == new.tensors.keys():
        weights = max(
            difference(tensor, new.tensors[name]) for name, tensor in old.tensors.items()
        )
    return difference(old.losses, new.losses), difference(old.norms, new.norms), weights


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("new", metavar="NEW")
    parser.add_argument("--runs", default=",".join(RUNS), help=f"of {', '.join(RUNS)}")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="where results of OLD are kept"
    )
    asked = parser.parse_args()
    names = asked.runs.split(",")
    if unknown := [name for name in names if name not in RUNS]:
        parser.error(f"there is no run {', '.join(unknown)}; there are {', '.join(RUNS)}")
    old, new = (
        _git("rev-parse", "--verify", f"{commit}^{{commit}}") for commit in (asked.old, asked.new)
    )
    before = results(old, names, asked.keep)
    after = results(new, names, None)
    sys.stdout.write("| run | losses equal | norms equal | weights equal | largest difference |\n")
    sys.stdout.write("| --- | --- | --- | --- | ---: |\n")
    is_alike = True
    for name in names:
        first = before[name]
        second = after[name]
        if isinstance(first, FailedError) or isinstance(second, FailedError):
            is_alike = False
            sys.stdout.write(f"| {name} | failed | failed | failed | |\n")
            continue
        found = compared(first, second)
        tolerance = TOLERANCE if RUNS[name].values["training.dtype"] == "float64" else 0.0
        is_alike &= max(found) <= tolerance
        equal = " | ".join("no" if apart else "yes" for apart in found)
        sys.stdout.write(f"| {name} | {equal} | {max(found):.1e} |\n")
    return not is_alike


if __name__ == "__main__":
    sys.exit(main())
