"""Asynchronous saves: the saved state is a snapshot, and a failed save does not stop training."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from parallelisms.mesh.collectives import to_local
from tests.ranks import run_ranks
from tests.system.in_process import configured, dataset_of, run_here, saved_by, trainer_of
from tests.system.runs import (
    checkpoints,
    digests,
    lines,
    mounted,
    state,
    tensors,
    timeless,
    write_run,
)
from trainer.checkpoint import save
from trainer.checkpoint.background_save import Save
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.save import HostStaging
from trainer.checkpoint.write_tensors import write_tensors
from trainer.errors import RankFailedError, RunFailedError
from trainer.step.process_group import World, attempt_name
from trainer.step.trainer import Trainer
from trainer.storage import manifest
from trainer.storage.durable_io import fsync_path
from trainer.storage.run_dir import RunDir

SYNC = "--checkpoint.async=false"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def wait_for_save(manager: CheckpointManager) -> Save:
    saved = manager.wait()
    assert saved is not None
    return saved


class SlowFsync:
    """Delays every fsync."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.flush = os.fsync
        self.seconds = seconds
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, descriptor: int) -> None:
        time.sleep(self.seconds)
        self.flush(descriptor)


# ---- asynchronous saves


def test_training_during_a_save_does_not_change_the_checkpoint(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(run, run.parent / "run")
    changed = Event()
    write = write_tensors

    def wait_and_write(*arguments: Any) -> None:
        assert changed.wait(60)
        write(*arguments)

    monkeypatch.setattr(save, "write_tensors", wait_and_write)
    with (
        trainer_of(config) as trainer,
        CheckpointManager(config, RunDir(config.output_dir), trainer.world) as manager,
    ):
        steps = trainer.train_steps()
        next(steps)
        before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
        manager.save(trainer)
        assert [next(steps).step for _ in range(3)] == [2, 3, 4]
        for tensor in trainer.state_dict().values():
            to_local(tensor).fill_(7)
        assert manager.pop_finished() == [], "the save must not finish before the state changes"
        changed.set()
        saved = wait_for_save(manager)
    assert saved.path is not None
    loaded = tensors(saved.path)
    assert loaded.keys() == before.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in before.items())
    assert state(saved.path)["step"] == 1


def test_asynchronous_and_synchronous_saves_are_bitwise_equal(run: Path) -> None:
    folders = [run.parent / "async", run.parent / "sync"]
    for folder, options in zip(folders, ((), (SYNC,)), strict=True):
        run_here(configured(run, folder, *options))
    for step in ("step-3", "step-6"):
        one, other = (folder / "checkpoints" / step for folder in folders)
        assert digests(one) == digests(other)
        states = [timeless(folder) for folder in (one, other)]
        assert [state["config"].pop("checkpoint.async") for state in states] == [True, False]
        assert states[0] == states[1]


def test_training_waits_for_the_copy_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = {}
    for options in ((), (SYNC,)):
        config = configured(run, run.parent / f"run{len(options)}", *options)
        with monkeypatch.context() as patched, trainer_of(config) as trainer:
            SlowFsync(patched, 0.1)
            with CheckpointManager(config, RunDir(config.output_dir), trainer.world) as manager:
                manager.save(trainer)
                while not (collected := manager.pop_finished()):
                    time.sleep(0.01)
        (saved,) = collected
        assert saved.seconds > 0.4, "data, metadata, state, manifest and folders are fsynced"
        blocked[options] = saved.blocked_seconds / saved.seconds
    assert blocked[()] < 0.5
    assert blocked[(SYNC,)] > 0.9


def test_a_save_waits_for_the_previous_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(run, run.parent / "run")
    SlowFsync(monkeypatch, 0.05)
    with (
        trainer_of(config) as trainer,
        CheckpointManager(config, RunDir(config.output_dir), trainer.world) as manager,
    ):
        steps = trainer.train_steps()
        for _ in range(3):
            next(steps)
            manager.save(trainer)
            manager.save(trainer)  # The same step is not saved twice.
            assert len([*RunDir(config.output_dir).checkpoints_dir.glob(".tmp-*")]) <= 1
        assert wait_for_save(manager).step == 3
        first, *others = manager.pop_finished()
    assert [saved.step for saved in (first, *others)] == [1, 2, 3]
    assert all(saved.blocked_seconds > 0.5 * saved.seconds for saved in (first, *others)), (
        "every save blocked until its end"
    )
    assert checkpoints(config.output_dir) == ["step-1", "step-2", "step-3"]


def test_staging_buffers_are_reused() -> None:
    staging = HostStaging()
    tensor = torch.arange(4.0)
    first = staging.start_copy({"a": tensor})()["a"]
    tensor.fill_(5)
    assert first.tolist() == [0, 1, 2, 3]
    second = staging.start_copy({"a": tensor})()["a"]
    assert (second.data_ptr(), second.tolist()) == (first.data_ptr(), [5, 5, 5, 5])
    assert staging.start_copy({"a": torch.zeros(5)})()["a"].shape == (5,)


def test_a_failed_host_copy_fails_only_the_save(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(run, run.parent / "run")
    with (
        trainer_of(config) as trainer,
        CheckpointManager(config, RunDir(config.output_dir), trainer.world) as manager,
    ):
        with monkeypatch.context() as patched:

            def refuse(*_: object) -> Tensor:
                raise torch.OutOfMemoryError("no host memory")

            patched.setattr(HostStaging, "_buffer", refuse)
            manager.save(trainer)
            assert "OutOfMemoryError: no host memory" in str(wait_for_save(manager).problem)
        saved_by(manager, trainer)
    assert checkpoints(config.output_dir) == ["step-0"]


def test_a_checkpoint_is_complete_when_it_is_renamed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a crash of the machine: the folder's entries are on disk before the rename, the
    rename after it.
    """
    events = list[str]()
    rename = Path.rename

    def check_rename(path: Path, target: Path) -> Path:
        if target.name == "step-0":
            problems = manifest.find_damage(path, manifest.read(path), manifest.read(path).files)
            events.append(f"rename {problems}")
        return rename(path, target)

    def record_fsync(path: Path) -> None:
        events.append(f"fsync {path.name.partition('.tmp-')[1] or path.name}")
        fsync_path(path)

    monkeypatch.setattr(Path, "rename", check_rename)
    monkeypatch.setattr(save, "fsync_path", record_fsync)
    config = configured(run, run.parent / "run", SYNC)
    with trainer_of(config) as trainer:
        saved_by(CheckpointManager(config, RunDir(config.output_dir), trainer.world), trainer)
    assert events == ["fsync .tmp-", "rename []", "fsync checkpoints"]


# ---- attempt name


def attempt_name_of(names: dict[int, str]) -> str:
    os.environ.pop("LONGHAUL_ATTEMPT", None)
    if name := names.get(distributed.get_rank()):
        os.environ["LONGHAUL_ATTEMPT"] = name
    return attempt_name()


@pytest.mark.ranks
def test_ranks_agree_on_the_attempt_name() -> None:
    one, other = run_ranks(attempt_name_of, 2, {})
    assert one == other
    assert len(one) == 8
    assert run_ranks(attempt_name_of, 2, {0: "job 7/a", 1: "b"}) == ["job-7-a"] * 2


# ---- failures


def check_failed_save(
    run: Path, problem: str, *options: str, break_it: Callable[[RunDir], object]
) -> None:
    """A failed save leaves no files and reports its problem; the next save succeeds."""
    config = configured(run, run.parent / "run", *options)
    folder = RunDir(config.output_dir)
    folder.create()
    with (
        trainer_of(config) as trainer,
        CheckpointManager(config, folder, trainer.world) as manager,
    ):
        steps = trainer.train_steps()
        next(steps)
        repair = break_it(folder)
        manager.save(trainer)
        saved = wait_for_save(manager)
        assert (saved.step, saved.path) == (1, None)
        assert problem in str(saved.problem)
        if callable(repair):
            repair()
        assert checkpoints(folder.path) == []
        next(steps)
        assert saved_by(manager, trainer) == folder.checkpoints_dir / "step-2"
        assert [result.problem is None for result in manager.pop_finished()] == [False, True]


@pytest.mark.parametrize("options", [(), (SYNC,)], ids=["async", "sync"])
def test_a_file_in_place_of_the_folder_fails_the_save(run: Path, options: tuple[str, ...]) -> None:
    def replace(folder: RunDir) -> Callable[[], object]:
        folder.checkpoints_dir.rmdir()
        folder.checkpoints_dir.touch()

        def repair() -> None:
            folder.checkpoints_dir.unlink()
            folder.create()

        return repair

    check_failed_save(run, "FileExistsError", *options, break_it=replace)


def test_a_missing_folder_is_created(run: Path) -> None:
    config = configured(run, run.parent / "run")
    folder = RunDir(config.output_dir)
    with trainer_of(config) as trainer:
        saved_by(CheckpointManager(config, folder, trainer.world), trainer)
    assert checkpoints(folder.path) == ["step-0"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT, errno.EROFS])
def test_a_disk_error_fails_the_save_and_is_cleaned_up(run: Path, number: int) -> None:
    def break_it(_: RunDir) -> Callable[[], object]:
        context = pytest.MonkeyPatch()

        def refuse(_: int) -> None:
            raise OSError(number, os.strerror(number))

        context.setattr(os, "fsync", refuse)
        return context.undo

    check_failed_save(run, f"OSError: [Errno {number}] {os.strerror(number)}", break_it=break_it)


def test_too_little_disk_space_fails_before_writing(run: Path) -> None:
    def break_it(_: RunDir) -> Callable[[], object]:
        context = pytest.MonkeyPatch()
        context.setattr(save, "_free_bytes", lambda _: 100_000)
        return context.undo

    check_failed_save(run, "disk full: 97.7 KiB free, 1.", break_it=break_it)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=8m", "tmpfs"):
        yield tmp_path / "disk"


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_full_disk_does_not_stop_training(
    run: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Whether the free space is too small before the save or a write fails, the message is the
    same.
    """
    config = configured(run, small_disk / "run", "--checkpoint.keep=1")
    folder = RunDir(config.output_dir)
    ballast = small_disk / "ballast"
    folder.create()
    with (
        trainer_of(config) as trainer,
        CheckpointManager(config, folder, trainer.world) as manager,
    ):
        steps = trainer.train_steps()
        next(steps)
        saved_by(manager, trainer)
        free = shutil.disk_usage(small_disk).free
        ballast.write_bytes(bytes(free - 200_000))
        next(steps)
        with monkeypatch.context() as patched:
            if when == "while":
                answers = iter([free])
                ask = save._free_bytes
                patched.setattr(
                    save, "_free_bytes", lambda folder: next(answers, None) or ask(folder)
                )
            manager.save(trainer)
            saved = wait_for_save(manager)
        assert "disk full: " in str(saved.problem)
        assert checkpoints(folder.path) == ["step-1"]
        ballast.unlink()
        next(steps)
        saved_by(manager, trainer)
    assert checkpoints(folder.path) == ["step-3"]


def save_with_failing_rank(
    run: Path, number: int
) -> tuple[list[str], list[float], dict[str, str]]:
    """Two saves during training, of which the first fails on rank 1: (problems, losses, digests of
    the second).
    """
    rank = distributed.get_rank()
    config = configured(run, run.parent / "run", "--training.global_batch_size=4")
    folder = RunDir(config.output_dir)
    trainer = Trainer(config, World(rank, 2, torch.device("cpu")), dataset_of(config))
    flush = os.fsync
    problems = []
    losses = []

    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    with CheckpointManager(config, folder, trainer.world) as manager:
        for step_result in trainer.train_steps():
            losses.append(step_result.read().loss)
            if step_result.step in (2, 4):
                os.fsync = refuse if (rank, step_result.step) == (1, 2) else flush  # type: ignore[assignment]
                manager.save(trainer)
            problems += [str(saved.problem) for saved in manager.pop_finished()]
        manager.wait()
        problems += [str(saved.problem) for saved in manager.pop_finished()]
    os.fsync = flush
    distributed.barrier()
    return problems, losses, digests(folder.checkpoints_dir / "step-4") if rank == 0 else {}


@pytest.mark.ranks
def test_an_error_on_one_rank_fails_the_save_on_both_and_stops_neither(run: Path) -> None:
    dataset_of(configured(run, run.parent / "run"))  # Tokenize once, not on every rank.
    results = run_ranks(save_with_failing_rank, 2, run, errno.EIO)
    message = "[rank 1] OSError: [Errno 5] Input/output error"
    assert [problems for problems, _, _ in results] == [[message, "None"]] * 2
    assert results[0][1] == results[1][1]
    assert checkpoints(run.parent / "run") == ["step-4"]
    assert results[0][2]


def save_twice(run: Path, kind: str) -> tuple[str, float, str]:
    """A save that rank 1 breaks, and another: (first problem, seconds of the first save, second
    problem).
    """
    rank = distributed.get_rank()
    config = configured(run, run.parent / "run", "--training.global_batch_size=4")
    trainer = Trainer(config, World(rank, 2, torch.device("cpu")), dataset_of(config))
    steps = trainer.train_steps()
    with CheckpointManager(config, RunDir(config.output_dir), trainer.world) as manager:
        next(steps)
        with pytest.MonkeyPatch.context() as patched:
            if rank == 1:
                BREAKS[kind](patched, run.parent)
            manager.save(trainer)
            first = wait_for_save(manager)
        next(steps)
        manager.save(trainer)
        second = wait_for_save(manager)
    return str(first.problem), first.seconds, str(second.problem)


def refuse_the_folder(patched: pytest.MonkeyPatch, _: Path) -> None:
    make = Path.mkdir

    def refuse(path: Path, *arguments: Any, **options: Any) -> None:
        if path.name.startswith(".tmp-"):
            raise PermissionError(errno.EACCES, "Permission denied")
        make(path, *arguments, **options)

    patched.setattr(Path, "mkdir", refuse)


def write_elsewhere(patched: pytest.MonkeyPatch, root: Path, name: str = ".") -> None:
    (root / "elsewhere").mkdir()
    temporary = property(lambda save: root / "elsewhere" / name / f".tmp-step-{save.step}")
    patched.setattr(save.SaveRequest, "temporary_path", temporary)


def cut_after_hashing(patched: pytest.MonkeyPatch, _: Path) -> None:
    hashed = save._hash_own_files

    def cut(folder: Path, rank: int) -> dict[str, Any]:
        files = hashed(folder, rank)
        os.truncate(folder / "__1_0.distcp", 1000)
        return files

    patched.setattr(save, "_hash_own_files", cut)


def move_before_hashing(patched: pytest.MonkeyPatch, _: Path) -> None:
    hashed = save._hash_own_files
    patched.setattr(
        save, "_hash_own_files", lambda folder, rank: hashed(folder.with_name(".tmp-gone"), rank)
    )


BREAKS: dict[str, Callable[[pytest.MonkeyPatch, Path], None]] = {
    "mkdir": refuse_the_folder,
    "elsewhere": write_elsewhere,
    "nowhere": lambda patched, root: write_elsewhere(patched, root, "absent"),
    "cut": cut_after_hashing,
    "moved": move_before_hashing,
}
SHARED = "job.output_dir must be on a file system that all nodes share"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mkdir", "[rank 1] PermissionError: [Errno 13] Permission denied"),
        ("elsewhere", f"[rank 0] __1_0.distcp was written, but rank 0 does not see it: {SHARED}"),
        ("nowhere", f"/elsewhere/absent is missing: {SHARED}"),
        ("cut", f" bytes, but rank 0 sees 1,000: {SHARED}"),
        ("moved", "[rank 1] FileNotFoundError: [Errno 2] No such file or directory: "),
    ],
)
def test_a_file_that_a_rank_cannot_write_or_rank_0_cannot_see_prevents_the_commit(
    run: Path, kind: str, message: str
) -> None:
    dataset_of(configured(run, run.parent / "run"))
    (problem, seconds, second), other = run_ranks(save_twice, 2, run, kind)
    assert message in problem
    assert (other[0], other[2]) == (problem, second)
    assert max(seconds, other[1]) < 20
    assert second == "None"
    assert checkpoints(run.parent / "run") == ["step-2"]
    assert not [*run.parent.rglob(".tmp-*")]


# ---- in a run


class Kill(BaseException):
    """Not an `Exception`."""


@pytest.mark.parametrize("options", [(), (SYNC,)], ids=["async", "sync"])
def test_a_base_exception_aborts_the_save(
    run: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    def kill(*_: object) -> int:
        raise Kill("enough")

    monkeypatch.setattr("trainer.checkpoint.manager.write_checkpoint", kill)
    config = configured(run, run.parent / "run", *options)
    with trainer_of(config) as trainer:
        manager = CheckpointManager(config, RunDir(config.output_dir), trainer.world)
        with pytest.raises(RankFailedError, match="checkpoint of step 0 aborted: Kill: enough"):
            saved_by(manager, trainer)
    assert checkpoints(config.output_dir) == []


def test_a_failed_save_is_an_event_and_training_continues(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = save._commit
    failures_left = [1]

    def commit(*arguments: object) -> None:
        failures_left[0] -= 1
        if failures_left[0] == 0:
            raise OSError(errno.EIO, "Input/output error")
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(save, "_commit", commit)
    config = configured(run, run.parent / "run")
    run_here(config)
    events = {event["event"]: event for event in lines(config.output_dir / "events.jsonl")}
    assert (events["checkpoint_failed"]["step"], events["checkpoint"]["step"]) == (3, 6)
    assert events["checkpoint_failed"]["reason"] == "OSError: [Errno 5] Input/output error"
    saved_event = events["checkpoint"]
    assert saved_event["bytes"] == manifest.read(Path(saved_event["path"])).bytes
    assert 0 < saved_event["blocked_seconds"] <= saved_event["seconds"] + 1
    assert checkpoints(config.output_dir) == ["step-6"]


def test_a_failed_last_save_fails_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config = configured(run, run.parent / "run")
    run_here(configured(run, run.parent / "run", "--training.steps=3"))
    monkeypatch.setattr(save, "_commit", refuse)
    with pytest.raises(
        RunFailedError, match=r"the last checkpoint, of step 6, failed: OSError: .*No space left"
    ):
        run_here(config)
    assert checkpoints(config.output_dir) == ["step-3"]
    assert lines(config.output_dir / "events.jsonl")[-1]["event"] == "checkpoint_failed"
