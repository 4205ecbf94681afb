"""Nodes of the storm (benchmarks/storm.py) on one machine, and what happens to them.

A node is a network namespace with a shared memory of its own; a cable connects the two. Ranks 0
and 1 train on the first node, 2 and 3 on the second. In memory, each node holds the checkpoints of
its ranks and copies of those of the other.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.faults import wait_for
from benchmarks.storm_faults import DAMAGES, Fault, delete
from trainer.checkpoint.memory_folder import memory_folder

if TYPE_CHECKING:
    from benchmarks.storm_run import Run

NAMES = ("longhaul-storm-0", "longhaul-storm-1")
IN_NAMESPACE = "mount -t tmpfs -o mode=1777 storm /dev/shm && echo ready && exec sleep infinity"


class Node:
    """The namespaces of a node, which a sleeping process keeps."""

    def __init__(self, name: str) -> None:
        command = ["ip", "netns", "exec", name, "sh", "-c", IN_NAMESPACE]
        self._keeper = subprocess.Popen(command, stdout=subprocess.PIPE)
        if self._keeper.stdout is None or self._keeper.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{name} has no shared memory of its own")
        self.prefix = ["nsenter", f"--target={self._keeper.pid}", "--net", "--mount"]

    def memory(self, run: Run) -> Path:
        """The in-memory checkpoints of a run on this node, as seen from outside."""
        return Path(f"/proc/{self._keeper.pid}/root", *memory_folder(run.folder).parts[1:])

    def remove(self) -> None:
        self._keeper.kill()
        self._keeper.wait()


def connect_nodes() -> list[Node]:
    """Creates both nodes."""
    remove_namespaces()
    for name in NAMES:
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
    ip(
        "link",
        "add",
        "eth0",
        "netns",
        NAMES[0],
        "type",
        "veth",
        "peer",
        "name",
        "eth0",
        "netns",
        NAMES[1],
    )
    for index, name in enumerate(NAMES):
        ip("-n", name, "addr", "add", f"10.98.0.{index + 1}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
    return [Node(name) for name in NAMES]


def remove_namespaces() -> None:
    for name in NAMES:
        if Path("/run/netns", name).exists():
            ip("netns", "del", name)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


# ---- faults


def node_faults() -> Iterator[Fault]:
    on_nodes = partial(Fault, needs_root=True, needs_nodes=True)
    yield on_nodes("the cable of a node pulled", pull_cable)
    yield on_nodes("a node lost with its memory", lose_node, launches=True)
    yield on_nodes("both nodes lost with their memory", lose_both, launches=True)
    yield on_nodes(
        "a node comes back with an older in-memory checkpoint", come_back, launches=True
    )
    yield on_nodes(
        "a node comes back with that of an earlier launch",
        come_back_from_an_earlier_launch,
        launches=True,
    )
    yield on_nodes("nodes whose newest in-memory checkpoints differ", disagree, launches=True)
    yield on_nodes(
        "in-memory checkpoints of a node: cut off", damage_node("cut off"), launches=True
    )
    yield on_nodes(
        "in-memory checkpoints of a node: a bit flipped",
        damage_node("a bit flipped"),
        launches=True,
    )
    yield on_nodes(
        "a rank's in-memory checkpoint damaged on both nodes", damage_both, launches=True
    )


def pull_cable(run: Run, _: random.Random) -> None:
    ip("-n", NAMES[1], "link", "set", "eth0", "down")
    wait_for(lambda: run.ending() is not None, 200)
    ip("-n", NAMES[1], "link", "set", "eth0", "up")


def train_in_memory(run: Run, strike: Callable[[], None] | None = None) -> None:
    """Some steps of a launch that copies each to memory, until it is killed; `strike` comes
    between.
    """
    run.kill()
    run.start("--checkpoint.memory_interval", "1")
    for between in (strike, None):
        reached = run.step()
        wait_for(lambda: run.step() > reached + 2, 240)  # noqa: B023 - called in this turn
        if between is not None:
            between()
    run.kill()


def lose_node(run: Run, draw: random.Random) -> None:
    """With the checkpoints of its ranks and those that it holds for the other."""
    train_in_memory(run)
    clear(draw.choice(run.nodes).memory(run))


def lose_both(run: Run, _: random.Random) -> None:
    train_in_memory(run)
    for node in run.nodes:
        clear(node.memory(run))


def clear(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def come_back(run: Run, draw: random.Random) -> None:
    """Of the same launch, from some steps ago."""
    folder = draw.choice(run.nodes).memory(run)
    old = run.root / "old-memory"
    train_in_memory(run, lambda: snapshot(folder, old))
    restore(old, folder)


def come_back_from_an_earlier_launch(run: Run, draw: random.Random) -> None:
    folder = draw.choice(run.nodes).memory(run)
    old = run.root / "old-memory"
    train_in_memory(run)
    snapshot(folder, old)
    train_in_memory(run)
    restore(old, folder)


def snapshot(folder: Path, to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)


def restore(old: Path, folder: Path) -> None:
    clear(folder)
    for path in old.iterdir():
        shutil.copy(path, folder)


def disagree(run: Run, draw: random.Random) -> None:
    """Half of the files of each node are gone, whichever step they have."""
    train_in_memory(run)
    for node in run.nodes:
        damage(node.memory(run), "*", 4, delete, draw)


def damage_node(kind: str) -> Callable[[Run, random.Random], None]:
    def strike(run: Run, draw: random.Random) -> None:
        train_in_memory(run)
        damage(draw.choice(run.nodes).memory(run), "*", 4, DAMAGES[kind], draw)

    return strike


def damage_both(run: Run, draw: random.Random) -> None:
    train_in_memory(run)
    rank = draw.randrange(4)
    for node in run.nodes:
        damage(node.memory(run), f"*-{rank}.*", 1, DAMAGES["a bit flipped"], draw)


def damage(
    folder: Path,
    pattern: str,
    count: int,
    kind: Callable[[Path, random.Random], None],
    draw: random.Random,
) -> None:
    files = sorted(folder.glob(pattern))
    for path in draw.sample(files, min(count, len(files))):
        with suppress(FileNotFoundError):
            kind(path, draw)
