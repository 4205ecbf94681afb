"""`longhaul branch` and `longhaul runs`: a run that starts from a checkpoint of another one."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.artifacts import content, forge
from tests.system.in_process import configured, run_here
from tests.system.runs import (
    Done,
    checkpoints,
    digests,
    forked,
    metrics,
    state,
    steps,
    tensors,
    timeless,
    write_run,
)
from trainer import branch, runs
from trainer.checkpoint.__main__ import main as checkpoint_command
from trainer.storage import lineage
from trainer.storage.lineage import Lineage
from trainer.storage.run_dir import RunDir
from trainer.storage.train_state import StagePosition

Capture = pytest.CaptureFixture[str]
EXACT = ("step", "tokens", "loss", "grad_norm", "lr", "sources")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the finished run `parent`: checkpoints at steps 2, 4 and 6."""
    root = tmp_path_factory.mktemp("branches")
    run_here(configured(write_run(root), root / "parent", "--checkpoint.interval=2"))
    return root


def branched(parent: object, new: Path, *words: str) -> None:
    assert branch.main([str(parent), str(new), *words]) == 0


def trained(folder: Path, *options: str, processes: int = 1) -> Done:
    """The branch, trained by the command that `longhaul branch` prints."""
    done = forked(folder / "config.toml", folder, *options, processes=processes)
    assert done.statuses == [0] * processes, done.said
    return done


def refused(capsys: Capture, parent: object, new: Path, *words: str) -> str:
    capsys.readouterr()
    assert branch.main([str(parent), str(new), *words]) == 2
    assert not new.exists()
    return capsys.readouterr().err


# ---- exactness


@pytest.mark.ranks
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_unchanged_branch_trains_bitwise_as_its_parent(tmp_path: Path, processes: int) -> None:
    parent = tmp_path / "parent"
    config = write_run(tmp_path)
    options = ("--training.deterministic=true",)
    assert forked(config, parent, *options, processes=processes).statuses == [0] * processes
    branched(f"{parent}@3", tmp_path / "child")
    done = trained(tmp_path / "child", processes=processes)
    assert "branch of ../parent@3; carried: weights, optimizer, data position, step" in done.said
    assert "; changed: nothing" in done.said
    child = tmp_path / "child"
    assert metrics(child, *EXACT) == metrics(parent, *EXACT)[3:]
    for step in ("step-3", "step-6"):
        assert digests(child / "checkpoints" / step) == digests(parent / "checkpoints" / step)
    assert timeless(child / "checkpoints/step-6") == timeless(parent / "checkpoints/step-6")


@pytest.mark.ranks
def test_carried_data_continue_and_fresh_data_begin(root: Path, tmp_path: Path) -> None:
    for name, words in (("carried", ()), ("fresh", ("--fresh-data",))):
        branched(f"{root}/parent@4", tmp_path / name, "--optimizer.lr", "1e-3", *words)
        done = trained(tmp_path / name)
        assert "changed: optimizer.lr 0.01 -> 0.001" in done.said
    tokens = metrics(root / "parent", "tokens")
    assert metrics(tmp_path / "carried", "tokens") == tokens[4:]
    assert metrics(tmp_path / "fresh", "tokens") == tokens[:2]
    first, last = (
        state(folder / "checkpoints" / step)["trainer"]
        for folder, step in ((root / "parent", "step-2"), (tmp_path / "fresh", "step-6"))
    )
    assert {key: last[key] for key in ("next_sequence", "tokens", "sources")} == {
        key: first[key] for key in ("next_sequence", "tokens", "sources")
    }
    assert last["step"] == 6


@pytest.mark.ranks
def test_a_fresh_optimizer_starts_at_the_branch_and_resumes(root: Path, tmp_path: Path) -> None:
    child = tmp_path / "child"
    branched(f"{root}/parent@4", child, "--fresh-optimizer", "--training.steps", "8")
    trained(child, "--training.steps=5")
    trained(child, "--training.steps=8")
    assert steps(child) == [5, 6, 7, 8]
    counts = [state(child / "checkpoints" / f"step-{at}")["optimizer_steps"] for at in (5, 6, 8)]
    assert counts == [1, 2, 4]
    # AdamW's first step has the length of the learning rate in every weight.
    before = tensors(root / "parent/checkpoints/step-4")
    after = tensors(child / "checkpoints/step-5")
    name = "model.blocks.0.feed_forward.down_proj.weight"
    (lr,) = metrics(child, "lr")[0]
    moved = (after[name] - before[name] * (1 - 0.1 * lr)).abs()
    assert moved.median().item() == pytest.approx(lr, rel=1e-2)
    # A branch of the branch knows when its optimizer started.
    branched(f"{child}@5", tmp_path / "grandchild", "--training.steps", "8")
    assert content(tmp_path / "grandchild/lineage.json")["optimizer_start"] == 4
    trained(tmp_path / "grandchild")
    assert metrics(tmp_path / "grandchild", *EXACT) == metrics(child, *EXACT)[1:]


@pytest.mark.ranks
def test_other_lengths_and_data_start_the_data_and_say_so(
    root: Path, tmp_path: Path, capsys: Capture
) -> None:
    child = tmp_path / "child"
    branched(f"{root}/parent@4", child, "--training.seq_len", "32", "--data.packing", "concat")
    printed = capsys.readouterr().out.splitlines()
    assert printed[1:5] == [
        "carried: weights, optimizer, step",
        "fresh: data position",
        'changed: data.packing "best_fit" -> "concat"',
        "changed: training.seq_len 64 -> 32",
    ]
    # What was branched with stays: another change is another run.
    other = forked(child / "config.toml", child, "--training.seq_len=48")
    assert other.statuses == [78]
    assert "training.seq_len was 32 and is now 48" in other.said
    assert "sequence 0; the data starts from its beginning" in trained(child).said
    assert metrics(child, "step", "tokens")[-1] == (6, 2 * 6 * 32)


@pytest.mark.ranks
def test_a_flat_run_becomes_staged(root: Path, tmp_path: Path, capsys: Capture) -> None:
    sections = (root / "run.toml").read_text()
    for line in ("seq_len = 64\n", "steps = 6\n"):
        sections = sections.replace(line, "")
    recipe = tmp_path / "recipe.toml"
    past = '[[stage]]\nname = "past"\nseq_len = 64\nsteps = 4\n'
    recipe.write_text(
        f'{sections}\n{past}\n[[stage]]\nname = "long"\nseq_len = 128\nsteps = 2\nrope = {{ theta = 2e6 }}\n'
    )
    child = tmp_path / "child"
    branched(f"{root}/parent@4", child, "--config", str(recipe))
    assert 'stage "long" (2 of 2): steps 5 to 6' in capsys.readouterr().out
    done = trained(child)
    assert f'stage "long" starts from {child}/checkpoints/step-4 with the optimizer' in done.said
    assert metrics(child, "step", "stage") == [(5, "long"), (6, "long")]
    (before,) = metrics(root / "parent", "tokens")[3]
    # Sequences have some padding.
    assert before + 2 * 6 * 100 < metrics(child, "tokens")[-1][0] <= before + 2 * 6 * 128


@pytest.mark.ranks
def test_weights_alone_start_a_run_at_step_0(root: Path, tmp_path: Path) -> None:
    child = tmp_path / "child"
    branched(f"{root}/parent@4", child, "--weights-only")
    assert "carried: weights; fresh: optimizer, data position, step" in trained(child).said
    assert steps(child) == [1, 2, 3, 4, 5, 6]
    assert metrics(child, "tokens") == metrics(root / "parent", "tokens")
    first = metrics(root / "parent", "loss")[0]
    assert metrics(child, "loss")[0] < first
    assert state(child / "checkpoints/step-6")["optimizer_steps"] == 6


@pytest.mark.ranks
def test_a_branch_of_a_branch_that_has_not_trained_adds_up(root: Path, tmp_path: Path) -> None:
    branched(f"{root}/parent@4", tmp_path / "one", "--fresh-optimizer", "--optimizer.lr", "1e-3")
    branched(tmp_path / "one", tmp_path / "two", "--training.seed", "1")
    found = lineage.read(tmp_path / "two")
    assert found is not None
    assert (found.parent, found.optimizer_start, found.carries_data) == ("../one", 4, False)
    assert [*found.changed] == ["optimizer.lr", "training.seed"]
    trained(tmp_path / "two")


# ---- refusals


def test_what_a_branch_cannot_change_is_refused_by_name(
    root: Path, tmp_path: Path, capsys: Capture
) -> None:
    parent = f"{root}/parent@4"
    new = tmp_path / "new"
    said = refused(capsys, parent, new, "--model.dim", "32", "--training.dtype", "float64")
    assert "error: model.dim was 64 and is now 32: a branch cannot change it" in said
    assert 'training.dtype was "float32" and is now "float64"' in said
    assert "must be" in refused(capsys, parent, new, "--training.steps", "0")
    done = refused(capsys, f"{root}/parent", new)
    assert "starts at step 6 and would be done at step 6: it needs --training.steps" in done
    missing = refused(capsys, f"{root}/parent@3", new)
    assert "contains step-2, step-4, step-6" in missing
    assert "leave it out" in refused(capsys, parent, new, "--job.output_dir", "x")
    weights = refused(capsys, parent, new, "--weights-only", "--model.dim", "32")
    assert "model.dim = 32, but the initial weights have 64" in weights
    both = refused(capsys, parent, new, "--weights-only", "--fresh-data")
    assert "--weights-only includes --fresh-optimizer and --fresh-data" in both
    new.mkdir()
    assert branch.main([parent, str(new)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_an_unusable_checkpoint_exits_78(root: Path, tmp_path: Path, capsys: Capture) -> None:
    branched(f"{root}/parent@4", tmp_path / "one")
    (tmp_path / "one/checkpoints/step-4/state.json").unlink()
    assert branch.main([f"{tmp_path}/one@4", str(tmp_path / "two")]) == 78
    assert "state.json is missing" in capsys.readouterr().err
    assert not (tmp_path / "two").exists()


@pytest.mark.ranks
def test_a_branch_without_its_checkpoint_or_lineage_trains_nothing(
    root: Path, tmp_path: Path
) -> None:
    child = tmp_path / "child"
    branched(f"{root}/parent@4", child, "--fresh-data")
    record = child / "lineage.json"
    whole = record.read_bytes()
    record.write_bytes(whole.replace(b'"carries_data": false', b'"carries_data": true'))
    damaged = forked(child / "config.toml", child)
    assert damaged.statuses == [78]
    assert f"{record} is damaged: it does not match its own checksum" in damaged.said
    record.write_bytes(whole)
    (child / "checkpoints/step-4").rename(tmp_path / "step-4")
    lost = forked(child / "config.toml", child)
    assert lost.statuses == [78]
    assert "parent@4 and has lost its checkpoints; branch again" in lost.said
    assert checkpoints(child) == []


# ---- files


def test_a_branch_shares_files_and_outlives_its_parents(
    root: Path, tmp_path: Path, capsys: Capture
) -> None:
    branched(f"{root}/parent@4", tmp_path / "one")
    assert "shares its files" in capsys.readouterr().out
    shared = tmp_path / "one/checkpoints/step-4"
    for path in shared.iterdir():
        assert path.stat().st_ino == (root / "parent/checkpoints/step-4" / path.name).stat().st_ino
    branched(tmp_path / "one", tmp_path / "two")
    for path in shared.iterdir():
        path.unlink()
    assert checkpoint_command(["verify", str(tmp_path / "two")]) == 0


def test_files_that_cannot_be_linked_are_copied(
    root: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    branched(f"{root}/parent@4", tmp_path / "one")
    assert "copied" in capsys.readouterr().out
    copied = tensors(tmp_path / "one/checkpoints/step-4")
    whole = tensors(root / "parent/checkpoints/step-4")
    assert all(torch.equal(copied[name], whole[name]) for name in whole)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which needs root")
def test_files_of_somebody_else_are_copied(root: Path, tmp_path: Path, capsys: Capture) -> None:
    """Their owner may write into them later."""
    branched(f"{root}/parent@4", tmp_path / "theirs")
    for path in (tmp_path / "theirs/checkpoints/step-4").iterdir():
        path.write_bytes(unlinked(path))
        os.chown(path, 65534, 65534)
    branched(tmp_path / "theirs", tmp_path / "mine")
    assert "copied" in capsys.readouterr().out
    for path in (tmp_path / "mine/checkpoints/step-4").iterdir():
        assert (path.stat().st_uid, path.stat().st_nlink) == (os.geteuid(), 1)


def unlinked(path: Path) -> bytes:
    """The content of a file, which is removed."""
    found = path.read_bytes()
    path.unlink()
    return found


# ---- the list


def listed(folder: Path, capsys: Capture) -> list[str]:
    capsys.readouterr()
    assert runs.main([str(folder)]) == 0
    return capsys.readouterr().out.splitlines()


def test_runs_are_listed_below_their_parents(root: Path, tmp_path: Path, capsys: Capture) -> None:
    branched(f"{root}/parent@4", tmp_path / "a")
    branched(tmp_path / "a", tmp_path / "b", "--training.steps", "9")
    branched(f"{root}/parent@2", tmp_path / "c", "--weights-only")
    (tmp_path / "not a run").mkdir()
    head, *rows = listed(tmp_path, capsys)
    assert head.split() == ["run", "steps", "state", "branch", "of"]
    assert [row.split("  ")[0] or row[:3] for row in rows] == ["a", "  b", "c"]
    assert f"4 of 9  not started  {tmp_path}/a@4, carried: weights, optimizer" in rows[1]
    assert "0 of 6  not started" in rows[2]
    assert "parent@2, carried: weights; fresh: optimizer" in rows[2]
    assert listed(root / "parent", capsys)[1].split()[:5] == ["parent", "6", "of", "6", "done"]


def test_a_narrow_terminal_shows_every_word_of_the_list(
    root: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    branched(f"{root}/parent@4", tmp_path / "child-of-another", "--fresh-optimizer")
    (row,) = listed(tmp_path, capsys)[1:]
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    head, *lines = listed(tmp_path, capsys)
    assert max(map(len, lines)) <= 60
    assert head.split() == ["run", "steps", "state", "branch", "of"]
    assert lines[0].startswith("child-of-another  4 of 6  not started  ")
    assert sorted("".join(lines).replace(" ", "")) == sorted(row.replace(" ", ""))


def test_runs_that_name_each_other_as_parents_are_listed_once(
    root: Path, tmp_path: Path, capsys: Capture
) -> None:
    branched(f"{root}/parent@4", tmp_path / "a")
    branched(tmp_path / "a", tmp_path / "b")
    forge(tmp_path / "a/lineage.json", lambda record: record.update(parent="../b"))
    (tmp_path / "c").mkdir()
    RunDir(tmp_path / "c").checkpoints_dir.mkdir()
    (tmp_path / "c/lineage.json").write_text("{")
    rows = listed(tmp_path, capsys)[1:]
    assert [row.split()[0] for row in rows] == ["c", "a", "b"]
    assert "lineage.json is damaged" in rows[0]


def foreign(run: Path, parent: str) -> None:
    """A run folder without checkpoints, whose record names this parent."""
    RunDir(run).checkpoints_dir.mkdir(parents=True)
    record = Lineage(
        parent=parent,
        step=1,
        manifest="0" * 64,
        carries_step=True,
        carries_data=True,
        optimizer_start=0,
        stage=StagePosition(name="", index=0, start_step=0),
        changed={},
        created="",
    )
    lineage.write(run, record)


def test_a_parent_that_is_no_path_or_a_loop_of_links_ends_no_list(
    tmp_path: Path, capsys: Capture
) -> None:
    foreign(tmp_path / "loop", "../link")
    (tmp_path / "link").symlink_to("link")
    foreign(tmp_path / "null", "parent")
    forge(tmp_path / "null/lineage.json", lambda record: record.update(parent="a\0b"))
    rows = listed(tmp_path, capsys)[1:]
    assert [row.split()[0] for row in rows] == ["loop", "null"]
    assert f"{tmp_path}/link@1" in rows[0]
    assert "lineage.json is damaged: parent" in rows[1]


def test_a_name_of_several_lines_forges_no_row(tmp_path: Path, capsys: Capture) -> None:
    foreign(tmp_path / "run\nforged", "../parent\nforged")
    (row,) = listed(tmp_path, capsys)[1:]
    assert row.startswith(r"run\nforged")
    assert rf"{tmp_path}/parent\nforged@1" in row


def test_a_chain_of_branches_may_have_any_length(tmp_path: Path, capsys: Capture) -> None:
    """Longer than Python's stack, and indented to a bound."""
    length = sys.getrecursionlimit() + 10
    for number in range(length):
        foreign(tmp_path / f"{number:05}", f"../{number - 1:05}")
    rows = listed(tmp_path, capsys)[1:]
    assert [row.split()[0] for row in rows] == [f"{number:05}" for number in range(length)]
    assert max(map(len, rows)) < 200


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: Capture) -> None:
    assert runs.main([str(tmp_path)]) == 2
    assert runs.main([str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
