"""Whole runs of a tiny configuration: `launched` by the launcher, or `forked` on the rank pool,
within a second.

Pool ranks run `train.main` with the variables that torchrun sets for a worker; results are the
same. Both use one thread per rank; in the pool, warnings are errors. `fork` starts processes that
a test may signal or kill.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.artifacts import content
from tests.garbage import freeze_imports
from tests.ranks import become_strict, context, team
from trainer.config.run_spec import RunSpec
from trainer.errors import EXIT_BAD_CONFIG
from trainer.launch.launcher import format_problems, load_and_validate, prepare_run
from trainer.metrics import loggers
from trainer.resilience.signals import SignalHandler
from trainer.storage import manifest

ROOT = Path(__file__).resolve().parents[2]
WORDS = [
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
    "jumps",
    "rests",
]
PLACES = (
    "NGPU",
    "NNODES",
    "NODE_RANK",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "SLURM_STEP_ID",
    "SLURM_NTASKS",
)

RUN = """\
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
seq_len = 64
global_batch_size = 6
steps = 6
dtype = "float32"

[optimizer]
lr = 1e-2

[checkpoint]
interval = 3

[metrics]
log_interval = 1
tensorboard = false
"""

# One length, and the same targets with growing context; neither count divides by the number of
# ranks.
SETS = """
[validation.sets.packed]
seq_len = 50
rows = 7

[validation.sets.context]
seq_len = [16, 40, 81]
rows = 5
tail = 11
"""


@dataclass(frozen=True)
class Done:
    """Exit status of each rank, or of the launcher if there is one, and the output."""

    statuses: list[int]
    said: str


def write_run(root: Path) -> Path:
    """Writes a corpus of documents of odd lengths and a configuration for it; returns the path of
    the configuration.
    """
    draw = random.Random(0)
    for number in range(40):
        words = (draw.choice(WORDS) for _ in range(draw.randint(1, 40)))
        path = root / "corpus" / f"{number:02}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(" ".join(words) + "\n")
    config = root / "run.toml"
    config.write_text(RUN.format(root=root))
    return config


def arguments(config: Path, folder: Path, *options: str) -> list[str]:
    return ["--config", str(config), "--job.output_dir", str(folder), *options]


# ---- by the launcher


def launch(config: Path, folder: Path, *options: str, processes: int) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key not in PLACES}
    environment |= {"NGPU": str(processes), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", "trainer.launch", *arguments(config, folder, *options)]
    # A file, not a pipe: a worker that outlives its launcher would keep a pipe open.
    with folder.with_suffix(".log").open("a") as log:
        return subprocess.Popen(
            command, cwd=config.parent, env=environment, stdout=log, stderr=log, text=True
        )


def launched(
    config: Path, folder: Path, *options: str, processes: int, patience: float = 120
) -> Done:
    log = folder.with_suffix(".log")
    said_before = len(log.read_text()) if log.exists() else 0
    status = launch(config, folder, *options, processes=processes).wait(patience)
    return Done([status], log.read_text()[said_before:])


def workers(launcher: int) -> list[int]:
    """The `train.py` descendants of a process."""
    found: list[int] = []
    # The process, or one of its threads, has exited.
    with suppress(OSError):
        for task in Path(f"/proc/{launcher}/task").glob("*/children"):
            for pid in map(int, task.read_text().split()):
                found += [pid, *workers(pid)] if b"train.py" in command_of(pid) else workers(pid)
    return found


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def is_alive(pid: int) -> bool:
    """False for zombies, which have exited but were not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], object], seconds: float = 60) -> bool:
    """Whether the condition came true in time.

    Asking takes at most a quarter of the time, which others need.
    """
    deadline = time.monotonic() + seconds
    while True:
        began = time.thread_time()
        if condition():
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(max(0.002, 3 * (time.thread_time() - began)))


def kill_launcher(launcher: subprocess.Popen[str]) -> list[int]:
    """Sends SIGKILL; returns the workers that survived for two seconds, after killing them,
    too.
    """
    pids = workers(launcher.pid)
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not any(map(is_alive, pids)), 2)
    survivors = [pid for pid in pids if is_alive(pid)]
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
    return survivors


# ---- forked


def fork(
    config: Path,
    folder: Path,
    *options: str,
    processes: int,
    of_rank: Mapping[int, tuple[str, ...]] | None = None,
) -> list[ForkServerProcess]:
    port = free_port()
    log = folder.with_suffix(".log")
    ranks = [
        context.Process(
            target=_train,
            args=(
                rank,
                processes,
                port,
                log,
                arguments(config, folder, *options, *(of_rank or {}).get(rank, ())),
            ),
            daemon=True,
        )
        for rank in range(processes)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def forked(
    config: Path,
    folder: Path,
    *options: str,
    processes: int = 1,
    seconds: float = 60,
    of_rank: Mapping[int, tuple[str, ...]] | None = None,
    train: Callable[[list[str]], int] | None = None,
) -> Done:
    """`of_rank` has extra options for single ranks; `train` stands in for `train_rank`."""
    log = folder.with_suffix(".log")
    port = free_port()
    said_before = len(log.read_text()) if log.exists() else 0
    tasks = [
        partial(
            train_in_pool,
            (rank, processes, port, log),
            arguments(config, folder, *options, *(of_rank or {}).get(rank, ())),
            train or train_rank,
        )
        for rank in range(processes)
    ]
    with team(tasks) as ranks:
        # Peers of a rank that failed wait for it in a collective; the launcher would end them.
        outcomes = ranks.outcomes(seconds, failed=lambda outcome: outcome.value != 0, grace=2)
    statuses = [outcomes[rank].value if rank in outcomes else None for rank in range(processes)]
    exit_codes = [
        ranks.statuses.get(rank) or 0 if status is None else status
        for rank, status in enumerate(statuses)
    ]
    return Done(exit_codes, log.read_text()[said_before:])


def end(ranks: list[ForkServerProcess]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def become(rank: int, size: int, port: int, log: Path) -> None:
    """Makes this process a rank, as torchrun would, with output to a file and warnings as
    errors.
    """
    place = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({key: str(value) for key, value in place.items()})
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    become_strict()


def train_rank(argv: list[str], signal_handler: SignalHandler | None = None) -> int:
    """A rank under srun: prepares the run as its own launcher, then trains."""
    import train

    config, world, problems = load_and_validate(argv, os.environ, fetching=True)
    if problems or world is None:
        if world is None or world.is_first_of_node:
            sys.stderr.write(format_problems(problems, argv, world))
        return EXIT_BAD_CONFIG
    loggers.configure_logging(world.rank or 0)
    spec = prepare_run(config, world)
    return train.main([spec.to_json()], signal_handler) if isinstance(spec, RunSpec) else spec


def _train(rank: int, size: int, port: int, log: Path, argv: list[str]) -> None:
    freeze_imports()
    become(rank, size, port, log)
    sys.exit(train_rank(argv))


def train_in_pool(
    place: tuple[int, int, int, Path],
    argv: list[str],
    train: Callable[[list[str]], int] = train_rank,
) -> int:
    """Returns the exit status of `train.py`."""
    own = [os.dup(number) for number in (1, 2)]
    try:
        become(*place)
        try:
            return train(argv)
        except BaseException:  # noqa: BLE001 - as train.py does
            traceback.print_exc()
            return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, was in zip((1, 2), own, strict=True):
            os.dup2(was, number)
            os.close(was)


# ---- disks


@contextmanager
def mounted(place: Path, *options: str) -> Iterator[None]:
    """Mounts something at `place` with these options of `mount`."""
    place.mkdir(exist_ok=True)
    said = subprocess.run(["mount", *options, place], capture_output=True, text=True)
    if said.returncode:
        pytest.skip(f"cannot mount, which needs root: {said.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Remounts the folder read-only; files that are already open stay writable."""
    with mounted(folder, "--bind", str(folder)):
        subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
        yield


# ---- the run folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(folder: Path, *keys: str) -> list[tuple[Any, ...]]:
    """These keys of every line of metrics.jsonl, exactly as written."""
    return [tuple(line[key] for key in keys) for line in lines(folder / "metrics.jsonl")]


def steps(folder: Path) -> list[int]:
    return [step for (step,) in metrics(folder, "step")]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("*"))


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """The full tensors of a checkpoint from any mesh."""
    reader = dcp.FileSystemReader(checkpoint)
    entries: dict[str, Any] = reader.read_metadata().state_dict_metadata
    loaded = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
    }
    with warnings.catch_warnings():
        # dcp warns that there is no process group.
        warnings.simplefilter("ignore")
        dcp.load(loaded, storage_reader=reader, no_dist=True)
    return loaded


def digests(checkpoint: Path) -> dict[str, str]:
    found = tensors(checkpoint)
    bits = {
        name: tensor.view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in sorted(found.items())
    }
    return {name: hashlib.sha256(one).hexdigest() for name, one in bits.items()}


def reseal(checkpoint: Path) -> None:
    """Rewrites the manifest for the current files, to change a checkpoint on purpose."""
    about = manifest.read(checkpoint)
    files = {name: manifest.hash_file(checkpoint / name) for name in about.files}
    manifest.write(checkpoint, about.model_copy(update={"files": files}))


def state(checkpoint: Path) -> dict[str, Any]:
    return content(checkpoint / "state.json")


def timeless(checkpoint: Path) -> dict[str, Any]:
    """The state without its timings, which is equal for equal runs."""
    found = state(checkpoint)
    assert found["trainer"].pop("goodput")["productive_seconds"] > 0
    return found
