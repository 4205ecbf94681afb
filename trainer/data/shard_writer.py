"""Writes tokenized documents to shards."""

from __future__ import annotations

import hashlib
import os
import sys
from array import array
from io import BufferedRandom
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.config.source import CorpusSpec
from trainer.data.token_dataset import BLOCK_BYTES, DTYPES, TokenShard, token_dtype
from trainer.data.tokenizer import Tokenizer
from trainer.errors import DataError
from trainer.storage.durable_io import write_and_fsync

BUFFER_BYTES = 1 << 20
BUFFER_TOKENS = 1 << 18


def document_separators(tokenizer: Tokenizer, separators: str) -> tuple[Tensor, Tensor]:
    """(prefix, suffix) of a document, int32. Raises DataError for an unknown special token."""
    prefix = [] if separators != "bos_eos" or tokenizer.bos is None else [tokenizer.bos]
    suffix = [] if separators == "none" else [tokenizer.eos]
    if separators not in ("bos_eos", "eos", "none"):
        if separators not in tokenizer.special_tokens:
            known = ", ".join([*tokenizer.special_tokens][:8]) or "none"
            raise DataError(
                f'data.separators = "{separators}" is not a special token of the tokenizer; it has {known}'
            )
        suffix = [tokenizer.special_tokens[separators]]
    return torch.tensor(prefix, dtype=torch.int32), torch.tensor(suffix, dtype=torch.int32)


class Savepoint(NamedTuple):
    tokens: int
    documents: int
    document_tokens: int


class ShardWriter:
    """Appends documents with their separators to shards `name`, `name-1`, ...

    A document never spans two shards.
    """

    def __init__(
        self, folder: Path, name: str, tokenizer: Tokenizer, spec: CorpusSpec, *, shard_tokens: int
    ) -> None:
        self.shards: list[TokenShard] = []
        self.longest = 0
        """Tokens of the longest document in `shards`."""
        self._folder = folder
        self._name = name
        self._dtype = DTYPES[token_dtype(tokenizer.vocab_size)]
        self._prefix, self._suffix = (
            ids.tolist() for ids in document_separators(tokenizer, spec.separators)
        )
        self._max_body = (spec.max_document or sys.maxsize) - len(self._prefix) - len(self._suffix)
        self._max_shard_tokens = shard_tokens
        self._begin_shard()

    def _begin_shard(self) -> None:
        self._shard_name = f"{self._name}-{len(self.shards)}" if self.shards else self._name
        # Also readable, because `_end_shard` hashes what was written.
        self._file = BufferedRandom(
            (self._folder / f"{self._shard_name}.bin").open("w+b", buffering=0),
            buffer_size=BUFFER_BYTES,
        )
        self._starts = array("q", [0])
        self._num_tokens = 0  # of this shard
        self._clear()
        # of the open document, without separators
        self._document_tokens = 0

    def add(self, ids: Tensor) -> None:
        """Appends tokens to the open document.

        Starts another one when it reaches `max_document`.
        """
        size = ids.numel()
        while size:
            if not self._document_tokens:
                self._write_separator(self._prefix)
            taken = min(size, self._max_body - self._document_tokens)
            self._write_body(ids[:taken] if taken < size else ids, taken)
            self._document_tokens += taken
            ids = ids[taken:] if taken < size else ids
            size = size - taken
            if self._document_tokens == self._max_body:
                self._close_document()

    def end_document(self) -> None:
        """Ends the open document; does nothing if it has no tokens."""
        self._close_document()
        if self._num_tokens >= self._max_shard_tokens:
            self._end_shard()
            self._begin_shard()

    def savepoint(self) -> Savepoint:
        return Savepoint(self._num_tokens, len(self._starts), self._document_tokens)

    def rollback(self, savepoint: Savepoint) -> None:
        """Drops what was added since `savepoint`. No shard may have ended since."""
        # Once nothing is unwritten, truncating the file undoes everything.
        self._flush()
        self._num_tokens, documents, self._document_tokens = savepoint
        del self._starts[documents:]
        self._file.seek(self._num_tokens * self._dtype.itemsize)
        self._file.truncate()

    def finish(self) -> None:
        """Ends the last document and shard; all of it is on disk on return."""
        self._close_document()
        if self._num_tokens:
            self._end_shard()
        else:
            self.close()
            (self._folder / f"{self._shard_name}.bin").unlink()

    def close(self) -> None:
        self._file.close()

    def _close_document(self) -> None:
        if self._document_tokens:
            self._write_separator(self._suffix)
            self._starts.append(self._num_tokens)
            self._document_tokens = 0

    def _write_separator(self, ids: list[int]) -> None:
        for token in ids:
            self._separators.append((self._num_unwritten, token))
            self._num_tokens += 1
            self._num_unwritten += 1

    def _write_body(self, ids: Tensor, size: int) -> None:
        self._num_tokens += size
        if size >= BUFFER_TOKENS:
            self._flush()
            self._file.write(self._to_bytes(ids))
            return
        self._bodies.append(ids)
        self._num_unwritten += size
        if self._num_unwritten >= BUFFER_TOKENS:
            self._flush()

    def _to_bytes(self, ids: Tensor) -> bytearray:
        content = bytearray(ids.numel() * self._dtype.itemsize)
        torch.frombuffer(content, dtype=self._dtype).copy_(ids)
        return content

    def _flush(self) -> None:
        """Writes documents together, because they may be short."""
        # torch.frombuffer refuses an empty buffer.
        if self._num_unwritten:
            # Two scatters place all separators and bodies. torch has few operations for uint16, so
            # the stream stays int32 until `_to_bytes`.
            stream = torch.empty(self._num_unwritten, dtype=torch.int32)
            is_body = torch.ones(self._num_unwritten, dtype=torch.bool)
            places, separators = (
                torch.tensor(self._separators, dtype=torch.int64).view(-1, 2).unbind(1)
            )
            is_body[places] = False
            stream[places] = separators.int()
            if self._bodies:
                stream[is_body] = torch.cat(self._bodies).int()
            self._file.write(self._to_bytes(stream))
        self._clear()

    def _clear(self) -> None:
        self._bodies = list[Tensor]()
        self._separators = list[tuple[int, int]]()
        """(place among the unwritten tokens, token)."""
        self._num_unwritten = 0

    def _end_shard(self) -> None:
        self._flush()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.seek(0)
        whole = hashlib.sha256()
        blocks = bytearray()
        while block := self._file.read(BLOCK_BYTES):
            whole.update(block)
            blocks += hashlib.sha256(block).digest()
        self.close()
        starts = bytearray(self._starts.tobytes())
        write_and_fsync(self._folder / f"{self._shard_name}.blocks", blocks)
        write_and_fsync(self._folder / f"{self._shard_name}.idx", starts)
        self.longest = max(
            self.longest, int(torch.frombuffer(starts, dtype=torch.int64).diff().max())
        )
        self.shards.append(
            TokenShard(
                name=self._shard_name,
                tokens=self._num_tokens,
                documents=len(self._starts) - 1,
                bin_sha256=whole.hexdigest(),
                idx_sha256=hashlib.sha256(starts).hexdigest(),
                blocks_sha256=hashlib.sha256(blocks).hexdigest(),
            )
        )
