"""Weights & Biases, trackio and MLflow: the packages themselves, on this machine's disk, and what
may go wrong with one.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.system.in_process import configured, run_here
from tests.system.runs import arguments, lines, wait_for, write_run
from trainer.config.extension import TrackedRun
from trainer.config.sections import MetricsSection
from trainer.launch import launcher
from trainer.metrics import tracker_clients
from trainer.metrics.tracker_clients import (
    EVENT_TEXT,
    InBackground,
    Value,
    without_secrets,
)
from trainer.metrics.trackers import TRACKERS, Trackers, wanted
from trainer.storage.run_id import recorded_run_id, run_id

API_KEY = "0123456789abcdef0123456789abcdef01234567"
Found = tuple[list[str], dict[int, float], dict[str, Any], list[str]]
"""Names of runs, losses by step, a part of the configuration, and events in words."""


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """As of a user who has logged in but names no server. trackio reads its folder once."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [
            name for name in os.environ if name.startswith(("WANDB_", "TRACKIO_", "MLFLOW_"))
        ]:
            patch.delenv(name)
        patch.setenv("WANDB_API_KEY", API_KEY)
        # Set by us otherwise, for the rest of the process.
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_PROJECT", "longhaul")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        yield
        if find_spec("wandb") is not None:
            import wandb

            wandb.teardown()


def tracked(folder: Path, *, first_step: int = 1) -> TrackedRun:
    return TrackedRun(
        name="long",
        folder=folder,
        first_step=first_step,
        config={"optimizer": {"lr": 0.25}},
        toml="[optimizer]\nlr = 0.25\n",
        prediction={"device": "h200", "step_seconds": 1.5},
        lineage={"initial_load_path": "other", "run_id": "0" * 16},
    )


def wandb_records(folder: Path) -> list[Any]:
    """Of all offline files, in order.

    A file is a log of LevelDB: blocks of 32 KiB with chunks of records.
    """
    from wandb.proto import wandb_internal_pb2

    records = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        data = path.read_bytes()
        at = 7
        payload = b""
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            size = int.from_bytes(data[at + 4 : at + 6], "little")
            kind = data[at + 6]
            if at + 7 + size > len(data):
                break
            payload += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # Whole, or the last part.
                records.append(getattr(wandb_internal_pb2, "Record").FromString(payload))  # noqa: B009 - made at run time
                payload = b""
    return records


def wait_for_wandb(folder: Path, *, launches: int) -> None:
    """Its own process writes on after the end of a run."""
    assert wait_for(
        lambda: sum(record.HasField("exit") for record in wandb_records(folder)) == launches
    )


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for record in wandb_records(folder):
        if record.HasField("history"):
            items = (
                (item.key or "/".join(item.nested_key), item.value_json)
                for item in record.history.item
            )
            rows.append({key: json.loads(value) for key, value in items})
    return rows


def found_by_wandb(folder: Path) -> Found:
    wait_for_wandb(folder, launches=2)
    runs = [record.run for record in wandb_records(folder) if record.HasField("run")]
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    losses = {
        row["step"]: row["train/loss"] for row in wandb_history(folder) if "train/loss" in row
    }
    texts = [row[EVENT_TEXT] for row in wandb_history(folder) if EVENT_TEXT in row]
    return [run.run_id for run in runs], losses, config, texts


def found_by_trackio(_: Path) -> Found:
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("longhaul")
    logs = SQLiteStorage.get_logs("longhaul", name)
    losses = {entry["step"]: entry["train/loss"] for entry in logs if "train/loss" in entry}
    texts = [entry[EVENT_TEXT]["_value"] for entry in logs if EVENT_TEXT in entry]
    return (
        [name.removeprefix("long-")],
        losses,
        SQLiteStorage.get_run_config("longhaul", name) or {},
        texts,
    )


def found_by_mlflow(folder: Path) -> Found:
    with sqlite3.connect(folder / "mlflow.db") as database:
        ids = [
            value
            for (value,) in database.execute(
                "select value from tags where key = 'longhaul.run_id'"
            )
        ]
        losses = dict(database.execute("select step, value from metrics where key = 'train/loss'"))
        params = dict(database.execute("select key, value from params"))
        tags = dict(database.execute("select key, value from tags"))
    database.close()
    nested: dict[str, Any] = {"optimizer": {"lr": float(params["optimizer.lr"])}}
    nested["prediction"] = {
        "device": params["prediction.device"],
        "step_seconds": float(params["prediction.step_seconds"]),
    }
    nested["lineage"] = {key: params[f"lineage.{key}"] for key in ("initial_load_path", "run_id")}
    return ids, losses, nested, tags["longhaul.events"].splitlines()[::-1]


@pytest.mark.parametrize(
    ("name", "find"),
    [("wandb", found_by_wandb), ("trackio", found_by_trackio), ("mlflow", found_by_mlflow)],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_launches_of_a_run_are_one_run_of_the_package(
    name: str, find: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name, reason=f"needs {name}")
    # MLflow makes the tables of its database.
    monkeypatch.setattr(tracker_clients, "CLOSE_SECONDS", 300.0)
    for first_step, last_step in ((1, 3), (3, 4)):
        tracker: Any = TRACKERS[name](tracked(tmp_path, first_step=first_step))
        for step in range(first_step, last_step + 1):
            tracker.log(
                step,
                {
                    "train/loss": 1 / step,
                    "train_experts/load by layer": [[0.5]],
                    "train_loss_by_source/a+b": 1.0,
                },
            )
        tracker.log(last_step, {"train_events/end": 1.0})
        tracker.note(last_step, "spike", "loss jumps")
        tracker.note(last_step, "end", "all steps are done")
        tracker.close()
    names, losses, config, texts = find(tmp_path)
    assert set(names) == {recorded_run_id(tmp_path)}
    assert losses == {step: 1 / step for step in range(1, 5)}
    assert config["optimizer"] == {"lr": 0.25}
    assert config["prediction"] == {"device": "h200", "step_seconds": 1.5}
    assert config["lineage"] == {"initial_load_path": "other", "run_id": "0" * 16}
    assert texts == [
        line
        for step in (3, 4)
        for line in (f"step {step}, spike: loss jumps", f"step {step}, end: all steps are done")
    ]


def test_a_run_and_its_resume_are_in_weights_and_biases(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs wandb")
    run = write_run(tmp_path)
    folder = tmp_path / "run"
    options = (
        "--metrics.trackers",
        "wandb",
        "--schedule.kind",
        "constant",
        "--checkpoint.interval",
        "2",
    )
    run_here(configured(run, folder, *options, "--training.steps", "4"))
    (folder / "checkpoints" / "step-4").rename(folder / "checkpoints" / ".tmp-step-4")
    with (folder / "events.jsonl").open("a") as events:
        events.write('{"event": "restart", "time": 0, "life": 1, "without_progress": 0}\n')
    run_here(configured(run, folder, *options, "--training.steps", "5"))
    names, losses, config, texts = found_by_wandb(folder)
    assert set(names) == {recorded_run_id(folder)}
    assert losses == {record["step"]: record["loss"] for record in lines(folder / "metrics.jsonl")}
    assert config["training"]["seq_len"] == 64
    rows = [
        (key, row["step"])
        for row in wandb_history(folder)
        for key in row
        if key.startswith("train_events/") and key != EVENT_TEXT
    ]
    expected = [("start", 0), ("end", 4), ("restart", 2), ("start", 2), ("end", 5)]
    assert rows == [(f"train_events/{kind}", step) for kind, step in expected]
    saved = "saved: "
    assert [text.partition(saved)[0] for text in texts] == [
        "step 0, start: started on 1 rank",
        "step 2, checkpoint: step-2 ",
        "step 4, checkpoint: step-4 ",
        f"step 4, end: all steps are done, loss {losses[4]:.4f}",
        "step 2, restart: workers failed and are started again (launch 2)",
        "step 2, start: resumed from step-2 on 1 rank",
        "step 4, checkpoint: step-4 ",
        "step 5, checkpoint: step-5 ",
        f"step 5, end: all steps are done, loss {losses[5]:.4f}",
    ]
    alerts = [record.alert for record in wandb_records(folder) if record.HasField("alert")]
    assert [(alert.title, alert.level) for alert in alerts] == [("restart", "WARN")]
    saves = sorted(
        {row["step"] for row in wandb_history(folder) if "train_checkpoint/bytes" in row}
    )
    assert saves == [2, 4, 5]
    written = [
        path
        for path in folder.rglob("*")
        if path.is_file() and API_KEY.encode() in path.read_bytes()
    ]
    assert written == []


# ---- what may go wrong


class Client:
    """Takes values; its making, its first step or its end may fail, or wait."""

    def __init__(self, *, fails: bool = False, waits: threading.Event | None = None) -> None:
        self.steps = list[int]()
        self.notes = list[tuple[int, str, str]]()
        self.fails = fails
        self.waits = waits

    def __call__(self, _run: TrackedRun, _identity: str) -> Client:
        return self

    def log(self, step: int, _values: Mapping[str, Value]) -> None:
        if self.waits is not None:
            self.waits.wait()
        if self.fails:
            raise OSError(f"https://me:{API_KEY}@server/ refuses {API_KEY}")
        self.steps.append(step)

    def note(self, step: int, kind: str, text: str) -> None:
        self.notes.append((step, kind, text))

    def close(self) -> None:
        self.steps.append(-1)


def trackers_of(client: Client, folder: Path, patch: pytest.MonkeyPatch) -> Trackers:
    patch.setitem(TRACKERS, "wandb", lambda run: InBackground(client, run))
    return Trackers(tracked(folder), ["wandb"])


def test_a_tracker_that_fails_is_said_once_and_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = trackers_of(Client(fails=True), tmp_path, monkeypatch)
    with caplog.at_level(logging.WARNING, logger="trainer"):
        trackers.log(1, {"train/loss": 1.0})
        for thread in threading.enumerate():
            if thread.name == "tracker":
                thread.join()
        for step in range(2, 5):
            trackers.log(step, {"train/loss": 1.0})
        trackers.close()
    assert [record.getMessage() for record in caplog.records] == [
        "tracker wandb is left out from here on: OSError: https://***@server/ refuses ***"
    ]


def test_events_reach_trackers_in_words_and_without_passwords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client()
    trackers = trackers_of(client, tmp_path, monkeypatch)
    event = {
        "event": "checkpoint_failed",
        "step": 7,
        "reason": f"s3://me:{API_KEY}@store\nis full",
    }
    trackers.note(7, event)
    # Where the text is cut.
    trackers.note(8, {"event": "preempted", "reason": f"{'-' * 480} {API_KEY}"})
    trackers.close()
    noted, cut = client.notes
    assert noted == (7, "checkpoint_failed", "checkpoint not saved: s3://***@store is full")
    assert cut[2].endswith("- ***")


def test_a_tracker_of_an_extension_needs_no_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Numbers:
        def log(self, step: int, values: Mapping[str, Value]) -> None:
            """Takes what it is given."""

        def close(self) -> None:
            """Has nothing to end."""

    monkeypatch.setitem(TRACKERS, "wandb", lambda _: Numbers())
    trackers = Trackers(tracked(tmp_path), ["wandb"])
    trackers.note(1, {"event": "end", "loss": 1.0})
    trackers.close()
    assert caplog.text == ""


def test_training_waits_for_no_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracker_clients, "CLOSE_SECONDS", 0.01)
    network = threading.Event()
    client = Client(waits=network)
    trackers = trackers_of(client, tmp_path, monkeypatch)
    for step in range(1, 100):
        trackers.log(step, {"train/loss": 1.0})
    with caplog.at_level(logging.WARNING, logger="trainer"):
        trackers.close()
    assert client.steps == []
    assert (
        "tracker wandb is left out from here on: TimeoutError: not finished within 0.01 s"
        in caplog.text
    )
    network.set()


def test_what_waits_for_a_tracker_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracker_clients, "MAX_WAITING", 10)
    network = threading.Event()
    trackers = trackers_of(Client(waits=network), tmp_path, monkeypatch)
    with caplog.at_level(logging.WARNING, logger="trainer"):
        for step in range(1, 20):
            trackers.log(step, {"train/loss": 1.0})
    assert caplog.text.count("10 records wait for it") == 1
    network.set()


def test_all_records_reach_a_tracker_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client()
    trackers = trackers_of(client, tmp_path, monkeypatch)
    for step in range(1, 50):
        trackers.log(step, {"train/loss": 1.0})
    trackers.close()
    assert client.steps == [*range(1, 50), -1]


def test_a_tracker_that_is_not_installed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        launcher, "find_spec", lambda name: None if name == "mlflow" else find_spec("json")
    )
    argv = arguments(write_run(tmp_path), tmp_path / "run", "--metrics.trackers", "wandb,mlflow")
    _, _, (problem,) = launcher.load_and_validate(argv, {"NGPU": "1"})
    assert problem.startswith("metrics.trackers = mlflow needs mlflow: ")
    assert problem.endswith(" -m pip install mlflow")
    _, _, problems = launcher.load_and_validate(argv, {"NGPU": "1"}, planning=True)
    assert problems == [], "a plan needs no package"


def test_which_trackers_run() -> None:
    assert wanted(MetricsSection()) == ["tensorboard"]
    assert wanted(MetricsSection(tensorboard=False, trackers=("mlflow", "wandb", "mlflow"))) == [
        "mlflow",
        "wandb",
    ]


@pytest.mark.parametrize("damage", [b"", b"\xff\x00", b"x" * 100])
def test_a_run_keeps_its_id_and_a_damaged_one_is_replaced(damage: bytes, tmp_path: Path) -> None:
    first = run_id(tmp_path)
    assert run_id(tmp_path) == recorded_run_id(tmp_path) == first
    (tmp_path / "run_id").write_bytes(damage)
    assert recorded_run_id(tmp_path) is None
    assert run_id(tmp_path) != first


def test_a_pipe_in_place_of_the_id_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run_id")
    assert recorded_run_id(tmp_path) is None


def test_short_values_of_the_environment_stay_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "a")
    assert without_secrets("a message") == "a message"
