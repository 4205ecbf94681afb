"""`longhaul watch`: the page of a run that trains, has ended, is broken or is a stranger's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bad_inputs.cases import ANY_FILE, Damage
from tests.plan.test_html import EVIL, Page
from tests.system.in_process import configured, run_here
from tests.system.runs import write_run
from tests.watch.invented_runs import BEGAN, EVENTS, record, write_invented_run, write_lines
from trainer.plan.document import LineChart, Table
from trainer.storage import exit_markers
from trainer.watch.__main__ import main, render
from trainer.watch.page import RunPage, RunView

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def invented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_invented_run(tmp_path_factory.mktemp("invented") / "run")


@pytest.fixture
def run(invented: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(invented, tmp_path / "run"))


def table(page: RunPage, title: str) -> list[list[str]]:
    (found,) = (each for each in page.sections if each.title == title)
    assert isinstance(found, Table)
    return [[*row] for row in found.rows]


def chart(page: RunPage, title: str) -> dict[str, list[tuple[float, float]]]:
    (found,) = (each for each in page.sections if each.title == title)
    assert isinstance(found, LineChart)
    return {name: [*line] for name, line in found.lines.items()}


# ---- what it shows


def test_the_page_has_the_numbers_of_the_newest_record(invented: Path) -> None:
    page = RunView(invented).page()
    facts = dict(page.facts)
    newest = record(300)
    assert page.name == "long_code"
    assert facts["step"] == "300 of 2,000"
    assert facts["loss"] == f"{newest['loss']:.4f}"
    assert facts["learning rate"] == "3.00e-04"
    assert facts["validation loss, held_out"] == "3.4000"
    assert facts["predicted step time"] == "11.2 s"
    assert facts["MFU"] == "41.2%"
    assert facts["goodput"] == "93.5%"
    assert facts["launches"] == "2, on 32 ranks"
    assert facts["faults"] == "3"
    assert page.notes == ["the planner's figure of this network was not measured"]


def test_curves_are_those_of_the_records(invented: Path) -> None:
    page = RunView(invented).page()
    loss = chart(page, "Loss")
    assert loss["training"] == [(step, record(step)["loss"]) for step in range(1, 301)]
    assert loss["validation, held_out"] == [(0, 8.1), (100, 4.7), (200, 3.4)]
    by_position = chart(page, "Loss by position in the document")
    # No document is long enough for the last bucket.
    assert [*by_position] == ["0-256", "256-1K", "1K-4K", "4K-16K"]
    assert by_position["1K-4K"][9] == (10, record(10)["loss"] - 0.2)
    assert chart(page, "Step time")["predicted"] == [(1, 11.2), (300, 11.2)]
    assert [*chart(page, "Balance of work over ranks")] == ["attention", "data parallelism"]
    assert {"Throughput", "Utilisation", "Learning rate", "Gradient norm"} <= {
        section.title for section in page.sections
    }


def test_tables_have_predictions_experts_events_checkpoints_and_lineage(invented: Path) -> None:
    page = RunView(invented).page()
    compared = table(page, "Predicted and measured")
    assert compared[1] == ["peak device memory, GiB", "69.8", "71.3", "1.02"]
    assert table(page, "Load of experts at the newest step") == [
        ["1", "1.70", "0.30", "0"],
        ["2", "1.80", "0.00", "1"],
    ]
    events = table(page, "Events")
    assert events[0] == ["2026-09-21 16:03:20", "240", "resumed from step-240 on 32 ranks"]
    assert [row[2] for row in events if row[2].startswith("⚠")] == [
        "⚠ rank 17 on node-3 is a straggler: compute takes 1.6 times the median",
        "⚠ rolled back to step-100, skipping sequences 3200 to 4864",
        "⚠ loss 9.750 is 11 sigmas above the recent mean",
    ]
    assert table(page, "Checkpoints")[0] == [
        *("200", "2026-09-21 15:23:20", "96.0 GiB", "39.8", "1.1", "on disk")
    ]
    assert table(page, "Lineage") == [
        ["branch of", "../long_web@4000"],
        ["parts", "carried: weights; fresh: optimizer, data position, step"],
        ["changed", "training.seq_len 131072 -> 1048576"],
    ]


def touch_lease(run: Path) -> None:
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "lease").touch()


@pytest.mark.parametrize(
    ("prepare", "state", "reason"),
    [
        (touch_lease, "running", ""),
        (lambda run: (run / "checkpoints/step-2000").mkdir(), "done", ""),
        (
            lambda run: exit_markers.write(run, "REQUEUE", reason="SIGTERM"),
            "preempted; the same command resumes it",
            "SIGTERM",
        ),
        (
            lambda run: exit_markers.write(run, "STOP", reason="steps 5 to 9 diverged\nmore"),
            "failed; it needs a person",
            "steps 5 to 9 diverged",
        ),
        (
            lambda run: exit_markers.write(run, "RETRY", reason="out of memory"),
            "failed; another launch may succeed",
            "out of memory",
        ),
        (
            Path.exists,
            "interrupted: no launch is running, and none left a reason",
            "",
        ),
        (lambda run: (run / "events.jsonl").unlink(), "not started", ""),
    ],
)
def test_the_state_is_that_of_the_newest_launch(
    run: Path, prepare: Callable[[Path], object], state: str, reason: str
) -> None:
    prepare(run)
    page = RunView(run).page()
    assert (page.state.text, page.reason) == (state, reason)
    assert f"{state.partition(';')[0]}, step 300 of 2,000</title>" in render(RunView(run))


def test_the_page_follows_a_run_that_trains_and_ends(tmp_path: Path) -> None:
    config = configured(
        write_run(tmp_path), tmp_path / "run", "--training.steps=4", "--checkpoint.interval=2"
    )
    run_here(config)
    view = RunView(tmp_path / "run")
    page = view.page()
    assert (page.state.text, dict(page.facts)["step"]) == ("done", "4 of 4")
    assert [row[0] for row in table(page, "Checkpoints")] == ["4", "2"]
    assert [*chart(page, "Loss")] == ["training"]
    assert [row[2] for row in table(page, "Events")][-1] == "started on 1 rank"
    run_here(configured(tmp_path / "run.toml", tmp_path / "run", "--training.steps=6"))
    page = view.page()
    assert dict(page.facts)["step"] == "6 of 6"
    assert [step for step, _ in chart(page, "Loss")["training"]] == [1, 2, 3, 4, 5, 6]
    assert page.notes == []


# ---- the command


def test_once_writes_a_page_of_its_own(run: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "page.html"
    assert main([str(run), "--once", str(file)]) == 0
    assert capsys.readouterr().out == f"wrote {file}\n"
    text = file.read_text()
    page = Page(text)
    assert {tag for tag, _ in page.elements} & {"script", "img", "iframe", "form"} == set()
    assert "http" not in text.replace('name="viewport"', "")
    names = [each["aria-label"] for each in page.having_class("scroll")]
    assert "Loss, chart" in names
    assert all(names)


@pytest.mark.parametrize("made", ["", "folder", "file"])
def test_what_is_no_run_is_refused_in_one_line(made: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "outputs"
    if made == "folder":
        path.mkdir()
    elif made == "file":
        path.touch()
    assert main([str(path), "--once", str(tmp_path / "page.html")]) == 2
    reason = "has no config.toml and no checkpoints" if made == "folder" else "is not a folder"
    expected = f"error: {path} {reason}: it is not the folder of a run\n"
    assert capsys.readouterr().err == expected
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written_is_refused(run: Path, capsys: Capture) -> None:
    assert main([str(run), "--once", str(run / "none" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    text = render(RunView(tmp_path))
    assert "No step is logged yet." in text
    assert "not started" in text


# ---- files of a stranger


def test_texts_of_the_run_are_escaped(tmp_path: Path) -> None:
    known = Page(render(RunView(write_invented_run(tmp_path / "known"))))
    run = write_invented_run(tmp_path / "run")
    exit_markers.write(run, "STOP", reason=EVIL)
    evil = [{"event": "upload_failed", "reason": EVIL}, {"event": EVIL, "why": EVIL}]
    write_lines(run / "events.jsonl", [*evil, {**EVENTS[2], "set": EVIL}])
    positions = {"loss_by_position": {EVIL: 1.0}, "stage": EVIL}
    write_lines(run / "metrics.jsonl", [record(301) | positions])
    found = Page(render(RunView(run), nonce="x"))
    tags = {tag for tag, _ in known.elements} | {"script", "noscript"}
    assert {tag for tag, _ in found.elements} <= tags
    names = {name for _, attributes in known.elements for name in attributes} | {"nonce"}
    assert {name for _, attributes in found.elements for name in attributes} <= names
    assert sum("alert('x')" in text for text in found.texts) >= 5


FILES = ("metrics.jsonl", "events.jsonl", "config.toml", "prediction.json", "lineage.json", "STOP")


@pytest.mark.parametrize("damage", ANY_FILE.values(), ids=ANY_FILE)
def test_files_of_any_content_give_a_page(run: Path, damage: Damage) -> None:
    exit_markers.write(run, "STOP", reason="it diverged")
    for name in FILES:
        damage(run / name)
    assert render(RunView(run)).startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_leaves_the_others_on_the_page(run: Path, name: str) -> None:
    exit_markers.write(run, "STOP", reason="it diverged")
    view = RunView(run)
    whole = view.page()
    (run / name).write_bytes(b"\xff\xfe\n")
    page = RunView(run).page()
    kept = {
        "metrics.jsonl": "Events",
        "events.jsonl": "Loss",
        "lineage.json": "Loss",
    }
    assert kept.get(name, "Lineage") in [section.title for section in page.sections]
    assert page.state.text == whole.state.text or name == "STOP"
    assert any(name in note for note in page.notes) or name == "STOP"


def test_numbers_of_a_stranger_are_drawn_or_left_out(run: Path) -> None:
    lines: list[dict[str, object]] = [
        {"step": step, "loss": loss, "lr": tiny, "grad_norm": huge, "expert_load": load}
        for step, (loss, tiny, huge, load) in enumerate(
            [
                (5e-324, 1e-300, -1e99, [[1e99, -1.0], "x", [None]]),
                (1e-323, 2e-300, 1e99, 7),
                ("1", [], -1, [[]]),
                (10**30, 0, 2.0**300, [[0, 0]]),
            ],
            2**53 - 10,
        )
    ]
    write_lines(run / "metrics.jsonl", lines, mode="w")
    write_lines(
        run / "events.jsonl", [{"event": "end", "time": -BEGAN}, {"time": 1e300}], mode="w"
    )
    assert "nats per token" in render(RunView(run))
    for line in lines:
        write_lines(run / "metrics.jsonl", [line], mode="w")
        assert render(RunView(run)).startswith("<!DOCTYPE html>")
