"""Files at a URL that a sealed file commits: copies of checkpoints, corpora, exported weights.
Imports no torch.

    <URL>/<seal>              the sealed file, which lists the others with sizes and hashes
    <URL>/<hash>/<file>       the others; <hash> is the beginning of the seal's sha256

The seal is written last and never replaced. Files of two commands that write to the same URL have
different names, so the first seal commits only files of its own command.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from models.files import MAX_SEALED_BYTES
from trainer.errors import ConfigError
from trainer.storage.durable_io import format_bytes
from trainer.storage.object_store import RemoteError, RemoteFolder, RemoteMissingError, reporting
from trainer.storage.progress import progress

log = logging.getLogger("trainer")

HASH_CHARS = 16
FILES_AT_ONCE = 8


@dataclass(frozen=True)
class SealedFiles:
    """A sealed file at a URL, and where the files that it lists are."""

    folder: str
    """Name of the folder with the seal; "" for the URL itself."""
    seal: str
    """Name of the sealed file."""
    content: bytes
    """The sealed file as it is stored."""
    files: Mapping[str, tuple[int, str]]
    """(bytes, sha256) by name."""

    @property
    def seal_name(self) -> str:
        return "/".join(filter(None, (self.folder, self.seal)))

    def name_of(self, file: str) -> str:
        digest = hashlib.sha256(self.content).hexdigest()[:HASH_CHARS]
        return "/".join(filter(None, (self.folder, digest, file)))

    def missing(self, store: RemoteFolder) -> list[str]:
        """The files that are not there in full."""
        sizes = store.sizes(self.folder)
        return [
            name
            for name, (size, _) in sorted(self.files.items())
            if sizes.get(self.name_of(name)) != size
        ]

    def to_upload(self, store: RemoteFolder) -> list[str]:
        """The files that an earlier try did not upload.

        One that is there was compared with this seal before it appeared.
        """
        return self.missing(store)

    def upload_file(
        self, store: RemoteFolder, folder: Path, name: str, on_bytes: Callable[[int], None]
    ) -> None:
        """Uploads a file of a local folder. Raises `DamageError` if it differs from the seal."""
        size, digest = self.files[name]
        store.upload(
            folder / name, self.name_of(name), size=size, digest=digest, on_bytes=on_bytes
        )

    def download_file(
        self, store: RemoteFolder, folder: Path, name: str, on_bytes: Callable[[int], None]
    ) -> None:
        """Writes a file of a local folder. Raises `DamageError` if the object differs from the
        seal.
        """
        size, digest = self.files[name]
        store.download(
            self.name_of(name), folder / name, size=size, digest=digest, on_bytes=on_bytes
        )

    def commit(self, store: RemoteFolder) -> bool:
        """Writes the seal; returns False if there is another one already.

        Raises `RemoteError` unless all files are there in full.
        """
        if missing := self.missing(store):
            place = "/".join(filter(None, (store.url, self.folder)))
            raise RemoteError(f"{place}: {', '.join(missing[:3])} did not arrive in full")
        if store.create(self.seal_name, self.content):
            return True
        # A reply may have been lost on the way, and the library asked again.
        return store.read(self.seal_name, max_bytes=MAX_SEALED_BYTES) == self.content


def require_new(store: RemoteFolder, files: SealedFiles, *, key: str) -> None:
    """Raises `ConfigError` if another seal is there."""
    with suppress(RemoteMissingError):
        if store.read(files.seal_name, max_bytes=MAX_SEALED_BYTES) != files.content:
            raise ConfigError([f"{key}: {store.url} exists already, with other content"])


def upload_folder(folder: Path, url: str, files: SealedFiles, *, key: str) -> None:
    """Uploads the files of a local folder and commits them; continues an upload that was cut off.

    `key` names the URL in errors. Raises `ConfigError` if something else is there, `RunFailedError`
    if the store fails, and `DamageError` if a file differs from the seal.
    """
    with reporting(key, url):
        store = RemoteFolder(url)
        store.require_conditional_writes()
        require_new(store, files, key=key)
        sizes = {name: files.files[name][0] for name in files.to_upload(store)}
        log.info("uploading %s to %s", format_bytes(sum(sizes.values())), url)
        transfer(
            sizes,
            lambda name, count: files.upload_file(store, folder, name, count),
            title=f"uploading to {url}",
        )
        if not files.commit(store):
            raise ConfigError([f"{key}: {url} was written by another command meanwhile"])


def transfer(
    sizes: Mapping[str, int], move: Callable[[str, Callable[[int], None]], None], *, title: str
) -> None:
    """Uploads or downloads files of these bytes by name, several at once, and shows progress.

    `move` takes a name and the function that counts its bytes. Raises what it raises.
    """
    stop = Event()
    with (
        progress(title, total=sum(sizes.values())) as shown,
        ThreadPoolExecutor(FILES_AT_ONCE) as pool,
    ):

        def count(num_bytes: int) -> None:
            if stop.is_set():
                raise RemoteError("the transfer was stopped")
            shown.advance(num_bytes)

        started = [pool.submit(move, name, count) for name in sizes]
        try:
            for each in as_completed(started):
                each.result()
        except BaseException:
            # After a signal, too: the pool waits for what is in progress.
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
