"""In-memory checkpoints: resumed from what is whole on every rank, here or on the next node, and
from nothing else.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

from tests.ranks import run_ranks
from tests.resilience.memory_states import (
    NODES,
    RANKS,
    memory_of_node,
    node_of,
    state_of,
    tensors_of,
)
from tests.system.in_process import configured, saved_by, trainer_of
from tests.system.runs import (
    Done,
    digests,
    forked,
    launched,
    lines,
    metrics,
    mounted,
    steps,
    train_rank,
    write_run,
)
from trainer.checkpoint import manager
from trainer.checkpoint import memory_folder as memory
from trainer.checkpoint.in_memory import InMemoryCheckpoints
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.rank_sync import PhaseError
from trainer.checkpoint.save import SaveRequest, write_checkpoint
from trainer.errors import EXIT_FAILURE, RunFailedError
from trainer.launch.host_memory import in_memory_checkpoint_problems
from trainer.launch.restarts import _progress
from trainer.plan.reserves import HOST_FRACTION
from trainer.run import train_loop
from trainer.step.process_group import World
from trainer.step.trainer import StepResult
from trainer.storage.artifact import HEADER_BYTES
from trainer.storage.run_dir import RunDir
from trainer.storage.train_state import TrainState
from trainer.trace.answers import traced_rank_steps

EXACT = ("step", "loss", "grad_norm")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The configuration of a run in `run`, whose memory is freed afterwards."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    yield write_run(tmp_path)
    memory.remove_memory_folder(memory.memory_folder(tmp_path / "run"))


# ---- on two nodes of two ranks, without training


def copy_while_one_is_written(root: Path) -> tuple[bool, bool, int]:
    group = distributed.group.WORLD
    assert group is not None
    copies = InMemoryCheckpoints(
        RunDir(root), World(0, 1, torch.device("cpu")), group, tensors_of(0, 0)
    )
    get_written = copies.copy(tensors_of(0, 1), state_of(1), to_disk=True)
    for step in (2, 3, 4):
        copies.copy(tensors_of(0, step), state_of(step), to_disk=False)
    unchanged = all(
        torch.equal(value, tensors_of(0, 1)[name]) for name, value in get_written().items()
    )
    copies.release(1)
    # The first agrees that no rank writes it any more.
    for step in (4, 5):
        copies.copy(tensors_of(0, step), state_of(step), to_disk=False)
    copies.wait()
    is_reused = all(
        torch.equal(value, tensors_of(0, 5)[name]) for name, value in get_written().items()
    )
    return unchanged, is_reused, len([*copies.folder.iterdir()])


@pytest.mark.ranks
def test_what_a_save_writes_is_not_overwritten_before_it_ends(run: Path) -> None:
    assert run_ranks(copy_while_one_is_written, 1, run.parent / "run") == [(True, True, 2)]


# ---- runs


def crash_after_step_8(argv: list[str], *, root: Path) -> int:
    """A rank of two nodes that ends with a traceback.

    Its last checkpoint is in memory, and did not reach the disk.
    """
    after_step = train_loop.TrainLoop._after_step

    def crash(loop: train_loop.TrainLoop, result: StepResult) -> str:
        reason = after_step(loop, result)
        if result.step in (6, 8):
            memory_of(loop.checkpoints).wait()
            distributed.barrier()
        if result.step == 6 and os.environ["RANK"] == "2":
            shutil.copytree(memory_of(loop.checkpoints).folder, root / "node 1 at step 6")
        if result.step == 8:
            raise RuntimeError("crash")
        return reason

    def fail_at_step_8(request: SaveRequest, group: distributed.ProcessGroup) -> int:
        if request.step == 8:
            raise PhaseError("disk full")
        return write_checkpoint(request, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "write_checkpoint", fail_at_step_8)
        patch.setattr(train_loop.TrainLoop, "_after_step", crash)
        return on_two_nodes(argv, root=root)


def on_two_nodes(argv: list[str], *, root: Path, swapped: bool = False) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(RANKS // NODES))
        patch.setattr(
            memory,
            "SHARED_MEMORY",
            memory_of_node(root, node_of(int(os.environ["RANK"])) ^ swapped),
        )
        return train_rank(argv)


def nothing(_: list[Path], __: Path) -> None:
    pass


def lose_node_1(nodes: list[Path], _: Path) -> None:
    shutil.rmtree(nodes[1])


def lose_both(nodes: list[Path], _: Path) -> None:
    for node in nodes:
        shutil.rmtree(node)


def go_back_to_step_6(nodes: list[Path], root: Path) -> None:
    """Node 1 returns with what it had then."""
    shutil.rmtree(nodes[1])
    shutil.copytree(root / "node 1 at step 6", nodes[1])


def tear_node_1(nodes: list[Path], _: Path) -> None:
    for path in nodes[1].iterdir():
        path.write_bytes(path.read_bytes()[:-100])


def tear_what_node_0_holds(nodes: list[Path], root: Path) -> None:
    """Of the other node's newest; that node has step 6."""
    go_back_to_step_6(nodes, root)
    (newest,) = [
        path
        for path in nodes[0].glob("held-2.*")
        if b'"step": 8' in path.read_bytes()[:HEADER_BYTES]
    ]
    content = bytearray(newest.read_bytes())
    content[-100] ^= 1
    newest.write_bytes(content)


Damage = Callable[[list[Path], Path], None]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("damage", "swapped", "resumed", "restored"),
    [
        (lose_node_1, False, 8, [2, 3]),
        pytest.param(lose_node_1, True, 8, [0, 1, 3], marks=pytest.mark.slow),
        pytest.param(nothing, True, 8, [1, 3], marks=pytest.mark.slow),
        pytest.param(go_back_to_step_6, False, 8, [2, 3], marks=pytest.mark.slow),
        pytest.param(tear_node_1, False, 8, [2, 3], marks=pytest.mark.slow),
        pytest.param(tear_what_node_0_holds, False, 6, [], marks=pytest.mark.slow),
        pytest.param(lose_both, False, 4, None, marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_bitwise_from_the_newest_step_that_is_whole_on_its_nodes(
    run: Path, damage: Damage, *, swapped: bool, resumed: int, restored: list[int] | None
) -> None:
    root = run.parent
    folder = run.parent / "run"
    options: tuple[str, ...] = ("--training.steps", "10", "--checkpoint.interval", "4")
    assert forked(run, root / "whole", *options, processes=RANKS).statuses == [0] * RANKS
    options += ("--checkpoint.memory_interval", "3")
    crashed = forked(
        run, folder, *options, processes=RANKS, train=partial(crash_after_step_8, root=root)
    )
    assert 1 in crashed.statuses
    assert "RuntimeError: crash" in crashed.said
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-4"]
    nodes = [
        memory_of_node(root, node) / memory.memory_folder(folder).name for node in range(NODES)
    ]
    damage(nodes, root)
    train = partial(on_two_nodes, root=root, swapped=swapped)
    done = forked(run, folder, *options, processes=RANKS, train=train)
    assert done.statuses == [0] * RANKS, done.said
    source = nodes[swapped] if restored is not None else folder / "checkpoints" / "step-4"
    assert f"resumed from {source}: continuing with step {resumed + 1}" in done.said
    said = f"step {resumed} of ranks {restored} is restored from the memory of other ranks"
    assert (said in done.said) == bool(restored), done.said
    assert steps(folder) == [*range(1, 11)]
    assert metrics(folder, *EXACT) == metrics(root / "whole", *EXACT)
    assert digests(folder / "checkpoints" / "step-10") == digests(
        root / "whole" / "checkpoints" / "step-10"
    )
    # What was missing on the disk is saved at once, and a run that is done leaves nothing in
    # memory.
    saved = [
        event["step"] for event in lines(folder / "events.jsonl") if event["event"] == "checkpoint"
    ]
    assert saved == [4, 8, 10]
    assert not any(node.exists() for node in nodes)


@pytest.mark.parametrize(
    ("changes", "removed", "expected"),
    [
        ((), None, 5),
        (("--optimizer.lr", "3e-3"), None, 4),
        pytest.param(("--checkpoint.keep", "7"), None, 4, marks=pytest.mark.slow),
        ((), "step-4", 2),  # By a person who goes back.
        ((), "newest", 4),
    ],
)
def test_a_changed_run_and_one_whose_checkpoint_was_removed_resume_from_the_disk(
    run: Path, changes: tuple[str, ...], removed: str | None, expected: int
) -> None:
    options = ("--checkpoint.interval", "2", "--checkpoint.memory_interval", "1")
    config = configured(run, run.parent / "run", *options)
    folder = RunDir(config.output_dir)
    with trainer_of(config) as trainer:
        checkpoints = CheckpointManager(config, folder, trainer.world)
        assert checkpoints.resume(trainer) is None
        results = trainer.train_steps()
        for step in range(1, 6):
            assert next(results).step == step
            if checkpoints.should_save(step, trainer.stage):
                saved_by(checkpoints, trainer)
            elif checkpoints.should_copy(step):
                checkpoints.copy_to_memory(trainer)
        del results
        memory_of(checkpoints).wait()
        assert memory.Newest.read(folder.checkpoints_dir)[:2] == (5, 4)
        assert _progress(folder) == 5
    # By a launch without in-memory checkpoints, which takes its own course from step 4.
    if removed == "newest":
        without = configured(run, run.parent / "run", "--checkpoint.interval", "2")
        with trainer_of(without) as trainer:
            checkpoints = CheckpointManager(without, folder, trainer.world)
            assert checkpoints.resume(trainer) == folder.checkpoints_dir / "step-4"
        assert not memory.memory_folder(folder.path).exists()
        assert not (folder.checkpoints_dir / memory.RECORD_FILE).exists()
    elif removed is not None:
        (folder.checkpoints_dir / removed).rename(folder.checkpoints_dir / "set aside")
    disk = folder.checkpoints_dir / f"step-{expected}"
    changed = configured(run, run.parent / "run", *options, *changes)
    with trainer_of(changed) as trainer:
        checkpoints = CheckpointManager(changed, folder, trainer.world)
        assert checkpoints.resume(trainer) == (
            memory.memory_folder(folder.path) if expected == 5 else disk
        )
        assert trainer.step == expected
        assert memory.Newest.read(folder.checkpoints_dir)[:2] == (
            expected if expected == 5 else -1,
            min(expected, 4),
        )
        # After a spike, nothing in memory is used.
        if expected == 5:
            assert checkpoints.roll_back(trainer) == folder.checkpoints_dir / "step-4"
            assert checkpoints.resume(trainer) == folder.checkpoints_dir / "step-4"


def memory_of(checkpoints: CheckpointManager) -> InMemoryCheckpoints:
    assert checkpoints._in_memory is not None
    return checkpoints._in_memory


def mix_launches(root: Path) -> list[int | None]:
    """Node 0 took part in a second launch, which went back to step 4 of the disk; node 1 was
    unreachable meanwhile.
    """
    rank = distributed.get_rank()
    run_dir = RunDir(root)
    group = distributed.group.WORLD
    assert group is not None
    world = World(rank, RANKS, torch.device("cpu"), NODES)
    kept = dict[Path, bytes]()
    for course in range(2):
        copies = InMemoryCheckpoints(run_dir, world, group, tensors_of(rank, 0))
        if course:
            copies.discard()
        for step in (8, 9):
            copies.copy(tensors_of(rank, step + 100 * course), state_of(step), to_disk=False)
        copies.wait()
        distributed.barrier()
        if not course and rank == 0:
            lost = [*copies.folder.glob("rank-[23].*"), *copies.folder.glob("held-[01].*")]
            kept = {path: path.read_bytes() for path in lost}
        distributed.barrier()
    for path, content in kept.items():
        path.write_bytes(content)
    distributed.barrier()
    loaded = tensors_of(rank, 0)
    state = InMemoryCheckpoints(run_dir, world, group, loaded).load_newest(
        loaded, state_of(0), committed_step=4
    )
    return run_steps(loaded, rank, state)


def run_steps(loaded: dict[str, Tensor], rank: int, state: TrainState | None) -> list[int | None]:
    same = [
        step
        for step in (0, 8, 9, 108, 109)
        if torch.equal(loaded["model.weight"], tensors_of(rank, step)["model.weight"])
    ]
    return [*same, None if state is None else state.step]


@pytest.mark.ranks
def test_steps_of_two_launches_are_not_mixed(run: Path) -> None:
    """What node 1 has is of the first launch; its part of the second comes from node 0."""
    assert run_ranks(mix_launches, RANKS, run.parent / "run") == [[109, 9]] * RANKS


@pytest.mark.ranks
def test_a_disk_that_cannot_be_written_does_not_end_the_run(run: Path) -> None:
    assert run_ranks(copy_without_a_disk, 1, run.parent / "run") == [(3, None)]


def copy_without_a_disk(root: Path) -> tuple[int, int | None]:
    """(the newest step that is recorded, what is resumed from): metrics since may be missing."""
    group = distributed.group.WORLD
    assert group is not None
    run_dir = RunDir(root)
    world = World(0, 1, torch.device("cpu"))
    write = memory.Newest.write
    copies = InMemoryCheckpoints(run_dir, world, group, tensors_of(0, 0))
    for step in (3, 4, 5):
        copies.copy(tensors_of(0, step), state_of(step), to_disk=False)
        copies.wait()
        memory.Newest.write = no_space  # type: ignore[method-assign, assignment]
    memory.Newest.write = write  # type: ignore[method-assign]
    recorded = memory.Newest.read(run_dir.checkpoints_dir).in_memory
    loaded = tensors_of(0, 0)
    state = InMemoryCheckpoints(run_dir, world, group, loaded).load_newest(
        loaded, state_of(0), committed_step=2
    )
    return recorded, None if state is None else state.step


def test_what_says_nothing_about_newest_steps_is_none(tmp_path: Path) -> None:
    path = tmp_path / memory.RECORD_FILE
    assert memory.Newest.read(tmp_path) == (-1, -1, "")
    for content in (b"", b"3", b"a b c", b"1 2", b"\xff", bytes(1000)):
        path.write_bytes(content)
        assert memory.Newest.read(tmp_path) == (-1, -1, "")
    path.unlink()
    os.mkfifo(path)
    assert memory.Newest.read(tmp_path) == (-1, -1, "")
    memory.Newest(9, 4, "abc").write(tmp_path)
    assert memory.Newest.read(tmp_path) == (9, 4, "abc")


def test_too_little_memory_is_an_error_that_names_the_key(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(run, run.parent / "run", "--checkpoint.memory_interval", "1")
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with trainer_of(config) as trainer, pytest.raises(RunFailedError) as raised:
        CheckpointManager(config, RunDir(config.output_dir), trainer.world).resume(trainer)
    assert "checkpoint.memory_interval needs " in str(raised.value)
    assert "in /dev/shm, which has" in str(raised.value)


def with_memory(run: Path, *options: str) -> Done:
    return launched(
        run, run.parent / "run", "--checkpoint.memory_interval", "1", *options, processes=1
    )


@pytest.mark.slow
@pytest.mark.ranks
def test_a_folder_in_place_of_a_file_in_memory_is_removed(run: Path) -> None:
    folder = memory.memory_folder(run.parent / "run")
    memory.create_memory_folder(folder)
    for name in ("rank-0.0", "other-7.1"):
        (folder / name / "inner").mkdir(parents=True)
    (run.parent / "run" / "checkpoints" / memory.RECORD_FILE).mkdir()
    done = with_memory(run)
    assert done.statuses == [0], done.said
    assert "in-memory checkpoints are not recorded: Is a directory" in done.said
    assert "in-memory checkpoints: " in done.said
    assert "Traceback" not in done.said


@pytest.mark.slow
@pytest.mark.ranks
def test_shared_memory_without_inodes_ends_a_run_with_one_error(run: Path) -> None:
    folder = memory.memory_folder(run.parent / "run")
    memory.create_memory_folder(folder)
    with mounted(folder, "-t", "tmpfs", "-o", "nr_inodes=2,mode=700", "tmpfs"):
        (folder / "rank-0.1").touch()
        done = with_memory(run, "--distributed.restarts", "0")
    assert done.statuses == [EXIT_FAILURE], done.said
    assert (
        f"error: checkpoint.memory_interval: {folder}/rank-0.0 cannot be used: No space left on device"
        in done.said
    )
    assert "Traceback" not in done.said


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_trace_counts_in_memory_checkpoints(run: Path) -> None:
    options = ("--checkpoint.memory_interval", "1", "--parallelism.ranks_per_node", "2")
    config = configured(run, run.parent / "run", *options)
    shards = config.model.build().num_parameters * (4 + 8)
    for world_size, copies in ((2, 2), (4, 4)):
        (step,) = traced_rank_steps(config, world_size, on_gpu=False)
        assert step.memory.item("in-memory checkpoints").host_bytes == pytest.approx(
            copies * shards / world_size, rel=0.01
        )
        assert step.memory.item("async-checkpoint staging").host_bytes == 0


def test_in_memory_checkpoints_that_a_node_cannot_hold_are_refused(run: Path) -> None:
    config = configured(run, run.parent / "run", "--checkpoint.memory_interval", "1")
    states = config.model.build().num_parameters * (4 + 8)
    for nodes, copies in ((1, 2), (2, 4)):
        usable = copies * states / nodes / HOST_FRACTION
        refused, held = (
            in_memory_checkpoint_problems(
                config, 2 * nodes, ranks_per_node=2, host_bytes=share * usable
            )
            for share in (0.99, 1.01)
        )
        assert held == []
        assert re.match(
            r"checkpoint.memory_interval = 1: a node needs about .* for in-memory checkpoints",
            refused[0],
        )


def test_memory_of_ended_runs_is_freed_and_that_of_others_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path)
    (tmp_path / "run").mkdir()
    own = memory.memory_folder(tmp_path / "run")
    old, recent = (tmp_path / f"longhaul-{os.geteuid()}-{name}" for name in ("old", "recent"))
    for folder in (old, recent):
        folder.mkdir()
    long_ago = time.time() - memory.ABANDONED_SECONDS - 1
    os.utime(old, (long_ago, long_ago))
    descriptor = memory.hold(old)
    memory.remove_abandoned()
    assert (old.exists(), recent.exists()) == (True, True)
    os.close(descriptor)
    memory.create_memory_folder(own)
    memory.remove_abandoned()
    assert (old.exists(), recent.exists(), own.exists()) == (False, True, True)
    memory.create_memory_folder(own)
    own.chmod(0o777)
    with pytest.raises(RunFailedError, match="is not a folder that only this user can write to"):
        memory.create_memory_folder(own)
