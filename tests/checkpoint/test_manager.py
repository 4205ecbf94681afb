"""When to save, what a checkpoint contains, and which checkpoints are refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.artifacts import forge
from tests.system.in_process import configured, run_here, saved_by, trainer_of
from tests.system.runs import checkpoints, reseal, state, tensors, write_run
from trainer.checkpoint import load, save
from trainer.checkpoint.manager import CheckpointManager
from trainer.errors import UnreadableError
from trainer.step.process_group import World
from trainer.storage import manifest
from trainer.storage.run_dir import ResumeError, RunDir


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


@pytest.mark.parametrize(
    ("options", "expected_steps"),
    [
        ((), [3, 6, 7]),
        (("--checkpoint.interval", "100"), [7]),
        (("--checkpoint.interval", "1"), [1, 2, 3, 4, 5, 6, 7]),
        (("--checkpoint.enabled", "false"), []),
    ],
)
def test_every_nth_step_and_the_last_are_saved(
    run: Path, options: tuple[str, ...], expected_steps: list[int]
) -> None:
    config = configured(run, run.parent / "run", "--training.steps", "7", *options)
    manager = CheckpointManager(
        config, RunDir(config.output_dir), World(0, 1, torch.device("cpu"))
    )
    assert [
        step for step in range(1, 8) if manager.should_save(step, config.training_stages[0])
    ] == expected_steps


def test_resume_restores_what_was_saved(run: Path) -> None:
    config = configured(run, run.parent / "run")
    folder = RunDir(config.output_dir)
    with trainer_of(config) as trainer:
        steps = trainer.train_steps()
        assert [next(steps).step, next(steps).step] == [1, 2]
        saved_tensors = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
        scalars = trainer.train_state()
        saved = saved_by(CheckpointManager(config, folder, trainer.world), trainer)
        del steps
    assert saved == folder.checkpoints_dir / "step-2"
    assert {name: tensor.tolist() for name, tensor in tensors(saved).items()} == {
        name: tensor.tolist() for name, tensor in saved_tensors.items()
    }
    assert sorted(path.name for path in saved.iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "manifest.json",
        "state.json",
    ]
    assert (
        scalars
        == state(saved)["trainer"]
        == {
            "step": 2,
            "next_sequence": 12,
            "tokens": scalars["tokens"],
            "skipped": 0,
            "sources": {"corpus": scalars["tokens"]},
            "losses": trainer.loss_spikes.state_dict(),
            "goodput": trainer.goodput.state_dict(),
        }
    )
    with trainer_of(config) as trainer:
        assert CheckpointManager(config, folder, trainer.world).resume(trainer) == saved
        assert trainer.train_state() == scalars
        assert all(
            torch.equal(tensor, saved_tensors[name])
            for name, tensor in trainer.state_dict().items()
        )


def test_a_fresh_run_starts_at_step_0(run: Path) -> None:
    config = configured(run, run.parent / "run")
    with trainer_of(config) as trainer:
        assert (
            CheckpointManager(config, RunDir(config.output_dir), trainer.world).resume(trainer)
            is None
        )
        assert (trainer.step, trainer.next_sequence) == (0, 0)


def test_a_committed_step_is_not_rewritten(run: Path) -> None:
    config = configured(run, run.parent / "run")
    folder = RunDir(config.output_dir)
    with trainer_of(config) as trainer:
        saved = saved_by(CheckpointManager(config, folder, trainer.world), trainer)
        before = {path: path.stat().st_mtime_ns for path in saved.iterdir()}
        assert saved_by(CheckpointManager(config, folder, trainer.world), trainer) == saved
    assert {path: path.stat().st_mtime_ns for path in saved.iterdir()} == before


def test_a_full_disk_makes_room_by_superfluous_checkpoints(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(
        run, run.parent / "run", "--checkpoint.keep", "3", "--checkpoint.async", "false"
    )
    folder = RunDir(config.output_dir)
    with trainer_of(config) as trainer:
        manager = CheckpointManager(config, folder, trainer.world)
        for step in (1, 2, 3):
            trainer.step = step
            saved_by(manager, trainer)
        fewer = configured(
            run, run.parent / "run", "--checkpoint.keep", "2", "--checkpoint.async", "false"
        )
        manager = CheckpointManager(fewer, folder, trainer.world)
        monkeypatch.setattr(
            save, "_free_bytes", lambda _: 0 if len(checkpoints(folder.path)) > 2 else 1 << 40
        )
        trainer.step = 4
        saved_by(manager, trainer)
    assert checkpoints(folder.path) == ["step-3", "step-4"]


QUICK = (("manifest.json", 1), ("state.json", 3), (".metadata", 2), ("__0_0.distcp", 1))
"""Unreadable file, and of how many checkpoints."""


@pytest.mark.parametrize(
    ("name", "unreadable"),
    [
        pytest.param(
            name, unreadable, marks=() if (name, len(unreadable)) in QUICK else pytest.mark.slow
        )
        for name in ("manifest.json", "state.json", ".metadata", "__0_0.distcp")
        for unreadable in (["step-6"], ["step-4", "step-6"], ["step-2", "step-4", "step-6"])
    ],
)
def test_a_checkpoint_that_the_device_cannot_read_is_passed_over_if_one_before_it_can(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str, unreadable: list[str]
) -> None:
    config = configured(run, run.parent / "run", "--checkpoint.interval", "2")
    run_here(config)
    folder = RunDir(config.output_dir)
    before = checkpoints(folder.path)
    monkeypatch.setattr(manifest, "RETRY_DELAY_SECONDS", 0.0)
    retry = manifest.retry_io

    def fail(path: Path, function: Callable[[], Any]) -> Any:
        def read() -> Any:
            if path.name == name and path.parent.name in unreadable:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return function()

        return retry(path, read)

    monkeypatch.setattr(manifest, "retry_io", fail)
    monkeypatch.setattr(load, "retry_io", fail)
    with trainer_of(config) as trainer:
        manager = CheckpointManager(config, folder, trainer.world)
        if len(unreadable) == 3:
            with pytest.raises(UnreadableError, match="cannot be read"):
                manager.resume(trainer)
            assert checkpoints(folder.path) == before, "nothing is renamed: the device may recover"
            return
        resumed = manager.resume(trainer)
    assert resumed is not None
    assert resumed.name == f"step-{6 - 2 * len(unreadable)}"
    committed = before[: -len(unreadable)]
    bad = [f"bad-{each}" for each in unreadable]
    assert [
        each.rsplit("-2", 1)[0] if "bad" in each else each for each in checkpoints(folder.path)
    ] == [
        *bad,
        *committed,
    ]


def test_pruning_does_not_count_damaged_checkpoints(run: Path) -> None:
    config = configured(
        run, run.parent / "run", "--checkpoint.keep", "2", "--checkpoint.async", "false"
    )
    with trainer_of(config) as trainer:
        manager = CheckpointManager(config, RunDir(config.output_dir), trainer.world)
        for step in (1, 2, 3):
            trainer.step = step
            saved = saved_by(manager, trainer)
            if step == 2:
                (saved / "manifest.json").unlink()
    assert checkpoints(config.output_dir) == ["step-1", "step-2", "step-3"]


def test_a_failed_save_leaves_no_checkpoint_and_the_next_launch_trains(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(run, run.parent / "run", "--checkpoint.interval", "2")
    folder = RunDir(config.output_dir)
    with trainer_of(config) as trainer, monkeypatch.context() as full:
        full.setattr(save, "_free_bytes", lambda _: 0)
        manager = CheckpointManager(config, folder, trainer.world)
        manager.save(trainer)
        failed = manager.wait()
        assert failed is not None
        assert (failed.step, failed.path) == (0, None)
        assert "disk full" in str(failed.problem)
    assert folder.committed_checkpoints() == []
    assert checkpoints(folder.path) == []
    run_here(config)
    assert checkpoints(folder.path) == ["step-2", "step-4", "step-6"]


@pytest.mark.parametrize(
    "change", [{"step": 50}, {"step": 50, "optimizer_steps": 50}, {"optimizer_steps": 5}]
)
def test_a_state_of_another_step_than_its_tensors_is_refused(
    run: Path, change: dict[str, int]
) -> None:
    config = configured(run, run.parent / "run")
    run_here(config)
    folder = RunDir(config.output_dir)
    (_, newest), *_ = reversed(folder.committed_checkpoints())
    step = change.get("step", 6)
    forge(
        newest / "state.json",
        lambda state: (state.update(change), state["trainer"].update(step=step)),
    )
    about = manifest.read(newest)
    manifest.write(newest, about.model_copy(update={"step": step}))
    renamed = newest.rename(newest.with_name(f"step-{step}"))
    reseal(renamed)
    with (
        trainer_of(config) as trainer,
        pytest.raises(
            ResumeError, match=r"optimizer tensors count 6 steps, and state.json is for step"
        ),
    ):
        CheckpointManager(config, folder, trainer.world).resume(trainer)


def test_a_checkpoint_of_otherwise_packed_data_is_refused(run: Path) -> None:
    config = configured(run, run.parent / "run")
    run_here(config)
    folder = RunDir(config.output_dir)
    (_, newest), *_ = reversed(folder.committed_checkpoints())
    assert [*state(newest)["plans"]] == ["corpus"]
    forge(newest / "state.json", lambda state: state["plans"].update(corpus="another"))
    reseal(newest)
    with (
        trainer_of(config) as trainer,
        pytest.raises(
            ResumeError,
            match='was trained on otherwise packed data: corpus was "another" and is now "',
        ),
    ):
        CheckpointManager(config, folder, trainer.world).resume(trainer)


def test_another_version_is_said(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = configured(run, run.parent / "run")
    folder = RunDir(config.output_dir)
    with trainer_of(config) as trainer:
        saved = saved_by(CheckpointManager(config, folder, trainer.world), trainer)
        forge(saved / "manifest.json", lambda about: about["versions"].update(torch="2.9.0"))
        with caplog.at_level("INFO"):
            CheckpointManager(config, folder, trainer.world).resume(trainer)
    assert "the checkpoint was written with torch 2.9.0; these are longhaul " in caplog.text


CHANGES = {
    "absent": (
        "model.embed.weight",
        None,
        r"model.embed.weight is absent in the checkpoint and \(\(264, 64\), torch.float32\) in the model",
    ),
    "unexpected": (
        "model.extra",
        torch.zeros(2),
        r"model.extra is \(\(2,\), torch.float32\) in the checkpoint and absent in the model",
    ),
    "dtype": (
        "model.head.norm.weight",
        torch.ones(64).half(),
        r"\(\(64,\), torch.float16\) in the checkpoint and .*float32\) in the model",
    ),
    "shape": (
        "model.head.norm.weight",
        torch.ones(32),
        r"\(\(32,\), torch.float32\) in the checkpoint and \(\(64,\), torch.float32",
    ),
}


@pytest.mark.parametrize(("name", "value", "message"), CHANGES.values(), ids=list(CHANGES))
def test_mismatching_tensors_are_refused_and_nothing_is_loaded(
    run: Path, name: str, value: torch.Tensor | None, message: str
) -> None:
    """torch.distributed.checkpoint silently accepts an absent name or another dtype."""
    config = configured(run, run.parent / "run")
    folder = RunDir(config.output_dir)
    with trainer_of(config) as trainer:
        expected = trainer.state_dict()
        changed = {key: tensor for key, tensor in expected.items() if key != name} | (
            {} if value is None else {name: value}
        )
        trainer.state_dict = lambda: changed  # type: ignore[method-assign]
        saved_by(CheckpointManager(config, folder, trainer.world), trainer)
        trainer.state_dict = lambda: expected  # type: ignore[method-assign]
        before = {key: tensor.clone() for key, tensor in expected.items()}
        with pytest.raises(
            ResumeError,
            match=rf"(?s)step-0 does not match the model: 1 tensors differ:\n  .*{message}",
        ):
            CheckpointManager(config, folder, trainer.world).resume(trainer)
        assert all(torch.equal(tensor, before[key]) for key, tensor in expected.items())


def test_optimizer_moments_are_converted_to_optimizer_dtype(run: Path) -> None:
    """Every other tensor stays float32."""
    saved_tensors: list[dict[str, torch.Tensor]] = []
    for step, dtype in enumerate(("float32", "bfloat16", "float32"), 1):
        config = configured(run, run.parent / "run", f"--memory.optimizer_dtype={dtype}")
        with trainer_of(config) as trainer:
            checkpoints = CheckpointManager(config, RunDir(config.output_dir), trainer.world)
            checkpoints.resume(trainer)
            loaded = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
            for name, tensor in saved_tensors[-1].items() if saved_tensors else ():
                assert torch.equal(loaded[name], tensor.to(loaded[name].dtype)), name
                assert (
                    str(loaded[name].dtype)
                    == f"torch.{dtype if '.exp_avg' in name else 'float32'}"
                )
            assert trainer.step == step - 1
            assert len(trainer.config_changes) == (step > 1)
            next(trainer.train_steps())
            saved_tensors.append(
                {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
            )
            saved_by(checkpoints, trainer)


def test_a_checkpoint_of_other_data_is_refused(run: Path) -> None:
    config = configured(run, run.parent / "run")
    folder = RunDir(config.output_dir)
    with trainer_of(config) as trainer:
        saved = saved_by(CheckpointManager(config, folder, trainer.world), trainer)
        path = saved / "state.json"
        forge(path, lambda state: state.update(data={"corpus": "another"}))
        reseal(saved)
        with pytest.raises(
            ResumeError, match='was trained on other data: corpus was "another" and is now "'
        ):
            CheckpointManager(config, folder, trainer.world).resume(trainer)
