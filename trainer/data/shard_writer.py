"""Writes tokenized documents to shards."""

from __future__ import annotations

import hashlib
import os
from array import array
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.checkpoint.durable_io import write_and_fsync
from trainer.data.token_dataset import DTYPES, TokenShard, token_dtype
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError

FLUSH_TOKENS = 1 << 20


def document_separators(tokenizer: Tokenizer, separators: str) -> tuple[Tensor, Tensor]:
    """(prefix, suffix) of a document, int32. Raises DataError for an unknown special token."""
    prefix = [] if separators != "bos_eos" or tokenizer.bos is None else [tokenizer.bos]
    suffix = [] if separators == "none" else [tokenizer.eos]
    if separators not in ("bos_eos", "eos", "none"):
        if separators not in tokenizer.special_tokens:
            known = ", ".join([*tokenizer.special_tokens][:8]) or "none"
            raise DataError(f'data.separators = "{separators}" is not a special token of the tokenizer; it has {known}')
        suffix = [tokenizer.special_tokens[separators]]
    return torch.tensor(prefix, dtype=torch.int32), torch.tensor(suffix, dtype=torch.int32)


class Savepoint(NamedTuple):
    tokens: int
    documents: int
    document_tokens: int


class ShardWriter:
    """Appends documents with their separators to shards `name`, `name-1`, ... A document never spans two shards."""

    def __init__(
        self,
        folder: Path,
        name: str,
        tokenizer: Tokenizer,
        *,
        separators: str = "bos_eos",
        max_document: int | None,
        shard_tokens: int,
    ) -> None:
        self.shards: list[TokenShard] = []
        self.longest = 0
        """Tokens of the longest document in `shards`."""
        self._folder = folder
        self._base_name = name
        self._prefix_ids, self._suffix_ids = document_separators(tokenizer, separators)
        self._max_document_body = (
            None if max_document is None else max_document - len(self._prefix_ids) - len(self._suffix_ids)
        )
        self._dtype = DTYPES[token_dtype(tokenizer.vocab_size)]
        self._max_shard_tokens = shard_tokens
        self._file: FileIO | None = None
        self._begin_shard()

    def _begin_shard(self) -> None:
        self._starts = array("q", [0])
        self._pending: list[Tensor] = []
        self._num_pending = 0
        self._num_tokens = 0  # of this shard, pending tokens included
        self._document_tokens = 0  # of the open document, without separators

    def add(self, ids: Tensor) -> None:
        """Appends tokens to the open document. Starts another one when it reaches `max_document`."""
        while ids.numel():
            if not self._document_tokens:
                self._append(self._prefix_ids)
            chunk = ids if self._max_document_body is None else ids[: self._max_document_body - self._document_tokens]
            self._append(chunk)
            self._document_tokens += chunk.numel()
            ids = ids[chunk.numel() :]
            if self._document_tokens == self._max_document_body:
                self._close_document()

    def end_document(self) -> None:
        """Ends the open document; does nothing if it has no tokens."""
        self._close_document()
        if self._num_tokens >= self._max_shard_tokens:
            self._end_shard()

    def savepoint(self) -> Savepoint:
        return Savepoint(self._num_tokens, len(self._starts), self._document_tokens)

    def rollback(self, savepoint: Savepoint) -> None:
        """Drops what was added since `savepoint`. No shard may have ended since."""
        self._flush()
        self._num_tokens, documents, self._document_tokens = savepoint
        del self._starts[documents:]
        if self._file is not None:
            self._file.truncate(self._num_tokens * self._dtype.itemsize)
            self._file.seek(0, os.SEEK_END)

    def finish(self) -> None:
        """Ends the last document and shard; all of it is on disk on return."""
        self.end_document()
        self._end_shard()

    def close(self) -> None:
        """Closes the file of an unfinished shard and drops pending tokens."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    @property
    def _shard_name(self) -> str:
        return f"{self._base_name}-{len(self.shards)}" if self.shards else self._base_name

    def _close_document(self) -> None:
        if self._document_tokens:
            self._append(self._suffix_ids)
            self._starts.append(self._num_tokens)
            self._document_tokens = 0

    def _append(self, ids: Tensor) -> None:
        self._pending.append(ids)
        self._num_pending += ids.numel()
        self._num_tokens += ids.numel()
        if self._num_pending >= FLUSH_TOKENS:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        content = bytearray(self._num_pending * self._dtype.itemsize)
        torch.frombuffer(content, dtype=self._dtype).copy_(torch.cat(self._pending))
        self._pending, self._num_pending = [], 0
        if self._file is None:
            # Unbuffered: a full disk raises here, not when the file is closed.
            self._file = (self._folder / f"{self._shard_name}.bin").open("w+b", buffering=0)
        remaining = memoryview(content)
        while remaining:
            remaining = remaining[self._file.write(remaining) :]

    def _end_shard(self) -> None:
        self._flush()
        if self._file is None:
            return
        if not self._num_tokens:  # Everything was rolled back.
            self.close()
            (self._folder / f"{self._shard_name}.bin").unlink()
            return
        os.fsync(self._file.fileno())
        self._file.seek(0)
        tokens_sha256 = hashlib.file_digest(self._file, "sha256").hexdigest()
        self.close()
        starts = bytearray(self._starts.tobytes())
        write_and_fsync(self._folder / f"{self._shard_name}.idx", starts)
        shard = TokenShard(
            name=self._shard_name,
            tokens=self._num_tokens,
            documents=len(self._starts) - 1,
            bin_sha256=tokens_sha256,
            idx_sha256=hashlib.sha256(starts).hexdigest(),
        )
        self.longest = max(self.longest, int(torch.frombuffer(starts, dtype=torch.int64).diff().max()))
        self.shards.append(shard)
        self._begin_shard()
