"""Damaged checkpoints are detected and quarantined; runs resume from the newest intact one,
bitwise.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.system.in_process import configured, run_here
from tests.system.runs import checkpoints, digests, forked, lines, metrics, state, steps, write_run
from trainer.checkpoint import resume
from trainer.checkpoint.resume import latest_verified_checkpoint
from trainer.errors import RunFailedError
from trainer.step.process_group import gloo_group, process_group
from trainer.storage import manifest
from trainer.storage.run_dir import ResumeError, RunDir, next_stage

EXACT = ("step", "tokens", "loss", "grad_norm", "lr")
OPTIONS = ("--schedule.kind=constant", "--checkpoint.interval=2", "--training.dtype=float32")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def zero_a_page(path: Path) -> None:
    """Zeroes the second page, or the rest of a shorter file, like a page that never reached the
    disk.
    """
    content = path.read_bytes()
    start = min(4096, len(content) // 2)
    path.write_bytes(
        content[:start] + bytes(min(4096, len(content) - start)) + content[start + 4096 :]
    )


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit": flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "gone": Path.unlink,
    "a page": zero_a_page,
    "empty": lambda path: os.truncate(path, 0),
}
FILES = ("__0_0.distcp", ".metadata", "state.json", "manifest.json")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps, and one that stopped after step 4."""
    root = tmp_path_factory.mktemp("runs")
    run = write_run(root)
    run_here(configured(run, root / "whole", *OPTIONS))
    run_here(configured(run, root / "stopped", *OPTIONS, "--training.steps=4"))
    assert checkpoints(root / "stopped") == ["step-2", "step-4"]
    return root


@pytest.fixture
def stopped(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root / "stopped", tmp_path / "run"))


def quarantined(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("bad-step-*"))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(damage, marks=pytest.mark.slow if damage in ("cut", "empty", "gone") else ())
        for damage in DAMAGES
    ],
)
def test_every_damage_to_every_file_is_detected_and_quarantined(
    root: Path, stopped: Path, name: str, damage: str
) -> None:
    DAMAGES[damage](stopped / "checkpoints" / "step-4" / name)
    config = configured(root / "run.toml", stopped, *OPTIONS)
    folder = RunDir(stopped)
    with process_group(config.distributed):
        group = gloo_group(config.distributed)
        assert latest_verified_checkpoint(folder, group) == stopped / "checkpoints" / "step-2"
        assert latest_verified_checkpoint(folder, group) == stopped / "checkpoints" / "step-2"
    (quarantine_folder,) = quarantined(stopped)
    assert quarantine_folder.name.startswith("bad-step-4-")
    assert name in (quarantine_folder / "reason").read_text()
    (event,) = [event for event in lines(folder.events_path) if event["event"] == "quarantined"]
    assert (event["path"], event["moved"]) == (
        str(stopped / "checkpoints" / "step-4"),
        str(quarantine_folder),
    )
    assert name in event["reason"]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case[1] in ("a page", "cut") else ())
        for case in zip(FILES, ("a bit", "a page", "cut", "gone"), strict=True)
    ],
)
def test_a_run_resumes_from_the_previous_checkpoint_bitwise(
    root: Path, stopped: Path, name: str, damage: str
) -> None:
    DAMAGES[damage](stopped / "checkpoints" / "step-4" / name)
    run_here(configured(root / "run.toml", stopped, *OPTIONS))
    assert len(quarantined(stopped)) == 1
    assert [place for place in checkpoints(stopped) if place.startswith("step")] == [
        "step-2",
        "step-4",
        "step-6",
    ]
    assert steps(stopped) == [1, 2, 3, 4, 5, 6]
    assert metrics(stopped, *EXACT) == metrics(root / "whole", *EXACT)
    for step in ("step-4", "step-6"):
        one, other = (folder / "checkpoints" / step for folder in (stopped, root / "whole"))
        assert digests(one) == digests(other)
    assert [
        line["step"] for line in lines(stopped / "events.jsonl") if line["event"] == "start"
    ] == [0, 2]


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_split_verification_and_agree_on_damage(root: Path, tmp_path: Path) -> None:
    config = root / "run.toml"
    folder = tmp_path / "run"
    assert forked(config, folder, *OPTIONS, "--training.steps=4", processes=2).statuses == [0, 0]
    for step, name in (("step-4", "__0_0.distcp"), ("step-2", "__1_0.distcp")):
        flip(folder / "checkpoints" / step / name)
    done = forked(config, folder, *OPTIONS, processes=2)
    assert done.statuses == [78, 78]
    assert [path.name[:11] for path in quarantined(folder)] == ["bad-step-2-", "bad-step-4-"]
    assert f"error: no checkpoint in {folder}/checkpoints is intact:\n  bad-step-2-" in done.said
    size = (quarantined(folder)[0] / "__1_0.distcp").stat().st_size
    assert f"__1_0.distcp: checksum mismatch ({size:,} bytes)\n  bad-step-4-" in done.said
    assert "is damaged, renamed to bad-step-4-" in done.said
    assert "Traceback" not in done.said
    # The next launch does not silently restart at step 0.
    again = forked(config, folder, *OPTIONS, processes=2)
    assert again.statuses == [78, 78]
    assert "is intact:\n  bad-step-2-" in again.said
    assert steps(folder) == [1, 2, 3, 4]


def test_a_model_mismatch_does_not_quarantine(root: Path, stopped: Path) -> None:
    done = forked(root / "run.toml", stopped, *OPTIONS, "--training.dtype=float64")
    assert done.statuses == [78]
    assert "does not match the model" in done.said
    assert checkpoints(stopped) == ["step-2", "step-4"]


def test_a_read_error_does_not_quarantine(
    root: Path, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(manifest, "RETRY_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(manifest, "hash_file", fail)
    config = configured(root / "run.toml", stopped, *OPTIONS)
    # Exit code 1.
    with pytest.raises(RunFailedError, match=r"cannot be read \(attempt 4\): Input/output error"):
        run_here(config)
    assert checkpoints(stopped) == ["step-2", "step-4"]


def test_a_failed_quarantine_ends_the_run(
    root: Path, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    flip(stopped / "checkpoints" / "step-4" / "__0_0.distcp")
    monkeypatch.setattr(resume, "quarantine", refuse)
    with pytest.raises(
        RunFailedError, match=r"step-4 is damaged \(.*\) and cannot be renamed: Permission denied"
    ):
        run_here(configured(root / "run.toml", stopped, *OPTIONS))
    assert checkpoints(stopped) == ["step-2", "step-4"]


def test_the_launcher_selects_a_checkpoint_by_its_small_files(root: Path, stopped: Path) -> None:
    folder = RunDir(stopped)
    config = configured(root / "run.toml", stopped, *OPTIONS)
    flip(stopped / "checkpoints" / "step-4" / "__0_0.distcp")
    assert folder.resume_checkpoint(config) == stopped / "checkpoints" / "step-4", (
        "large files are not read"
    )
    flip(stopped / "checkpoints" / "step-4" / "state.json")
    assert folder.resume_checkpoint(config) == stopped / "checkpoints" / "step-2"
    (stopped / "checkpoints" / "step-2" / "manifest.json").unlink()
    with pytest.raises(
        ResumeError,
        match=r"is intact:\n  step-4: state.json: checksum mismatch .*\n  step-2: manifest.json is missing",
    ):
        next_stage(config)
    assert checkpoints(stopped) == ["step-2", "step-4"], "nothing is renamed yet"


STAGES = """
[[stage]]
name = "short"
seq_len = 64
steps = 3

[[stage]]
name = "long"
seq_len = 128
steps = 2
"""


def test_damage_back_to_an_earlier_stage_needs_another_launch(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    folder = tmp_path / "run"
    text = run.read_text().replace("seq_len = 64\n", "").replace("steps = 6\n", "")
    run.write_text(text.replace("interval = 3", "interval = 2") + STAGES)
    assert forked(run, folder).statuses == [0]  # The first stage.
    assert checkpoints(folder) == ["step-2", "step-3"]
    flip(folder / "checkpoints" / "step-3" / "__0_0.distcp")
    done = forked(run, folder)
    assert done.statuses == [1]
    message = f'stage "long" cannot resume from {folder}/checkpoints/step-2, which is at step 2 of an earlier stage; '
    assert f"error: {message}run the same command again to resume that stage\n" in done.said
    assert "Traceback" not in done.said
    for step in (3, 5):
        assert forked(run, folder).statuses == [0]
        assert state(folder / "checkpoints" / f"step-{step}")["step"] == step
    assert steps(folder) == [1, 2, 3, 4, 5]


def test_damaged_initial_weights_are_rejected_and_not_renamed(root: Path, stopped: Path) -> None:
    flip(stopped / "checkpoints" / "step-4" / "__0_0.distcp")
    done = forked(root / "run.toml", root / "other", f"--checkpoint.initial_load_path={stopped}")
    assert done.statuses == [78]
    assert (
        f"error: {stopped}/checkpoints/step-4 is damaged: __0_0.distcp: checksum mismatch"
        in done.said
    )
    assert checkpoints(stopped) == ["step-2", "step-4"]
    assert not torch.distributed.is_initialized()
