"""`python -m trainer.plan` and `./run_train.sh --plan`: what they say, and what they leave with."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

from tests.system.runs import write_run
from trainer.config.parse import load
from trainer.hardware.device_specs import detect_device, load_device
from trainer.launch import launcher
from trainer.metrics.prediction import MEASURED_STEPS, Prediction
from trainer.plan.__main__ import main
from trainer.plan.plan import plan_stage

FITS = ["--config", "llama3_8b_1m", "--device", "h100-80gb"]


def test_a_run_that_fits_leaves_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FITS, "--world-size", "32"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("llama3_8b_1m on 32 x h100-80gb (4 nodes)\nFITS: ")
    for part in ("MFU", "device hours", "kept for the backward pass", "attention", "saves"):
        assert part in said


def test_a_run_that_does_not_fit_leaves_with_3_and_says_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "llama3_8b_1m_8gpu", "--device", "a100-40gb", "--memory.offload", "none"]) == 3
    said = capsys.readouterr().out
    assert "DOES NOT FIT: a device needs" in said
    assert "frees" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device", "h100-80"], 'error: device "h100-80": there is no such table or file; did you mean h100-80gb?'),
        (["--world-size", "7"], "error: the mesh "),
        (["--trainin.steps", "7"], "error: "),
        (["search"], "error: how many devices? give --gpus N or --nodes N, or ask for the --fewest"),
        (["find"], "error: find: there are search, calibrate; see --help"),
        (["search", "--gpus", "0"], "error: argument --gpus: 0 must be a whole number, 1 at least"),
        (["--network", "fast"], "error: argument --network: fast must be a number above 0, in GB/s"),
        (["--gpus", "8", "--nodes", "4"], "error: --world-size, --gpus and --nodes say how many devices"),
        (["search", "--gpus", "8", "--longest", "--fewest"], "error: one question at a time"),
    ],
)
def test_what_is_wrong_is_told_with_2(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = [word for word in words if word in ("search", "find")]
    assert main([*command, *FITS, *(word for word in words if word not in command)]) == 2
    assert capsys.readouterr().err.startswith(told)


def test_nodes_and_links_change_what_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for words in ([], ["--network", "5"], ["--network", "5", "--link", "20"]):
        assert main([*FITS, "--nodes", "4", *words]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("an update"))
        seconds.append(float(line.split()[2]))
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[2]


def test_a_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert main([*FITS, "--html", str(page)]) == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert f"written: {page}" in capsys.readouterr().err
    assert main([*FITS, "--html", str(tmp_path / "absent" / "plan.html")]) == 2
    assert capsys.readouterr() == (
        "",
        f"error: {tmp_path}/absent/plan.html cannot be written: {tmp_path}/absent is no folder\n",
    )


def test_a_recipe_is_planned_stage_by_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "llama31_8b_128k", "--device", "h100-80gb"]) in (0, 3)
    said = capsys.readouterr().out
    assert "stages of the run" in said
    assert all(stage.name in said for stage in load(["--config", "llama31_8b_128k"]).training_stages)


def test_a_search_prints_what_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "--config", "llama3_8b", "--device", "h200", "--gpus", "8", "--seq-len", "65536"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("llama3_8b with rows of 65,536 tokens on 8 x h200\n")
    first, second, *_ = said.split("to paste\n")[1].split("# ")[1:]
    for block in (first, second):
        assert tomllib.loads(f"# {block}")["parallelism"]["cp_method"] in (
            "auto",
            "ring",
            "allgather",
            "ulysses",
            "hybrid",
        )
    assert main(["search", "--config", "llama3_8b", "--device", "l40s", "--gpus", "1", "--longest"]) == 3
    assert "not even rows of 4,096 tokens fit" in capsys.readouterr().out


def test_a_measured_table_is_one_that_plans_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.plan import calibrate

    monkeypatch.setattr(calibrate, "SMALL", (64, 64, 1 << 16))
    table = tmp_path / "mine.toml"
    assert main(["calibrate", "--extends", "h200", "--output", str(table)]) == 0
    mine, theirs = load_device(str(table)), load_device("h200")
    assert mine.matmul_flops != theirs.matmul_flops
    assert mine.network_bandwidth == theirs.network_bandwidth
    assert "measured by trainer.plan calibrate on" in mine.sources["device.matmul_tflops"]
    assert plan_stage(load(FITS[:2]), 32, mine).step_seconds > plan_stage(load(FITS[:2]), 32, theirs).step_seconds


def test_the_drivers_name_of_a_gpu_finds_its_table(tmp_path: Path) -> None:
    assert detect_device(tmp_path) is None
    (tmp_path / "0000:19:00.0").mkdir()
    (tmp_path / "0000:19:00.0" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 18\n")
    assert detect_device(tmp_path) == load_device("h200")


# ---- before and beside training


def started(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["launch", *words])
    monkeypatch.setattr(launcher, "run_with_restarts", lambda *_: 0)
    monkeypatch.setenv("NGPU", "2")
    return launcher.main()


def test_a_start_shows_its_plan_and_goes_on(
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
    assert 'device "h99": there is no such table' in capsys.readouterr().err


def test_what_was_predicted_stands_beside_what_is_measured() -> None:
    config = load(FITS[:2])
    seconds = plan_stage(config, 32, load_device("h100-80gb")).step_seconds
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
