"""Corpora at URLs: the tokens of the local corpus, whatever the cache and the store do."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from tests.object_server import BUCKET, SECRET, Proxy
from tests.system.in_process import configured, run_here
from tests.system.runs import arguments, digests, launched, metrics, write_run
from trainer.config.source import CorpusSpec
from trainer.data import remote_corpus, remote_shard
from trainer.data.block_cache import BlockCache
from trainer.data.prepare import prepare
from trainer.data.prepare.__main__ import main as prepare_main
from trainer.data.token_dataset import TokenDataset
from trainer.data.tokenizer import ByteTokenizer
from trainer.errors import ConfigError, DataError, RankFailedError, RunFailedError
from trainer.launch.launcher import load_and_validate
from trainer.storage import object_store as store_module
from trainer.storage import remote_files
from trainer.storage.object_store import RemoteFolder

URL = f"s3://{BUCKET}/corpora/books"
EXACT = ("step", "tokens", "loss", "grad_norm", "lr")
pytestmark = pytest.mark.usefixtures("proxy")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RETRY", {**store_module.RETRY, "max_retries": 0})
    monkeypatch.setattr(remote_shard, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(remote_shard, "MAX_RETRY_SECONDS", 0.02)


@pytest.fixture
def local(tmp_path: Path) -> TokenDataset:
    """Two shards of several blocks each, the last of which is not full; uploaded."""
    for number in range(2):
        path = tmp_path / "text" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{number} {line}\n" for line in range(20_000)))
    spec = CorpusSpec(corpus=str(tmp_path / "text"), cache_dir=tmp_path / "prepared")
    dataset = prepare(spec, ByteTokenizer(), shard_tokens=1)
    assert len(dataset.meta.shards) == 2
    remote_corpus.upload_corpus(dataset, URL, key="--output")
    return dataset


def remote_dataset(tmp_path: Path, name: str = "node", **options: object) -> TokenDataset:
    """The corpus as a machine reads it whose cache is the folder `name`."""
    spec = CorpusSpec(corpus=URL, cache_dir=tmp_path / name, **options)  # type: ignore[arg-type]
    return prepare(spec, ByteTokenizer())


def requests_for_tokens(proxy: Proxy) -> int:
    return sum(method == "GET" and path.endswith(".bin") for method, path in proxy.requests)


def everything(dataset: TokenDataset) -> torch.Tensor:
    return dataset.read(0, dataset.num_tokens)


def test_every_token_and_the_fingerprint_are_those_of_the_local_corpus(
    local: TokenDataset, tmp_path: Path
) -> None:
    remote = remote_dataset(tmp_path)
    assert remote.is_remote
    assert remote.fingerprint == local.fingerprint
    assert torch.equal(remote.document_starts, local.document_starts)
    assert torch.equal(everything(remote), everything(local))
    draw = torch.Generator().manual_seed(0)
    starts = torch.randint(local.num_tokens - 200_000, (20,), generator=draw)
    lengths = torch.randint(1, 200_000, (20,), generator=draw)
    assert torch.equal(remote.read_ranges(starts, lengths), local.read_ranges(starts, lengths))


def test_a_block_is_fetched_once_and_only_when_it_is_read(
    local: TokenDataset, proxy: Proxy, tmp_path: Path
) -> None:
    remote = remote_dataset(tmp_path)
    assert requests_for_tokens(proxy) == 0
    assert torch.equal(remote.read(5, 9), local.read(5, 9))
    assert requests_for_tokens(proxy) == 1
    # Also by another process that opens the folder.
    again = TokenDataset(remote.folder)
    again.read(5, 9)
    again.read(100, 30_000)
    assert requests_for_tokens(proxy) == 1


def test_ranks_that_read_the_same_tokens_fetch_them_once(
    local: TokenDataset, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = remote_dataset(tmp_path)
    other = TokenDataset(remote.folder)

    @contextmanager
    def locked(cache: BlockCache, blocks: Sequence[int]) -> Iterator[None]:
        # The other rank held the lock, and has fetched the blocks.
        del cache, blocks
        with monkeypatch.context() as patch:
            patch.setattr(BlockCache, "locked", lambda *_: nullcontext())
            other.read(0, 9)
        yield

    monkeypatch.setattr(BlockCache, "locked", locked)
    assert torch.equal(remote.read(0, 9), local.read(0, 9))
    assert requests_for_tokens(proxy) == 1


def test_a_damaged_block_of_the_cache_is_fetched_again(
    local: TokenDataset, proxy: Proxy, tmp_path: Path
) -> None:
    remote = remote_dataset(tmp_path)
    everything(remote)
    cache = remote.folder / remote_shard.CACHE_FILENAME
    content = bytearray(cache.read_bytes())
    content[70_000] ^= 1
    cache.write_bytes(content)
    proxy.requests.clear()
    assert torch.equal(everything(TokenDataset(remote.folder)), everything(local))
    assert requests_for_tokens(proxy) == 1
    assert cache.read_bytes()[70_000] == content[70_000] ^ 1


def test_the_cache_keeps_its_size_and_costs_only_requests(
    local: TokenDataset, proxy: Proxy, tmp_path: Path
) -> None:
    two_blocks = 2 * (1 << 16) / (1 << 30)
    remote = remote_dataset(tmp_path, remote_cache_gib=two_blocks)
    for _ in range(2):
        assert torch.equal(everything(remote), everything(local))
    assert (remote.folder / remote_shard.CACHE_FILENAME).stat().st_size <= 2 << 16
    assert requests_for_tokens(proxy) > 2


def test_a_cache_that_cannot_be_written_is_said_once(
    local: TokenDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    remote = remote_dataset(tmp_path)
    monkeypatch.setattr(os, "pwrite", full)
    for _ in range(2):
        assert torch.equal(everything(remote), everything(local))
    assert caplog.text.count("blocks are not kept: No space left on device") == 1


def test_a_block_of_the_bucket_that_differs_from_its_hash_is_refused_by_name(
    local: TokenDataset, tmp_path: Path
) -> None:
    store = RemoteFolder(URL)
    (name,) = [name for name in store.sizes() if name.endswith(f"{local.meta.shards[0].name}.bin")]
    content = bytearray(store.read(name, max_bytes=1 << 30))
    content[70_000] ^= 1
    store.delete([name])
    store.create(name, bytes(content))
    remote = remote_dataset(tmp_path)
    remote.read(0, 100)
    with pytest.raises(
        DataError, match=rf"{URL}/{name} is damaged: checksum mismatch in bytes 65,536 to 131,072"
    ):
        everything(remote)
    store.delete([name])
    with pytest.raises(DataError, match=rf"{URL}/{name} is damaged: it is missing"):
        everything(remote)
    # As the message says.
    remote_corpus.upload_corpus(local, URL, key="--output")
    assert torch.equal(everything(remote), everything(local))


@pytest.mark.parametrize("kind", ["busy", "cut", "dead", "expired"])
def test_a_store_that_fails_is_asked_again(
    local: TokenDataset, proxy: Proxy, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    remote = remote_dataset(tmp_path)
    proxy.first(3, kind, method="GET")
    assert torch.equal(everything(remote), everything(local))
    assert caplog.text.count("reading tokens failed, tried again") in (1, 2)


def test_a_store_that_stays_away_ends_the_run_with_a_reason(
    local: TokenDataset, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del local
    monkeypatch.setattr(remote_shard, "GIVE_UP_SECONDS", 0.1)
    remote = remote_dataset(tmp_path)
    proxy.always("busy", method="GET")
    with pytest.raises(RankFailedError, match=r"no tokens can be read: .*503") as raised:
        everything(remote)
    assert raised.value.status == 1


# ---- uploads


def test_meta_json_is_the_last_object_and_is_only_created(
    local: TokenDataset, proxy: Proxy
) -> None:
    put = [path for method, path in proxy.requests if method == "PUT" and "probe" not in path]
    assert put[-1].endswith("/corpora/books/meta.json")
    assert len(put) == 3 * len(local.meta.shards) + 1


def test_an_upload_that_was_cut_off_continues_and_is_no_corpus_before(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One after the other, so that the first file is there when the second fails.
    monkeypatch.setattr(remote_files, "FILES_AT_ONCE", 1)
    (tmp_path / "a.txt").write_text("a" * 1000)
    spec = CorpusSpec(corpus=str(tmp_path / "a.txt"), cache_dir=tmp_path / "prepared")
    dataset = prepare(spec, ByteTokenizer())
    proxy.always("full", method="PUT", part=".blocks")
    with pytest.raises(Exception, match="507"):
        remote_corpus.upload_corpus(dataset, URL, key="--output")
    proxy.heal()
    with pytest.raises(ConfigError, match="is not a prepared corpus"):
        remote_dataset(tmp_path)
    proxy.requests.clear()
    remote_corpus.upload_corpus(dataset, URL, key="--output")
    put = [path for method, path in proxy.requests if method == "PUT" and "probe" not in path]
    first, *_, last = [Path(path).name for path in put]
    assert (first, last) == ("shard-00000.blocks", "meta.json")
    assert not any(path.endswith(".bin") for path in put), "it was there in full"
    assert torch.equal(everything(remote_dataset(tmp_path)), everything(dataset))


def test_a_corpus_whose_files_did_not_arrive_is_not_committed(
    local: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteFolder, "upload", lambda *_, **__: None)
    with pytest.raises(RunFailedError, match="did not arrive in full"):
        remote_corpus.upload_corpus(local, f"{URL}-2", key="--output")
    assert RemoteFolder(f"{URL}-2").sizes() == {}


def test_another_corpus_is_never_replaced(local: TokenDataset, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("another text")
    spec = CorpusSpec(corpus=str(tmp_path / "a.txt"), cache_dir=tmp_path / "prepared")
    other = prepare(spec, ByteTokenizer())
    with pytest.raises(ConfigError, match=f"{URL} exists already, with other content"):
        remote_corpus.upload_corpus(other, URL, key="--output")
    assert torch.equal(everything(remote_dataset(tmp_path)), everything(local))


def test_a_local_shard_that_was_damaged_is_not_uploaded(
    local: TokenDataset, tmp_path: Path
) -> None:
    path = local.folder / f"{local.meta.shards[0].name}.bin"
    content = bytearray(path.read_bytes())
    content[9] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot be uploaded: shard-00000.bin differs"):
        remote_corpus.upload_corpus(local, f"{URL}-2", key="--output")
    assert not any(name.endswith("meta.json") for name in RemoteFolder(f"{URL}-2").sizes())
    del tmp_path


# ---- commands and runs


def test_prepare_uploads_and_inspects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text " * 500)
    assert prepare_main(["--corpus", "a.txt", "--output", URL]) == 0
    assert f"{URL}: uploaded" in capsys.readouterr().out
    shutil.rmtree("prepared")
    assert prepare_main(["inspect", URL, "--verify"]) == 0
    said = capsys.readouterr().out
    assert "checksums" in said
    assert "some text some" in said


@pytest.mark.usefixtures("proxy", "local")
def test_a_check_says_what_is_at_the_url_of_a_corpus(tmp_path: Path) -> None:
    def problems(url: str) -> list[str]:
        words = arguments(write_run(tmp_path), tmp_path / "run", f"--data.corpus={url}")
        return load_and_validate(words, {"NGPU": "1"}, checking=True)[2]

    texts = f"s3://{BUCKET}/texts"
    RemoteFolder(texts).create("one.txt", b"a page")
    assert problems(URL) == []
    (said,) = problems(texts)
    assert f'{texts}" is not a prepared corpus; text is not read from URLs' in said
    assert said.endswith(f"prepare --corpus FOLDER --output {texts}")
    assert problems(f"{texts}/2024") == [f'data.corpus = "{texts}/2024": nothing is there']
    RemoteFolder(URL).delete(["meta.json"])
    RemoteFolder(URL).create("meta.json", b"{}")
    with pytest.raises(DataError, match="is damaged"):
        problems(URL)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--corpus", "s3://user:kept@bucket/x"], "must not contain a user, password or query"),
        (["--corpus", "a.txt", "--output", "s3://bucket/x?kept=1"], "must not contain a user"),
        (["--corpus", "a.txt", "--output", "s3://bucket"], "must be s3://BUCKET/PREFIX"),
        (["--corpus", "s3://bucket/nothing"], 's3://bucket/nothing": nothing is there'),
    ],
)
def test_urls_that_cannot_be_used_are_refused(
    arguments: list[str],
    rule: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    assert prepare_main(arguments) == 2
    said = capsys.readouterr().err
    assert rule in said
    assert "kept" not in said


def test_a_store_that_refuses_is_an_error_of_the_configuration(
    local: TokenDataset, proxy: Proxy, tmp_path: Path
) -> None:
    del local
    proxy.always("denied")
    with pytest.raises(ConfigError, match=r"data.corpus: .*403 Forbidden: .*AWS_ACCESS_KEY_ID"):
        remote_dataset(tmp_path)


def test_without_credentials_nothing_is_prepared(
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{proxy.port}")
    proxy.always("denied")
    assert prepare_main(["--corpus", "a.txt", "--output", URL]) == 2
    assert "set AWS_ACCESS_KEY_ID" in capsys.readouterr().err
    assert not (tmp_path / "prepared").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.corpus", URL),
        ("checkpoint.remote", URL),
        ("checkpoint.initial_load_path", f"hf:{URL}"),
        ("tokenizer.path", URL),
    ],
)
def test_without_the_library_a_url_is_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    run = write_run(tmp_path)
    monkeypatch.setattr(store_module, "find_spec", lambda _: None)
    kind = "huggingface" if key == "tokenizer.path" else "byte"
    argv = arguments(run, tmp_path / "run", f"--{key}", value, f"--tokenizer.kind={kind}")
    _, _, problems = load_and_validate(argv, {**os.environ, "NGPU": "1"}, fetching=True)
    assert f'{key} = "{URL}" needs obstore: {sys.executable} -m pip install obstore' in problems


def upload_corpus_of(run: Path) -> None:
    """Uploads the corpus of a run."""
    spec = CorpusSpec(corpus=str(run.parent / "corpus"), cache_dir=run.parent / "prepared")
    remote_corpus.upload_corpus(prepare(spec, ByteTokenizer()), URL, key="--output")


def test_a_run_moves_between_a_folder_and_a_url_bitwise(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    upload_corpus_of(run)
    constant = ("--schedule.kind=constant", "--schedule.warmup_steps=0", "--checkpoint.interval=2")
    run_here(configured(run, tmp_path / "whole", *constant))
    moved = tmp_path / "moved"
    for steps, corpus in ((2, URL), (4, str(tmp_path / "corpus")), (6, URL)):
        options = ("--data.corpus", corpus, "--training.steps", f"{steps}")
        run_here(configured(run, moved, *constant, *options))
    assert metrics(moved, *EXACT) == metrics(tmp_path / "whole", *EXACT)
    assert digests(moved / "checkpoints" / "step-6") == digests(
        tmp_path / "whole" / "checkpoints" / "step-6"
    )


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_from_a_url_equals_one_from_a_folder(
    tmp_path: Path, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).resolve().parents[2])]
    monkeypatch.setattr("tests.system.runs.ROOT", os.pathsep.join(filter(None, paths)))
    run = write_run(tmp_path)
    upload_corpus_of(run)
    here = launched(run, tmp_path / "here", processes=processes, patience=300)
    assert here.statuses == [0], here.said
    options = ("--data.corpus", URL, "--data.cache_dir", str(tmp_path / "node"))
    away = launched(run, tmp_path / "away", *options, processes=processes, patience=300)
    assert away.statuses == [0], away.said
    assert metrics(tmp_path / "away", *EXACT) == metrics(tmp_path / "here", *EXACT)
    assert digests(tmp_path / "away" / "checkpoints" / "step-6") == digests(
        tmp_path / "here" / "checkpoints" / "step-6"
    )
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    recorded = json.loads((next((tmp_path / "node").glob("books-*")) / "remote.json").read_text())
    assert recorded["content"]["url"] == URL
