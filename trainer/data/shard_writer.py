"""Writing tokens: documents into shards."""

from __future__ import annotations

import hashlib
import os
from array import array
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.checkpoint.durable_io import write_synced
from trainer.data.errors import DataError
from trainer.data.token_dataset import DTYPES, Shard, narrowest
from trainer.data.tokenizer import Tokenizer

FLUSH_TOKENS = 1 << 20


def between(tokenizer: Tokenizer, separators: str) -> tuple[Tensor, Tensor]:
    """What a document begins and ends with, int32. Raises DataError for a special token that there is not."""
    begins = [] if separators != "bos_eos" or tokenizer.bos is None else [tokenizer.bos]
    ends = [] if separators == "none" else [tokenizer.eos]
    if separators not in ("bos_eos", "eos", "none"):
        if separators not in tokenizer.specials:
            known = ", ".join([*tokenizer.specials][:8]) or "none"
            raise DataError(f'data.separators = "{separators}" is no special token of the tokenizer; it has {known}')
        ends = [tokenizer.specials[separators]]
    return torch.tensor(begins, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)


class Mark(NamedTuple):
    """A place to go back to."""

    tokens: int
    documents: int
    body: int


class ShardWriter:
    """Appends documents to shards, each between its separators. A document is never in two shards.

    The first is named `name`, those that follow `name-1`, ...
    """

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
        self.shards: list[Shard] = []
        self.longest = 0
        """Tokens of the longest document in `shards`."""
        self._folder = folder
        self._stem = name
        self._begins, self._ends = between(tokenizer, separators)
        self._room = None if max_document is None else max_document - len(self._begins) - len(self._ends)
        self._dtype = DTYPES[narrowest(tokenizer.vocab_size)]
        self._shard_tokens = shard_tokens
        self._file: FileIO | None = None
        self._begin_shard()

    def _begin_shard(self) -> None:
        self._starts = array("q", [0])
        self._pending: list[Tensor] = []
        self._num_pending = 0
        self._tokens = 0  # of this shard, pending ones included
        self._body = 0  # of the open document, separators left out

    def add(self, ids: Tensor) -> None:
        """Tokens of the open document, which is cut, and another begun, where it reaches `max_document`."""
        while ids.numel():
            if not self._body:
                self._append(self._begins)
            part = ids if self._room is None else ids[: self._room - self._body]
            self._append(part)
            self._body += part.numel()
            ids = ids[part.numel() :]
            if self._body == self._room:
                self._close_document()

    def end_document(self) -> None:
        """Ends the open document; without tokens there is none."""
        self._close_document()
        if self._tokens >= self._shard_tokens:
            self._end_shard()

    def mark(self) -> Mark:
        return Mark(self._tokens, len(self._starts), self._body)

    def go_back(self, mark: Mark) -> None:
        """Forgets what was added since `mark`, which must be of the open document."""
        self._flush()
        self._tokens, documents, self._body = mark
        del self._starts[documents:]
        if self._file is not None:
            self._file.truncate(self._tokens * self._dtype.itemsize)
            self._file.seek(0, os.SEEK_END)

    def finish(self) -> None:
        """What was added is on disk."""
        self.end_document()
        self._end_shard()

    def close(self) -> None:
        """Lets go of an unfinished shard; what is not on disk is lost."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    @property
    def _name(self) -> str:
        return f"{self._stem}-{len(self.shards)}" if self.shards else self._stem

    def _close_document(self) -> None:
        if self._body:
            self._append(self._ends)
            self._starts.append(self._tokens)
            self._body = 0

    def _append(self, ids: Tensor) -> None:
        self._pending.append(ids)
        self._num_pending += ids.numel()
        self._tokens += ids.numel()
        if self._num_pending >= FLUSH_TOKENS:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        content = bytearray(self._num_pending * self._dtype.itemsize)
        torch.frombuffer(content, dtype=self._dtype).copy_(torch.cat(self._pending))
        self._pending, self._num_pending = [], 0
        if self._file is None:
            # Unbuffered: what cannot be written fails here, not when the file is closed.
            self._file = (self._folder / f"{self._name}.bin").open("w+b", buffering=0)
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _end_shard(self) -> None:
        self._flush()
        if self._file is None:
            return
        if not self._tokens:  # All of it was gone back on.
            self.close()
            (self._folder / f"{self._name}.bin").unlink()
            return
        os.fsync(self._file.fileno())
        self._file.seek(0)
        tokens_sha256 = hashlib.file_digest(self._file, "sha256").hexdigest()
        self.close()
        starts = bytearray(self._starts.tobytes())
        write_synced(self._folder / f"{self._name}.idx", starts)
        shard = Shard(
            name=self._name,
            tokens=self._tokens,
            documents=len(self._starts) - 1,
            bin_sha256=tokens_sha256,
            idx_sha256=hashlib.sha256(starts).hexdigest(),
        )
        self.longest = max(self.longest, int(torch.frombuffer(starts, dtype=torch.int64).diff().max()))
        self.shards.append(shard)
        self._begin_shard()
