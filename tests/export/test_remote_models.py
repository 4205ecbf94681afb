"""Models at URLs: downloads of folders, and exports that are uploaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_initial_weights import write_hf_model
from tests.checkpoint.test_manifest import commit
from tests.export.test_hf_commands import checkpoint_of
from tests.huggingface_folders import write_family
from tests.object_server import BUCKET, Proxy
from tests.system.in_process import configured
from tests.system.runs import arguments, write_run
from trainer.checkpoint.__main__ import main as checkpoint_main
from trainer.checkpoint.initial_weights import resolve_initial_path
from trainer.config.data import TokenizerSection
from trainer.config.parse import load
from trainer.config.toml_format import to_toml
from trainer.data.tokenizer import open_tokenizer
from trainer.errors import ConfigError, DataError, RunFailedError
from trainer.hf import main as hf_main
from trainer.launch.launcher import load_and_validate
from trainer.new.model_source import open_model, open_tokenizer_section
from trainer.storage import object_store as store_module
from trainer.storage.manifest import read_validated
from trainer.storage.object_store import RemoteFolder
from trainer.storage.remote_models import (
    HASHES_FILE,
    fetch_model,
    upload_checkpoint,
)

URL = f"s3://{BUCKET}/models/x"
pytestmark = pytest.mark.usefixtures("proxy")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RETRY", {**store_module.RETRY, "max_retries": 0})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_run(tmp_path)


def put(folder: Path, url: str = URL) -> None:
    """Uploads a folder as other tools do."""
    for path in folder.rglob("*"):
        if path.is_file():
            RemoteFolder(url).create(f"{path.relative_to(folder)}", path.read_bytes())


def contents(folder: Path) -> dict[str, bytes]:
    return {
        f"{path.relative_to(folder)}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def fetched(tmp_path: Path) -> Path:
    return fetch_model(URL, tmp_path / "cache", key="model")


def gets(proxy: Proxy) -> list[str]:
    return [path for method, path in proxy.requests if method == "GET" and "list-type" not in path]


# ---- downloads


def test_a_folder_is_downloaded_once_while_it_is_the_same(
    run: Path, tmp_path: Path, proxy: Proxy
) -> None:
    write_hf_model(run, tmp_path / "model")
    put(tmp_path / "model")
    RemoteFolder(URL).create("pytorch_model.bin", b"not used")
    first = fetched(tmp_path)
    assert contents(first) == contents(tmp_path / "model")
    proxy.requests.clear()
    assert fetched(tmp_path) == first
    assert gets(proxy) == []
    RemoteFolder(URL).delete(["config.json"])
    RemoteFolder(URL).create("config.json", b"{}")
    second = fetched(tmp_path)
    assert second != first
    assert (second / "config.json").read_bytes() == b"{}"


def test_a_download_that_is_cut_off_continues(run: Path, tmp_path: Path, proxy: Proxy) -> None:
    write_hf_model(run, tmp_path / "model")
    put(tmp_path / "model")
    proxy.always("dead", method="GET", part="model-00001")
    with pytest.raises(RunFailedError, match="the same command continues"):
        fetched(tmp_path)
    assert not [
        path
        for path in (tmp_path / "cache").iterdir()
        if path.name.endswith("-x") and path.name[0] != "."
    ]
    proxy.heal()
    proxy.requests.clear()
    assert contents(fetched(tmp_path)) == contents(tmp_path / "model")
    assert not any("config.json" in path for path in gets(proxy)), "it was there in full"


def test_a_folder_that_changes_during_its_download_is_not_believed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hf_model(run, tmp_path / "model")
    put(tmp_path / "model")
    whole = RemoteFolder.download

    def download(store: RemoteFolder, name: str, *place: Path, **options: Any) -> None:
        whole(store, name, *place, **options)
        if name == "config.json":
            store.delete([name])
            store.create(name, b"{}")

    monkeypatch.setattr(RemoteFolder, "download", download)
    with pytest.raises(RunFailedError, match="changed while it was downloaded"):
        fetched(tmp_path)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    RemoteFolder(URL).create("readme.txt", b"text")
    with pytest.raises(ConfigError, match="it is no model"):
        fetched(tmp_path)


def test_the_newest_copy_of_a_run_gives_weights_too(tmp_path: Path) -> None:
    for step in (3, 6):
        upload_checkpoint(
            commit(tmp_path / f"step-{step}", step=step), f"{URL}/step-{step}", "key"
        )
    assert contents(fetched(tmp_path)) == contents(tmp_path / "step-6")
    older = fetch_model(f"{URL}/step-3", tmp_path / "cache", key="model")
    assert read_validated(older).step == 3


# ---- in configurations


def test_a_model_at_a_url_is_imported_and_a_run_downloads_it(run: Path, tmp_path: Path) -> None:
    write_hf_model(run, tmp_path / "model")
    write_family(tmp_path / "model", "qwen2")
    put(tmp_path / "model")
    assert hf_main(["import", URL, "new.toml"]) == 2, "the tokenizer has more tokens"
    (tmp_path / "model" / "tokenizer.json").unlink()
    RemoteFolder(URL).delete(["tokenizer.json"])
    assert hf_main(["import", URL, "new.toml"]) == 0
    assert f'initial_load_path = "hf:{URL}"' in (tmp_path / "new.toml").read_text()

    options = ("--checkpoint.initial_load_path", f"hf:{URL}")
    argv = arguments(run, tmp_path / "run", *options)
    environment = {**os.environ, "NGPU": "1"}
    config, _, problems = load_and_validate(argv, environment, fetching=True)
    assert problems == []
    # The configuration, and what is recorded of the run, keep the URL.
    assert config.checkpoint.initial_load_path == f"hf:{URL}"
    local = resolve_initial_path(f"hf:{URL}", config.data.cache_dir)
    assert contents(local) == {
        name: each
        for name, each in contents(tmp_path / "model").items()
        if name.endswith((".json", ".safetensors", ".txt"))
    }
    config, _, problems = load_and_validate(argv, environment)
    assert (problems, config.checkpoint.initial_load_path) == ([], f"hf:{URL}")
    # The model is checked as one in a folder is.
    wrong = [*argv, "--model.ffn_dim=68"]
    assert "model.ffn_dim = 68" in str(load_and_validate(wrong, environment, fetching=True)[2])


def test_a_run_with_checkpoints_downloads_no_initial_weights(
    run: Path, tmp_path: Path, proxy: Proxy
) -> None:
    commit(tmp_path / "step-6")
    upload_checkpoint(tmp_path / "step-6", f"s3://{BUCKET}/runs/x/step-6", "key")
    options = ("--checkpoint.initial_load_path", f"hf:{URL}")
    remote = ("--checkpoint.remote", f"s3://{BUCKET}/runs/x")
    argv = arguments(run, tmp_path / "run", *options, *remote)
    proxy.requests.clear()
    _, _, problems = load_and_validate(argv, {**os.environ, "NGPU": "1"}, fetching=True)
    assert problems == []
    assert not any("models" in path for _, path in proxy.requests)


def test_a_tokenizer_at_a_url_gives_the_ids_of_the_local_one(tmp_path: Path, proxy: Proxy) -> None:
    folder = tmp_path / "model"
    write_family(folder, "qwen2")
    put(folder)
    RemoteFolder(URL).create("model.safetensors", b"not needed")
    here = open_tokenizer(TokenizerSection(kind="huggingface", path=folder))
    stated = TokenizerSection.model_validate({"kind": "huggingface", "path": URL})
    there = open_tokenizer(stated)
    assert there.fingerprint == here.fingerprint
    assert there.encode("some text").tolist() == here.encode("some text").tolist()
    assert not any("safetensors" in path for path in gets(proxy))
    named = TokenizerSection.model_validate(
        {"kind": "huggingface", "path": f"{URL}/tokenizer.json"}
    )
    assert open_tokenizer(named).encode("some text").tolist() == here.encode("some text").tolist()
    assert open_tokenizer_section(URL) == {"kind": "huggingface", "path": URL}


def test_a_configuration_keeps_its_urls(run: Path, tmp_path: Path) -> None:
    options = (
        *("--tokenizer.kind=huggingface", "--tokenizer.path", URL),
        *("--checkpoint.initial_load_path", f"hf:{URL}", "--data.corpus", URL),
    )
    written = to_toml(configured(run, tmp_path / "run", *options))
    assert written.count(f'"{URL}"') == 2
    (tmp_path / "again.toml").write_text(written)
    assert to_toml(load(["--config", str(tmp_path / "again.toml")])) == written


@pytest.mark.parametrize("key", ["tokenizer.path", "checkpoint.initial_load_path", "data.corpus"])
def test_a_url_with_a_secret_is_refused_and_not_repeated(run: Path, key: str) -> None:
    prefix = "hf:" if key.startswith("checkpoint") else ""
    with pytest.raises(ConfigError, match="must not contain a user") as raised:
        configured(run, run.parent / "run", f"--{key}", f"{prefix}s3://user:kept@bucket/x")
    assert "kept" not in str(raised.value)


def test_a_new_run_starts_from_a_url(run: Path, tmp_path: Path) -> None:
    write_hf_model(run, tmp_path / "model")
    put(tmp_path / "model")
    for name in (URL, f"hf:{URL}"):
        source = open_model(name, os.environ)
        assert source.values["checkpoint"] == {"initial_load_path": f"hf:{URL}"}
    with pytest.raises(ConfigError, match="--model: the URL must not contain a user"):
        open_model("s3://user:kept@bucket/x", os.environ)


# ---- exports


def test_an_export_at_a_url_is_the_local_one(
    run: Path, tmp_path: Path, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = checkpoint_of(configured(run, tmp_path / "run"))
    assert hf_main(["export", str(checkpoint), "local"]) == 0
    proxy.requests.clear()
    assert hf_main(["export", str(checkpoint), URL]) == 0
    assert f"{URL}: uploaded, each file with its hash" in capsys.readouterr().out
    written = [path.rpartition("/")[2] for method, path in proxy.requests if method == "PUT"]
    assert written[-2:] == [HASHES_FILE, "config.json"]
    downloaded = contents(fetched(tmp_path))
    del downloaded[HASHES_FILE]
    assert downloaded == contents(tmp_path / "local")
    assert not list(tmp_path.glob(".export-*"))
    # As a folder that exists.
    assert hf_main(["export", str(checkpoint), URL]) == 2
    assert f"{URL} exists already: it has config.json" in capsys.readouterr().err


def test_a_damaged_object_of_an_export_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(configured(run, tmp_path / "run"))
    assert hf_main(["export", str(checkpoint), URL]) == 0
    store = RemoteFolder(URL)
    content = bytearray(store.read("model.safetensors", max_bytes=1 << 30))
    content[-1] ^= 1
    store.delete(["model.safetensors"])
    store.create("model.safetensors", bytes(content))
    with pytest.raises(DataError, match=r"model.safetensors: checksum mismatch"):
        fetched(tmp_path)


def test_an_export_that_was_cut_off_is_replaced_by_the_next(
    run: Path, tmp_path: Path, proxy: Proxy
) -> None:
    checkpoint = checkpoint_of(configured(run, tmp_path / "run"))
    # Of an export of other weights that was cut off: alike but for its content.
    assert hf_main(["export", str(checkpoint), "local"]) == 0
    size = (tmp_path / "local" / "model.safetensors").stat().st_size
    RemoteFolder(URL).create("model.safetensors", bytes(size))
    proxy.always("full", method="PUT", part=HASHES_FILE)
    assert hf_main(["export", str(checkpoint), URL]) == 1
    with pytest.raises(ConfigError, match="it is no model"):
        fetched(tmp_path)
    proxy.heal()
    assert hf_main(["export", str(checkpoint), URL]) == 0
    downloaded = contents(fetched(tmp_path))
    assert downloaded["model.safetensors"] == contents(tmp_path / "local")["model.safetensors"]


def test_exported_weights_at_a_url_start_a_run(run: Path, tmp_path: Path, proxy: Proxy) -> None:
    checkpoint = checkpoint_of(configured(run, tmp_path / "run"))
    assert checkpoint_main(["export", str(checkpoint), "local"]) == 0
    proxy.requests.clear()
    assert checkpoint_main(["export", str(checkpoint), URL]) == 0
    written = [path for method, path in proxy.requests if method == "PUT"]
    assert written[-1].endswith("/models/x/manifest.json")
    assert contents(fetched(tmp_path)) == contents(tmp_path / "local")
    assert checkpoint_main(["export", str(checkpoint), URL]) == 2


@pytest.mark.parametrize("output", ["http://host/models/x", "S3://bucket/x", "s3:/bucket/x"])
def test_a_url_of_another_kind_becomes_no_folder(
    output: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert checkpoint_main(["export", "run", output]) == 2
    assert "the URL must begin with one of s3://, gs://, az://" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_an_endpoint_without_encryption_is_refused_before_any_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    refused = pytest.raises(ConfigError, match="set AWS_ALLOW_HTTP=true")
    with refused, store_module.reporting("checkpoint.remote", URL):
        RemoteFolder(URL)
