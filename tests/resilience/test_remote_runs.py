"""Whole runs with `checkpoint.remote`: killed, and resumed on a machine that has only the
configuration and the corpus.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.object_server import SECRET, TOKEN, URL, Proxy
from tests.system.runs import (
    ROOT,
    digests,
    kill_launcher,
    launch,
    launched,
    lines,
    metrics,
    wait_for,
    write_run,
)
from trainer.storage.remote_checkpoints import RemoteCheckpoints

pytestmark = pytest.mark.ranks

REMOTE = ("--checkpoint.remote", URL)
EXACT = ("step", "tokens", "loss", "grad_norm", "lr")


@pytest.fixture(autouse=True)
def same_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    # Processes that a test starts import the libraries from where this one has them.
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setattr("tests.system.runs.ROOT", os.pathsep.join(filter(None, paths)))


def steps_stored() -> list[int]:
    return RemoteCheckpoints(URL).steps()


def test_a_killed_run_resumes_bitwise_from_copies_alone_and_writes_no_secret(
    proxy: Proxy, tmp_path: Path
) -> None:
    config = write_run(tmp_path)
    options = ("--training.steps", "6", "--checkpoint.interval", "1")
    whole = launched(config, tmp_path / "whole", *options, processes=1, patience=300)
    assert whole.statuses == [0], whole.said

    killed = tmp_path / "killed"
    # However fast it trains, the run waits for these at its end.
    late = [f"/step-{step}/" for step in range(3, 7)]
    proxy.fault = lambda method, path: (
        "busy" if method == "PUT" and any(each in path for each in late) else ""
    )
    victim = launch(config, killed, *options, *REMOTE, processes=1)
    assert wait_for(steps_stored, 300)
    assert kill_launcher(victim) == []
    found = steps_stored()[-1]
    shutil.rmtree(killed)
    proxy.heal()

    new = tmp_path / "new"
    resumed = launched(config, new, *options, *REMOTE, processes=1, patience=300)
    assert resumed.statuses == [0], resumed.said
    assert f"resumed from {new}/checkpoints/step-{found}:" in resumed.said
    assert metrics(new, *EXACT) == metrics(tmp_path / "whole", *EXACT)[found:]
    assert digests(new / "checkpoints" / "step-6") == digests(
        tmp_path / "whole" / "checkpoints" / "step-6"
    )
    assert steps_stored() == [4, 5, 6]
    events = [line["event"] for line in lines(new / "events.jsonl")]
    assert {"checkpoint_downloaded", "checkpoint_uploaded"} <= {*events}
    require_no_secrets(tmp_path)


def require_no_secrets(folder: Path) -> None:
    """In a folder, and in what is stored."""
    objects = RemoteCheckpoints(URL).folder
    written = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    stored = [objects.read(name, max_bytes=1 << 30) for name in objects.sizes()]
    assert len(written) > 10
    assert stored
    for content in written + stored:
        assert SECRET.encode() not in content
        assert TOKEN.encode() not in content


@pytest.mark.slow
def test_a_store_that_fails_does_not_end_training_and_is_repeated(
    proxy: Proxy, tmp_path: Path
) -> None:
    config = write_run(tmp_path)
    folder = tmp_path / "run"
    # The probe is let through.
    proxy.always("full", method="PUT", part="/step-")
    running = launch(config, folder, *REMOTE, processes=2)
    assert wait_for((folder / "checkpoints" / "step-6").exists)
    assert wait_for((folder / "DONE").exists)
    log = folder.with_suffix(".log")
    assert wait_for(lambda: "uploading checkpoints failed" in log.read_text())
    # The launcher forwards it: the run is done, and waits.
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 1
    said = log.read_text()
    assert said.count("uploading checkpoints failed, tried again later") == 1
    assert f"the run is done, but {URL} may lack step-6: " in said
    assert (folder / "RETRY").exists()
    assert steps_stored() == []

    proxy.heal()
    again = launched(config, folder, *REMOTE, processes=2)
    assert again.statuses == [0], again.said
    assert "already done" in again.said
    assert steps_stored() == [3, 6]


def test_without_credentials_nothing_starts(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_run(tmp_path)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    # The service of an instance, which answers here that it has none.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{proxy.port}")
    proxy.always("denied")
    for words in (REMOTE, (*REMOTE, "--check")):
        refused = launched(config, tmp_path / "run", *words, processes=1)
        assert refused.statuses == [2], refused.said
        assert "set AWS_ACCESS_KEY_ID" in refused.said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_without_the_library_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A module of this name that is not found hides the library, installed or not.
    hiding = tmp_path / "hiding"
    hiding.mkdir()
    (hiding / "sitecustomize.py").write_text("import sys\nsys.modules['obstore'] = None\n")
    monkeypatch.setattr(
        "tests.system.runs.ROOT", f"{hiding}{os.pathsep}{Path(__file__).resolve().parents[2]}"
    )
    refused = launched(write_run(tmp_path), tmp_path / "run", *REMOTE, processes=1)
    assert refused.statuses == [2], refused.said
    assert f'checkpoint.remote = "{URL}" needs obstore: ' in refused.said
    assert "pip install obstore" in refused.said


def test_a_password_in_a_url_is_refused_and_not_repeated(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    url = "s3://user:my-password@bucket/x"
    refused = launched(config, tmp_path / "run", "--checkpoint.remote", url, processes=1)
    assert refused.statuses == [2]
    assert "must not contain a user, password or query" in refused.said
    assert "my-password" not in refused.said
