"""The on-disk format of a prepared corpus, and its reader.

shard-00000.bin     tokens, little-endian: uint16 if vocab_size <= 65536, else int32
shard-00000.idx     document starts in the shard, then its length: int64
shard-00000.blocks  sha256 of every BLOCK_BYTES of the tokens
meta.json           written last: it seals the other files by their hashes
"""

from __future__ import annotations

import hashlib
import json
import mmap
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from models.files import MAX_SHARD_INDEX_BYTES
from models.ranges import concatenated_ranges, cut_ranges
from trainer.config.migrations import Migration
from trainer.data.own_files import META_FILENAME
from trainer.data.remote_shard import REMOTE_FILENAME, RemoteCorpus, RemoteShard
from trainer.data.token_blocks import BlockLayout, MappedShard
from trainer.errors import DataError, ResumeError
from trainer.storage.artifact import (
    Artifact,
    DamageError,
    open_regular,
    parse_object,
    read_artifact,
    read_regular,
)

DTYPES = {"uint16": torch.uint16, "int32": torch.int32}
BLOCK_BYTES = 1 << 16
"""Unit of verification: a block is hashed before a token in it is trained on. The kernel reads as
much ahead anyway.
"""


MAX_SHARD_BYTES = 1 << 44
MAX_VOCAB_SIZE = 1 << 31
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class TokenShard(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    name: str = Field(pattern=r"^shard-[0-9-]+$")
    tokens: int = Field(ge=1, le=MAX_SHARD_BYTES)
    documents: int = Field(ge=1, le=MAX_SHARD_BYTES)
    bin_sha256: str
    idx_sha256: str
    blocks_sha256: str = ""


class TextCounts(BaseModel):
    """Numbers of texts in the files with one suffix."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    texts: Count = 0
    """Texts with at least one character."""
    empty: Count = 0
    skipped: Count = 0

    def __add__(self, other: TextCounts) -> TextCounts:
        return TextCounts(
            texts=self.texts + other.texts,
            empty=self.empty + other.empty,
            skipped=self.skipped + other.skipped,
        )


class PartitionResult(Artifact):
    """The outcome of a tokenized partition."""

    kind: ClassVar[str] = "tokenized partition"
    # Records of before texts were counted are incomplete: their partitions are tokenized again.
    migrations: ClassVar[tuple[Migration, ...]] = (Migration(),)
    shards: list[TokenShard]
    longest: int
    counts: dict[str, TextCounts]
    """Counts by suffix."""
    bad: list[str]
    """Descriptions of the first skipped files and lines."""


class TokenDatasetMeta(Artifact):
    kind: ClassVar[str] = "prepared corpus"
    # Version 1 is of before files were sealed; its shards are hashed as a whole.
    migrations: ClassVar[tuple[Migration, ...]] = (
        Migration(new_keys={"block_bytes": None}),
        Migration(new_keys={"counts": None}),
    )
    dtype: Literal["uint16", "int32"]
    vocab_size: int = Field(ge=1, le=MAX_VOCAB_SIZE)
    bos: int | None
    eos: int
    tokens: int
    documents: int
    longest: Count
    files: Count
    skipped: Count
    tokenizer: str
    separators: str
    max_document: int | None
    shards: list[TokenShard]
    block_bytes: int | None = Field(ge=1, le=MAX_SHARD_BYTES)
    """Bytes of a hashed block; None: a shard is one block."""
    counts: dict[str, TextCounts] | None
    """Counts by suffix; None: texts were not counted, and first bytes not examined."""

    @model_validator(mode="after")
    def _require_sums(self) -> Self:
        for name in ("tokens", "documents"):
            if getattr(self, name) != sum(getattr(shard, name) for shard in self.shards):
                raise ValueError(f"{name} must be the sum over shards")
        if not all(
            0 <= token < self.vocab_size
            for token in (self.eos, 0 if self.bos is None else self.bos)
        ):
            raise ValueError(f"bos and eos must be tokens of the {self.vocab_size}")
        return self

    @classmethod
    def from_unsealed(cls, data: bytes) -> tuple[dict[str, Any], int]:
        values = parse_object(data)
        digest = values.pop("sha256", None)
        content = json.dumps(values, separators=(",", ":"), ensure_ascii=False)
        if values.pop("version", None) != 2:
            raise DamageError(f"it is not a {cls.kind}")
        if hashlib.sha256(content.encode()).hexdigest() != digest:
            raise DamageError("it does not match its own checksum")
        return values, 1


def token_dtype(vocab_size: int) -> Literal["uint16", "int32"]:
    return "uint16" if vocab_size <= 1 << 16 else "int32"


class TokenDataset:
    """A prepared corpus, mapped into memory: one stream of tokens, document after document.

    Raises DataError if the folder does not match its `meta.json`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._remote: RemoteCorpus | None = None
        try:
            self.meta = read_artifact(folder / META_FILENAME, TokenDatasetMeta)
        except DamageError as error:
            raise self._damaged(META_FILENAME, str(error)) from None
        except (OSError, ResumeError) as error:
            raise DataError(f"{folder / META_FILENAME} cannot be read: {error}") from None
        self.num_tokens = self.meta.tokens
        self.num_documents = self.meta.documents
        self.vocab_size = self.meta.vocab_size
        self.eos = self.meta.eos
        # Depends on the tokens, not on the paths or times of the text files.
        identity = [
            self.meta.tokenizer,
            [(shard.bin_sha256, shard.idx_sha256) for shard in self.meta.shards],
        ]
        self.fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
        # One more than shards: the last offset is the end of the stream, so zip below is not
        # strict.
        self._shard_offsets = torch.tensor(
            [*accumulate((shard.tokens for shard in self.meta.shards), initial=0)]
        )
        self._remote = self._open_remote()
        self._shards = [self._open_shard(shard) for shard in self.meta.shards]
        shard_starts = [
            self._load_document_starts(shard) + first
            for shard, first in zip(self.meta.shards, self._shard_offsets, strict=False)
        ]
        self.document_starts = torch.cat(
            [*(each[:-1] for each in shard_starts), torch.tensor([self.num_tokens])]
        )
        """[documents + 1] int64: start of each document in the stream, then the end of the
        stream.
        """

    @property
    def is_remote(self) -> bool:
        """Whether the tokens are at a URL."""
        return self._remote is not None

    @property
    def document_lengths(self) -> Tensor:
        """[documents] int64: tokens of each document."""
        return self.document_starts.diff()

    def read(self, start: int, stop: int) -> Tensor:
        """[stop - start] int64: a slice of the stream.

        Raises DataError for a token outside the vocabulary.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(
                f"tokens {start} to {stop} are outside the {self.num_tokens} of {self.folder}"
            )
        return self.read_ranges(torch.tensor([start]), torch.tensor([stop - start]))

    def read_ranges(self, starts: Tensor, lengths: Tensor) -> Tensor:
        """int64: parts of the stream, concatenated.

        Raises DataError for a token outside the vocabulary.
        """
        shard, starts, lengths = cut_ranges(starts, lengths, self._shard_offsets)
        offsets = lengths.cumsum(0) - lengths
        tokens = torch.empty(int(lengths.sum()), dtype=torch.int64)
        for index in shard.unique().tolist():
            is_here = shard == index
            here = lengths[is_here]
            in_shard = starts[is_here] - self._shard_offsets[index]
            tokens[concatenated_ranges(offsets[is_here], here)] = self._read_shard(
                index, in_shard, here
            )
        return tokens

    def _read_shard(self, index: int, starts: Tensor, lengths: Tensor) -> Tensor:
        name = f"{self.meta.shards[index].name}.bin"
        try:
            tokens = self._shards[index].read(starts, lengths).to(torch.int64)
        except DamageError as error:
            raise self._damaged(name, str(error)) from None
        # An id outside the vocabulary would fail in the embedding on the device, far from its
        # cause.
        smallest, largest = tokens.aminmax()
        if smallest >= 0 and largest < self.vocab_size:
            return tokens
        first = int(((tokens < 0) | (tokens >= self.vocab_size)).nonzero()[0])
        place = int(concatenated_ranges(starts, lengths)[first])
        problem = f"token {place} is {int(tokens[first])}, but vocab_size = {self.vocab_size}"
        raise self._damaged(name, problem)

    def _open_remote(self) -> RemoteCorpus | None:
        """Where the tokens are; None if they are in the folder."""
        if not (self.folder / REMOTE_FILENAME).exists():
            return None
        try:
            return RemoteCorpus(self.folder)
        except (OSError, DamageError, ResumeError) as error:
            raise self._damaged(REMOTE_FILENAME, str(error)) from None

    def _open_shard(self, shard: TokenShard) -> MappedShard | RemoteShard:
        dtype = DTYPES[self.meta.dtype]
        block_bytes = self.meta.block_bytes
        layout = BlockLayout(
            num_bytes=shard.tokens * dtype.itemsize,
            block_bytes=block_bytes or shard.tokens * dtype.itemsize,
            digests=bytes.fromhex(shard.bin_sha256)
            if block_bytes is None
            else self._read(shard, "blocks"),
            dtype=dtype,
        )
        if self._remote is not None:
            return self._remote.open_shard(f"{shard.name}.bin", layout)
        return self._map_shard(self.folder / f"{shard.name}.bin", layout)

    def _map_shard(self, path: Path, layout: BlockLayout) -> MappedShard:
        try:
            with open_regular(path) as file:
                size = path.stat().st_size
                if size != layout.num_bytes:
                    raise self._damaged(
                        path.name, f"{size} bytes, {META_FILENAME} says {layout.num_bytes}"
                    )
                # torch.frombuffer warns of memory that cannot be written. A private copy can be,
                # and no write reaches the file.
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except DamageError as error:
            raise self._damaged(path.name, str(error)) from None
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        return MappedShard(content, layout)

    def _load_document_starts(self, shard: TokenShard) -> Tensor:
        content = self._read(shard, "idx")
        if len(content) == 8 * (shard.documents + 1):
            starts = torch.frombuffer(bytearray(content), dtype=torch.int64)
            if (int(starts[0]), int(starts[-1])) == (0, shard.tokens) and bool(
                (starts.diff() > 0).all()
            ):
                return starts
        rule = f"it must ascend from 0 to {shard.tokens} in {shard.documents} documents"
        raise self._damaged(f"{shard.name}.idx", rule)

    def _read(self, shard: TokenShard, suffix: Literal["idx", "blocks"]) -> bytes:
        path = self.folder / f"{shard.name}.{suffix}"
        digest = getattr(shard, f"{suffix}_sha256")
        try:
            content = read_regular(path, max_bytes=MAX_SHARD_INDEX_BYTES)
        except DamageError as error:
            raise self._damaged(path.name, str(error)) from None
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        if hashlib.sha256(content).hexdigest() != digest:
            raise self._damaged(path.name, f"checksum mismatch ({len(content)} bytes)")
        return content

    def _damaged(self, name: str, problem: str) -> DataError:
        if self._remote is not None and name.endswith(".bin"):
            return self._remote.damaged(name, problem)
        return DataError(
            f"{self.folder / name} is damaged: {problem}; delete {self.folder} to prepare it again"
        )
