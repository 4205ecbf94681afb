"""In-memory checkpoints: resumed from what is whole on every rank, here or on the next node, and
from nothing else.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

from parallelisms.mesh.collectives import all_gather_values
from tests.ranks import run_ranks
from tests.system.in_process import configured, saved_by, trainer_of
from tests.system.runs import (
    Done,
    forked,
    launched,
    lines,
    metrics,
    mounted,
    steps,
    train_rank,
    write_run,
)
from trainer.checkpoint import in_memory, manager
from trainer.checkpoint import memory_folder as memory
from trainer.checkpoint.in_memory import InMemoryCheckpoints
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.rank_sync import PhaseError
from trainer.checkpoint.save import SaveRequest, write_checkpoint
from trainer.errors import EXIT_FAILURE, ConfigError, RunFailedError
from trainer.launch.restarts import _progress
from trainer.memory.auto import fit_memory_options
from trainer.memory.estimator import estimate_memory
from trainer.run import train_loop
from trainer.step.distributed import World
from trainer.step.trainer import StepResult
from trainer.storage.artifact import HEADER_BYTES
from trainer.storage.run_dir import RunDir
from trainer.storage.train_state import SpikeState, StagePosition, TrainerState, TrainState

EXACT = ("step", "loss", "grad_norm")
RANKS = 4
NODES = 2
STATE_BYTES = 1 << 14


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The configuration of a run in `run`, whose memory is freed afterwards."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    yield write_run(tmp_path)
    memory.remove_memory_folder(memory.memory_folder(tmp_path / "run"))


# ---- on two nodes of two ranks, without training


def state_of(step: int) -> TrainState:
    scalars = TrainerState(
        step=step,
        next_sequence=6 * step,
        tokens=0,
        skipped=0,
        sources={},
        losses=SpikeState(),
        goodput=None,
    )
    return TrainState(
        step=step,
        trainer=scalars,
        stage=StagePosition(name="", index=0, start_step=0),
        data={"corpus": "abc"},
        plans={},
        config={"optimizer.lr": 0.1, "schedule.kind": "constant"},
        schema_version=1,
        degrees={"dp_shard": RANKS},
        torch="2",
        optimizer_steps=None,
    )


def tensors_of(rank: int, step: int) -> dict[str, Tensor]:
    """Shapes differ between ranks, as for stages of a pipeline."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    return {
        "model.weight": torch.randn(3 + rank, 5, generator=draw),
        "model.bias": torch.randn(0 if rank else 7, generator=draw),
        "optimizer.weight.exp_avg": torch.randn(3 + rank, 5, generator=draw).bfloat16(),
        "optimizer.weight.step": torch.tensor(float(step)),
    }


def damages(cases: int) -> Iterator[dict[str, str]]:
    """What happens to each file: one node lost, nothing, both copies of one rank's newest, of any
    step, and random ones.
    """
    names = [
        f"{kind}-{rank}.{index}"
        for kind, rank, index in product(("rank", "held"), range(RANKS), range(2))
    ]
    # A rank's copies are held on the other node.
    for node in range(NODES):
        lost = {
            f"{kind}-{rank}"
            for rank in range(RANKS)
            for kind in (("held", "rank")[rank // 2 == node],)
        }
        yield {name: "deleted" for name in names if name.partition(".")[0] in lost}
    yield {}
    yield {"rank-1.0": "bit of a shard", "held-1.0": "a pipe"}
    # Found when it has been fetched.
    yield {"rank-1.0": "shortened", "held-1.0": "bit of a shard"}
    yield {name: "deleted" for name in names if "-3." in name}
    draw = random.Random(1)
    for _ in range(cases):
        share = draw.choice((0.1, 0.3, 0.5))
        yield {name: draw.choice(KINDS) for name in names if draw.random() < share}


KINDS = (
    "deleted",
    "a pipe",
    "shortened",
    "bit of the header",
    "bit of the state",
    "bit of a shard",
    "of an earlier step",
)


def damage(path: Path, kind: str, content: bytearray, other: bytes) -> None:
    """`other` is the rank's file of another step."""
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
    whole = {
        (name.partition(".")[0].partition("-")[2], step)
        for name, step in step_of.items()
        if name not in found
    }
    return next(
        (step for step in (9, 8) if all((str(rank), step) in whole for rank in range(RANKS))), None
    )


def load_after_damage(
    root: Path, cases: int
) -> list[tuple[dict[str, str], int | None, int | None]]:
    """(damage, the step that is loaded, the step that should be) for each case; checks the loaded
    values.
    """
    rank = distributed.get_rank()
    results = []
    group = distributed.group.WORLD
    assert group is not None
    world = World(rank, RANKS, torch.device("cpu"), NODES)
    run_dir = RunDir(root)
    in_memory.STATE_BYTES = STATE_BYTES
    for found in damages(cases):
        if rank == 0:
            memory.remove_memory_folder(memory.memory_folder(root))
        distributed.barrier()
        copies = InMemoryCheckpoints(run_dir, world, group, tensors_of(rank, 0))
        for step in (7, 8, 9):
            copies.copy(tensors_of(rank, step), state_of(step), to_disk=False)
        copies.wait()
        distributed.barrier()
        assert memory.Newest.read(run_dir.checkpoints_dir).in_memory == 9
        step_of = {
            file.path.name: header.step
            for file in (*copies._files, *copies._held)
            if (header := file.read_header())
        }
        everywhere = all_gather_values(step_of)
        if rank == 0:
            contents = {path.name: path.read_bytes() for path in copies.folder.iterdir()}
            for name, kind in found.items():
                other = contents[name[:-1] + str(1 - int(name[-1]))]
                damage(copies.folder / name, kind, bytearray(contents[name]), other)
        distributed.barrier()
        # The next launch.
        copies = InMemoryCheckpoints(run_dir, world, group, tensors_of(rank, 0))
        loaded = tensors_of(rank, 0)
        state = copies.load_newest(loaded, state_of(0), committed_step=4)
        if state is not None:
            assert state.model_copy(update={"optimizer_steps": None}) == state_of(state.step)
        wanted = tensors_of(rank, 0 if state is None else state.step)
        assert all(torch.equal(value, wanted[name]) for name, value in loaded.items())
        expected = expected_step(
            found, {name: step for part in everywhere for name, step in part.items()}
        )
        results.append((found, state.step if state else None, expected))
        # The next copy goes in place of another step, on every rank.
        if state is not None:
            copies.copy(tensors_of(rank, 10), state_of(10), to_disk=False)
            copies.wait()
            distributed.barrier()
            (newest,) = [
                file
                for file in copies._files
                if (header := file.read_header()) and header.step == 10
            ]
            newest.clear()
            for file in copies._held:
                file.clear()
            copies = InMemoryCheckpoints(run_dir, world, group, tensors_of(rank, 0))
            again = copies.load_newest(loaded, state_of(0), committed_step=4)
            assert again is not None
            assert again.step == state.step
            copies = InMemoryCheckpoints(run_dir, world, group, tensors_of(rank, 0))
            assert copies.load_newest(loaded, state_of(0), committed_step=again.step) is None
    return results


@pytest.mark.ranks
@pytest.mark.parametrize("cases", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_the_newest_step_that_is_whole_somewhere_is_loaded_whatever_is_damaged(
    run: Path, cases: int
) -> None:
    by_rank = run_ranks(
        load_after_damage, RANKS, run.parent / "run", cases, timeout=30 + 2 * cases
    )
    assert by_rank == by_rank[:1] * RANKS
    assert [case for case in by_rank[0] if case[1] != case[2]] == []
    assert [loaded for _, loaded, _ in by_rank[0][:6]] == [9, 9, 9, 8, 8, None]


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


def crash_after_step_8(argv: list[str]) -> int:
    """A rank of two nodes that ends with a traceback.

    Its last checkpoint is in memory, and did not reach the disk.
    """
    after_step = train_loop.TrainLoop._after_step

    def crash(loop: train_loop.TrainLoop, result: StepResult) -> str:
        reason = after_step(loop, result)
        if result.step == 8:
            memory_of(loop.checkpoints).wait()
            raise RuntimeError("crash")
        return reason

    def fail_at_step_8(request: SaveRequest, group: distributed.ProcessGroup) -> int:
        if request.step == 8:
            raise PhaseError("disk full")
        return write_checkpoint(request, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "write_checkpoint", fail_at_step_8)
        patch.setattr(train_loop.TrainLoop, "_after_step", crash)
        return on_two_nodes(argv)


def on_two_nodes(argv: list[str]) -> int:
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS // NODES)
    return train_rank(argv)


@pytest.mark.ranks
def test_a_run_whose_node_is_lost_continues_bitwise_from_the_memory_of_the_other(
    run: Path,
) -> None:
    root = run.parent
    folder = run.parent / "run"
    options: tuple[str, ...] = ("--training.steps", "10", "--checkpoint.interval", "4")
    assert forked(run, root / "whole", *options, processes=RANKS).statuses == [0] * RANKS
    options += ("--checkpoint.memory_interval", "3")
    crashed = forked(run, folder, *options, processes=RANKS, train=crash_after_step_8)
    assert 1 in crashed.statuses
    assert "RuntimeError: crash" in crashed.said
    shared = memory.memory_folder(folder)
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-4"]
    for path in [*shared.glob("rank-[23].*"), *shared.glob("held-[01].*")]:
        path.unlink()
    done = forked(run, folder, *options, processes=RANKS, train=on_two_nodes)
    assert done.statuses == [0] * RANKS, done.said
    assert f"resumed from {shared}: continuing with step 9" in done.said
    assert "step 8 of ranks [2, 3] is restored from the memory of the next node" in done.said
    assert steps(folder) == [*range(1, 11)]
    assert metrics(folder, *EXACT) == metrics(root / "whole", *EXACT)
    # What was missing on the disk is saved at once, and a run that is done leaves nothing in
    # memory.
    saved = [
        event["step"] for event in lines(folder / "events.jsonl") if event["event"] == "checkpoint"
    ]
    assert saved == [4, 8, 10]
    assert not shared.exists()


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


def test_the_plan_counts_in_memory_checkpoints_and_refuses_what_a_node_cannot_hold(
    run: Path,
) -> None:
    options = ("--checkpoint.memory_interval", "1", "--parallelism.ranks_per_node", "2")
    config = configured(run, run.parent / "run", *options)
    shards = config.model.build().num_parameters * (4 + 8)
    for world_size, copies in ((2, 2), (4, 4)):
        estimate = estimate_memory(config, world_size)
        assert estimate.item("in-memory checkpoints").host_bytes == pytest.approx(
            copies * shards / world_size, rel=0.01
        )
        assert estimate.item("async-checkpoint staging").host_bytes == 0
    with pytest.raises(
        ConfigError,
        match=r"checkpoint.memory_interval = 1: a node needs .* for in-memory checkpoints",
    ):
        fit_memory_options(config, 2, ranks_per_node=2, device_bytes=0, host_bytes=shards)
    fit_memory_options(config, 2, ranks_per_node=2, device_bytes=0, host_bytes=1000 * shards)


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
