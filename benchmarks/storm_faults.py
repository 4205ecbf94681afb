"""The faults of the storm (benchmarks/storm.py): of processes, disks, clocks and leases, and
damage to files.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.faults import wait_for
from trainer.checkpoint.memory_folder import memory_folder
from trainer.storage.artifact import seal
from trainer.storage.lease import LeaseOwner

if TYPE_CHECKING:
    from benchmarks.storm_run import Run

Restore = Callable[[], None]


@dataclass(frozen=True)
class Fault:
    name: str
    strike: Callable[[Run, random.Random], Restore | None]
    """Returns what puts a damaged file back, as a person would.

    Leaves no launcher in `Run` if it must be started again.
    """
    needs_person: bool = False
    """Whether the run may end with 78 or 2."""
    needs_two_checkpoints: bool = False
    needs_root: bool = False
    needs_nodes: bool = False
    needs_replicas: bool = False
    """Whether ranks must hold copies of what they train."""
    launches: bool = False
    """Whether the strike itself starts and kills launches."""
    goes_on: bool = False
    """Whether the launch that it strikes survives it."""
    fits_nodes: bool = False
    """Whether it can strike a run on two nodes."""


def every_fault() -> list[Fault]:
    """Those of one node."""
    return [*process_faults(), *file_faults(), *disk_faults(), *other_faults()]


# ---- processes


def process_faults() -> Iterator[Fault]:
    for rank in range(4):
        yield Fault(
            f"kill -9 of rank {rank}", partial(signal_rank, number=signal.SIGKILL, rank=rank)
        )
    kill_one = partial(signal_rank, number=signal.SIGKILL)
    yield Fault(
        "kill -9 of a rank in a save",
        lambda run, draw: in_a_save(run, lambda: kill_one(run, draw)),
    )
    yield Fault("kill -9 of the launcher", kill_launcher, fits_nodes=True)
    yield Fault("kill -9 of launcher and ranks", lambda run, _: run.kill(), fits_nodes=True)
    yield Fault("kill -9 of all in a save", lambda run, _: in_a_save(run, run.kill))
    yield Fault("SIGSTOP of a rank", partial(signal_rank, number=signal.SIGSTOP))
    yield Fault("SIGSTOP of the launcher for 3 s", stop_launcher, goes_on=True)
    yield Fault(
        "SIGTERM to the launcher", lambda run, _: run.launchers[0].terminate(), fits_nodes=True
    )
    yield Fault("SIGTERM in a save", lambda run, _: in_a_save(run, run.launchers[0].terminate))
    yield Fault("SIGUSR1 to a rank", partial(signal_rank, number=signal.SIGUSR1))


def signal_rank(
    run: Run, draw: random.Random, *, number: signal.Signals, rank: int | None = None
) -> None:
    """Without `rank`, to any."""
    with suppress(ProcessLookupError, IndexError):  # It ended meanwhile.
        os.kill(run.workers()[draw.randrange(4) if rank is None else rank], number)


def kill_launcher(run: Run, _: random.Random) -> None:
    """Its ranks end by themselves."""
    pids = run.workers()
    run.launchers[0].kill()
    for each in run.launchers:
        each.wait()
    wait_for(lambda: not any(map(is_alive, pids)), 15)
    run.launchers.clear()


def stop_launcher(run: Run, _: random.Random) -> None:
    run.launchers[0].send_signal(signal.SIGSTOP)
    time.sleep(3)
    run.launchers[0].send_signal(signal.SIGCONT)


def in_a_save(run: Run, strike: Callable[[], None]) -> None:
    """Between the creation of a temporary folder and its commit."""
    wait_for(lambda: any((run.folder / "checkpoints").glob(".tmp-step-*")), 240)
    strike()


# ---- files


def file_faults() -> Iterator[Fault]:
    kinds = (*DAMAGES,)
    for name, kind in product(("manifest.json", ".metadata", "state.json", "__0_0.distcp"), kinds):
        yield damage_fault(
            f"{name} of the newest checkpoint", newest(name), kind, needs_two_checkpoints=True
        )
    for pattern, kind in product(
        ("*.plan", "shard-*.bin", "shard-*.idx", "shard-*.blocks", "meta.json"), kinds
    ):
        yield damage_fault(pattern, prepared(pattern), kind, needs_person=True)
    for name, kind in product(
        ("config.toml", "prediction.json", "events.jsonl", "STOP", "checkpoints/newest"), kinds
    ):
        yield damage_fault(name, in_run(name), kind, needs_person=kind == "made a pipe")
    for name, kind in product(("lease", "rank-0.log"), kinds):
        yield damage_fault(
            f"logs/{name}", in_run(f"logs/{name}"), kind, needs_person=kind == "made a pipe"
        )
    for kind in ("a bit flipped", "cut off", "deleted", "made a pipe"):
        yield Fault(
            f"metrics.jsonl: {kind}",
            damage_metrics(kind),
            needs_person=kind == "made a pipe",
            launches=True,
        )
        yield Fault(f"an in-memory checkpoint: {kind}", damage_memory(kind), launches=True)


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(max(len(content), 1))])


def delete(path: Path, _: random.Random) -> None:
    path.unlink()


def make_a_pipe(path: Path, _: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "a bit flipped": flip,
    "cut off": cut,
    "deleted": delete,
    "made a pipe": make_a_pipe,
}
Find = Callable[["Run", random.Random], Path]


def newest(name: str) -> Find:
    return lambda run, _: run.checkpoints()[-1] / name


def prepared(pattern: str) -> Find:
    return lambda run, draw: draw.choice(sorted((run.root / "prepared").rglob(pattern)))


def in_run(name: str) -> Find:
    return lambda run, _: run.folder / name


def damage_fault(
    name: str,
    find: Find,
    kind: str,
    *,
    needs_person: bool = False,
    needs_two_checkpoints: bool = False,
) -> Fault:
    def strike(run: Run, draw: random.Random) -> Restore:
        run.kill()
        path = find(run, draw)
        if not path.exists():
            path.write_text("not written by a run")
        content = path.read_bytes()
        DAMAGES[kind](path, draw)

        def restore() -> None:
            if path.parent.exists():  # Else it was set aside.
                path.unlink(missing_ok=True)
                path.write_bytes(content)

        return restore

    return Fault(f"{name}: {kind}", strike, needs_person, needs_two_checkpoints)


def damage_metrics(kind: str) -> Callable[[Run, random.Random], Restore | None]:
    """A person puts the lines back that a launch then misses: it cannot know of them."""

    def strike(run: Run, draw: random.Random) -> Restore | None:
        run.kill()
        path = run.folder / "metrics.jsonl"
        content = path.read_bytes()
        by_step = {
            json.loads(line)["step"]: line
            for line in content.splitlines(keepends=True)
            if line.endswith(b"\n")
        }
        DAMAGES[kind](path, draw)
        if kind == "made a pipe":

            def restore() -> None:
                path.unlink(missing_ok=True)
                path.write_bytes(content)

            return restore
        reached = max(by_step)
        run.start()
        wait_for(lambda: run.step() > reached + 1, 240)
        run.kill()
        for line in path.read_bytes().splitlines(keepends=True):
            with suppress(ValueError, KeyError, TypeError):
                by_step.setdefault(json.loads(line)["step"], line)
        path.write_bytes(b"".join(by_step[step] for step in sorted(by_step)))
        return None

    return strike


def damage_memory(kind: str) -> Callable[[Run, random.Random], None]:
    def strike(run: Run, draw: random.Random) -> None:
        run.kill()
        run.start("--checkpoint.memory_interval", "1")
        reached = run.step()
        wait_for(lambda: run.step() > reached + 2, 240)
        run.kill()
        files = sorted(memory_folder(run.folder).glob("rank-*"))
        for path in draw.sample(files, min(2, len(files))):
            DAMAGES[kind](path, draw)

    return strike


# ---- disks, of a small file system of its own


def mount_disk(folder: Path) -> bool:
    """Whether this process may mount."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "storm", str(folder)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def unmount_disk(folder: Path) -> None:
    subprocess.run(["umount", "-l", folder], check=False, capture_output=True)


def disk_faults() -> Iterator[Fault]:
    yield Fault("a full disk for 3 s", fill_disk, needs_root=True, goes_on=True)
    yield Fault("a full disk until the run ends", fill_disk_and_kill, needs_root=True)
    yield Fault("a read-only disk for 3 s", make_read_only, needs_root=True, goes_on=True)
    yield Fault("a slow disk for 3 s", slow_disk, goes_on=True)


def fill(run: Run) -> Path:
    path = run.folder / "filler"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    return path


def fill_disk(run: Run, _: random.Random) -> None:
    path = fill(run)
    time.sleep(3)
    path.unlink()


def fill_disk_and_kill(run: Run, _: random.Random) -> None:
    path = fill(run)
    run.kill()
    run.start()
    wait_for(lambda: run.ending() is not None, 240)
    path.unlink()


def make_read_only(run: Run, _: random.Random) -> None:
    """Files that are open already can still be written."""
    subprocess.run(["mount", "--bind", run.folder, run.folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", run.folder], check=True)
        time.sleep(3)
    finally:
        unmount_disk(run.folder)


def slow_disk(run: Run, _: random.Random) -> None:
    (run.root / "slow").touch()
    time.sleep(3)
    (run.root / "slow").unlink()


# ---- clocks and leases


def other_faults() -> Iterator[Fault]:
    yield Fault(
        "the clock set forward by a day", partial(set_clock, seconds=86400.0), goes_on=True
    )
    yield Fault("the clock set back by a day", partial(set_clock, seconds=-86400.0), goes_on=True)
    yield Fault("a second launch in the folder", launch_twice, goes_on=True)
    yield Fault("the lease of a dead node", hold_lease_of_dead_node)
    yield Fault("a replica drifts", drift, needs_replicas=True)
    yield Fault(
        "a replica drifts, and in-memory checkpoints with it",
        drift_and_kill,
        needs_replicas=True,
        launches=True,
    )


def set_clock(run: Run, _: random.Random, *, seconds: float) -> None:
    (run.root / "clock").write_text(str(seconds))


def launch_twice(run: Run, _: random.Random) -> None:
    first = run.launchers
    run.launchers = []
    run.start()
    second = run.launchers
    run.launchers = first
    codes = [each.wait(240) for each in second]
    if codes != [2] * len(codes):
        raise RuntimeError(f"a second launch in the folder ended with {codes}")


def hold_lease_of_dead_node(run: Run, _: random.Random) -> None:
    run.kill()
    logs = run.folder / "logs"
    owner = LeaseOwner(
        folder=logs.stat().st_ino,
        host="lost",
        boot="lost",
        pid_namespace="",
        pid=7,
        started="1",
        job="",
        attempt="",
    )
    (logs / "lease").write_bytes(seal(owner))


def drift(run: Run, draw: random.Random) -> None:
    """A wrong bit in a weight of one rank.

    The check before the next checkpoint on disk finds it.
    """
    path = run.root / f"drift-{draw.randrange(4)}"
    path.touch()
    wait_for(lambda: not path.exists(), 240)


def drift_and_kill(run: Run, draw: random.Random) -> None:
    """A launch resumes from drifted in-memory checkpoints; the check before it saves to the disk
    finds them.
    """

    def mismatches() -> int:
        return (run.folder / "events.jsonl").read_bytes().count(b'"replica_mismatch"')

    run.kill()
    known = mismatches()
    run.start("--checkpoint.memory_interval", "1")
    reached = run.step()
    wait_for(lambda: run.step() > reached, 240)
    drift(run, draw)
    reached = run.step()
    wait_for(lambda: run.step() > reached + 1 or mismatches() > known, 240)
    run.kill()
    if mismatches() == known:
        run.start("--checkpoint.memory_interval", "1")
        wait_for(lambda: mismatches() > known, 240)
        run.kill()


# ---- /proc


def children(pid: int) -> list[int]:
    """The ranks of a launcher, in order."""
    with suppress(OSError):
        found = [
            int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
        return [each for each in found if b"train.py" in command_of(each)]
    return []


def command_of(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def is_alive(pid: int) -> bool:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
