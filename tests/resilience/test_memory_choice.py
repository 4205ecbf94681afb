"""Which in-memory checkpoint a launch resumes from: the newest step that is whole, whatever is
missing, torn or older on a node.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import distributed

from parallelisms.mesh.collectives import all_gather_values
from tests.ranks import run_ranks
from tests.resilience.memory_states import (
    NODES,
    RANKS,
    memory_of_node,
    node_of,
    state_of,
    tensors_of,
)
from trainer.checkpoint import in_memory
from trainer.checkpoint import memory_folder as memory
from trainer.checkpoint.in_memory import InMemoryCheckpoints
from trainer.checkpoint.memory_folder import Copy, newest_whole
from trainer.step.process_group import World
from trainer.storage.artifact import HEADER_BYTES
from trainer.storage.run_dir import RunDir

STATE_BYTES = 1 << 14


def every_table(draw: random.Random) -> set[Copy]:
    """What three ranks can read of three steps: each part at random, of its owner or of others, in
    one or several files.
    """
    copies = product(range(1, 4), range(3), range(3), ("rank", "held", "other"))
    return {
        Copy(step, owner, holder, f"{kind}-{owner}")
        for step, owner, holder, kind in copies
        if draw.random() < 0.15
    }


def test_every_rank_is_given_its_part_of_the_newest_step_that_is_whole() -> None:
    draw = random.Random(0)
    outcomes = set[int | None]()
    for _ in range(2000):
        copies = every_table(draw)
        by_step = {
            step: {copy.owner for copy in copies if copy.step == step} for step in range(1, 4)
        }
        expected = max(
            (step for step, owners in by_step.items() if owners == {0, 1, 2} and step > 1),
            default=None,
        )
        chosen = newest_whole(copies, 3, newer_than=1)
        outcomes.add(expected)
        assert (chosen is None) == (expected is None)
        for rank, copy in enumerate(chosen or ()):
            assert (copy.step, copy.owner) == (expected, rank)
            assert copy in copies
            others = [each for each in copies if each.step == copy.step and each.owner == rank]
            assert copy.holder == rank or all(each.holder != rank for each in others), (
                "its own comes first"
            )
        assert chosen == newest_whole(sorted(copies, reverse=True), 3, newer_than=1), (
            "all ranks choose alike"
        )
    assert outcomes == {None, 2, 3}


def test_a_step_is_not_put_together_of_parts_of_different_steps() -> None:
    assert (
        newest_whole({Copy(8, 0, 0, "rank-0.0"), Copy(9, 1, 1, "rank-1.0")}, 2, newer_than=4)
        is None
    )


# ---- on two nodes of two ranks, without training


def damages(cases: int) -> Iterator[dict[str, str]]:
    """What happens to each file: one node lost or older, nothing, both copies of one rank's
    newest, of any step, and random ones.
    """
    names = [
        f"{kind}-{rank}.{index}"
        for kind, rank, index in product(("rank", "held"), range(RANKS), range(2))
    ]
    nodes = [
        [name for name in names if node_of(int(name[5])) == (node ^ name.startswith("held"))]
        for node in (0, 1)
    ]
    for node in nodes:
        yield dict.fromkeys(node, "deleted")
    yield {}
    yield {"rank-1.0": "bit of a shard", "held-1.0": "a pipe"}
    # Found when it has been fetched.
    yield {"rank-1.0": "shortened", "held-1.0": "bit of a shard"}
    yield {name: "deleted" for name in names if "-3." in name}
    for node in nodes:
        yield dict.fromkeys(node, OLDER)
    yield dict.fromkeys(names, OLDER)
    yield dict.fromkeys(nodes[0], OLDER) | dict.fromkeys(nodes[1], "deleted")
    yield dict.fromkeys(nodes[0], OLDER) | {
        "held-1.0": "bit of a shard",
        "held-1.1": "bit of the state",
    }
    draw = random.Random(1)
    for _ in range(cases):
        share = draw.choice((0.1, 0.3, 0.5))
        yield {name: draw.choice(KINDS) for name in names if draw.random() < share}


OLDER = "of some steps ago"
KINDS = (
    OLDER,
    "deleted",
    "a pipe",
    "shortened",
    "bit of the header",
    "bit of the state",
    "bit of a shard",
    "of an earlier step",
)


def damage(path: Path, kind: str, content: bytearray, other: bytes) -> None:
    """`other` is the rank's file of another step; of an older one, the whole file that it was
    then.
    """
    if kind == OLDER:
        path.write_bytes(other)
        return
    if kind in ("deleted", "a pipe"):
        path.unlink()
        if kind == "a pipe":
            os.mkfifo(path)
        return
    if kind == "shortened":
        del content[-1:]
    elif kind == "of an earlier step":  # Its data: the header is of this step.
        content[HEADER_BYTES:] = other[HEADER_BYTES:]
    else:
        at = {"bit of the header": 200, "bit of the state": HEADER_BYTES + 300}.get(
            kind, HEADER_BYTES + STATE_BYTES
        )
        content[at] ^= 4
    path.write_bytes(content)


def expected_step(found: dict[str, str], step_of: dict[str, int]) -> int | None:
    """The newest step of which every rank's part is whole somewhere."""
    whole = {(name[5], step) for name, step in step_of.items() if found.get(name, OLDER) == OLDER}
    steps = (9, 8, 6, 5)
    return next(
        (step for step in steps if all((str(rank), step) in whole for rank in range(RANKS))), None
    )


def load_after_damage(
    root: Path, cases: int, *, swap: bool
) -> list[tuple[dict[str, str], int | None, int | None]]:
    """(damage, the step that is loaded, the step that should be) for each case; checks the loaded
    values.

    With `swap`, the nodes have changed places before the next launch.
    """
    rank = distributed.get_rank()
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_memory, "STATE_BYTES", STATE_BYTES)
        for found in damages(cases):
            patch.setattr(memory, "SHARED_MEMORY", memory_of_node(root.parent, node_of(rank)))
            expected = copy_and_damage(root, found)
            if swap:
                patch.setattr(
                    memory, "SHARED_MEMORY", memory_of_node(root.parent, 1 - node_of(rank))
                )
            copies = launch(root)
            loaded = tensors_of(rank, 0)
            state = copies.load_newest(loaded, state_of(0), committed_step=4)
            wanted = tensors_of(rank, 0 if state is None else state.step)
            assert all(torch.equal(value, wanted[name]) for name, value in loaded.items())
            if state is not None:
                assert state.model_copy(update={"optimizer_steps": None}) == state_of(state.step)
                require_every_rank_to_keep(state.step, copies, root)
            require_no_files_of_others(copies)
            results.append((found, state.step if state else None, expected))
    return results


def launch(root: Path) -> InMemoryCheckpoints:
    rank = distributed.get_rank()
    group = distributed.group.WORLD
    assert group is not None
    return InMemoryCheckpoints(
        RunDir(root), World(rank, RANKS, torch.device("cpu"), NODES), group, tensors_of(rank, 0)
    )


def copy_and_damage(root: Path, found: dict[str, str]) -> int | None:
    """Copies steps 5 to 9 to empty memory, of which two remain, and damages the files; returns the
    step to resume from.
    """
    rank = distributed.get_rank()
    if rank == 0:
        for path in files_of(root):
            path.unlink()
    distributed.barrier()
    copies = launch(root)
    at_step_6 = dict[str, bytes]()
    for step in (5, 6, 7, 8, 9):
        copies.copy(tensors_of(rank, step), state_of(step), to_disk=False)
        if step == 6:
            copies.wait()
            distributed.barrier()
            at_step_6 = {path.name: path.read_bytes() for path in files_of(root)}
            distributed.barrier()
    copies.wait()
    distributed.barrier()
    assert memory.Newest.read(RunDir(root).checkpoints_dir).in_memory == 9
    headers = {file.path.name: file.read_header() for file in (*copies._files, *copies._held)}
    # The file of step 9 held step 5 before, that of step 8 step 6.
    step_of = {
        name: 14 - header.step if found.get(name) == OLDER else header.step
        for name, header in headers.items()
        if header
    }
    everywhere = all_gather_values(step_of)
    if rank == 0:
        contents = {path.name: path.read_bytes() for path in files_of(root)}
        for path in [path for path in files_of(root) if path.name in found]:
            other = contents[path.name[:-1] + str(1 - int(path.name[-1]))]
            kind = found[path.name]
            damage(
                path,
                kind,
                bytearray(contents[path.name]),
                at_step_6[path.name] if kind == OLDER else other,
            )
    distributed.barrier()
    return expected_step(found, {name: step for part in everywhere for name, step in part.items()})


def require_every_rank_to_keep(step: int, copies: InMemoryCheckpoints, root: Path) -> None:
    """The next copy goes in place of another step, on every rank."""
    rank = distributed.get_rank()
    copies.copy(tensors_of(rank, 10), state_of(10), to_disk=False)
    copies.wait()
    distributed.barrier()
    (newest,) = [
        file for file in copies._files if (header := file.read_header()) and header.step == 10
    ]
    newest.clear()
    for file in copies._held:
        file.clear()
    again = launch(root).load_newest(tensors_of(rank, 0), state_of(0), committed_step=4)
    assert again is not None
    assert again.step == step
    assert launch(root).load_newest(tensors_of(rank, 0), state_of(0), committed_step=step) is None


def require_no_files_of_others(copies: InMemoryCheckpoints) -> None:
    """Those of ranks that were on this node before are gone."""
    distributed.barrier()
    ranks = [each for each in range(RANKS) if node_of(each) == node_of(distributed.get_rank())]
    expected = {f"rank-{each}" for each in ranks} | {
        f"held-{(each + RANKS // NODES) % RANKS}" for each in ranks
    }
    assert {path.stem for path in copies.folder.iterdir()} == expected
    distributed.barrier()


def files_of(root: Path) -> list[Path]:
    return [
        path
        for node in range(NODES)
        for path in sorted(memory_of_node(root.parent, node).glob("*/*"))
    ]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("cases", "swap"),
    [
        (2, True),
        pytest.param(200, False, marks=pytest.mark.slow),
        pytest.param(200, True, marks=pytest.mark.slow),
    ],
)
def test_the_newest_step_that_is_whole_somewhere_is_loaded_whatever_is_damaged(
    tmp_path: Path, cases: int, *, swap: bool
) -> None:
    root = tmp_path / "run"
    (root / "checkpoints").mkdir(parents=True)
    by_rank = run_ranks(
        partial(load_after_damage, swap=swap), RANKS, root, cases, timeout=60 + 4 * cases
    )
    assert by_rank == by_rank[:1] * RANKS
    assert [case for case in by_rank[0] if case[1] != case[2]] == []
    assert [loaded for _, loaded, _ in by_rank[0][:11]] == [9, 9, 9, 8, 8, None, 9, 9, 6, 6, 6]
