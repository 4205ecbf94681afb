"""A storm of faults: does a run that survives it equal one that nothing happened to?

    python -m benchmarks.storm [--faults 120] [--seed 1] [--only TEXT] [--mesh cp=2,tp=2] [--folder DIR] [--nodes] [--write]

A small model on four CPU processes, on three meshes one after the other. Faults of every kind
follow each other a few steps apart: of processes, disks, clocks, leases, replicas, and damage to
every kind of file (`benchmarks/storm_faults.py`), and with `--nodes` what happens to nodes and
their memory (`benchmarks/storm_nodes.py`). Half of the launches keep in-memory checkpoints. What
the launcher does not restart, the storm starts again with the same command, as a scheduler would;
where an ending needs a person (78 or 2), it restores the damaged file, as that person would. Then
the same steps are trained on the same meshes undisturbed, and every tensor of the last checkpoint
of each mesh, every line of metrics and the position in the data must be equal, bit by bit. Exits
with 1 if not, if a fault ends the run in a class that is not its own, or if a run does not recover
within minutes.

Mounts of small and read-only disks and network namespaces (`--nodes`: another leg on the third
mesh, as two nodes) need root; without it, those faults are left out, which is said. `--mesh`
trains on one of the meshes only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import storm_faults, storm_nodes
from benchmarks.data import machine, say
from benchmarks.faults import wait_for
from benchmarks.pages import replace_block
from benchmarks.storm_faults import Fault
from benchmarks.storm_nodes import Node
from benchmarks.storm_run import RANKS, ROOT, Run
from trainer.checkpoint.memory_folder import memory_folder, remove_memory_folder
from trainer.storage.manifest import read_state

PATIENCE_SECONDS = 300.0
"""For a fault to be recovered from: a dead node's lease takes 90."""
RESTORED = ", restored by a person"
MESHES = (
    {"dp_shard": 4},
    {"cp": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2},
)


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


class Storm:
    def __init__(self, root: Path, seed: int) -> None:
        self.run = Run(root)
        self.draw = random.Random(seed)
        self.recoveries: list[Recovery] = []
        self.ends: list[int] = []
        """Last step on each mesh."""

    def pass_over(
        self, mesh: dict[str, int], faults: Sequence[Fault], nodes: Sequence[Node]
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
            # A pipe in place of the metrics hides how far the run is.
            reached = max(reached, self.run.step())
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
        # A person has restored it already if the launch noticed; a second time would undo what
        # the launch has written since.
        if restore is not None and RESTORED not in ending:
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
                    ending += RESTORED
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
    root: Path, faults: int, seed: int, only: str, *, meshes: Sequence[dict[str, int]], nodes: bool
) -> tuple[list[Recovery], list[str]]:
    """Prints what happens; returns the recoveries, and what differs.

    Fewer faults than meshes: as many meshes.
    """
    storm = Storm(root / "storm", seed)
    may_mount = storm_faults.mount_disk(storm.run.folder)
    legs = plan_legs(meshes[:faults], faults, seed, only, is_root=may_mount, nodes=nodes)
    say(
        f"{machine()}; {RANKS} ranks, {sum(len(leg.faults) for leg in legs)} faults, seed {seed}\n"
    )
    try:
        for leg in legs:
            say(f"mesh {leg.mesh}, {2 if leg.is_on_nodes else 1} nodes")
            storm.pass_over(
                leg.mesh, leg.faults, storm_nodes.connect_nodes() if leg.is_on_nodes else ()
            )
        say(
            f"\n{len(storm.recoveries)} faults in {storm.ends[-1]} steps; training {storm.ends} undisturbed"
        )
        whole = train_undisturbed(root / "whole", [leg.mesh for leg in legs], storm.ends)
        return storm.recoveries, differences(storm.run, whole, storm.ends)
    finally:
        storm.run.kill()
        for node in storm.run.nodes:
            node.remove()
        storm_nodes.remove_namespaces()
        if storm.run.folder.exists():
            remove_memory_folder(memory_folder(storm.run.folder))
        storm_faults.unmount_disk(storm.run.folder)
        say("\n" + "\n".join(table(storm.recoveries)))


class Leg(NamedTuple):
    mesh: dict[str, int]
    faults: list[Fault]
    is_on_nodes: bool = False


def plan_legs(
    meshes: Sequence[dict[str, int]],
    faults: int,
    seed: int,
    only: str,
    *,
    is_root: bool,
    nodes: bool,
) -> list[Leg]:
    """Faults in random order, each kind once before any comes again, dealt to the meshes that they
    fit.
    """
    draw = random.Random(seed)
    legs = [Leg(mesh, []) for mesh in meshes]
    kinds = [fault for fault in every_fault() if only in fault.name]
    for fault in kinds:
        if fault.needs_root and not is_root:
            say(f"left out, needs root: {fault.name}")
    kinds = [fault for fault in kinds if is_root or not fault.needs_root]
    copies = [leg for leg in legs if "dp_replicate" in leg.mesh]
    anywhere = [
        fault for fault in kinds if not fault.needs_nodes and (copies or not fault.needs_replicas)
    ]
    shuffled = chain.from_iterable(draw.sample(anywhere, len(anywhere)) for _ in cycle((0,)))
    for fault in islice(shuffled, faults if anywhere else 0):
        min(
            copies if fault.needs_replicas else legs, key=lambda leg: len(leg.faults)
        ).faults.append(fault)
    if nodes and is_root:
        between = cycle([fault for fault in kinds if fault.fits_nodes])
        on_nodes = [fault for fault in kinds if fault.needs_nodes] * 2
        draw.shuffle(on_nodes)
        both = [each for fault in on_nodes for each in (fault, *islice(between, 1))]
        legs.append(Leg(legs[-1].mesh, both, is_on_nodes=True))
    return [leg for leg in legs if leg.faults]


def every_fault() -> list[Fault]:
    return [*storm_faults.every_fault(), *storm_nodes.node_faults()]


def mesh_of(text: str) -> dict[str, int]:
    return {axis: int(size) for axis, _, size in (part.partition("=") for part in text.split(","))}


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
        "--mesh", type=mesh_of, choices=MESHES, help="one of them only, such as cp=2,tp=2"
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
        meshes = MESHES if options.mesh is None else (options.mesh,)
        recoveries, found = campaign(
            root.absolute(),
            options.faults,
            options.seed,
            options.only,
            meshes=meshes,
            nodes=options.nodes,
        )
    say("\nbitwise equal to the undisturbed run" if not found else f"\nDIFFERENT: {found[:10]}")
    if options.write and not found:
        page = ROOT / "docs" / "reliability.md"
        page.write_text(replace_block(page.read_text(), "storm", table(recoveries)))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
