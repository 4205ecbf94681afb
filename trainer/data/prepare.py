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
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from trainer.data.corpus import Corpus
from trainer.data.errors import DataError
from trainer.data.prepared import META, VERSION, Meta, Prepared, Shard, narrowest
from trainer.data.progress import LOG_SECONDS, progress
from trainer.data.source import Source
from trainer.data.tokenizer import Tokenizer
from trainer.files import sync, write_synced

log = logging.getLogger(__name__)

SHARD_TOKENS = 1 << 29
FLUSH_TOKENS = 1 << 20
LOCK_SECONDS = 0.2


def prepare(data: Source, tokenizer: Tokenizer, *, shard_tokens: int = SHARD_TOKENS) -> Prepared:
    """The tokens of `data.corpus`, from `data.cache_dir` if they are there.

    Every rank calls this; of those that share a file system one tokenizes and the others wait. The result depends on
    the corpus, the options and the tokenizer alone. Raises DataError.
    """
    corpus = Corpus(data.corpus, documents=data.documents, bad_files=data.bad_files)
    folder = data.cache_dir / f"{corpus.name}-{cache_key(corpus, data, tokenizer, shard_tokens)}"
    try:
        if not (folder / META).exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(folder.with_name(f".{folder.name}.lock")) as alone:
                if not (folder / META).exists():
                    if alone:
                        remove_leftovers(folder)
                    tokenize(corpus, tokenizer, folder, max_document=data.max_document, shard_tokens=shard_tokens)
    except OSError as error:
        raise DataError(f'data.cache_dir = "{data.cache_dir}" cannot be written: {error}') from error
    prepared = Prepared(folder)
    log.info(
        "%s: %s tokens, %s documents, the longest %s; fingerprint %s",
        folder,
        *(f"{count:,}" for count in (prepared.num_tokens, prepared.num_documents, prepared.meta.longest)),
        prepared.fingerprint,
    )
    return prepared


def cache_key(corpus: Corpus, data: Source, tokenizer: Tokenizer, shard_tokens: int) -> str:
    files = [(file.name, file.size, file.mtime_ns) for file in corpus.files]
    options = [VERSION, corpus.is_stdlib, data.documents, data.max_document, data.bad_files, shard_tokens]
    return hashlib.sha256(json.dumps([files, options, tokenizer.fingerprint]).encode()).hexdigest()[:16]


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


def remove_leftovers(folder: Path) -> None:
    """What a process that was killed left of `folder`; only its lock's holder may call this."""
    for path in [folder, *folder.parent.glob(f"{folder.name}.tmp-*")]:
        if path.exists():
            log.info("removing %s, which was never finished", path)
            shutil.rmtree(path)


def tokenize(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path, *, max_document: int | None, shard_tokens: int
) -> None:
    """Writes `folder` under another name and renames it when it is whole and on disk."""
    temporary = folder.with_name(f"{folder.name}.tmp-{socket.gethostname()}-{os.getpid()}")
    writer = ShardWriter(temporary, tokenizer, max_document=max_document, shard_tokens=shard_tokens)
    try:
        temporary.mkdir()
        with progress(f"tokenizing {corpus.name}", total_bytes=corpus.size) as advance:
            for _, parts in groupby(corpus.parts(), key=attrgetter("document")):
                for part in parts:
                    try:
                        tokens = tokenizer.encode(part.text)
                    except DataError as error:
                        raise DataError(f"{part.file}: {error}") from error
                    writer.add(tokens)
                    advance(len(part.text) if part.text.isascii() else len(part.text.encode()), len(tokens))
                writer.end_document()
        meta = writer.finish(files=len(corpus.files), skipped=len(corpus.skipped))
        write_synced(temporary / META, meta.model_dump_json(indent=2).encode())
        sync(temporary)
        publish(temporary, folder)
    finally:
        writer.close()
        shutil.rmtree(temporary, ignore_errors=True)
    if corpus.skipped:
        log.warning("%s: %d bad files or lines were skipped", corpus.name, len(corpus.skipped))


def publish(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError:
        # Without locks another process may have been first; what it wrote is the same.
        if not (folder / META).exists():
            raise
    sync(folder.parent)


class ShardWriter:
    """Appends documents to shards, each between `bos` (if there is one) and `eos`. A document is never in two shards."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, *, max_document: int | None, shard_tokens: int) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._bos = [] if tokenizer.bos is None else [torch.tensor([tokenizer.bos], dtype=torch.int32)]
        self._eos = torch.tensor([tokenizer.eos], dtype=torch.int32)
        self._room = None if max_document is None else max_document - len(self._bos) - 1
        self._dtype = narrowest(tokenizer.vocab_size)
        self._shard_tokens = shard_tokens
        self._shards: list[Shard] = []
        self._longest = 0
        self._file: IO[bytes] | None = None
        self._begin_shard()

    def _begin_shard(self) -> None:
        self._starts = array("q", [0])
        self._hash = hashlib.sha256()
        self._pending: list[Tensor] = []
        self._num_pending = 0
        self._tokens = 0  # of this shard, pending ones included
        self._body = 0  # of the open document, bos left out

    def add(self, ids: Tensor) -> None:
        """Tokens of the open document, which is ended, and another begun, where it reaches `max_document`."""
        while ids.numel():
            if not self._body:
                for bos in self._bos:
                    self._append(bos)
            part = ids if self._room is None else ids[: self._room - self._body]
            self._append(part)
            self._body += part.numel()
            ids = ids[part.numel() :]
            if self._body == self._room:
                self.end_document()

    def end_document(self) -> None:
        """Ends the open document; without tokens there is none."""
        if not self._body:
            return
        self._append(self._eos)
        self._longest = max(self._longest, self._tokens - self._starts[-1])
        self._starts.append(self._tokens)
        self._body = 0
        if self._tokens >= self._shard_tokens:
            self._end_shard()

    def finish(self, *, files: int, skipped: int) -> Meta:
        """What was written, which is then on disk. Raises DataError if there is no document."""
        self._end_shard()
        if not self._shards:
            raise DataError(f"the corpus has no text: {files} files, {skipped} bad files or lines")
        return Meta(
            version=VERSION,
            dtype=self._dtype,
            vocab_size=self._tokenizer.vocab_size,
            bos=self._tokenizer.bos,
            eos=self._tokenizer.eos,
            tokens=sum(shard.tokens for shard in self._shards),
            documents=sum(shard.documents for shard in self._shards),
            longest=self._longest,
            files=files,
            skipped=skipped,
            tokenizer=self._tokenizer.fingerprint,
            shards=self._shards,
        )

    def close(self) -> None:
        """Lets go of an unfinished shard; what is not on disk is lost."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    @property
    def _name(self) -> str:
        return f"shard-{len(self._shards):05d}"

    def _append(self, ids: Tensor) -> None:
        self._pending.append(ids)
        self._num_pending += ids.numel()
        self._tokens += ids.numel()
        if self._num_pending >= FLUSH_TOKENS:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        dtype = torch.uint16 if self._dtype == "uint16" else torch.int32
        content = bytearray(self._num_pending * dtype.itemsize)
        torch.frombuffer(content, dtype=dtype).copy_(torch.cat(self._pending))
        self._pending, self._num_pending = [], 0
        self._hash.update(content)
        if self._file is None:
            # Unbuffered: what cannot be written fails here, not when the file is closed.
            self._file = (self._folder / f"{self._name}.bin").open("wb", buffering=0)
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _end_shard(self) -> None:
        self._flush()
        if self._file is None:
            return
        os.fsync(self._file.fileno())
        self.close()
        starts = self._starts.tobytes()
        write_synced(self._folder / f"{self._name}.idx", starts)
        shard = Shard(
            name=self._name,
            tokens=self._tokens,
            documents=len(self._starts) - 1,
            bin_sha256=self._hash.hexdigest(),
            idx_sha256=hashlib.sha256(starts).hexdigest(),
        )
        self._shards.append(shard)
        self._begin_shard()
