"""`python -m trainer.slurm`, with three stub commands in place of SLURM that record their
arguments.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.artifacts import content
from trainer import __version__
from trainer.config.parse import load
from trainer.config.slurm import SlurmSection
from trainer.slurm import jobs, snapshot
from trainer.slurm.__main__ import build_parser, main
from trainer.slurm.scheduler import JobState

ROOT = Path(__file__).resolve().parents[2]
SIZE = ["--nodes", "2", "--gpus-per-node", "0", "--processes-per-node", "2"]
FAKE = """\
#!/bin/bash
echo "$(basename "$0") $*" >>"{folder}/commands.txt"
{body}
"""
# The output of Slurm 22.05.
JOB = (
    "JobId=41 JobName=run UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901759 Nice=0 Account=(null) "
    "QOS=(null) JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 "
    "ExitCode=0:0 RunTime=00:02:07 TimeLimit=1-00:00:00 TimeMin=N/A Partition=main ReqNodeList=(null) "
    "ExcNodeList=(null) NodeList=n[1-2] BatchHost=n1 NumNodes=2 NumCPUs=4 NumTasks=4"
)
RUNNING = JOB.format(state="RUNNING", reason="None", restarts=2)
PENDING = JOB.format(state="PENDING", reason="Resources", restarts=0)
ENDED = JOB.format(state="COMPLETED", reason="None", restarts=0)
UNKNOWN_JOB = 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1'


class Scheduler:
    """Stub scripts for the commands of SLURM."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.answer("sbatch", "echo 41")
        self.answer("scontrol", UNKNOWN_JOB)
        self.answer("scancel", "")

    def answer(self, command: str, body: str) -> None:
        path = self.folder / command
        path.write_text(FAKE.format(folder=self.folder, body=body))
        path.chmod(0o755)

    def set_job(self, job: str) -> None:
        self.answer("scontrol", f"echo '{job}'")

    def commands(self) -> list[str]:
        path = self.folder / "commands.txt"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    found = Scheduler(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{found.folder}:{os.environ['PATH']}")
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def submit(run: Path, *options: str) -> int:
    return main(["submit", "--config", "debug", "--job.output_dir", str(run), *SIZE, *options])


# ---- command line


def test_short_options_set_keys_of_the_job() -> None:
    words = [
        "render",
        "--gpus-per-node",
        "4",
        "--time=1:00:00",
        "--training.steps",
        "5",
        "--slurm.nodes",
        "2",
    ]
    _, overrides = build_parser().parse(words)
    config = load(overrides)
    assert (config.slurm.gpus_per_node, config.slurm.time, config.slurm.nodes) == (4, "1:00:00", 2)
    assert config.training.steps == 5


@pytest.mark.parametrize("command", ["render", "submit", "status", "cancel"])
def test_help_lists_every_slurm_key(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: python -m trainer.slurm {command}")
    assert all(
        f"\n  --{key.replace('_', '-')} VALUE" in printed for key in SlurmSection.model_fields
    )
    assert main(["--help"]) == 0
    assert f"\n  {command} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            [],
            "error: command line: trainer.slurm needs a command: render, submit, status, cancel\n",
        ),
        (["start"], 'error: command line: command "start" is unknown; did you mean status?\n'),
        (["status"], "error: no run given: pass its folder, or --config NAME|PATH\n"),
        (["cancel", "/nowhere"], "error: /nowhere: no such run folder\n"),
        (["status", "--config", "debug", "--zebra", "1"], "--zebra"),
    ],
)
def test_a_wrong_command_line_exits_with_2(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert problem in printed.err
    assert printed.out == ""


# ---- render


def test_render_and_submit_differ_only_in_the_configuration_path(
    scheduler: Scheduler, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "--slurm.max_stuck=4"
    assert main(["render", "--config", "debug", "--job.output_dir", str(run), *SIZE, long]) == 0
    printed = capsys.readouterr().out
    assert scheduler.commands() == []
    assert not run.exists()
    submit(run, long)
    written = (run / "slurm" / "1" / "job.sh").read_text()
    differ = [
        pair
        for pair in zip(printed.splitlines(), written.splitlines(), strict=True)
        if pair[0] != pair[1]
    ]
    config = ROOT / "train_configs" / "debug.toml"
    assert differ == [
        (
            f"ARGUMENTS=(--config {config} --job.output_dir={run})",
            f"ARGUMENTS=(--config {run}/slurm/1/config.toml)",
        )
    ]
    assert f"PYTHON={sys.executable}\n" in printed


def test_render_works_without_corpus_and_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "--config", "llama3_8b_1m", "--nodes", "4"]) == 0
    printed = capsys.readouterr()
    assert "#SBATCH --nodes=4\n" in printed.out
    assert "error: tokenizer.path" in printed.err
    assert main(["render", "--config", "llama3_8b_1m", "--nodes", "3"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "needs 32 processes, but the world size is 24 (" in printed.err
    assert printed.err.endswith("for 24 processes (3 nodes x 8)\n")


# ---- submit


def test_submit_stores_the_job_and_prints_the_next_commands(
    scheduler: Scheduler, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(run, "--training.steps", "7") == 0
    folder = run / "slurm" / "1"
    assert scheduler.commands() == [f"sbatch --parsable {folder}/job.sh"]
    assert load(["--config", str(folder / "config.toml")]).training.steps == 7
    assert content(folder / "job.json")["job"] == "41"
    assert (folder / "code.txt").read_text().splitlines()[0] == snapshot.code_version(ROOT)
    printed = capsys.readouterr().out
    assert printed.startswith(f"job 41 submitted: 2 nodes x 2 ranks, as {folder}/job.sh\n")
    for line in (
        f"tail -F {run}/slurm/job-41.log\n",
        f"trainer.slurm status {run}\n",
        f"trainer.slurm cancel {run}\n",
    ):
        assert line in printed


def test_submissions_are_numbered(scheduler: Scheduler, run: Path) -> None:
    assert [jobs.create_submission_dir(run).name for _ in range(11)] == [
        str(number) for number in range(1, 12)
    ]
    scheduler.answer("sbatch", "echo '41;cluster'")
    assert submit(run) == 0
    (run / "slurm" / "9" / "job.json").write_text(
        '{"job": "40", "time": 1.0, "nodes": 1, "processes": 2}\n'
    )
    assert (run / "slurm" / "12" / "job.sh").is_file()
    assert jobs.submitted_job_ids(run) == ["40", "41"], "9 is of before files were sealed"


def test_a_copied_run_does_not_have_the_jobs_of_the_original(
    scheduler: Scheduler, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(run)
    scheduler.set_job(RUNNING)
    copied = shutil.copytree(run, tmp_path / "copied")
    capsys.readouterr()
    assert main(["cancel", str(copied)]) == 0
    assert capsys.readouterr().out == f"{copied} has no job that is queued or running\n"
    assert not any(command.startswith("scancel") for command in scheduler.commands())
    assert jobs.submitted_job_ids(run.rename(tmp_path / "moved")) == ["41"]


def test_a_damaged_job_record_is_named(
    scheduler: Scheduler, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    submit(run)
    scheduler.set_job(RUNNING)
    path = run / "slurm" / "1" / "job.json"
    path.write_bytes(path.read_bytes().replace(b"41", b"42"))
    assert jobs.submitted_job_ids(run) == []
    assert (
        f"{path} cannot be read, so its job is unknown: it does not match its own checksum"
        in caplog.text
    )


def test_all_problems_of_a_configuration_are_reported_and_nothing_is_submitted(
    scheduler: Scheduler, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(run, "--parallelism.dp_shard", "3", "--training.micro_batch_size", "3") == 2
    printed = capsys.readouterr().err
    assert printed.count("error: ") == 2
    assert "but the world size is 4 (" in printed
    assert submit(run, "--zebra", "3", "--time", "soon") == 2
    assert capsys.readouterr().err.count("error: ") == 2
    assert scheduler.commands() == []
    assert not (run / "slurm").exists()


def test_a_queued_or_running_run_cannot_be_submitted_again(
    scheduler: Scheduler, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(run) == 0
    for job, code in ((PENDING, 2), (RUNNING, 2), (ENDED, 0)):
        scheduler.set_job(job)
        assert submit(run) == code
    assert (
        "error: job 41 of this run is PENDING (Resources); cancel it first: "
        in capsys.readouterr().err
    )
    assert sum(line.startswith("sbatch") for line in scheduler.commands()) == 2


def test_the_run_folder_of_another_run_is_refused(
    scheduler: Scheduler, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "step-3").mkdir(parents=True)
    assert submit(run) == 78
    assert "is intact:" in capsys.readouterr().err
    assert scheduler.commands() == []


def test_an_error_of_sbatch_is_reported(
    scheduler: Scheduler, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler.answer("sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    assert submit(run) == 1
    assert capsys.readouterr().err == "error: sbatch: error: invalid partition specified: x\n"
    assert jobs.submitted_job_ids(run) == []


def test_missing_slurm_commands_are_reported(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert submit(run) == 1
    rule = "run this on a machine that can submit SLURM jobs"
    assert capsys.readouterr().err == f"error: sbatch is not on PATH: {rule}\n"


# ---- status and cancel


def test_status_shows_jobs_newest_step_checkpoint_and_markers(
    scheduler: Scheduler, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(run)
    scheduler.set_job(RUNNING)
    record = {"step": 12, "loss": 2.345678, "grad_norm": None, "step_seconds": 0.5}
    (run / "metrics.jsonl").write_text(f'{{"step": 11}}\n{json.dumps(record)}\n{{"step": 13, "lo')
    (run / "checkpoints" / "step-9").mkdir()
    (run / "checkpoints" / "step-10").mkdir()
    (run / "REQUEUE").write_text(
        '{"step": 10, "reason": "SIGUSR1", "attempt": "41.2.0", "time": 0}'
    )
    capsys.readouterr()
    assert main(["status", str(run)]) == 0
    rows = [line.partition("  ") for line in capsys.readouterr().out.splitlines()]
    status = {name: value.strip() for name, _, value in rows}
    assert status["run"] == str(run)
    assert status["job 41"] == "RUNNING on n[1-2] for 00:02:07 of 1-00:00:00, requeued 2 times"
    assert status["newest step"] == "step 12, loss 2.3457, step_seconds 0.5, written 0:00:00 ago"
    assert status["newest checkpoint"] == "step-10, written 0:00:00 ago"
    assert status["REQUEUE"].startswith("step 10, reason SIGUSR1, attempt 41.2.0, 19")
    assert status["log"] == f"{run}/slurm/job-41.log"


@pytest.mark.usefixtures("scheduler")
def test_status_of_a_run_without_steps_and_scheduler(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(run) == 0
    capsys.readouterr()
    command = ["status", "--config", "debug", "--job.output_dir", str(run)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "finished; the scheduler no longer has its record\n" in printed
    assert printed.count("  none\n") == 2
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(command) == 0
    assert "unknown: scontrol is not on PATH" in capsys.readouterr().out


def test_cancel_disables_requeueing_first(
    scheduler: Scheduler, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(run)
    scheduler.set_job(RUNNING)
    assert main(["cancel", str(run)]) == 0
    assert scheduler.commands()[-2:] == ["scontrol update JobId=41 Requeue=0", "scancel 41"]
    assert "job 41 cancelled; it was RUNNING on n[1-2]" in capsys.readouterr().out
    scheduler.set_job(ENDED)
    assert main(["cancel", str(run)]) == 0
    assert scheduler.commands()[-1] == "scontrol --oneliner show job 41"
    assert capsys.readouterr().out == f"{run} has no job that is queued or running\n"


@pytest.mark.parametrize(
    ("state", "is_finished"),
    [
        ("PENDING", False),
        ("RUNNING", False),
        ("COMPLETING", False),
        ("REQUEUED", False),
        ("TIMEOUT", True),
    ],
)
def test_finished_states_are_those_that_cannot_requeue(state: str, is_finished: bool) -> None:  # noqa: FBT001
    assert (
        JobState("41", JOB.format(state=state, reason="None", restarts=0)).is_finished
        == is_finished
    )


# ---- code version


def test_a_snapshot_has_commit_changes_and_untracked_files(tmp_path: Path) -> None:
    root = tmp_path / "code"
    folder = tmp_path / "snapshot"
    folder.mkdir()
    root.mkdir()
    (root / "pyproject.toml").write_text('[project]\nversion = "1.2"\n')
    assert snapshot.code_version(root) == f"version {__version__}"
    assert snapshot.uncommitted_changes(root) == ("", [])
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run(["git", *author, *words], cwd=root, check=True, capture_output=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, check=True, capture_output=True, text=True
    ).stdout
    snapshot.write_code_version(root, folder)
    assert [path.name for path in folder.iterdir()] == ["code.txt"]
    assert (folder / "code.txt").read_text() == f"commit {commit}"
    (root / "pyproject.toml").write_text('[project]\nversion = "1.3"\n')
    (root / "new.py").touch()
    snapshot.write_code_version(root, folder)
    assert (
        folder / "code.txt"
    ).read_text() == f"commit {commit.strip()} with uncommitted changes\nuntracked: new.py\n"
    assert '+version = "1.3"' in (folder / "code.diff").read_text()
