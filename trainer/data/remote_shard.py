"""Tokens at a URL, read in blocks that are compared with their hashes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Annotated, ClassVar

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from models.ranges import concatenated_ranges
from trainer.command_table import typed
from trainer.config.sections import require_remote
from trainer.data.block_cache import BlockCache
from trainer.data.token_blocks import BlockLayout
from trainer.errors import EXIT_FAILURE, DataError, RankFailedError
from trainer.storage.artifact import Artifact, DamageError, read_artifact
from trainer.storage.object_store import RemoteError, RemoteFolder, RemoteMissingError

log = logging.getLogger("trainer")

REMOTE_FILENAME = "remote.json"
CACHE_FILENAME = "tokens.cache"
BLOCKS_AT_ONCE = 256
"""Blocks that are asked for together, 16 MiB."""
FIRST_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0
GIVE_UP_SECONDS = 600.0
"""Time without an answer after which the run fails: less than `distributed.hang_minutes`."""


class RemotePlace(Artifact):
    """Where the tokens of a prepared folder are that has only their index."""

    kind: ClassVar[str] = "place of a remote corpus"
    url: Annotated[str, BeforeValidator(require_remote)]
    folder: str
    """Name of the folder with the shards, below the URL."""
    block_bytes: Annotated[int, Field(ge=1)]
    cached_blocks: Annotated[int, Field(ge=1)]
    """Blocks that are kept on disk at most."""


class RemoteTokens:
    """The objects of a corpus, whose requests are repeated while the store fails."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._store: RemoteFolder | None = None
        # The loader's thread reads, and so does validation.
        self._lock = Lock()

    def read_ranges(self, name: str, starts: list[int], lengths: list[int]) -> list[bytes]:
        """Raises `DamageError` for an object that is missing, and `RankFailedError` if the store
        does not answer for long.
        """
        began = time.monotonic()
        delay = FIRST_RETRY_SECONDS
        problem = ""
        while True:
            try:
                found = self._open().read_ranges(name, starts, lengths)
            except RemoteMissingError:
                raise DamageError("it is missing") from None
            except RemoteError as error:
                if not problem:
                    log.warning("reading tokens failed, tried again: %s", error)
                problem = str(error)
            else:
                if problem:
                    log.info("tokens of %s are read again", self.url)
                return found
            if time.monotonic() - began + delay > GIVE_UP_SECONDS:
                raise RankFailedError(EXIT_FAILURE, f"no tokens can be read: {problem}")
            time.sleep(delay)
            delay = min(2 * delay, MAX_RETRY_SECONDS)
            # Opened again: credentials may have been renewed.
            self._store = None

    def _open(self) -> RemoteFolder:
        # Late, because a client must not live through a fork.
        with self._lock:
            if self._store is None:
                self._store = RemoteFolder(self.url)
            return self._store


class RemoteShard:
    """Tokens of a shard at a URL: each block is read from the cache, or fetched into it."""

    def __init__(
        self,
        tokens: RemoteTokens,
        name: str,
        layout: BlockLayout,
        cache: BlockCache,
        *,
        first_block: int,
    ) -> None:
        self._tokens = tokens
        self._name = name
        self._layout = layout
        self._cache = cache
        self._first_block = first_block
        """Number of the shard's first block among those of the corpus."""

    def read(self, starts: Tensor, lengths: Tensor) -> Tensor:
        """Ranges of tokens, concatenated. Raises `DamageError`, and as `RemoteTokens`."""
        layout = self._layout
        blocks = layout.of_tokens(starts, lengths)
        contents = self._read_blocks(blocks)
        # Only the last block of a shard may be shorter, and nothing comes after it.
        joined = torch.frombuffer(
            bytearray().join(contents[block] for block in blocks), dtype=layout.dtype
        )
        places = concatenated_ranges(starts, lengths)
        tokens_per_block = layout.block_bytes // layout.dtype.itemsize
        block = places // tokens_per_block
        row = torch.searchsorted(torch.tensor(blocks), block)
        return joined[row * tokens_per_block + places % tokens_per_block]

    def _read_blocks(self, blocks: Sequence[int]) -> dict[int, bytes]:
        found = self._cached(blocks)
        missing = [block for block in blocks if block not in found]
        if not missing:
            return found
        with self._cache.locked([self._first_block + block for block in missing]):
            # Another rank may have fetched them meanwhile.
            found |= self._cached(missing)
            missing = [block for block in missing if block not in found]
            for start in range(0, len(missing), BLOCKS_AT_ONCE):
                found.update(self._fetched(missing[start : start + BLOCKS_AT_ONCE]))
        return found

    def _cached(self, blocks: Sequence[int]) -> dict[int, bytes]:
        """The blocks whose intact content is in the cache."""
        return {
            block: content
            for block in blocks
            if self._layout.is_intact(
                block,
                content := self._cache.read(self._first_block + block, self._layout.size(block)),
            )
        }

    def _fetched(self, blocks: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        starts = [block * self._layout.block_bytes for block in blocks]
        sizes = [self._layout.size(block) for block in blocks]
        contents = self._tokens.read_ranges(self._name, starts, sizes)
        for block, content in zip(blocks, contents, strict=True):
            self._layout.require_intact(block, content)
            self._cache.write(self._first_block + block, content)
            yield block, content


class RemoteCorpus:
    """The shards of a prepared folder whose tokens are at a URL.

    Raises `DamageError`, `NewerFormatError` and OSError for a damaged `remote.json`.
    """

    def __init__(self, folder: Path) -> None:
        place = read_artifact(folder / REMOTE_FILENAME, RemotePlace)
        self._place = place
        self._tokens = RemoteTokens(place.url)
        self._cache = BlockCache(
            folder / CACHE_FILENAME, places=place.cached_blocks, block_bytes=place.block_bytes
        )
        self._num_blocks = 0

    def open_shard(self, file: str, layout: BlockLayout) -> RemoteShard:
        """The next shard of the corpus."""
        name = f"{self._place.folder}/{file}"
        first_block = self._num_blocks
        self._num_blocks += layout.num_blocks
        return RemoteShard(self._tokens, name, layout, self._cache, first_block=first_block)

    def damaged(self, file: str, problem: str) -> DataError:
        """The error of a shard whose object differs from the corpus."""
        name = f"{self._place.url.rstrip('/')}/{self._place.folder}/{file}"
        return DataError(
            f"{name} is damaged: {problem}; delete this object and upload it again: "
            f"{typed('prepare', '--corpus', 'FOLDER', '--output', self._place.url)}"
        )
