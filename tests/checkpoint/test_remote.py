"""Copies of checkpoints at `checkpoint.remote`: uploads, retention, and downloads by which a run
starts on an empty machine.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.checkpoint.test_manifest import commit
from tests.object_server import URL, Proxy
from tests.system.runs import ROOT, wait_for
from trainer.checkpoint.__main__ import main as checkpoint_command
from trainer.config.sections import CheckpointSection
from trainer.errors import ConfigError, ResumeError, RunFailedError
from trainer.storage import object_store as store_module
from trainer.storage import progress, uploads
from trainer.storage.remote_checkpoints import RemoteCheckpoints
from trainer.storage.restore import restore_newest
from trainer.storage.run_dir import RunDir
from trainer.storage.run_id import recorded_run_id
from trainer.storage.uploads import Uploads

TENSORS = "__0_0.distcp"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    retry = {**store_module.RETRY, "max_retries": 1}
    monkeypatch.setattr(store_module, "RETRY", retry)
    monkeypatch.setattr(uploads, "FIRST_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(uploads, "MAX_RETRY_SECONDS", 0.1)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    folder = RunDir(tmp_path / "run")
    folder.create()
    return folder


def save(run: RunDir, step: int) -> Path:
    return commit(run.checkpoints_dir / f"step-{step}", step=step)


@contextmanager
def uploading(run: RunDir, *, keep: int = 3, keep_every: int | None = None) -> Iterator[Uploads]:
    with Uploads(run, URL, keep=keep, keep_every=keep_every) as running:
        yield running
    running._thread.join(30)
    assert not running._thread.is_alive()


def upload(run: RunDir, *, keep: int = 3, keep_every: int | None = None) -> None:
    with uploading(run, keep=keep, keep_every=keep_every) as running:
        assert running.finish() == ""


def restored(tmp_path: Path, name: str = "new") -> RunDir:
    """A run folder on another machine, after a launch has looked at the copies."""
    folder = RunDir(tmp_path / name)
    restore_newest(folder, URL, name="run", probes=True)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stored() -> RemoteCheckpoints:
    return RemoteCheckpoints(URL)


# ---- uploads


@pytest.fixture
def said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """The log, with every line of progress."""
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    return caplog


@pytest.mark.usefixtures("proxy")
def test_a_checkpoint_comes_back_byte_by_byte(
    run: RunDir, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    saved = save(run, 6)
    upload(run)
    new = restored(tmp_path)
    assert new.committed_checkpoints() == [(6, new.checkpoints_dir / "step-6")]
    assert files(new.checkpoints_dir / "step-6") == files(saved)
    assert [path.name for path in new.checkpoints_dir.iterdir()] == ["step-6"]
    assert f"downloading {URL}/step-6: 100 %, " in said.text


def test_the_manifest_is_the_last_object_and_is_only_created(proxy: Proxy, run: RunDir) -> None:
    save(run, 6)
    upload(run)
    put = [path for method, path in proxy.requests if method == "PUT"]
    assert put[-1].endswith("/step-6/manifest.json")
    assert sum("manifest" in path for path in put) == 1


def test_a_large_file_is_sent_in_parts(
    proxy: Proxy, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "CHUNK_BYTES", 5 << 20)
    saved = commit(run.checkpoints_dir / "step-6", step=6, tensors=b"7" * (12 << 20))
    upload(run)
    assert sum("partNumber" in path for method, path in proxy.requests if method == "PUT") == 3
    assert files(restored(tmp_path).checkpoints_dir / "step-6") == files(saved)


@pytest.mark.usefixtures("proxy")
def test_a_local_file_that_was_damaged_after_its_save_is_not_committed(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    save(run, 3)
    tensors = save(run, 6) / TENSORS
    content = bytearray(tensors.read_bytes())
    content[0] ^= 1
    tensors.write_bytes(content)
    with uploading(run) as running:
        assert "differs from its manifest" in running.finish()
    assert stored().steps() == [3]
    assert not any(name.endswith(TENSORS) for name in stored().folder.sizes("step-6"))
    assert "is damaged and is not uploaded" in caplog.text


@pytest.mark.parametrize("kind", ["busy", "cut", "dead", "expired", "denied", "full"])
def test_an_upload_that_fails_is_said_once_and_repeated(
    proxy: Proxy, run: RunDir, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(run, 3)
    proxy.always(kind, method="PUT")
    with uploading(run) as running:
        assert wait_for(lambda: sum(each[0] == "PUT" for each in list(proxy.requests)) > 6)
        assert stored().steps() == []
        proxy.heal()
        assert running.finish() == ""
    assert stored().steps() == [3]
    assert caplog.text.count("uploading checkpoints failed, tried again later") == 1
    assert "a fault" in caplog.text or kind in ("cut", "dead")


@pytest.mark.slow
def test_a_slow_link_delays_nobody_but_the_thread(
    proxy: Proxy, run: RunDir, said: pytest.LogCaptureFixture
) -> None:
    proxy.always("slow", method="PUT")
    with uploading(run) as running:
        save(run, 3)
        running.wake()
        # The call returned, and the upload has still to come.
        assert stored().steps() == []
        assert running.finish() == ""
    assert stored().steps() == [3]
    assert f"uploading to {URL}: " in said.text


def test_the_end_of_a_run_says_what_is_missing(
    proxy: Proxy, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "GIVE_UP_SECONDS", 0.5)
    save(run, 3)
    proxy.always("full", method="PUT")
    with uploading(run) as running:
        problem = running.finish()
    assert problem.startswith(f"{URL} may lack step-3: ")
    assert "507" in problem


@pytest.mark.usefixtures("proxy")
def test_a_second_launch_of_the_same_step_does_not_replace_the_first(
    run: RunDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = files(save(run, 6))
    upload(run)
    other = RunDir(tmp_path / "other")
    other.create()
    commit(other.checkpoints_dir / "step-6", step=6, tensors=b"of another launch")
    # Both have looked before either committed.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteCheckpoints, "steps", _once_empty())
        upload(other)
    assert "is there already, of another launch" in caplog.text
    assert files(restored(tmp_path).checkpoints_dir / "step-6") == first


def _once_empty() -> Callable[[RemoteCheckpoints], list[int]]:
    """`steps` that sees nothing the first time."""
    whole = RemoteCheckpoints.steps
    calls = list[int]()

    def steps(self: RemoteCheckpoints) -> list[int]:
        calls.append(1)
        return whole(self) if len(calls) > 1 else []

    return steps


@pytest.mark.usefixtures("proxy")
def test_a_launch_that_lost_its_run_folder_commits_nothing(run: RunDir) -> None:
    save(run, 6)

    def lost() -> None:
        raise RunFailedError("taken over")

    run.require_lease = lost
    with uploading(run) as running:
        assert wait_for(lambda: running._problem == "taken over")
    assert stored().steps() == []


# ---- retention


@pytest.mark.usefixtures("proxy")
def test_copies_follow_the_rules_of_local_checkpoints(run: RunDir) -> None:
    for step in (2, 4, 6, 8, 10):
        save(run, step)
        if step == 6:
            (run.checkpoints_dir / "step-6" / "pinned").touch()
        upload(run, keep=2, keep_every=4)
    assert stored().steps() == [4, 6, 8, 10]
    assert {name.split("/")[0] for name in stored().folder.sizes()} == {
        "step-4",
        "step-6",
        "step-8",
        "step-10",
    }


def test_checkpoints_that_would_be_deleted_at_once_are_not_uploaded(
    proxy: Proxy, run: RunDir
) -> None:
    for step in (2, 4, 6):
        save(run, step)
    upload(run, keep=1)
    assert stored().steps() == [6]
    assert not any("/step-2/" in path for method, path in proxy.requests if method == "PUT")


@pytest.mark.usefixtures("proxy")
def test_what_a_killed_upload_left_goes_with_a_newer_copy(run: RunDir) -> None:
    stored().folder.create("step-2/0123456789abcdef/__0_0.distcp", b"left over")
    save(run, 6)
    upload(run)
    assert stored().folder.sizes("step-2") == {}


def test_a_checkpoint_in_use_is_said_to_be(proxy: Proxy, run: RunDir) -> None:
    saved = save(run, 3)
    proxy.always("busy", method="PUT", part=TENSORS)
    with uploading(run) as running:
        assert wait_for(lambda: run.is_in_use(saved))
        proxy.heal()
        assert running.finish() == ""
    assert not run.is_in_use(saved)


# ---- downloads


@pytest.mark.usefixtures("proxy")
def test_the_newest_whole_copy_is_taken_and_a_damaged_one_set_aside(
    run: RunDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = save(run, 3)
    save(run, 6)
    upload(run)
    damage(stored(), step=6)
    new = restored(tmp_path)
    assert [step for step, _ in new.committed_checkpoints()] == [3]
    assert files(new.checkpoints_dir / "step-3") == files(saved)
    assert f"{URL}/step-6 is damaged" in caplog.text
    assert stored().steps() == [3]
    assert any(name.startswith("bad-step-6-") for name in stored().folder.sizes())


def damage(remote: RemoteCheckpoints, *, step: int) -> None:
    """Flips a bit in the stored tensors."""
    (name,) = (
        name for name in remote.folder.sizes(f"step-{step}") if name.endswith(f"/{TENSORS}")
    )
    content = bytearray(remote.folder.read(name, max_bytes=1 << 30))
    content[0] ^= 1
    remote.folder.delete([name])
    assert remote.folder.create(name, bytes(content))


@pytest.mark.usefixtures("proxy")
def test_copies_are_listed_and_verified_where_they_are(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (3, 6, 9):
        save(run, step)
    upload(run)
    stored().pin(3)
    damage(stored(), step=6)
    damage(stored(), step=9)
    assert checkpoint_command(["verify", URL]) == 78
    assert checkpoint_command(["verify", URL, "--all"]) == 78
    newest, *verified = capsys.readouterr().out.splitlines()
    mismatch = "checksum mismatch"
    assert newest.startswith(f"{URL}/step-9: ") and mismatch in newest
    assert verified[0] == newest, "the damaged file is named once"
    assert verified[1].startswith(f"{URL}/step-6: ") and mismatch in verified[1]
    assert verified[2:] == [f"{URL}/step-3: intact"]
    assert checkpoint_command(["verify", f"{URL}/step-3"]) == 0
    assert checkpoint_command(["list", f"{URL}/step-3"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "3"
    restored(tmp_path)
    capsys.readouterr()
    assert checkpoint_command(["list", URL]) == 0
    _, row, *set_aside = capsys.readouterr().out.splitlines()
    assert row.split()[0] == "3"
    assert row.split()[-2:] == ["intact", "pinned"]
    assert [line.partition("-2")[0] for line in set_aside] == ["bad-step-6", "bad-step-9"]
    assert all(mismatch in line for line in set_aside)
    # A manifest is small enough to be looked at by `list`.
    stored().folder.delete(["step-3/manifest.json"])
    assert stored().folder.create("step-3/manifest.json", b"{}")
    assert checkpoint_command(["list", URL]) == 0
    assert "damaged: " in capsys.readouterr().out


def test_copies_that_cannot_be_listed_exit_with_their_class(
    proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checkpoint_command(["list", f"{URL}/nothing"]) == 78
    assert f"{URL}/nothing is neither a copy of a checkpoint" in capsys.readouterr().err
    proxy.always("denied")
    assert checkpoint_command(["verify", URL]) == 2
    proxy.always("dead")
    assert checkpoint_command(["list", URL]) == 1
    assert capsys.readouterr().err.count("error: command line: DIR: ") == 2
    for words in (["prune", URL, "--keep", "1"], ["export", f"{URL}/step-3", "weights"]):
        assert checkpoint_command(words) == 2
        assert "this command takes what is on this machine" in capsys.readouterr().err


@pytest.mark.usefixtures("proxy")
def test_a_run_never_starts_over_where_all_copies_are_damaged(run: RunDir, tmp_path: Path) -> None:
    save(run, 3)
    upload(run)
    damage(stored(), step=3)
    with pytest.raises(ResumeError, match=r"no checkpoint at .* is intact:\n  step-3: .*checksum"):
        restored(tmp_path)
    assert stored().steps() == [3], "nothing is renamed: the store may be at fault"


@pytest.mark.usefixtures("proxy")
def test_a_copy_without_manifest_does_not_count(run: RunDir, tmp_path: Path) -> None:
    save(run, 3)
    upload(run)
    stored().folder.delete(["step-3/manifest.json"])
    assert restored(tmp_path).committed_checkpoints() == []


def test_a_download_that_is_cut_off_is_not_believed_and_continues(
    proxy: Proxy, run: RunDir, tmp_path: Path
) -> None:
    saved = save(run, 6)
    upload(run)
    proxy.always("dead", method="GET", part=TENSORS)
    new = RunDir(tmp_path / "new")
    with pytest.raises(RunFailedError, match="the same command continues"):
        restore_newest(new, URL, name="run", probes=False)
    assert new.committed_checkpoints() == []
    proxy.heal()
    proxy.requests.clear()
    assert restore_newest(new, URL, name="run", probes=False)
    assert files(new.checkpoints_dir / "step-6") == files(saved)
    asked = [path for method, path in proxy.requests if method == "GET"]
    assert not any(path.endswith("/state.json") for path in asked), "it was there in full"


def test_of_processes_that_share_a_folder_one_downloads(
    proxy: Proxy, run: RunDir, tmp_path: Path
) -> None:
    saved = save(run, 6)
    upload(run)
    proxy.requests.clear()
    # The downloader is still busy when the others ask.
    proxy.always("slow", method="GET", part=TENSORS)
    code = f"""if True:
        from pathlib import Path
        from trainer.storage.restore import restore_newest
        from trainer.storage.run_dir import RunDir
        print(restore_newest(RunDir(Path({str(tmp_path / "new")!r})), {URL!r}, name='run', probes=False))
    """
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert sorted(answers) == ["False", "False", "True"]
    assert sum(method == "GET" and path.endswith(TENSORS) for method, path in proxy.requests) == 1
    assert files(tmp_path / "new" / "checkpoints" / "step-6") == files(saved)


@pytest.mark.usefixtures("proxy")
def test_a_newer_local_checkpoint_wins(run: RunDir) -> None:
    save(run, 3)
    upload(run)
    save(run, 6)
    assert not restore_newest(run, URL, name="run", probes=False)
    assert [step for step, _ in run.committed_checkpoints()] == [3, 6]


@pytest.mark.usefixtures("proxy")
def test_a_damaged_local_checkpoint_is_replaced_by_its_copy(run: RunDir) -> None:
    saved = save(run, 6)
    whole = files(saved)
    upload(run)
    (saved / "manifest.json").write_text("{}")
    assert restore_newest(run, URL, name="run", probes=False)
    assert files(saved) == whole
    assert len([*run.checkpoints_dir.glob("bad-step-6-*")]) == 1


@pytest.mark.usefixtures("proxy")
def test_a_pinned_copy_comes_back_pinned(run: RunDir, tmp_path: Path) -> None:
    (save(run, 6) / "pinned").touch()
    upload(run)
    assert (restored(tmp_path).checkpoints_dir / "step-6" / "pinned").exists()


def test_a_store_that_does_not_answer_stops_only_a_run_without_checkpoints(
    proxy: Proxy, run: RunDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.always("dead")
    with pytest.raises(RunFailedError, match="does not start over while its copies"):
        restored(tmp_path)
    save(run, 3)
    assert not restore_newest(run, URL, name="run", probes=True)
    assert "the copies of checkpoints are not looked at" in caplog.text


@pytest.mark.parametrize("kind", ["expired", "denied"])
def test_a_store_that_refuses_is_an_error_of_the_configuration(
    proxy: Proxy, run: RunDir, kind: str
) -> None:
    save(run, 3)
    proxy.always(kind)
    with pytest.raises(ConfigError, match=r"403 Forbidden: .*AWS_ACCESS_KEY_ID"):
        restore_newest(run, URL, name="run", probes=True)


@pytest.mark.usefixtures("proxy")
def test_a_bucket_that_does_not_exist_is_an_error_of_the_configuration(run: RunDir) -> None:
    with pytest.raises(
        ConfigError, match=r"NoSuchBucket: .*; create the bucket, or correct"
    ) as met:
        restore_newest(run, "s3://nowhere/x", name="run", probes=True)
    assert "AWS_ACCESS_KEY_ID" not in str(met.value)


@pytest.mark.usefixtures("proxy")
def test_a_store_that_ignores_conditions_is_refused(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module.RemoteFolder, "create", lambda *_: True)
    with pytest.raises(ConfigError, match="must know conditional writes"):
        restore_newest(run, URL, name="run", probes=True)


@pytest.mark.usefixtures("proxy")
def test_a_probe_leaves_nothing(run: RunDir) -> None:
    assert not restore_newest(run, URL, name="run", probes=True)
    assert stored().folder.sizes().keys() == {"run.json"}


# ---- the key


@pytest.mark.parametrize("url", ["s3://bucket/runs/x", "gs://bucket/x/", "az://account/box/x"])
def test_urls_of_a_prefix_are_taken(url: str) -> None:
    assert CheckpointSection(remote=url).remote == url


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("s3://bucket", "must be s3://BUCKET/PREFIX"),
        ("outputs/x", "must be s3://BUCKET/PREFIX"),
        ("http://host/x", "must be s3://BUCKET/PREFIX"),
        ("s3://bucket/../x y", "must be s3://BUCKET/PREFIX"),
        ("s3://user:pass@bucket/x", "must not contain a user"),
        ("az://account/box/x?sig=secret", "must not contain a user"),
    ],
)
def test_other_urls_are_refused(url: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        CheckpointSection(remote=url)


@pytest.mark.usefixtures("proxy")
def test_copies_of_another_run_are_neither_taken_nor_added_to(run: RunDir, tmp_path: Path) -> None:
    save(run, 3)
    assert not restore_newest(run, URL, name="run", probes=True)
    upload(run)
    other = RunDir(tmp_path / "other")
    with pytest.raises(ConfigError, match='has the copies of another run, "run": each run needs'):
        restore_newest(other, URL, name="other", probes=True)
    assert other.committed_checkpoints() == []
    # A folder that has an id is of no other run, whatever its name.
    assert not restore_newest(other, f"{URL}/elsewhere", name="run", probes=True)
    with pytest.raises(ConfigError, match="another run"):
        restore_newest(other, URL, name="run", probes=False)
    moved = restored(tmp_path)
    assert moved.committed_checkpoints() == [(3, moved.checkpoints_dir / "step-3")]
    assert recorded_run_id(moved.path) == recorded_run_id(run.path)
