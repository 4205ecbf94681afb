"""`python -m trainer.checkpoint`: list, verify, prune and export."""

from __future__ import annotations

import logging
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
from trainer.storage import progress
from trainer.storage.run_dir import RunDir

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    run_here(configured(write_run(root), root / "run", "--checkpoint.interval=2"))
    return root


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained / "run", tmp_path / "run"))


def run_main(capsys: Capture, *argv: object) -> tuple[int, list[str], str]:
    """Exit status, lines of standard output, and standard error."""
    status = main([str(argument) for argument in argv])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def test_list_shows_every_checkpoint_and_its_status(run: Path, capsys: Capture) -> None:
    (run / "checkpoints" / "step-4" / "pinned").touch()
    flip(run / "checkpoints" / "step-6" / "state.json")
    status, (head, *rows), _ = run_main(capsys, "list", run)
    assert status == 0
    assert head.split() == ["step", "saved", "size", "ranks"]
    first, second, third = (row.split() for row in rows)
    assert (first[0], first[2:]) == ("2", [*first[2:4], "1", "intact"])
    assert second[-2:] == ["intact", "pinned"]
    size = (run / "checkpoints" / "step-6" / "state.json").stat().st_size
    assert rows[2].endswith(f"damaged: state.json: checksum mismatch ({size:,} bytes)")
    assert third[0] == "6"
    assert run_main(capsys, "list", run / "checkpoints" / "step-2")[1] == [head, rows[0]]
    assert run_main(capsys, "list", f"{run}@2")[1] == [head, rows[0]]
    for step in (3, "0" * 300):
        assert run_main(capsys, "list", f"{run}@{step}")[0] == 78
    status, _, err = run_main(capsys, "list", f"{run}@3")
    assert (status, f"{run}/checkpoints/step-3 is neither" in err) == (78, True)


def test_verify_names_the_damaged_file(run: Path, capsys: Capture) -> None:
    assert run_main(capsys, "verify", run) == (0, [f"{run}/checkpoints/step-6: intact"], "")
    flip(run / "checkpoints" / "step-4" / "__0_0.distcp")
    assert run_main(capsys, "verify", run)[0] == 0, "only the newest is verified"
    status, out, _ = run_main(capsys, "verify", run, "--all")
    assert status == 78
    size = (run / "checkpoints/step-4/__0_0.distcp").stat().st_size
    assert out == [
        f"{run}/checkpoints/step-6: intact",
        f"{run}/checkpoints/step-4: __0_0.distcp: checksum mismatch ({size:,} bytes)",
        f"{run}/checkpoints/step-2: intact",
    ]
    assert run_main(capsys, "verify", run / "checkpoints" / "step-4")[:2] == (78, [out[1]])
    flip(run / "checkpoints" / "step-2" / ".metadata")
    (line,) = run_main(capsys, "verify", f"{run}@2")[1]
    assert line.count(".metadata: checksum mismatch") == 1
    assert ";" not in line
    assert checkpoints(run) == ["step-2", "step-4", "step-6"], "nothing is renamed"


def test_verify_and_export_say_how_far_they_are(
    run: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    assert main(["verify", str(run)]) == 0
    assert caplog.messages[-1].startswith("verifying step-6: 100 %, ")
    caplog.clear()
    assert main(["export", str(run), str(tmp_path / "weights")]) == 0
    titles = [message.partition(":")[0] for message in caplog.messages]
    assert [*dict.fromkeys(titles)] == ["verifying step-6", "exporting weights"]
    assert caplog.messages[-1].startswith("exporting weights: 100 %, ")


def test_prune_keeps_the_newest_checkpoint_and_the_newest_intact_one(
    run: Path, capsys: Capture
) -> None:
    before = checkpoints(run)
    status, out, _ = run_main(capsys, "prune", run, "--keep", 1, "--dry-run")
    assert (status, out[-1]) == (0, "1 checkpoints would remain")
    checkpoint = run / "checkpoints" / "step-6"
    said = f"error: command line: {checkpoint} is a checkpoint; prune needs a run folder\n"
    assert run_main(capsys, "prune", checkpoint, "--keep", 1) == (2, [], said)
    assert checkpoints(run) == before
    flip(run / "checkpoints" / "step-6" / "__0_0.distcp")  # The manifest itself stays intact.
    status, out, _ = run_main(capsys, "prune", run, "--keep", 1)
    assert (status, out[0]) == (0, f"{run}/checkpoints/step-2 was deleted")
    assert checkpoints(run) == ["step-4", "step-6"]
    flip(run / "checkpoints" / "step-4" / ".metadata")
    status, out, err = run_main(capsys, "prune", run, "--keep", 1)
    assert (status, out) == (78, [])
    assert "is intact; nothing was deleted" in err
    assert checkpoints(run) == ["step-4", "step-6"]


def test_prune_keeps_pinned_checkpoints_and_the_initial_weights(
    trained: Path, run: Path, capsys: Capture
) -> None:
    (run / "checkpoints" / "step-2" / "pinned").touch()
    config = configured(
        trained / "run.toml", run, f"--checkpoint.initial_load_path={run}/checkpoints/step-4"
    )
    RunDir(run).record_start(config, 6)
    assert run_main(capsys, "prune", run, "--keep", 1) == (0, ["3 checkpoints remain"], "")
    (run / "checkpoints" / "step-2" / "pinned").unlink()
    assert run_main(capsys, "prune", run, "--keep", 1)[1][-1] == "2 checkpoints remain"
    assert checkpoints(run) == ["step-4", "step-6"]


def test_exported_weights_are_a_checkpoint_that_a_run_starts_from(
    trained: Path, run: Path, tmp_path: Path, capsys: Capture
) -> None:
    output = tmp_path / "weights"
    status, out, _ = run_main(capsys, "export", run, output)
    assert status == 0
    assert out[0].startswith(f"{output}: weights of {run}/checkpoints/step-6, ")
    whole = tensors(run / "checkpoints" / "step-6")
    exported = tensors(output)
    assert exported.keys() == {name for name in whole if name.startswith("model.")}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in exported.items())
    sizes = [
        sum(path.stat().st_size for path in folder.iterdir())
        for folder in (output, run / "checkpoints/step-6")
    ]
    assert sizes[0] < 0.5 * sizes[1]
    assert state(output) == state(run / "checkpoints" / "step-6")
    assert run_main(capsys, "verify", output)[0] == 0
    shutil.rmtree(run)
    config = configured(
        trained / "run.toml", tmp_path / "next", f"--checkpoint.initial_load_path={output}"
    )
    with trainer_of(config) as trainer:
        assert (
            CheckpointManager(config, RunDir(config.output_dir), trainer.world).resume(trainer)
            is None
        )
        state_dict = trainer.state_dict()
        assert all(torch.equal(state_dict[name], tensor) for name, tensor in exported.items())
    assert run_main(capsys, "export", output, output)[0] == 2


def test_export_finds_weights_at_any_offset_of_a_file(
    trained: Path, tmp_path: Path, capsys: Capture
) -> None:
    config = configured(trained / "run.toml", tmp_path / "run")
    with trainer_of(config) as trainer:
        state_dict = dict(reversed(trainer.state_dict().items()))
        trainer.state_dict = lambda: state_dict  # type: ignore[method-assign]
        saved = saved_by(
            CheckpointManager(config, RunDir(config.output_dir), trainer.world), trainer
        )
    assert run_main(capsys, "export", saved, tmp_path / "weights")[0] == 0
    whole = tensors(saved)
    exported = tensors(tmp_path / "weights")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in exported.items())


def test_export_of_a_damaged_checkpoint_leaves_nothing(
    run: Path, tmp_path: Path, capsys: Capture
) -> None:
    flip(run / "checkpoints" / "step-6" / "__0_0.distcp")
    status, _, err = run_main(capsys, "export", run, tmp_path / "weights")
    assert (status, "checksum mismatch" in err) == (78, True)
    assert not (tmp_path / "weights").exists()
    reseal(run / "checkpoints" / "step-6")
    assert run_main(capsys, "export", run, tmp_path / "weights")[0] == 0


@pytest.mark.parametrize("argv", [["list"], ["verify"], ["prune", "--keep=1"]])
def test_a_folder_without_checkpoints_exits_with_78(
    tmp_path: Path, capsys: Capture, argv: list[str]
) -> None:
    status, _, err = run_main(capsys, *argv, tmp_path)
    assert (status, err) == (
        78,
        f"error: {tmp_path} is neither a checkpoint nor a run folder with a checkpoint\n",
    )


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ([], "trainer.checkpoint needs a command: list, verify, prune, export"),
        (["list"], "list needs DIR"),
        (["prune", "x"], "prune needs --keep"),
        (["prune", "x", "--keep", "0"], "--keep 0 must be an integer, at least 1"),
        (
            ["export", "s3://b/x", "y"],
            "DIR this command takes what is on this machine: checkpoint.remote restores a run from there, and checkpoint.initial_load_path takes its weights",
        ),
        (["drop", "x"], 'command "drop" is unknown; see --help'),
        (["list", "x", "--job.name", "a"], "unknown argument --job.name"),
    ],
)
def test_wrong_arguments_exit_with_2(argv: list[str], problem: str, capsys: Capture) -> None:
    assert run_main(capsys, *argv) == (2, [], f"error: command line: {problem}\n")


def test_help_does_not_import_torch() -> None:
    code = "import sys; from trainer.checkpoint.__main__ import main\ntry: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in ("list", "verify", "prune", "export"))
