"""Saves in the background: what is written is what the trainer held, and a save that fails stops nothing."""

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

from parallelisms.collectives import to_local
from tests.ranks import run_ranks
from tests.system.in_process import configured, rows_of, run_here, saved_by, trainer_of
from tests.system.runs import checkpoints, digests, lines, mounted, state, tensors, timeless, write_run
from trainer.checkpoint import async_save, manifest, save
from trainer.checkpoint.async_save import SaveResult
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.run_dir import RunDir
from trainer.checkpoint.staging import HostStaging
from trainer.distributed import World, attempt_name
from trainer.errors import RankFailedError, RunFailedError
from trainer.trainer import Trainer

SYNC = "--checkpoint.async=false"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def ended(found: CheckpointManager) -> SaveResult:
    saved = found.wait()
    assert saved is not None
    return saved


class Slow:
    """A disk on which every flush waits until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.flush, self.seconds = os.fsync, seconds
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, descriptor: int) -> None:
        time.sleep(self.seconds)
        self.flush(descriptor)


# ---- in the background


def test_training_on_while_saving_does_not_change_what_is_saved(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(run, run.parent / "run")
    changed, write = Event(), save._write_tensors

    def wait_and_write(*arguments: Any, leading: bool) -> None:
        assert changed.wait(60)
        write(*arguments, is_rank_zero=leading)

    monkeypatch.setattr(save, "_write", wait_and_write)
    with trainer_of(config) as trainer, CheckpointManager(config, RunDir(config.output_dir), trainer.world) as found:
        updates = trainer.train_steps()
        next(updates)
        held = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
        found.save(trainer)
        assert [next(updates).step for _ in range(3)] == [2, 3, 4]
        for tensor in trainer.state_dict().values():
            to_local(tensor).fill_(7)
        assert found.pop_finished() == [], "it ended before the state was changed: the test shows nothing"
        changed.set()
        saved = ended(found)
    assert saved.path is not None
    there = tensors(saved.path)
    assert there.keys() == held.keys()
    assert all(torch.equal(there[name], tensor) for name, tensor in held.items())
    assert state(saved.path)["step"] == 1


def test_a_save_in_the_background_is_bit_by_bit_one_in_the_foreground(run: Path) -> None:
    folders = [run.parent / "async", run.parent / "sync"]
    for folder, options in zip(folders, ((), (SYNC,)), strict=True):
        run_here(configured(run, folder, *options))
    for step in ("step-3", "step-6"):
        one, other = (folder / "checkpoints" / step for folder in folders)
        assert digests(one) == digests(other)
        states = [timeless(folder) for folder in (one, other)]
        assert [found["config"].pop("checkpoint.async") for found in states] == [True, False]
        assert states[0] == states[1]


def test_training_waits_for_the_copy_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = {}
    for options in ((), (SYNC,)):
        config = configured(run, run.parent / f"run{len(options)}", *options)
        with monkeypatch.context() as patched, trainer_of(config) as trainer:
            Slow(patched, 0.3)
            with CheckpointManager(config, RunDir(config.output_dir), trainer.world) as found:
                found.save(trainer)
                while not (collected := found.pop_finished()):
                    time.sleep(0.01)
        (saved,) = collected
        assert saved.seconds > 1.2, "data, metadata, state, manifest and folders are flushed"
        blocked[options] = saved.blocked_seconds / saved.seconds
    assert blocked[()] < 0.5
    assert blocked[(SYNC,)] > 0.9


def test_one_save_is_under_way_and_the_next_waits_for_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(run, run.parent / "run")
    Slow(monkeypatch, 0.1)
    with trainer_of(config) as trainer, CheckpointManager(config, RunDir(config.output_dir), trainer.world) as found:
        updates = trainer.train_steps()
        for _ in range(3):
            next(updates)
            found.save(trainer)
            found.save(trainer)  # Of the same update: nothing.
            assert len([*RunDir(config.output_dir).checkpoints_dir.glob(".tmp-*")]) <= 1
        assert ended(found).step == 3
        first, *others = found.pop_finished()
    assert [saved.step for saved in (first, *others)] == [1, 2, 3]
    assert all(saved.blocked_seconds > 0.5 * saved.seconds for saved in (first, *others)), "each was waited for"
    assert checkpoints(config.output_dir) == ["step-1", "step-2", "step-3"]


def test_buffers_are_used_again() -> None:
    staging, tensor = HostStaging(), torch.arange(4.0)
    first = staging.start_copy({"a": tensor})()["a"]
    tensor.fill_(5)
    assert first.tolist() == [0, 1, 2, 3]
    second = staging.start_copy({"a": tensor})()["a"]
    assert (second.data_ptr(), second.tolist()) == (first.data_ptr(), [5, 5, 5, 5])
    assert staging.start_copy({"a": torch.zeros(5)})()["a"].shape == (5,)


def test_what_goes_wrong_while_copying_is_the_saves_problem(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(run, run.parent / "run")
    with trainer_of(config) as trainer, CheckpointManager(config, RunDir(config.output_dir), trainer.world) as found:
        with monkeypatch.context() as patched:

            def refuse(*_: object) -> Tensor:
                raise torch.OutOfMemoryError("no host memory")

            patched.setattr(HostStaging, "_buffer", refuse)
            found.save(trainer)
            assert "OutOfMemoryError: no host memory" in str(ended(found).problem)
        saved_by(found, trainer)
    assert checkpoints(config.output_dir) == ["step-0"]


# ---- its name


def named(names: dict[int, str]) -> str:
    if name := names.get(distributed.get_rank()):
        os.environ["LONGHAUL_ATTEMPT"] = name
    return attempt_name()


@pytest.mark.ranks
def test_ranks_agree_on_the_name_of_their_attempt() -> None:
    one, other = run_ranks(named, 2, {})
    assert one == other
    assert len(one) == 8
    assert run_ranks(named, 2, {0: "job 7/a", 1: "b"}) == ["job-7-a"] * 2


# ---- what fails


def fails(run: Path, problem: str, *options: str, break_it: Callable[[RunDir], object]) -> None:
    """A save that fails leaves nothing, is told, and the next one works."""
    config = configured(run, run.parent / "run", *options)
    folder = RunDir(config.output_dir)
    folder.create()
    with trainer_of(config) as trainer, CheckpointManager(config, folder, trainer.world) as found:
        updates = trainer.train_steps()
        next(updates)
        mend = break_it(folder)
        found.save(trainer)
        saved = ended(found)
        assert (saved.step, saved.path) == (1, None)
        assert problem in str(saved.problem)
        if callable(mend):
            mend()
        assert checkpoints(folder.path) == []
        next(updates)
        assert saved_by(found, trainer) == folder.checkpoints_dir / "step-2"
        assert [found.problem is None for found in found.pop_finished()] == [False, True]


@pytest.mark.parametrize("options", [(), (SYNC,)], ids=["async", "sync"])
def test_a_file_in_the_folders_place_is_told(run: Path, options: tuple[str, ...]) -> None:
    def replace(folder: RunDir) -> Callable[[], object]:
        folder.checkpoints_dir.rmdir()
        folder.checkpoints_dir.touch()

        def mend() -> None:
            folder.checkpoints_dir.unlink()
            folder.create()

        return mend

    fails(run, "FileExistsError", *options, break_it=replace)


def test_a_missing_folder_is_made(run: Path) -> None:
    config = configured(run, run.parent / "run")
    folder = RunDir(config.output_dir)
    with trainer_of(config) as trainer:
        saved_by(CheckpointManager(config, folder, trainer.world), trainer)
    assert checkpoints(folder.path) == ["step-0"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT, errno.EROFS])
def test_an_error_of_the_disk_is_told_and_cleaned_up(run: Path, number: int) -> None:
    def break_it(_: RunDir) -> Callable[[], object]:
        context = pytest.MonkeyPatch()

        def refuse(_: int) -> None:
            raise OSError(number, os.strerror(number))

        context.setattr(os, "fsync", refuse)
        return context.undo

    fails(run, f"OSError: [Errno {number}] {os.strerror(number)}", break_it=break_it)


def test_too_little_room_is_told_before_anything_is_written(run: Path) -> None:
    def break_it(_: RunDir) -> Callable[[], object]:
        context = pytest.MonkeyPatch()
        context.setattr(save, "_free", lambda _: 100_000)
        return context.undo

    fails(run, "disk full: 97.7 KiB free, 1.", break_it=break_it)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=8m", "tmpfs"):
        yield tmp_path / "disk"


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_disk_that_is_full_in_earnest_stops_no_training(
    run: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Found by asking before, or by a write that fails: both are told alike."""
    config = configured(run, small_disk / "run", "--checkpoint.keep=1")
    folder, ballast = RunDir(config.output_dir), small_disk / "ballast"
    folder.create()
    with trainer_of(config) as trainer, CheckpointManager(config, folder, trainer.world) as found:
        updates = trainer.train_steps()
        next(updates)
        saved_by(found, trainer)
        free = shutil.disk_usage(small_disk).free
        ballast.write_bytes(bytes(free - 200_000))
        next(updates)
        with monkeypatch.context() as patched:
            if when == "while":
                answers = iter([free])
                ask = save._free_bytes
                patched.setattr(save, "_free", lambda folder: next(answers, None) or ask(folder))
            found.save(trainer)
            saved = ended(found)
        assert "disk full: " in str(saved.problem)
        assert checkpoints(folder.path) == ["step-1"]
        ballast.unlink()
        next(updates)
        saved_by(found, trainer)
    assert checkpoints(folder.path) == ["step-3"]


def with_a_bad_rank(run: Path, number: int) -> tuple[list[str], list[float], dict[str, str]]:
    """Two saves while training goes on, of which the first fails on rank 1; problems, losses, and what there is then."""
    rank = distributed.get_rank()
    config = configured(run, run.parent / "run", "--training.global_batch_size=4")
    folder = RunDir(config.output_dir)
    trainer = Trainer(config, World(rank, 2, torch.device("cpu")), rows_of(config))
    flush, problems, losses = os.fsync, [], []

    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    with CheckpointManager(config, folder, trainer.world) as found:
        for update in trainer.train_steps():
            losses.append(update.read().loss)
            if update.step in (2, 4):
                os.fsync = refuse if (rank, update.step) == (1, 2) else flush  # type: ignore[assignment]
                found.save(trainer)
            problems += [str(saved.problem) for saved in found.pop_finished()]
        found.wait()
        problems += [str(saved.problem) for saved in found.pop_finished()]
    os.fsync = flush
    distributed.barrier()
    return problems, losses, digests(folder.checkpoints_dir / "step-4") if rank == 0 else {}


@pytest.mark.ranks
def test_an_error_on_one_of_two_ranks_is_told_by_both_and_stops_neither(run: Path) -> None:
    rows_of(configured(run, run.parent / "run"))  # Tokenized once, and not by every rank.
    found = run_ranks(with_a_bad_rank, 2, run, errno.EIO)
    told = "[rank 1] OSError: [Errno 5] Input/output error"
    assert [problems for problems, _, _ in found] == [[told, "None"]] * 2
    assert found[0][1] == found[1][1]
    assert checkpoints(run.parent / "run") == ["step-4"]
    assert found[0][2]


def mended_after(run: Path, kind: str) -> tuple[str, float, str]:
    """A save that fails because of rank 1, and the next; the first's problem and seconds, and the second's problem."""
    rank = distributed.get_rank()
    config = configured(run, run.parent / "run", "--training.global_batch_size=4")
    trainer = Trainer(config, World(rank, 2, torch.device("cpu")), rows_of(config))
    updates = trainer.train_steps()
    with CheckpointManager(config, RunDir(config.output_dir), trainer.world) as found:
        next(updates)
        with pytest.MonkeyPatch.context() as patched:
            if rank == 1:
                BREAKS[kind](patched, run.parent)
            found.save(trainer)
            first = ended(found)
        next(updates)
        found.save(trainer)
        second = ended(found)
    return str(first.problem), first.seconds, str(second.problem)


def refuse_the_folder(patched: pytest.MonkeyPatch, _: Path) -> None:
    make = Path.mkdir

    def refuse(path: Path, *arguments: Any, **options: Any) -> None:
        if path.name.startswith(".tmp-"):
            raise PermissionError(errno.EACCES, "Permission denied")
        make(path, *arguments, **options)

    patched.setattr(Path, "mkdir", refuse)


def write_elsewhere(patched: pytest.MonkeyPatch, place: Path, name: str = ".") -> None:
    (place / "elsewhere").mkdir()
    temporary = property(lambda save: place / "elsewhere" / name / f".tmp-step-{save.step}")
    patched.setattr(save.SaveRequest, "temporary", temporary)


def cut_after_hashing(patched: pytest.MonkeyPatch, _: Path) -> None:
    hashed = save._hash_own_files

    def cut(folder: Path, rank: int) -> dict[str, tuple[int, str]]:
        found = hashed(folder, rank)
        os.truncate(folder / "__1_0.distcp", 1000)
        return found

    patched.setattr(save, "_hashed", cut)


def move_before_hashing(patched: pytest.MonkeyPatch, _: Path) -> None:
    hashed = save._hash_own_files
    patched.setattr(save, "_hashed", lambda folder, rank: hashed(folder.with_name(".tmp-gone"), rank))


BREAKS: dict[str, Callable[[pytest.MonkeyPatch, Path], None]] = {
    "mkdir": refuse_the_folder,
    "elsewhere": write_elsewhere,
    "nowhere": lambda patched, place: write_elsewhere(patched, place, "absent"),
    "cut": cut_after_hashing,
    "moved": move_before_hashing,
}
SHARE = "job.output_dir must be on a file system that all nodes share"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("mkdir", "[rank 1] PermissionError: [Errno 13] Permission denied"),
        ("elsewhere", f"[rank 0] __1_0.distcp was written, but the first rank does not see it: {SHARE}"),
        ("nowhere", f"/elsewhere/absent is missing: {SHARE}"),
        ("cut", f" bytes, but the first rank sees 1,000: {SHARE}"),
        ("moved", "[rank 1] FileNotFoundError: [Errno 2] No such file or directory: "),
    ],
)
def test_what_one_rank_cannot_write_or_the_first_not_see_is_told_by_both_and_not_committed(
    run: Path, kind: str, told: str
) -> None:
    rows_of(configured(run, run.parent / "run"))
    (problem, seconds, second), other = run_ranks(mended_after, 2, run, kind)
    assert told in problem
    assert (other[0], other[2]) == (problem, second)
    assert max(seconds, other[1]) < 20
    assert second == "None"
    assert checkpoints(run.parent / "run") == ["step-2"]
    assert not [*run.parent.rglob(".tmp-*")]


# ---- in a run


class Kill(BaseException):
    """No Exception."""


@pytest.mark.parametrize("options", [(), (SYNC,)], ids=["async", "sync"])
def test_a_save_that_ends_by_what_is_no_exception_is_no_success(
    run: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    def kill(*_: object) -> int:
        raise Kill("enough")

    monkeypatch.setattr(async_save, "write_checkpoint", kill)
    config = configured(run, run.parent / "run", *options)
    with trainer_of(config) as trainer:
        found = CheckpointManager(config, RunDir(config.output_dir), trainer.world)
        with pytest.raises(RankFailedError, match="the checkpoint of update 0 was given up: Kill: enough"):
            saved_by(found, trainer)
    assert checkpoints(config.output_dir) == []


def test_a_save_that_fails_is_an_event_and_the_run_goes_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, left = save._commit, [1]

    def commit(*arguments: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.EIO, "Input/output error")
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(save, "_commit", commit)
    config = configured(run, run.parent / "run")
    run_here(config)
    events = {event["event"]: event for event in lines(config.output_dir / "events.jsonl")}
    assert (events["checkpoint_failed"]["step"], events["checkpoint"]["step"]) == (3, 6)
    assert events["checkpoint_failed"]["reason"] == "OSError: [Errno 5] Input/output error"
    kept = events["checkpoint"]
    assert kept["bytes"] == manifest.read(Path(kept["path"])).bytes
    assert 0 < kept["blocked_seconds"] <= kept["seconds"] + 1
    assert checkpoints(config.output_dir) == ["step-6"]


def test_a_last_save_that_fails_ends_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config = configured(run, run.parent / "run")
    run_here(configured(run, run.parent / "run", "--training.steps=3"))
    monkeypatch.setattr(save, "_commit", refuse)
    with pytest.raises(RunFailedError, match=r"the checkpoint of update 6, the last, failed: OSError: .*No space left"):
        run_here(config)
    assert checkpoints(config.output_dir) == ["step-3"]
    assert lines(config.output_dir / "events.jsonl")[-1]["event"] == "checkpoint_failed"
