"""Tokenize a corpus once, before any process group exists, into a folder that all later runs map into memory."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from trainer.checkpoint.durable_io import sync, write_synced
from trainer.data.corpus import Corpus
from trainer.data.errors import DataError
from trainer.data.prepare.tokenize import RECORDS, Job, write_pieces
from trainer.data.progress import LOG_SECONDS, progress
from trainer.data.shard_writer import between
from trainer.data.source import Source
from trainer.data.token_dataset import META, VERSION, Meta, Piece, Prepared, is_prepared, narrowest
from trainer.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SHARD_TOKENS = 1 << 29
LOCK_SECONDS = 0.2


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    *,
    workers: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    folder: Path | None = None,
) -> Prepared:
    """The tokens of a source, from `folder`, or else from its `cache_dir`, if they are there.

    Every rank calls this; of those that share a file system one tokenizes and the others wait. The result depends on
    the corpus, the options and the tokenizer alone. What an interrupted call finished, the next does not do again.
    Raises DataError, and RankError if a worker dies.
    """
    if is_prepared(Path(source.corpus)):
        return opened(Path(source.corpus), source, tokenizer)
    between(tokenizer, source.separators)
    corpus = Corpus(source)
    name = f"{corpus.name}-{cache_key(corpus, source, tokenizer, shard_tokens)}"
    told = f'data.cache_dir = "{source.cache_dir}"' if folder is None else str(folder)
    folder = folder or source.cache_dir / name
    try:
        if not (folder / META).exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(folder.with_name(f".{name}.lock")) as alone:
                mine = "" if alone else f"-{socket.gethostname()}-{os.getpid()}"
                if not (folder / META).exists():
                    job = Job(
                        folder=folder.with_name(f"{name}.tmp{mine}"),
                        tokenizer=tokenizer,
                        text_key=source.text_key,
                        separators=source.separators,
                        max_document=source.max_document,
                        shard_tokens=shard_tokens,
                        refuses=corpus.refuses,
                    )
                    tokenize(corpus, job, workers=workers)
                    publish(job.folder, folder)
    except OSError as error:
        raise DataError(f"{told} cannot be written: {error}") from error
    return opened(folder, source, tokenizer)


def opened(folder: Path, source: Source, tokenizer: Tokenizer) -> Prepared:
    """What was prepared. Raises DataError unless it is what the source and the tokenizer ask for."""
    prepared = Prepared(folder)
    if prepared.meta.tokenizer != tokenizer.fingerprint:
        raise DataError(
            f'data.corpus = "{folder}" was prepared with the tokenizer {prepared.meta.tokenizer}, '
            f"and [tokenizer] is {tokenizer.fingerprint}"
        )
    if prepared.meta.separators != source.separators:
        raise DataError(
            f'data.corpus = "{folder}" was prepared with data.separators = "{prepared.meta.separators}", '
            f'and it is "{source.separators}" now'
        )
    if source.max_document is not None and prepared.meta.longest > source.max_document:
        raise DataError(
            f'data.max_document = {source.max_document}, and data.corpus = "{folder}" was prepared with documents of '
            f"up to {prepared.meta.longest} tokens"
        )
    log.info(
        "%s: %s tokens, %s documents, the longest %s; fingerprint %s",
        folder,
        *(f"{count:,}" for count in (prepared.num_tokens, prepared.num_documents, prepared.meta.longest)),
        prepared.fingerprint,
    )
    return prepared


def cache_key(corpus: Corpus, source: Source, tokenizer: Tokenizer, shard_tokens: int) -> str:
    options = {key: value for key, value in asdict(source).items() if key not in ("corpus", "cache_dir")}
    described = [VERSION, corpus.identity, options, shard_tokens, tokenizer.fingerprint]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Waits until no other process holds `path`. Gives False on a file system without locks, where nobody waits."""
    with path.open("w") as file:
        said = time.monotonic()
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    log.warning("%s: no locks on this file system (%s); others may prepare too", path, error)
                    yield False
                    return
            else:
                yield True
                return
            if time.monotonic() - said >= LOG_SECONDS:
                said = time.monotonic()
                log.info("waiting for the process that holds %s", path)
            time.sleep(LOCK_SECONDS)


def tokenize(corpus: Corpus, job: Job, *, workers: int) -> None:
    """Makes of `job.folder`, in which an earlier call may have got somewhere, a whole preparation."""
    if (job.folder / META).exists():
        return
    pieces = list(enumerate(corpus.pieces()))
    records = job.folder / RECORDS
    records.mkdir(parents=True, exist_ok=True)
    for unfinished in (path for path in records.iterdir() if path.is_dir()):
        shutil.rmtree(unfinished)
    todo = [piece for piece in pieces if job.done(piece[0]) is None]
    if len(todo) < len(pieces):
        log.info("%s: %d of %d pieces are there already", job.folder, len(pieces) - len(todo), len(pieces))
    size = sum(unit.size for _, units in todo for unit in units)
    with progress(f"tokenizing {corpus.name}", total_bytes=size) as advance:
        write_pieces(job, todo, workers=workers, advance=advance)
    done = [Piece.model_validate_json(job.record(number).read_bytes()) for number, _ in pieces]
    if not any(piece.shards for piece in done):
        shutil.rmtree(job.folder)
    meta = summed(corpus, job, done)
    write_synced(job.folder / "meta.tmp", meta.sealed().model_dump_json(indent=2).encode())
    (job.folder / "meta.tmp").rename(job.folder / META)


def summed(corpus: Corpus, job: Job, done: Sequence[Piece]) -> Meta:
    """What all pieces are together, and in the log what was bad. Raises DataError if there is no text."""
    bad = [*corpus.skipped, *(problem for piece in done for problem in piece.bad)]
    level = logging.INFO if corpus.is_stdlib else logging.WARNING
    for problem in bad:
        log.log(level, "skipped %s", problem)
    skipped = len(corpus.skipped) + sum(piece.skipped for piece in done)
    if skipped:
        log.log(level, "%s: %d bad files or lines were skipped", corpus.name, skipped)
    shards = [shard for piece in done for shard in piece.shards]
    if not shards:
        files, first = len(corpus.files), f", the first {bad[0]}" if bad else ""
        raise DataError(f"the corpus has no text: {files} files, {skipped} bad files or lines{first}")
    tokenizer = job.tokenizer
    return Meta(
        version=VERSION,
        dtype=narrowest(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        bos=tokenizer.bos,
        eos=tokenizer.eos,
        tokens=sum(shard.tokens for shard in shards),
        documents=sum(shard.documents for shard in shards),
        longest=max(piece.longest for piece in done),
        files=len(corpus.files),
        skipped=skipped,
        tokenizer=tokenizer.fingerprint,
        separators=job.separators,
        max_document=job.max_document,
        shards=shards,
    )


def publish(work: Path, folder: Path) -> None:
    """Gives a whole preparation its name."""
    shutil.rmtree(work / RECORDS, ignore_errors=True)
    sync(work)
    try:
        work.rename(folder)
    except OSError:
        # Without locks another process may have been first; what it wrote is the same.
        if not (folder / META).exists():
            raise
        shutil.rmtree(work)
    sync(folder.parent)
