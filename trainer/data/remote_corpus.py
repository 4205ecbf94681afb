"""Prepared corpora at URLs: uploads, and the local folder by which a run reads one.

    data.cache_dir/NAME-HASH/       the index of the corpus: meta.json, *.idx and *.blocks
    .../remote.json                 where the tokens are
    .../tokens.cache                blocks of tokens that were read

To all else it is a prepared folder: packing plans are stored in it, and its fingerprint is that of
the local corpus.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from models.files import MAX_SEALED_BYTES
from trainer.command_table import typed
from trainer.config.source import CorpusSpec
from trainer.data.own_files import META_FILENAME, is_token_dataset
from trainer.data.remote_shard import REMOTE_FILENAME, RemotePlace
from trainer.data.token_blocks import DIGEST_BYTES
from trainer.data.token_dataset import DTYPES, TokenDataset, TokenDatasetMeta
from trainer.errors import ConfigError, DataError, ResumeError
from trainer.storage.artifact import DamageError, read_regular, unseal, write_artifact
from trainer.storage.durable_io import atomic_folder, file_lock, write_and_fsync
from trainer.storage.object_store import RemoteFolder, RemoteMissingError, reporting
from trainer.storage.remote_files import HASH_CHARS, SealedFiles, transfer, upload_folder

GIB = 1 << 30
FREE_SHARE = 2
"""Free bytes over the largest cache, unless `data.remote_cache_gib` is set."""


def corpus_files(meta: TokenDatasetMeta, content: bytes) -> SealedFiles:
    """The files of a corpus whose sealed `meta.json` is `content`.

    Raises `DamageError` for a corpus without hashes of blocks.
    """
    if meta.block_bytes is None:
        raise DamageError("it is of a version that hashed no blocks; prepare it again")
    itemsize = DTYPES[meta.dtype].itemsize
    if meta.block_bytes % itemsize:
        raise DamageError(f"block_bytes = {meta.block_bytes} is no multiple of a token's bytes")
    files = dict[str, tuple[int, str]]()
    for shard in meta.shards:
        size = shard.tokens * itemsize
        num_blocks = -(-size // meta.block_bytes)
        files[f"{shard.name}.bin"] = size, shard.bin_sha256
        files[f"{shard.name}.idx"] = 8 * (shard.documents + 1), shard.idx_sha256
        files[f"{shard.name}.blocks"] = DIGEST_BYTES * num_blocks, shard.blocks_sha256
    return SealedFiles("", META_FILENAME, content, files)


def upload_corpus(dataset: TokenDataset, url: str, *, key: str) -> None:
    """Uploads a prepared folder; continues an upload that was cut off.

    `key` names the URL in errors. Raises `ConfigError`, `DataError` for a damaged folder, and
    `RunFailedError` if the store fails.
    """
    folder = dataset.folder
    if (folder / REMOTE_FILENAME).exists():
        raise ConfigError([f"{key}: the corpus is at a URL already; copy it there"])
    try:
        content = read_regular(folder / META_FILENAME, max_bytes=MAX_SEALED_BYTES)
        upload_folder(folder, url, corpus_files(dataset.meta, content), key=key)
    except (DamageError, OSError) as error:
        raise DataError(f"{folder} cannot be uploaded: {error}") from None


def fetch_corpus(source: CorpusSpec) -> Path:
    """The local folder by which the corpus at `source.corpus` is read.

    Its index is downloaded if it is not here, by one of the processes that share `cache_dir`.
    Raises as `require_prepared`.
    """
    with _opened(source) as (store, meta, files):
        return _fetch_index(source, store, meta, files)


def require_prepared(source: CorpusSpec) -> None:
    """Reads the seal of the corpus at `source.corpus`.

    Raises `ConfigError` if nothing prepared is there or the store refuses, `DataError` if it is
    damaged, and `RunFailedError` if the store fails.
    """
    with _opened(source):
        pass


@contextmanager
def _opened(source: CorpusSpec) -> Iterator[tuple[RemoteFolder, TokenDatasetMeta, SealedFiles]]:
    """The store of a corpus, and what its seal says."""
    url = source.corpus.rstrip("/")
    subject = f'{source.key} = "{url}"'
    with reporting(source.key, url):
        store = RemoteFolder(url)
        try:
            content = store.read(META_FILENAME, max_bytes=MAX_SEALED_BYTES)
            meta, _ = unseal(content, TokenDatasetMeta)
            yield store, meta, corpus_files(meta, content)
        except RemoteMissingError:
            if store.is_empty():
                raise ConfigError([f"{subject}: nothing is there"]) from None
            command = typed("prepare", "--corpus", "FOLDER", "--output", url)
            raise ConfigError(
                [
                    f"{subject} is not a prepared corpus; text is not read from URLs: "
                    f"download it and run {command}"
                ]
            ) from None
        except (DamageError, ResumeError) as error:
            raise DataError(f"{subject} is damaged: {error}") from None
        except OSError as error:
            raise DataError(
                f'data.cache_dir = "{source.cache_dir}" cannot be written: {error}'
            ) from error


def _fetch_index(
    source: CorpusSpec, store: RemoteFolder, meta: TokenDatasetMeta, files: SealedFiles
) -> Path:
    digest = hashlib.sha256(store.url.encode() + b"\0" + files.content).hexdigest()[:HASH_CHARS]
    folder = source.cache_dir / f"{store.url.rpartition('/')[2]}-{digest}"
    source.cache_dir.mkdir(parents=True, exist_ok=True)
    with file_lock(source.cache_dir / f".{folder.name}.lock"):
        if not is_token_dataset(folder):
            with atomic_folder(folder) as temporary:
                transfer(
                    {
                        name: size
                        for name, (size, _) in files.files.items()
                        if not name.endswith(".bin")
                    },
                    lambda name, count: files.download_file(store, temporary, name, count),
                    title=f"downloading the index of {store.url}",
                )
                _write_place(temporary, source, store, meta, files)
                write_and_fsync(temporary / META_FILENAME, files.content)
        elif source.remote_cache_gib is not None:
            # It may have another value than in the run before.
            _write_place(folder, source, store, meta, files)
    return folder


def _write_place(
    folder: Path,
    source: CorpusSpec,
    store: RemoteFolder,
    meta: TokenDatasetMeta,
    files: SealedFiles,
) -> None:
    block_bytes = meta.block_bytes or 1
    tokens = [size for name, (size, _) in files.files.items() if name.endswith(".bin")]
    num_blocks = sum(-(-size // block_bytes) for size in tokens)
    place = RemotePlace(
        url=store.url,
        folder=files.name_of(""),
        block_bytes=block_bytes,
        cached_blocks=min(num_blocks, cache_bytes(source) // block_bytes) or 1,
    )
    write_artifact(folder / REMOTE_FILENAME, place)


def cache_bytes(source: CorpusSpec) -> int:
    """Largest size of the cache of a corpus."""
    if source.remote_cache_gib is not None:
        return int(source.remote_cache_gib * GIB)
    return shutil.disk_usage(source.cache_dir).free // FREE_SHARE
