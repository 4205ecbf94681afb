"""Tokens on disk: the format of a prepared corpus, and reading it.

shard-00000.bin   tokens, little-endian: uint16 if vocab_size <= 65536, else int32
shard-00000.idx   starts of the documents in the shard, then its length: int64
meta.json         what there is, written last
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from trainer.data.errors import DataError

VERSION = 1
META = "meta.json"


class Shard(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    tokens: int
    documents: int
    bin_sha256: str
    idx_sha256: str


class Meta(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1]
    dtype: Literal["uint16", "int32"]
    vocab_size: int
    bos: int | None
    eos: int
    tokens: int
    documents: int
    longest: int
    files: int
    skipped: int
    tokenizer: str
    shards: list[Shard]

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.uint16 if self.dtype == "uint16" else torch.int32


def narrowest(vocab_size: int) -> Literal["uint16", "int32"]:
    return "uint16" if vocab_size <= 1 << 16 else "int32"


class Prepared:
    """A prepared corpus, mapped into memory: one stream of tokens, in which documents follow each other.

    Raises DataError if the folder does not hold what its `meta.json` says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.meta = Meta.model_validate_json((folder / META).read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(f"{folder / META} cannot be read; delete {folder} to prepare it again: {error}") from error
        self.num_tokens = self.meta.tokens
        self.num_documents = self.meta.documents
        self.vocab_size = self.meta.vocab_size
        self.eos = self.meta.eos
        # Of the tokens, not of the times or paths of the files they come from.
        identity = [self.meta.tokenizer, [(shard.bin_sha256, shard.idx_sha256) for shard in self.meta.shards]]
        self.fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
        self._first = list(accumulate((shard.tokens for shard in self.meta.shards), initial=0))
        self._tokens = [self._map(shard.name + ".bin", shard.tokens) for shard in self.meta.shards]
        starts = [self._starts(shard) + first for shard, first in zip(self.meta.shards, self._first, strict=False)]
        self.starts = torch.cat([*(each[:-1] for each in starts), torch.tensor([self.num_tokens])])
        """[documents + 1] int64: where each document starts in the stream, and where the stream ends."""
        if self.starts.numel() != self.num_documents + 1 or self._first[-1] != self.num_tokens:
            raise self._broken(META, f"{self.num_tokens} tokens and {self.num_documents} documents, its shards do not")

    @property
    def lengths(self) -> Tensor:
        """[documents] int64."""
        return self.starts.diff()

    def read(self, start: int, stop: int) -> Tensor:
        """[stop - start] int64: that slice of the stream. Raises DataError naming a token outside the vocabulary."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(f"tokens {start} to {stop} are not within the {self.num_tokens} of {self.folder}")
        index = bisect_right(self._first, start) - 1
        slices = []
        while start < stop:
            first = self._first[index]
            end = min(stop, self._first[index + 1])
            slices.append(self._slice(index, start - first, end - first))
            start, index = end, index + 1
        return slices[0] if len(slices) == 1 else torch.cat([torch.empty(0, dtype=torch.int64), *slices])

    def _slice(self, index: int, start: int, stop: int) -> Tensor:
        tokens = self._tokens[index][start:stop].to(torch.int64)
        smallest, largest = tokens.aminmax()
        if smallest >= 0 and largest < self.vocab_size:
            return tokens
        at = int(((tokens < 0) | (tokens >= self.vocab_size)).nonzero()[0])
        path = self.folder / f"{self.meta.shards[index].name}.bin"
        raise DataError(
            f"{path} is damaged: token {start + at} is {int(tokens[at])}, and vocab_size = {self.vocab_size}; "
            f"delete {self.folder} to prepare it again"
        )

    def _map(self, name: str, tokens: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.meta.torch_dtype
        path = self.folder / name
        wanted = tokens * dtype.itemsize
        try:
            size = path.stat().st_size
            if size != wanted or not size:
                raise self._broken(name, f"{wanted} bytes, there are {size}")
            return torch.from_file(str(path), shared=False, size=tokens, dtype=dtype)
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error

    def _starts(self, shard: Shard) -> Tensor:
        starts = self._map(shard.name + ".idx", shard.documents + 1, torch.int64)
        if starts[0] != 0 or starts[-1] != shard.tokens or not bool((starts.diff() > 0).all()):
            raise self._broken(f"{shard.name}.idx", f"documents that fill {shard.tokens} tokens, these offsets do not")
        return starts

    def _broken(self, name: str, said: str) -> DataError:
        return DataError(
            f"{self.folder / name} is damaged: {META} says {said}; delete {self.folder} to prepare it again"
        )
