"""`python -m trainer.checkpoint`: what it lists, finds, deletes and exports."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.system.in_process import configured, run_here, saved_by, trainer_of
from tests.system.runs import ROOT, checkpoints, reseal, state, tensors, write_run
from trainer.checkpoint.__main__ import main
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.run_dir import RunDir

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    run_here(configured(write_run(root), root / "run", "--checkpoint.interval=2"))
    return root


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained / "run", tmp_path / "run"))


def said(capsys: Capture, *words: object) -> tuple[int, list[str], str]:
    """Exit status, lines of standard output, and standard error."""
    status = main([str(word) for word in words])
    out, aside = capsys.readouterr()
    return status, out.splitlines(), aside


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def test_all_are_listed_with_what_is_known_of_them(run: Path, capsys: Capture) -> None:
    (run / "checkpoints" / "step-4" / "pinned").touch()
    flip(run / "checkpoints" / "step-6" / "state.json")
    status, (head, *rows), _ = said(capsys, "list", run)
    assert status == 0
    assert head.split() == ["step", "saved", "size", "ranks"]
    first, second, third = (row.split() for row in rows)
    assert (first[0], first[2:]) == ("2", [*first[2:4], "1", "good"])
    assert second[-2:] == ["good", "pinned"]
    assert rows[2].endswith("damaged: state.json has other content than was written")
    assert third[0] == "6"
    assert said(capsys, "list", run / "checkpoints" / "step-2")[1] == [head, rows[0]]


def test_damage_is_found_and_named(run: Path, capsys: Capture) -> None:
    assert said(capsys, "verify", run) == (0, [f"{run}/checkpoints/step-6: good"], "")
    flip(run / "checkpoints" / "step-4" / "__0_0.distcp")
    assert said(capsys, "verify", run)[0] == 0, "only the newest is read"
    status, told, _ = said(capsys, "verify", run, "--all")
    assert status == 78
    assert told == [
        f"{run}/checkpoints/step-6: good",
        f"{run}/checkpoints/step-4: __0_0.distcp has other content than was written",
        f"{run}/checkpoints/step-2: good",
    ]
    assert said(capsys, "verify", run / "checkpoints" / "step-4")[:2] == (78, [told[1]])
    assert checkpoints(run) == ["step-2", "step-4", "step-6"], "nothing is renamed"


def test_pruning_keeps_the_newest_and_the_last_that_is_good(run: Path, capsys: Capture) -> None:
    before = checkpoints(run)
    status, told, _ = said(capsys, "prune", run, "--keep", 1, "--dry-run")
    assert (status, told[-1]) == (0, "1 checkpoints would stay")
    assert checkpoints(run) == before
    flip(run / "checkpoints" / "step-6" / "__0_0.distcp")  # Its manifest is as it was.
    status, told, _ = said(capsys, "prune", run, "--keep", 1)
    assert (status, told[0]) == (0, f"{run}/checkpoints/step-2 was deleted")
    assert checkpoints(run) == ["step-4", "step-6"]
    flip(run / "checkpoints" / "step-4" / ".metadata")
    status, told, aside = said(capsys, "prune", run, "--keep", 1)
    assert (status, told) == (78, [])
    assert "is good, and nothing was deleted" in aside
    assert checkpoints(run) == ["step-4", "step-6"]


def test_pruning_keeps_what_is_pinned_and_what_the_run_began_with(trained: Path, run: Path, capsys: Capture) -> None:
    (run / "checkpoints" / "step-2" / "pinned").touch()
    config = configured(trained / "run.toml", run, f"--checkpoint.initial_load_path={run}/checkpoints/step-4")
    RunDir(run).record_start(config, 6)
    assert said(capsys, "prune", run, "--keep", 1) == (0, ["3 checkpoints are left"], "")
    (run / "checkpoints" / "step-2" / "pinned").unlink()
    assert said(capsys, "prune", run, "--keep", 1)[1][-1] == "2 checkpoints are left"
    assert checkpoints(run) == ["step-4", "step-6"]


def test_the_weights_alone_become_a_checkpoint_that_a_run_begins_with(
    trained: Path, run: Path, tmp_path: Path, capsys: Capture
) -> None:
    output = tmp_path / "weights"
    status, told, _ = said(capsys, "export", run, output)
    assert status == 0
    assert told[0].startswith(f"{output}: the weights of {run}/checkpoints/step-6, ")
    whole = tensors(run / "checkpoints" / "step-6")
    slim = tensors(output)
    assert slim.keys() == {name for name in whole if name.startswith("model.")}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in slim.items())
    sizes = [sum(path.stat().st_size for path in folder.iterdir()) for folder in (output, run / "checkpoints/step-6")]
    assert sizes[0] < 0.5 * sizes[1]
    assert state(output) == state(run / "checkpoints" / "step-6")
    assert said(capsys, "verify", output)[0] == 0
    shutil.rmtree(run)
    config = configured(trained / "run.toml", tmp_path / "next", f"--checkpoint.initial_load_path={output}")
    with trainer_of(config) as trainer:
        assert CheckpointManager(config, RunDir(config.output_dir), trainer.world).resume(trainer) is None
        held = trainer.state_dict()
        assert all(torch.equal(held[name], tensor) for name, tensor in slim.items())
    assert said(capsys, "export", output, output)[0] == 2


def test_weights_are_found_wherever_they_lie_in_a_file(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    config = configured(trained / "run.toml", tmp_path / "run")
    with trainer_of(config) as trainer:
        held = dict(reversed(trainer.state_dict().items()))
        trainer.state_dict = lambda: held  # type: ignore[method-assign]
        saved = saved_by(CheckpointManager(config, RunDir(config.output_dir), trainer.world), trainer)
    assert said(capsys, "export", saved, tmp_path / "weights")[0] == 0
    whole, slim = tensors(saved), tensors(tmp_path / "weights")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in slim.items())


def test_an_export_of_what_is_damaged_leaves_nothing(run: Path, tmp_path: Path, capsys: Capture) -> None:
    flip(run / "checkpoints" / "step-6" / "__0_0.distcp")
    status, _, aside = said(capsys, "export", run, tmp_path / "weights")
    assert (status, "has other content" in aside) == (78, True)
    assert not (tmp_path / "weights").exists()
    reseal(run / "checkpoints" / "step-6")
    assert said(capsys, "export", run, tmp_path / "weights")[0] == 0


@pytest.mark.parametrize("words", [["list"], ["verify"], ["prune", "--keep=1"]])
def test_a_folder_without_checkpoints_is_told(tmp_path: Path, capsys: Capture, words: list[str]) -> None:
    status, _, aside = said(capsys, *words, tmp_path)
    assert (status, aside) == (78, f"error: {tmp_path} is neither a checkpoint nor a run folder with one\n")


@pytest.mark.parametrize("words", [[], ["list"], ["prune", "x"], ["prune", "x", "--keep", "0"], ["drop", "x"]])
def test_wrong_arguments_leave_with_2(words: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert "usage: python -m trainer.checkpoint" in capsys.readouterr().err


def test_the_commands_are_told_without_torch() -> None:
    code = "import sys; from trainer.checkpoint.__main__ import main\ntry: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("list", "verify", "prune", "export"))
