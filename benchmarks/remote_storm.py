"""A storm of faults of object storage: does a run that reads its corpus from a URL, keeps its
checkpoints at one, and loses its machine again and again equal one that nothing happened to?

    python -m benchmarks.remote_storm [--only TEXT] [--folder DIR] [--write]

A small model on two CPU processes, a server of S3 (moto) on loopback, and a proxy before it that
makes faults. The corpus is streamed through a cache of two of its blocks. "Nothing local": run
folder and cache are deleted after the kill, as a machine that is lost takes them with it. What the
launcher does not restart, the storm starts again with the same command, as a scheduler would.
A fault is over once the store answers again and a checkpoint of a later step is copied there.
Then the same steps are trained undisturbed from the local corpus, and every tensor of the last
checkpoint must be equal, bit by bit, and with them what the last launch logged. Exits with 1 if
not.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.data import machine, say
from benchmarks.pages import replace_block
from tests.object_server import BUCKET, Proxy, object_server, point_environment_at
from tests.system.runs import (
    ROOT,
    RUN,
    WORDS,
    digests,
    kill_launcher,
    launch,
    launched,
    lines,
    metrics,
    wait_for,
    workers,
)
from trainer.config.source import CorpusSpec
from trainer.data.prepare import prepare
from trainer.data.remote_corpus import upload_corpus
from trainer.data.remote_shard import CACHE_FILENAME
from trainer.data.token_dataset import BLOCK_BYTES
from trainer.data.tokenizer import ByteTokenizer
from trainer.storage.object_store import RemoteError
from trainer.storage.remote_checkpoints import RemoteCheckpoints

PAGE = ROOT / "docs" / "reliability.md"
CORPUS_URL = f"s3://{BUCKET}/corpora/storm"
RUN_URL = f"s3://{BUCKET}/runs/storm"
RANKS = 2
PATIENCE_SECONDS = 240.0
HITS = 6
"""Requests that fail before the store recovers."""
OPTIONS = (
    *("--training.seq_len=512", "--training.global_batch_size=4"),
    *("--schedule.kind=constant", "--schedule.warmup_steps=0", "--checkpoint.interval=20"),
    *("--distributed.restart_seconds=0", "--distributed.restarts=9"),
)
EXACT = ("step", "loss", "grad_norm", "lr", "tokens")


class StormError(Exception):
    pass


@dataclass
class Storm:
    root: Path
    proxy: Proxy
    launcher: subprocess.Popen[str] | None = None
    endings: list[int] = field(default_factory=list)
    """Exit codes since the last fault."""

    @property
    def running(self) -> subprocess.Popen[str]:
        if self.launcher is None:
            raise StormError("nothing was started")
        return self.launcher

    @property
    def folder(self) -> Path:
        return self.root / "away"

    @property
    def cache(self) -> Path:
        return self.root / "node"

    def start(self) -> None:
        remote = ("--data.corpus", CORPUS_URL, "--data.cache_dir", str(self.cache))
        size = f"--data.remote_cache_gib={2 * BLOCK_BYTES / (1 << 30)}"
        copies = ("--checkpoint.remote", RUN_URL, "--training.steps=1000000")
        self.launcher = launch(
            self.root / "run.toml", self.folder, *OPTIONS, *remote, size, *copies, processes=RANKS
        )

    def kill(self) -> None:
        if self.launcher is not None and self.launcher.poll() is None:
            kill_launcher(self.launcher)

    def lose_machine(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.cache, ignore_errors=True)

    def copied(self) -> int:
        """The newest step that is copied; -1 if none is known."""
        try:
            return max(RemoteCheckpoints(RUN_URL).steps(), default=-1)
        except RemoteError:
            return -1

    def step(self) -> int:
        return max((step for (step,) in metrics(self.folder, "step")), default=-1)

    def starts(self) -> int:
        """Launches of this run folder."""
        path = self.folder / "events.jsonl"
        return sum(line["event"] == "start" for line in lines(path)) if path.exists() else 0

    def fail(self, kind: str, *, method: str = "", part: str = "") -> None:
        """Lets requests fail until several did, and the store recover."""
        before = len(self.proxy.requests)
        self.proxy.always(kind, method=method, part=part)

        def is_over() -> bool:
            self.is_running()
            asked = self.proxy.requests[before:]
            return sum(each.startswith(method) and part in path for each, path in asked) >= HITS

        if not wait_for(is_over, PATIENCE_SECONDS):
            raise StormError("the store was not asked")
        self.proxy.heal()

    def recover(self, step: int) -> None:
        """Waits for a copy of a later step."""
        if not wait_for(lambda: self.is_running() and self.copied() > step, PATIENCE_SECONDS):
            raise StormError(f"no recovery in {PATIENCE_SECONDS:.0f} s; see {self.root}")

    def is_running(self) -> bool:
        """True; starts again what ended."""
        if self.launcher is None:
            self.start()
        elif (status := self.launcher.poll()) is not None:
            self.endings.append(status)
            self.start()
        return True


# ---- faults


def store(kind: str, **which: str) -> Callable[[Storm], None]:
    """The store fails while the run trains."""
    return lambda storm: storm.fail(kind, **which)


def lost(storm: Storm) -> None:
    storm.lose_machine()


def kill_rank(storm: Storm) -> None:
    os.kill(workers(storm.running.pid)[-1], 9)


def lost_in_an_upload(storm: Storm) -> None:
    before = len(storm.proxy.requests)
    storm.proxy.always("slow", method="PUT", part="/runs/storm/step-")
    wait_for(lambda: any(method == "PUT" for method, _ in storm.proxy.requests[before:]), 60)
    storm.lose_machine()
    storm.proxy.heal()


def lost_behind_a_full_bucket(storm: Storm) -> None:
    step = storm.step()
    storm.proxy.always("full", method="PUT")
    # Checkpoints that are never copied go with the machine.
    wait_for(lambda: storm.is_running() and storm.step() > step + 45, PATIENCE_SECONDS)
    storm.lose_machine()
    storm.proxy.heal()


def damage_cache(storm: Storm) -> None:
    for path in storm.cache.glob(f"*/{CACHE_FILENAME}"):
        path.write_bytes(random.Random(0).randbytes(path.stat().st_size))


def damage_newest_copy(storm: Storm) -> None:
    storm.lose_machine()
    copies = RemoteCheckpoints(RUN_URL)
    newest = copies.steps()[-1]
    name = next(name for name in copies.folder.sizes(f"step-{newest}") if name.endswith(".distcp"))
    content = bytearray(copies.folder.read(name, max_bytes=1 << 30))
    content[len(content) // 2] ^= 1
    copies.folder.delete([name])
    copies.folder.create(name, bytes(content))


def terminate(storm: Storm) -> None:
    storm.running.terminate()
    storm.running.wait(PATIENCE_SECONDS)
    shutil.rmtree(storm.folder)
    shutil.rmtree(storm.cache)


def start_without(kind: str) -> Callable[[Storm], None]:
    """The machine is lost, and the next launch meets a store that fails."""

    def strike(storm: Storm) -> None:
        storm.lose_machine()
        storm.proxy.always(kind)
        storm.start()
        storm.running.wait(PATIENCE_SECONDS)
        storm.proxy.heal()

    return strike


TOKENS = {"method": "GET", "part": ".bin"}
UPLOADS = {"method": "PUT", "part": "/runs/storm/step-"}
FAULTS: dict[str, Callable[[Storm], None]] = {
    "503 to reads of tokens": store("busy", **TOKENS),
    "503 to uploads": store("busy", **UPLOADS),
    "503 to everything": store("busy"),
    "kill -9 of all, nothing local": lost,
    "uploads cut off": store("cut", **UPLOADS),
    "reads of tokens cut off": store("dead", **TOKENS),
    "every connection cut": store("dead"),
    "slow link to tokens": store("slow", **TOKENS),
    "kill -9 of a rank": kill_rank,
    "slow link to uploads": store("slow", **UPLOADS),
    "credentials expire for tokens": store("expired", **TOKENS),
    "credentials expire for uploads": store("expired", **UPLOADS),
    "kill -9 of all in an upload, nothing local": lost_in_an_upload,
    "access denied to everything": store("denied"),
    "bucket full": store("full", method="PUT"),
    "kill -9 of all behind a full bucket, nothing local": lost_behind_a_full_bucket,
    "cache of tokens overwritten": damage_cache,
    "newest copy damaged, nothing local": damage_newest_copy,
    "SIGTERM, nothing local": terminate,
    "start with expired credentials, nothing local": start_without("expired"),
}


# ---- campaign


def write_inputs(root: Path) -> None:
    """A corpus of some 20 blocks, its copy at the URL, and the configuration."""
    draw = random.Random(0)
    folder = root / "corpus"
    folder.mkdir(parents=True)
    for number in range(40):
        text = " ".join(draw.choice(WORDS) for _ in range(draw.randint(500, 6000)))
        (folder / f"{number:02}.txt").write_text(text)
    (root / "run.toml").write_text(RUN.format(root=root))
    spec = CorpusSpec(corpus=str(folder), cache_dir=root / "prepared")
    upload_corpus(prepare(spec, ByteTokenizer()), CORPUS_URL, key="storm")


def campaign(root: Path, proxy: Proxy, only: str) -> tuple[list[str], list[str], int]:
    """(rows of the table, what differs, steps)."""
    write_inputs(root)
    storm = Storm(root, proxy)
    rows = ["| fault | endings | s |", "|---|---|---|"]
    try:
        storm.recover(0)
        for name in [name for name in FAULTS if only in name]:
            began = time.monotonic()
            reached = max(storm.copied(), 0)
            starts = storm.starts()
            FAULTS[name](storm)
            # What the fault itself ended is no ending.
            ended = storm.launcher is not None and storm.launcher.poll() == -9
            if ended:
                storm.launcher = None
            storm.recover(max(reached, storm.copied()))
            quiet = "trains on" if storm.starts() == starts else "restarted"
            endings = ", ".join(f"exit {code}" for code in storm.endings) or quiet
            storm.endings.clear()
            rows.append(
                f"| {name} | {'resumed' if ended else endings} | {time.monotonic() - began:.1f} |"
            )
            say(rows[-1])
        storm.running.terminate()
        if storm.running.wait(PATIENCE_SECONDS) != 0:
            raise StormError(f"the run was not saved; see {root}")
    finally:
        storm.kill()
    end = storm.step()
    whole = root / "whole"
    done = launched(
        root / "run.toml",
        whole,
        *OPTIONS,
        f"--training.steps={end}",
        processes=RANKS,
        patience=1200,
    )
    if done.statuses != [0]:
        raise StormError(f"the undisturbed run fails: {done.said[-2000:]}")
    return rows, differences(storm.folder, whole, end), end


def differences(storm: Path, whole: Path, end: int) -> list[str]:
    found = []
    ends = [digests(each / "checkpoints" / f"step-{end}") for each in (storm, whole)]
    if ends[0] != ends[1]:
        found.append(f"tensors of step {end}")
    of_last_launch = metrics(storm, *EXACT)
    if of_last_launch != metrics(whole, *EXACT)[-len(of_last_launch) :]:
        found.append("metrics of the last launch")
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose name has it")
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    parser.add_argument("--write", action="store_true", help=f"the table, into {PAGE.name}")
    asked = parser.parse_args(argv)
    say(machine())
    with (
        tempfile.TemporaryDirectory() as temporary,
        object_server() as proxy,
        pytest.MonkeyPatch.context() as patch,
    ):
        point_environment_at(proxy, patch)
        rows, differing, steps = campaign(asked.folder or Path(temporary), proxy, asked.only)
    say("\n".join(["", *rows, "", f"{len(rows) - 2} faults in {steps} steps"]))
    say("; ".join(differing) + " differ" if differing else "every tensor is equal, bit by bit")
    if asked.write and not differing:
        PAGE.write_text(replace_block(PAGE.read_text(), "remote_storm", rows))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
