"""Retention: which checkpoints are deleted, and that a partial `step-N` never exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.test_manifest import commit
from trainer.storage.retention import (
    checkpoints_to_delete,
    delete_checkpoint,
    list_quarantined,
    quarantine,
    remove_temporary_folders,
    valid_checkpoints,
)


def commit_steps(checkpoints: Path, *steps: int) -> list[tuple[int, Path]]:
    return [(step, commit(checkpoints / f"step-{step}", step=step)) for step in steps]


@pytest.mark.parametrize(
    ("keep", "keep_every", "deleted"),
    [
        (1, None, [2, 4, 6, 8]),
        (3, None, [2, 4]),
        (5, None, []),
        (6, None, []),
        (1, 4, [2, 6]),
        (2, 2, []),
    ],
)
def test_the_newest_and_every_nth_are_kept(
    tmp_path: Path, keep: int, keep_every: int | None, deleted: list[int]
) -> None:
    committed = commit_steps(tmp_path, 2, 4, 6, 8, 10)
    to_delete = checkpoints_to_delete(committed, keep=keep, keep_every=keep_every)
    assert to_delete == [folder for step, folder in committed if step in deleted]


def test_pinned_and_protected_checkpoints_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = commit_steps(tmp_path / "run", 2, 4, 6, 8)
    (tmp_path / "run" / "step-4" / "pinned").touch()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    protected = [Path("link/step-2")]
    assert checkpoints_to_delete(committed, keep=1, protected=protected) == [
        tmp_path / "run" / "step-6"
    ]


def test_damaged_checkpoints_do_not_count_and_are_kept(tmp_path: Path) -> None:
    committed = commit_steps(tmp_path, 2, 4, 6)
    (tmp_path / "step-6" / "manifest.json").unlink()
    (tmp_path / "step-2" / "state.json").write_text("{} ")
    assert valid_checkpoints(committed) == [committed[1]]
    assert checkpoints_to_delete(valid_checkpoints(committed), keep=1) == []


def test_a_checkpoint_is_renamed_before_it_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_steps(tmp_path, 2)
    names = []
    monkeypatch.setattr("shutil.rmtree", lambda folder: names.append(folder.name))
    delete_checkpoint(tmp_path / "step-2")
    assert names == [path.name for path in tmp_path.iterdir()] == [".tmp-old-step-2"]
    delete_checkpoint(tmp_path / "step-2")  # Already deleted: no error.
    assert names == [".tmp-old-step-2"]


def test_only_temporary_folders_are_removed(tmp_path: Path) -> None:
    commit_steps(tmp_path, 2)
    for name in (".tmp-step-4.dead", ".tmp-old-step-1", "bad-step-3-x"):
        commit(tmp_path / name)
    (tmp_path / ".tmp-link").symlink_to(tmp_path / "step-2")
    (tmp_path / ".tmp-file").touch()
    remove_temporary_folders(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad-step-3-x", "step-2"]
    assert len([*(tmp_path / "step-2").iterdir()]) == 4


def test_a_quarantined_checkpoint_states_its_reason(tmp_path: Path) -> None:
    commit_steps(tmp_path, 2, 4)
    quarantined = quarantine(tmp_path / "step-2", "a bit flipped")
    assert quarantined.parent == tmp_path
    assert quarantined.name.startswith("bad-step-2-")
    assert (quarantined / "reason").read_text() == "a bit flipped\n"
    assert list_quarantined(tmp_path) == [f"{quarantined.name}: a bit flipped"]
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-4"]
