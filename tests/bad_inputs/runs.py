"""Runs a command on a damaged copy of a run folder, in a forked process, and says what should not
have happened.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from tests.bad_inputs.cases import EXECUTED, Case, broken_rules
from tests.system.runs import train_rank
from trainer import branch, hf, runs
from trainer.checkpoint import __main__ as checkpoint_command
from trainer.config.parse import load
from trainer.data.prepare import __main__ as prepare_command
from trainer.errors import ENDINGS
from trainer.slurm import __main__ as slurm_command
from trainer.slurm import jobs
from trainer.storage import exit_markers
from trainer.storage.lease import Lease
from trainer.storage.run_dir import RunDir

SECONDS = 30.0
MAX_LINES = 25
MAX_CHARS = 6000
CONFIG = """
[model]
family = "llama3"
size = "debug"
num_layers = 1
dim = 16
num_heads = 2
num_kv_heads = 1
head_dim = 8
ffn_dim = 32
[data]
corpus = "prepared/corpus"
cache_dir = "prepared"
[training]
seq_len = 64
global_batch_size = 2
dtype = "float32"
[schedule]
kind = "constant" # the same learning rates with 4 and with 6 steps
[checkpoint]
interval = 2
[metrics]
log_interval = 1
tensorboard = false
"""
TRAIN = ["--config", "config.toml", "--job.output_dir=run", "--training.steps=6"]
FRESH = [
    "--config",
    "config.toml",
    "--job.output_dir=fresh",
    "--training.steps=1",
    "--checkpoint.enabled=false",
]
BRANCHED = ["--config", "branched/config.toml", "--job.output_dir=branched"]
COMMANDS: dict[str, Callable[[], int | None]] = {
    "train": lambda: train_rank(TRAIN),
    "fresh": lambda: train_rank(FRESH),
    "verify": lambda: checkpoint_command.main(["verify", "run", "--all"]),
    "inspect": lambda: prepare_command.main(
        ["inspect", "prepared/corpus", "--verify", "--config", "config.toml"]
    ),
    "prepare": lambda: prepare_command.main(["--corpus", "text", "--output", "made"]),
    "import": lambda: hf.main(["import", "hf", "imported.toml"]),
    "branched": lambda: train_rank(BRANCHED),
    "runs": lambda: runs.main(["."]),
    "status": lambda: slurm_command.main(["status", "run"]),
}


CHOSEN = ("trainer.next_sequence",)
"""Whoever can seal a checkpoint chooses what a run reads next, as he chooses its weights:
docs/security.md.
"""
LEFT = {"run/logs/lease": "run/logs/left"}
"""What is put in its place only for its own cases: to take over a lease takes a second."""


class Outcome(NamedTuple):
    code: int
    """Negative: the signal that ended the process."""
    said: str
    seconds: float


class Undisturbed(NamedTuple):
    """A run that resumes where nothing is damaged."""

    losses: list[float]
    """Of each step."""
    seconds: float


def make_folder(root: Path) -> None:
    """A run that stands at step 4 of 6, its prepared corpus, its export, a branch, and what a
    launcher leaves.
    """
    (root / "text").mkdir(parents=True)
    for number in range(20):
        (root / "text" / f"{number:02}.txt").write_text(
            f"the {number} quick brown foxes jump over lazy dogs. " * (1 + number % 5)
        )
    (root / "config.toml").write_text(CONFIG)

    def prepare() -> int:
        return prepare_command.main(
            ["--corpus", "text", "--output", "prepared/corpus", "--config", "config.toml"]
        )

    def train() -> int:
        return train_rank([*TRAIN, "--training.steps=4"])

    def leave() -> int:
        status = hf.main(["export", "run", "hf"])
        status = status or branch.main(["run@4", "branched", "--training.steps", "6"])
        folder = jobs.create_submission_dir(Path("run"))
        jobs.record_submission(folder, Path("run").absolute(), "41", load(TRAIN))
        exit_markers.write(Path("run"), "REQUEUE", reason="SIGTERM", attempt="41.0.0")
        with Lease(Path("run/logs")):
            shutil.copy("run/logs/lease", "run/logs/left")
        return status

    for part in (prepare, train, leave):
        outcome = run_forked(part, root, seconds=60)
        if outcome.code:
            raise RuntimeError(outcome.said)


def run_forked(
    function: Callable[[], int | None], folder: Path, *, seconds: float = SECONDS
) -> Outcome:
    log = folder / "said"
    began = time.monotonic()
    if not (child := os.fork()):
        _become(function, folder, log)
    code: int | None = None
    while code is None and time.monotonic() - began < seconds:
        done, status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
        time.sleep(0.01)
    if code is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    spent = time.monotonic() - began
    return Outcome(
        -signal.SIGALRM if code is None else code, log.read_text(errors="replace"), spent
    )


def _become(function: Callable[[], int | None], folder: Path, log: Path) -> None:
    """Never returns."""
    status = 99
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
        torch.set_num_threads(1)
        status = function() or 0
    except BaseException:  # noqa: BLE001 - it is what this looks for
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def problems(case: Case, template: Path, folder: Path, undisturbed: Undisturbed) -> list[str]:
    """What went wrong in a case, run in `folder`."""
    shutil.copytree(template, folder, symlinks=True)
    if left := LEFT.get(case.file):
        (folder / left).rename(folder / case.file)
    case.apply(folder / case.file)
    committed = {path.name for path in (folder / "run/checkpoints").glob("step-*")}
    outcome = run_forked(
        COMMANDS[case.command], folder, seconds=max(SECONDS, 10 * undisturbed.seconds)
    )
    found = [f"{outcome.seconds:.0f} s"] * (outcome.code == -signal.SIGALRM)
    codes = {ending.exit_code for ending in ENDINGS}
    found += [f"exit code {outcome.code}"] * (outcome.code not in codes and not found)
    found += ["a traceback"] * ("Traceback (most recent call last)" in outcome.said)
    found += ["something executed the file"] * any(folder.rglob(EXECUTED))
    lines = outcome.said.splitlines()
    failed = outcome.code in codes - {0}
    found += ["no message"] * (
        failed and not any(line.startswith(("error: ", "run/", "prepared/")) for line in lines)
    )
    found += [f"{len(lines)} lines"] * (failed and len(lines) > MAX_LINES)
    longest = max(map(len, lines), default=0)
    found += [f"a line of {longest} characters"] * (longest > MAX_CHARS)
    kept = {
        path.name.removeprefix("bad-").split("-2026")[0]
        for path in (folder / "run/checkpoints").glob("*step-*")
    }
    if lost := {
        name for name in committed if name not in kept and name != Path(case.file).parent.name
    }:
        found.append(f"lost {', '.join(sorted(lost))}")
    if any(letter < " " for letter in outcome.said.replace("\n", "").replace("\t", "")):
        found.append("control characters")
    if case.command == "fresh" and not outcome.code:
        (loss,) = losses_of(folder / "fresh")
        # Whose header does not say what the rules are about.
        with suppress(ValueError, KeyError, TypeError):
            found += [
                f"accepted against the rules of {each}"
                for each in broken_rules(folder / "prepared/corpus")
            ]
        found += [f"trained on nothing: loss {loss}"] * (not 3 < loss < 8)
    if (
        case.command == "train"
        and not outcome.code
        and not any(name in case.damage for name in CHOSEN)
    ):
        losses = losses_of(folder / "run")
        expected = undisturbed.losses
        found += [f"trained otherwise: losses {losses[-2:]}, not {expected[-2:]}"] * (
            losses[-2:] != expected[-2:]
        )
    if found:
        found.append(outcome.said[-600:])
    shutil.rmtree(folder, ignore_errors=True)
    return found


def losses_of(folder: Path) -> list[float]:
    """Of a run."""
    return [
        json.loads(line)["loss"] for line in RunDir(folder).metrics_path.read_text().splitlines()
    ]


def undisturbed_run(template: Path, folder: Path) -> Undisturbed:
    shutil.copytree(template, folder, symlinks=True)
    outcome = run_forked(COMMANDS["train"], folder, seconds=60)
    if outcome.code:
        raise RuntimeError(outcome.said)
    return Undisturbed(losses_of(folder / "run"), outcome.seconds)
