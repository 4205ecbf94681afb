"""Output and exit codes of `python -m trainer.plan` and `./run_train.sh --plan`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from tests.plan.made_up_traces import make_up_traces
from tests.system.runs import write_run
from trainer.config.parse import load
from trainer.hardware.device_specs import detect_device, load_device
from trainer.launch import launcher
from trainer.metrics.prediction import MEASURED_STEPS, Prediction
from trainer.plan.__main__ import main
from trainer.plan.run_plan import plan_stage

FITS = ["--config", "llama3_8b_1m", "--device", "h100-80gb"]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    make_up_traces(monkeypatch)


@pytest.fixture
def no_suggestions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a trace."""
    monkeypatch.setattr("trainer.plan.__main__.suggestions", lambda *_: [])


@pytest.mark.usefixtures("no_suggestions")
def test_a_plan_names_the_code_that_allocates_what_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["--config", "debug", "--device", "h100-80gb", "--why"]) == 0
    said = capsys.readouterr().out
    assert "gradients, allocated in models/linear.py:" in said
    for part in ("MFU", "device hours", "saved activations", "attention"):
        assert part in said


@pytest.mark.usefixtures("made_up")
def test_a_run_that_fits_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FITS, "--world-size", "32"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("llama3_8b_1m on 32 x h100-80gb (4 nodes)\nFITS: ")
    assert "saves" in said.partition("\nsuggestions\n")[2]


@pytest.mark.usefixtures("made_up")
def test_suggestions_follow_an_answer_that_is_printed_already(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.plan.__main__.suggestions", interrupted)
    with suppress(KeyboardInterrupt):
        main(FITS)
    assert capsys.readouterr().out.startswith("llama3_8b_1m on 32 x h100-80gb")


def test_a_process_whose_output_is_closed_ends_without_a_traceback() -> None:
    code = "import sys; sys.stdout = None; from trainer.plan.__main__ import main; sys.exit(main(['--gpus', 'x']))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: command line: --gpus")
    code = code.replace("sys.stdout", "sys.stderr")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.usefixtures("made_up")
def test_a_recipe_is_planned_for_its_largest_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "stages_debug", "--device", "h100-80gb"]) == 0
    assert capsys.readouterr().out.startswith("stages_debug on 2 x h100-80gb")


@pytest.mark.usefixtures("made_up")
def test_a_run_that_does_not_fit_exits_with_3_and_suggests_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(
            ["--config", "llama3_8b_1m_8gpu", "--device", "a100-40gb", "--memory.offload", "none"]
        )
        == 3
    )
    said = capsys.readouterr().out
    assert "DOES NOT FIT: a device needs" in said
    assert "frees" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--device", "h100-80"],
            'error: device "h100-80" is neither a table nor a file; did you mean h100-80gb?',
        ),
        (["--world-size", "7"], "error: the mesh "),
        (["--trainin.steps", "7"], "error: "),
        (["search"], "error: --gpus or --nodes is missing"),
        (["find"], "error: command line: unknown argument find"),
        (
            ["search", "--gpus", "0"],
            "error: command line: --gpus/--world-size 0 must be an integer, at least 1, optionally with",
        ),
        (
            ["--seq-len", "1"],
            "error: command line: --seq-len 1 must be an integer, at least 2, at most 2,147,483,647, optionally",
        ),
        (["--html", "/"], "error: command line: --html / cannot be written: a folder"),
        (
            ["--network", "fast"],
            "error: command line: --network fast must be a finite number, above 0",
        ),
        (
            ["--gpus", "8", "--nodes", "4"],
            "error: --world-size, --gpus and --nodes must give the same number",
        ),
        (
            ["search", "--gpus", "8", "--longest", "--fewest"],
            "error: --longest, --fewest: only one of them",
        ),
    ],
)
def test_invalid_arguments_exit_with_2(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [word for word in words if word in ("search", "find")]
    assert main([*command, *FITS, *(word for word in words if word not in command)]) == 2
    assert capsys.readouterr().err.startswith(told)


@pytest.mark.usefixtures("no_suggestions")
def test_slower_links_increase_the_step_time(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for words in ([], ["--network", "5"], ["--network", "5", "--link", "20"]):
        assert main([*FITS, "--nodes", "4", *words]) == 0
        line = next(
            line for line in capsys.readouterr().out.splitlines() if line.startswith("step time ")
        )
        seconds.append(float(line.split()[2]))
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[2]


@pytest.mark.usefixtures("made_up")
def test_html_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert main([*FITS, "--html", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>")
    for part in ("memory by sequence length", "MFU by sequence length", "<h2>Suggestions</h2>"):
        assert part in text
    assert f"wrote {page}" in capsys.readouterr().err
    assert main([*FITS, "--html", str(tmp_path / "absent" / "plan.html")]) == 2
    assert capsys.readouterr() == (
        "",
        f"error: command line: --html {tmp_path}/absent/plan.html cannot be written: {tmp_path}/absent is not a folder\n",
    )


@pytest.mark.usefixtures("made_up")
def test_all_stages_of_a_recipe_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "llama31_8b_128k", "--device", "h100-80gb"]) in (0, 3)
    said = capsys.readouterr().out
    assert "training stages" in said
    assert all(
        stage.name in said for stage in load(["--config", "llama31_8b_128k"]).training_stages
    )


@pytest.mark.usefixtures("made_up")
def test_search_prints_toml(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "search",
                "--config",
                "llama3_8b",
                "--device",
                "h200",
                "--gpus",
                "8",
                "--seq-len",
                "65536",
            ]
        )
        == 0
    )
    said, _, suggested = capsys.readouterr().out.partition("\nsuggestions\n")
    assert suggested.startswith("- ")
    assert said.startswith("llama3_8b with 65,536 tokens per sequence on 8 x h200\n")
    # Between two headings is what a user copies.
    _, *printed = re.split(r"configuration to paste, (\d) of (\d)\n", said)
    headings = [*zip(printed[::3], printed[1::3], strict=True)]
    assert headings == [(str(number), "5") for number in range(1, 6)]
    for block in printed[2::3]:
        assert tomllib.loads(block)["parallelism"].get("cp_method", "auto") in (
            "auto",
            "ring",
            "allgather",
            "ulysses",
            "hybrid",
        )
    assert (
        main(
            [
                "search",
                "--config",
                "llama3_70b_128k",
                "--device",
                "l40s",
                "--gpus",
                "1",
                "--longest",
            ]
        )
        == 3
    )
    assert "fewer than 4,096 tokens per sequence" in capsys.readouterr().out


def test_a_calibrated_table_can_be_planned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.plan import calibrate

    monkeypatch.setattr(calibrate, "SMALL", (64, 64, 1 << 16))
    table = tmp_path / "mine.toml"
    assert main(["calibrate", "--extends", "h200", "--output", str(table)]) == 0
    mine = load_device(str(table))
    theirs = load_device("h200")
    assert mine.matmul_flops != theirs.matmul_flops
    assert mine.network_bandwidth == theirs.network_bandwidth
    assert "measured by longhaul plan calibrate on" in table.read_text()
    assert (
        plan_stage(load(["--config", "debug"]), 2, mine).step_seconds
        > plan_stage(load(["--config", "debug"]), 2, theirs).step_seconds
    )


def test_a_gpu_is_detected_by_its_driver_name(tmp_path: Path) -> None:
    assert detect_device(tmp_path) is None
    (tmp_path / "0000:19:00.0").mkdir()
    (tmp_path / "0000:19:00.0" / "information").write_text(
        "Model: \t\t NVIDIA H200\nIRQ:   \t\t 18\n"
    )
    assert detect_device(tmp_path) == load_device("h200")


# ---- at launch and during training


def started(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["launch", *words])
    monkeypatch.setattr(launcher, "run_with_restarts", lambda *_: 0)
    monkeypatch.setenv("NGPU", "2")
    return launcher.main()


@pytest.mark.usefixtures("made_up")
def test_launch_shows_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ["--config", str(write_run(tmp_path)), "--job.output_dir", str(tmp_path / "run")]
    assert started(monkeypatch, *config, "--plan") == 0
    out, err = capsys.readouterr()
    assert "FITS" in out
    assert err == ""
    small = tmp_path / "small.toml"
    small.write_text('extends = "h100-80gb"\n[device]\nmemory_gib = 0.0001\n')
    assert started(monkeypatch, *config, "--plan", "--plan.device", str(small)) == 3
    out, err = capsys.readouterr()
    assert "DOES NOT FIT" in out
    assert err.startswith("error: the run does not fit: a device needs")
    assert started(monkeypatch, *config, "--plan.device", "h99") == 2
    assert 'device "h99" is neither a table nor a file' in capsys.readouterr().err


def test_prediction_is_compared_with_the_median_measurement() -> None:
    seconds = 6.5
    beside = Prediction(device="h100-80gb", step_seconds=seconds)
    told = [beside.compare(measured) for measured in (100.0, 5.0, 9.0, 6.0, 7.0)]
    assert told[:MEASURED_STEPS] == [None] * MEASURED_STEPS
    assert told[MEASURED_STEPS + 1] is None
    assert told[MEASURED_STEPS] == {
        "device": "h100-80gb",
        "predicted_seconds": seconds,
        "measured_seconds": 6.0,
    }
    assert json.dumps(told)
    unknown = Prediction()
    assert [unknown.compare(1.0) for _ in range(9)] == [None] * 9
