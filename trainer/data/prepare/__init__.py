"""Tokenize a corpus once, before any process group exists, into a folder that all later runs map
into memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

from trainer.config import checks, extension
from trainer.config.job_config import Config
from trainer.config.sections import is_remote
from trainer.config.source import CorpusSpec, corpus_specs
from trainer.data.contents import text_suffix
from trainer.data.corpus import Corpus
from trainer.data.own_files import META_FILENAME, RECORDS_FOLDER, is_token_dataset
from trainer.data.prepare.reading import describe_counts, describe_left_out, describe_reading
from trainer.data.prepare.tokenize import TokenizeJob, tokenize_partitions
from trainer.data.remote_corpus import fetch_corpus
from trainer.data.shard_writer import document_separators
from trainer.data.token_dataset import (
    BLOCK_BYTES,
    PartitionResult,
    TextCounts,
    TokenDataset,
    TokenDatasetMeta,
    token_dtype,
)
from trainer.data.tokenizer import Tokenizer, open_tokenizer
from trainer.data.vocabulary import text_vocab_size
from trainer.errors import DataError, ResumeError, in_one_line
from trainer.storage.artifact import Artifact, DamageError, read_artifact, write_artifact
from trainer.storage.durable_io import file_lock, fsync_path
from trainer.storage.progress import progress

log = logging.getLogger(__name__)

SHARD_TOKENS = 1 << 29
KEY_VERSION = 3
"""Version of the cache key; a change tokenizes every corpus again."""
UNCUT_BYTES = {"byte": sys.maxsize, "tiktoken": 25_000, "huggingface": 400_000}
"""Files of fewer bytes had the same ids in version 2, which cut longer texts. sentencepiece
encoded lines.
"""


def prepare_datasets(config: Config) -> dict[str, Path]:
    """Tokenizes the sources of a run that are not tokenized yet; returns the folder of each, by
    name.

    Raises DataError, and ConfigError if the model's vocabulary is smaller than the tokenizer's.
    """
    specs = corpus_specs(config)
    if not specs:
        return {}
    tokenizer = open_tokenizer(config.tokenizer)
    checks.require_vocab_size(config, text_vocab_size(tokenizer, config.data.separators))
    datasets = {name: prepare(spec, tokenizer) for name, spec in specs.items()}
    for dataset in datasets.values():
        log.info("%s", describe_prepared(dataset))
    return {name: dataset.folder for name, dataset in datasets.items()}


def describe_prepared(dataset: TokenDataset) -> str:
    """The line that ends a preparation.

    Of each text it says once whether it is in a document, empty or skipped.
    """
    meta = dataset.meta
    counts = None if meta.counts is None else meta.counts.values()
    skipped = meta.skipped if counts is None else sum(each.skipped for each in counts)
    empty = "" if counts is None else f", {sum(each.empty for each in counts):,} empty"
    return (
        f"{dataset.folder}: {meta.tokens:,} tokens, {meta.documents:,} documents, the longest {meta.longest:,}, "
        f"{skipped:,} skipped{empty}; fingerprint {dataset.fingerprint}"
    )


class PreparedFolders(Artifact):
    """The folder of each source, which the first process of a launch writes for the others."""

    kind: ClassVar[str] = "prepared folders"
    folders: dict[str, str]


def prepare_once(config: Config, launch: str | None) -> dict[str, Path]:
    """Runs `prepare_datasets` once for all processes of a launch that share a cache.

    Otherwise each would look at every file of the corpora, 1.5 s for 50,000. `launch` is the same
    for these processes and no others; None: there are no others.
    """
    if launch is None or all(
        is_token_dataset(Path(spec.corpus)) for spec in corpus_specs(config).values()
    ):
        return prepare_datasets(config)
    cache = config.data.cache_dir
    path = cache / f".{launch}.json"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with file_lock(path.with_suffix(".lock")) as acquired:
            if acquired and path.exists():
                with suppress(DamageError, ResumeError):
                    folders = {
                        name: Path(each)
                        for name, each in read_artifact(path, PreparedFolders).folders.items()
                    }
                    if all(map(is_token_dataset, folders.values())):
                        return folders
            folders = prepare_datasets(config)
            prepared = PreparedFolders(
                folders={name: str(folder) for name, folder in folders.items()}
            )
            write_artifact(path, prepared, owner=launch)
            # Each launch has its own name, so that files of earlier ones are of no use.
            for other in cache.glob(".launch-*"):
                if other.stem != path.stem:
                    other.unlink(missing_ok=True)
            return folders
    except OSError:
        # A cache that cannot be written: of corpora that are prepared elsewhere, or named by
        # `prepare`.
        return prepare_datasets(config)


def prepare(
    source: CorpusSpec,
    tokenizer: Tokenizer,
    *,
    workers: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    folder: Path | None = None,
) -> TokenDataset:
    """The tokens of a source, in `folder` or else in its `cache_dir`; tokenizes the source if they
    are absent.

    Every rank calls this; of those that share a file system one tokenizes and the others wait. The
    result depends only on the corpus, the options and the tokenizer. Resumes after an
    interruption. Raises DataError, and RankFailedError if a worker dies.
    """
    if is_remote(source.corpus):
        return open_token_dataset(fetch_corpus(source), source, tokenizer)
    if is_token_dataset(Path(source.corpus)):
        return open_token_dataset(Path(source.corpus), source, tokenizer)
    document_separators(tokenizer, source.separators)
    corpus = Corpus(source)
    name = folder_name(corpus, source, tokenizer, shard_tokens)
    location = f'data.cache_dir = "{source.cache_dir}"' if folder is None else str(folder)
    folder = folder or source.cache_dir / name
    try:
        if not (folder / META_FILENAME).exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(folder.with_name(f".{name}.lock")) as acquired:
                # Looked for again under the lock: another rank may have prepared the corpus
                # meanwhile.
                if not (folder / META_FILENAME).exists():
                    # Without locks, processes prepare in folders of their own, and `publish` keeps
                    # the first.
                    suffix = "" if acquired else f"-{socket.gethostname()}-{os.getpid()}"
                    work_folder = folder.with_name(f"{name}.tmp{suffix}")
                    tokenize_corpus(
                        corpus,
                        TokenizeJob(work_folder, source, tokenizer, shard_tokens),
                        workers=workers,
                    )
                    publish(work_folder, folder)
    except OSError as error:
        raise DataError(f"{location} cannot be written: {error}") from error
    dataset = open_token_dataset(folder, source, tokenizer)
    # The folder is from a version that did not refuse files that are not text.
    if dataset.meta.counts is None:
        corpus.require_readable(thoroughly=True)
        corpus.require_lines_by_suffix(folder)
    return dataset


def open_token_dataset(folder: Path, source: CorpusSpec, tokenizer: Tokenizer) -> TokenDataset:
    """A prepared folder.

    Raises DataError if it does not match the source's options and the tokenizer.
    """
    dataset = TokenDataset(folder)
    meta = dataset.meta
    named = source.corpus if is_remote(source.corpus) else folder
    prepared = f'data.corpus = "{named}" was prepared with'
    if meta.tokenizer != tokenizer.fingerprint:
        raise DataError(
            f"{prepared} the tokenizer {meta.tokenizer}, and [tokenizer] is {tokenizer.fingerprint}"
        )
    if meta.separators != source.separators:
        raise DataError(
            f'{prepared} data.separators = "{meta.separators}", and it is "{source.separators}" now'
        )
    if source.max_document is not None and meta.longest > source.max_document:
        limit = f"data.max_document = {source.max_document}"
        raise DataError(f"{limit}, and {prepared} documents of up to {meta.longest} tokens")
    return dataset


def prepared_folder(source: CorpusSpec, tokenizer: Tokenizer) -> Path | None:
    """The folder in which `prepare` finds the tokens of a source; None if they are absent.

    Raises DataError if the source is absent.
    """
    if is_remote(source.corpus):
        return fetch_corpus(source)
    if is_token_dataset(Path(source.corpus)):
        return Path(source.corpus)
    folder = source.cache_dir / folder_name(Corpus(source), source, tokenizer, SHARD_TOKENS)
    return folder if is_token_dataset(folder) else None


def folder_name(
    corpus: Corpus, source: CorpusSpec, tokenizer: Tokenizer, shard_tokens: int
) -> str:
    """Name of the prepared folder in `cache_dir`."""
    return f"{corpus.name}-{cache_key(corpus, source, tokenizer, shard_tokens)}"


def cache_key(corpus: Corpus, source: CorpusSpec, tokenizer: Tokenizer, shard_tokens: int) -> str:
    options = {
        name: value
        for name, value in asdict(source).items()
        if name not in ("corpus", "cache_dir", "remote_cache_gib", "key")
    }
    if source.files is None:
        # As in folders that were prepared before it existed.
        del options["files"]
    if options["bad_files"] == "error":
        # As in folders that were prepared before the value was renamed.
        options["bad_files"] = "refuse"
    if added := added_readers(corpus):
        options["sources"] = added
    version = 2 if had_same_ids(corpus, source, tokenizer) else KEY_VERSION
    key_parts = [version, corpus.identity, options, shard_tokens, tokenizer.fingerprint]
    return hashlib.sha256(json.dumps(key_parts).encode()).hexdigest()[:16]


def added_readers(corpus: Corpus) -> list[str]:
    """The extensions that read files of the corpus; the tokens are prepared again if their code
    changes.
    """
    readers = (extension.added_source(text_suffix(file.name)) for file in corpus.files)
    return sorted(
        {
            f"{each.extension.name} {each.extension.version} {each.source_hash}"
            for each in readers
            if each
        }
    )


def had_same_ids(corpus: Corpus, source: CorpusSpec, tokenizer: Tokenizer) -> bool:
    """Whether folders of version 2 hold the same ids, so that they are found again."""
    kind = tokenizer.fingerprint.partition("-")[0]
    if kind == "byte":
        return True
    is_by_file = source.documents == "file" and bool(corpus.files)
    largest = max((file.size for file in corpus.files), default=0)
    is_plain = all(
        Path(file.name).suffix not in (".gz", ".zst", ".parquet") for file in corpus.files
    )
    return is_by_file and is_plain and largest < UNCUT_BYTES.get(kind, 0)


def tokenize_corpus(corpus: Corpus, job: TokenizeJob, *, workers: int) -> None:
    """Writes all shards and `meta.json` to `job.folder`, which may hold finished partitions of an
    interrupted call.
    """
    # The folder is complete but not renamed: the process was killed just before `publish`.
    if (job.folder / META_FILENAME).exists():
        return
    corpus.require_readable(thoroughly=True)
    partitions = list(enumerate(corpus.partitions()))
    records = job.folder / RECORDS_FOLDER
    records.mkdir(parents=True, exist_ok=True)
    for stale in (path for path in records.iterdir() if path.is_dir()):
        # A worker of a killed process may be moving files out of it. Once it is gone, the worker
        # ends.
        shutil.rmtree(stale, ignore_errors=True)
    # Of a process that was killed before it renamed the file.
    for stale in job.folder.glob(f"{META_FILENAME}.tmp-*"):
        stale.unlink()
    pending = [
        (number, splits) for number, splits in partitions if job.finished_result(number) is None
    ]
    if num_finished := len(partitions) - len(pending):
        log.info(
            "%s: %d of %d partitions are tokenized already",
            job.folder,
            num_finished,
            len(partitions),
        )
    for line in describe_reading(corpus):
        log.info("%s", line)
    for line in describe_left_out(corpus):
        log.log(corpus.log_level, "%s", line)
    size = sum(split.size for _, splits in pending for split in splits)
    with progress(f"tokenizing {corpus.name}", total=size) as shown:
        tokenize_partitions(job, pending, workers=workers, advance=shown.advance)
    try:
        results = [
            read_artifact(job.record_path(number), PartitionResult) for number, _ in partitions
        ]
    except DamageError as error:
        raise DataError(
            f"a record in {records} is damaged: {error}; delete {job.folder} to prepare it again"
        ) from None
    # `build_meta` raises in this case: without text there is nothing to resume.
    if not any(result.shards for result in results):
        shutil.rmtree(job.folder)
    meta = build_meta(corpus, job, results)
    write_artifact(
        job.folder / META_FILENAME,
        meta,
        made_from=cache_key(corpus, job.spec, job.tokenizer, job.shard_tokens),
    )


def build_meta(
    corpus: Corpus, job: TokenizeJob, results: Sequence[PartitionResult]
) -> TokenDatasetMeta:
    """Sums up the partitions and logs their problems. Raises DataError if there is no text."""
    problems = [problem for result in results for problem in result.bad]
    for problem in problems:
        log.log(corpus.log_level, "skipped %s", in_one_line(problem))
    counts: dict[str, TextCounts] = {}
    for suffix, counted in (item for result in results for item in result.counts.items()):
        counts[suffix] = counts.get(suffix, TextCounts()) + counted
    for line in describe_counts(corpus.name, counts):
        log.info("%s", line)
    bad = sum(each.skipped for each in counts.values())
    shards = [shard for result in results for shard in result.shards]
    if not shards:
        files = len(corpus.files)
        first = f", the first {problems[0]}" if problems else ""
        empty = sum(each.empty for each in counts.values())
        found = f"{files:,} files, {empty:,} empty texts, {bad:,} skipped{first}"
        raise DataError(f'{job.spec.key} = "{job.spec.corpus}" has no text: {found}')
    tokenizer = job.tokenizer
    return TokenDatasetMeta(
        dtype=token_dtype(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        bos=tokenizer.bos,
        eos=tokenizer.eos,
        tokens=sum(shard.tokens for shard in shards),
        documents=sum(shard.documents for shard in shards),
        longest=max(result.longest for result in results),
        files=len(corpus.files),
        skipped=bad,
        tokenizer=tokenizer.fingerprint,
        separators=job.spec.separators,
        max_document=job.spec.max_document,
        shards=shards,
        block_bytes=BLOCK_BYTES,
        counts=counts,
    )


def publish(temporary: Path, folder: Path) -> None:
    """Renames a complete preparation to its final name."""
    # Contents are on disk before the name, so that after a crash a folder with the final name is
    # complete.
    shutil.rmtree(temporary / RECORDS_FOLDER, ignore_errors=True)
    fsync_path(temporary)
    try:
        temporary.rename(folder)
    except OSError:
        # Without locks another process may have been first; its result is the same.
        if not (folder / META_FILENAME).exists():
            raise
        shutil.rmtree(temporary)
    fsync_path(folder.parent)
