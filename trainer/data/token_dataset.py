"""The on-disk format of a prepared corpus, and its reader.

shard-00000.bin   tokens, little-endian: uint16 if vocab_size <= 65536, else int32
shard-00000.idx   document starts in the shard, then its length: int64
meta.json         written last
"""

from __future__ import annotations

import hashlib
import json
from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from models.ranges import concatenated_ranges, cut_ranges
from trainer.errors import DataError

VERSION = 2
META_FILENAME = "meta.json"
DTYPES = {"uint16": torch.uint16, "int32": torch.int32}


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TokenShard(Record):
    name: str
    tokens: int
    documents: int
    bin_sha256: str
    idx_sha256: str


class PartitionResult(Record):
    """The outcome of a tokenized partition."""

    shards: list[TokenShard]
    longest: int
    skipped: int
    bad: list[str]
    """Descriptions of the first skipped files and lines."""


class TokenDatasetMeta(Record):
    version: Literal[2]
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
    separators: str
    max_document: int | None
    shards: list[TokenShard]
    sha256: str = ""
    """Of all fields above."""

    def with_checksum(self) -> TokenDatasetMeta:
        content = self.model_dump_json(exclude={"sha256"})
        return self.model_copy(update={"sha256": hashlib.sha256(content.encode()).hexdigest()})


def token_dtype(vocab_size: int) -> Literal["uint16", "int32"]:
    return "uint16" if vocab_size <= 1 << 16 else "int32"


def is_token_dataset(folder: Path) -> bool:
    """Whether a folder holds prepared tokens, damaged or not, rather than text."""
    try:
        return b'"shards"' in (folder / META_FILENAME).read_bytes()
    except OSError:
        return False


class TokenDataset:
    """A prepared corpus, mapped into memory: one stream of tokens, document after document.

    Raises DataError if the folder does not match its `meta.json`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path, advice = folder / META_FILENAME, f"delete {folder} to prepare it again"
        try:
            self.meta = TokenDatasetMeta.model_validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read; {advice}: {error}") from error
        if self.meta != self.meta.with_checksum():
            raise DataError(f"{path} was changed after it was written; {advice}")
        self.num_tokens = self.meta.tokens
        self.num_documents = self.meta.documents
        self.vocab_size = self.meta.vocab_size
        self.eos = self.meta.eos
        # Depends on the tokens, not on the paths or times of the text files.
        identity = [self.meta.tokenizer, [(shard.bin_sha256, shard.idx_sha256) for shard in self.meta.shards]]
        self.fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
        self._shard_offsets = torch.tensor([*accumulate((shard.tokens for shard in self.meta.shards), initial=0)])
        self._shard_tokens = [self._map_shard(shard) for shard in self.meta.shards]
        shard_starts = [
            self._load_document_starts(shard) + first
            for shard, first in zip(self.meta.shards, self._shard_offsets, strict=False)
        ]
        self.document_starts = torch.cat([*(each[:-1] for each in shard_starts), torch.tensor([self.num_tokens])])
        """[documents + 1] int64: start of each document in the stream, then the end of the stream."""

    @property
    def document_lengths(self) -> Tensor:
        """[documents] int64."""
        return self.document_starts.diff()

    def read(self, start: int, stop: int) -> Tensor:
        """[stop - start] int64: a slice of the stream. Raises DataError for a token outside the vocabulary."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(f"tokens {start} to {stop} are outside the {self.num_tokens} of {self.folder}")
        return self.read_ranges(torch.tensor([start]), torch.tensor([stop - start]))

    def read_ranges(self, starts: Tensor, lengths: Tensor) -> Tensor:
        """int64: parts of the stream, concatenated. Raises DataError for a token outside the vocabulary."""
        shard, starts, lengths = cut_ranges(starts, lengths, self._shard_offsets)
        offsets, tokens = lengths.cumsum(0) - lengths, torch.empty(int(lengths.sum()), dtype=torch.int64)
        for index in shard.unique().tolist():
            is_here = shard == index
            here, in_shard = lengths[is_here], starts[is_here] - self._shard_offsets[index]
            tokens[concatenated_ranges(offsets[is_here], here)] = self._read_shard(
                index, concatenated_ranges(in_shard, here)
            )
        return tokens

    def _read_shard(self, index: int, places: Tensor) -> Tensor:
        tokens = self._shard_tokens[index][places].to(torch.int64)
        smallest, largest = tokens.aminmax()
        if smallest >= 0 and largest < self.vocab_size:
            return tokens
        first = int(((tokens < 0) | (tokens >= self.vocab_size)).nonzero()[0])
        problem = f"token {int(places[first])} is {int(tokens[first])}, but vocab_size = {self.vocab_size}"
        raise self._damaged(f"{self.meta.shards[index].name}.bin", problem)

    def _map_shard(self, shard: TokenShard) -> Tensor:
        path, dtype = self.folder / f"{shard.name}.bin", DTYPES[self.meta.dtype]
        expected_size = shard.tokens * dtype.itemsize
        try:
            size = path.stat().st_size
            if size != expected_size or not size:
                raise self._damaged(path.name, f"{size} bytes, {META_FILENAME} says {expected_size}")
            return torch.from_file(str(path), shared=False, size=shard.tokens, dtype=dtype)
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error

    def _load_document_starts(self, shard: TokenShard) -> Tensor:
        path = self.folder / f"{shard.name}.idx"
        try:
            content = bytearray(path.read_bytes())
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        if hashlib.sha256(content).hexdigest() != shard.idx_sha256:
            raise self._damaged(path.name, f"checksum mismatch ({len(content)} bytes)")
        return torch.frombuffer(content, dtype=torch.int64)

    def _damaged(self, name: str, problem: str) -> DataError:
        return DataError(f"{self.folder / name} is damaged: {problem}; delete {self.folder} to prepare it again")
