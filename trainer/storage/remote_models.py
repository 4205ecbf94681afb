"""Folders of models at URLs: downloads, and uploads of exports. Imports no torch.

    <URL>/longhaul.json     sizes and hashes of all files; commits an export, and is never replaced
    <URL>/config.json       written last, because others know a model by it

A folder that somebody else uploaded has no hashes: sizes are compared, and whether its files
change during the download. What was downloaded is kept, and used again while the URL lists the
same files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

from models.files import MAX_SEALED_BYTES
from trainer.errors import ConfigError, DataError
from trainer.storage.artifact import (
    Artifact,
    DamageError,
    NewerFormatError,
    read_regular,
    seal,
    unseal,
)
from trainer.storage.durable_io import file_lock, format_bytes, fsync_path, write_and_fsync
from trainer.storage.lineage import record_download
from trainer.storage.manifest import MANIFEST_FILE, hash_file, read_validated
from trainer.storage.object_store import RemoteError, RemoteFolder, reporting
from trainer.storage.remote_checkpoints import (
    copy_folders,
    read_remote_checkpoint,
    remote_checkpoint,
)
from trainer.storage.remote_files import HASH_CHARS, SealedFiles, transfer, upload_folder

log = logging.getLogger("trainer")

CONFIG_FILE = "config.json"
HASHES_FILE = "longhaul.json"
TOKENIZER_CACHE = Path("~/.cache/longhaul/tokenizers")
NAME = re.compile(r"[\w+-][\w.+-]*(/[\w+-][\w.+-]*)?")
TOKENIZER_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".tiktoken")
WEIGHTS = re.compile(r"model[\w.-]*\.safetensors")


class FileHashes(Artifact):
    """The files of an exported folder."""

    kind: ClassVar[str] = "hashes of an exported model"
    files: dict[str, tuple[int, str]]
    """(bytes, sha256) by name."""


@dataclass(frozen=True)
class Listing:
    """The files of a folder at a URL that are downloaded."""

    files: Mapping[str, tuple[int, str]]
    """(bytes, sha256 or "") by name."""
    identity: str
    """Changes with the content, as far as the store says."""
    object_of: Callable[[str], str] = str
    """The object of a file."""
    seal: tuple[str, bytes] | None = None
    """Name and content of the sealed file that lists them."""
    is_unchanged: Callable[[], bool] = lambda: True
    """Whether the store still lists the same."""


# ---- downloads


def fetch_model(url: str, cache: Path, *, key: str) -> Path:
    """The local copy, in `cache`, of a model's folder or of exported weights at a URL; of a run's
    copies, the newest. Downloads it if it is not here.

    `key` names the URL in errors. Raises `ConfigError` if nothing of that kind is there,
    `DataError` for damage, and `RunFailedError` if the store fails.
    """
    with _explained(key, url):
        store = RemoteFolder(url)
        versions = store.versions()
        sizes = {name: size for name, (size, _) in versions.items()}
        if copies := copy_folders(sizes):
            found = read_remote_checkpoint(store, copies[-1])
            listing = Listing(
                found.files,
                found.content.hex(),
                found.name_of,
                (MANIFEST_FILE, found.content),
            )
        elif CONFIG_FILE in versions:
            listing = _list_model(store, versions)
        else:
            raise ConfigError(
                [f"{key}: {url} has neither {CONFIG_FILE} nor {MANIFEST_FILE}: it is no model"]
            )
        folder = _download(store, listing, cache)
        record_download(url, folder)
        return folder


def fetch_tokenizer(url: str) -> Path:
    """The local copy of a tokenizer's file, or of the tokenizer files of a model's folder.

    Raises as `fetch_model`.
    """
    key = "tokenizer.path"
    with _explained(key, url):
        cache = TOKENIZER_CACHE.expanduser()
        store = RemoteFolder(url)
        if versions := store.versions():
            return _download(store, _list_model(store, versions, has_weights=False), cache)
        # The URL of a file lists nothing below it.
        place, _, name = store.url.rpartition("/")
        store = RemoteFolder(place)
        versions = store.versions()
        if name not in versions:
            raise ConfigError([f"{key}: {url} does not exist"])
        # A tokenizer.json needs the files beside it.
        if not name.endswith(".json"):
            versions = {name: versions[name]}
        return _download(store, _list_model(store, versions, has_weights=False), cache) / name


@contextmanager
def _explained(key: str, url: str) -> Iterator[None]:
    """Raises errors of a download as errors of a run."""
    with reporting(key, url):
        try:
            yield
        except (DamageError, NewerFormatError) as error:
            raise DataError(f"{key}: {url} is damaged: {error}") from None
        except OSError as error:
            raise DataError(f"{key}: {url} cannot be kept here: {error}") from None


def _list_model(
    store: RemoteFolder, versions: Mapping[str, tuple[int, str]], *, has_weights: bool = True
) -> Listing:
    """The files of a Hugging Face folder that are used."""
    hashes = dict[str, tuple[int, str]]()
    if HASHES_FILE in versions:
        content = store.read(HASHES_FILE, max_bytes=MAX_SEALED_BYTES)
        hashes = unseal(content, FileHashes)[0].files
    used = {
        name: version
        for name, version in sorted(versions.items())
        if NAME.fullmatch(name)
        and (
            name.endswith(TOKENIZER_SUFFIXES)
            or (has_weights and WEIGHTS.fullmatch(name) is not None)
        )
    }
    for name, (size, _) in hashes.items():
        if name in used and used[name][0] != size:
            raise DamageError(f"{name} has {used[name][0]:,} bytes instead of {size:,}")
    files = {name: (size, hashes.get(name, (0, ""))[1]) for name, (size, _) in used.items()}

    def is_unchanged() -> bool:
        now = store.versions()
        return all(now.get(name) == version for name, version in used.items())

    return Listing(files, json.dumps(used), is_unchanged=is_unchanged)


def _download(store: RemoteFolder, listing: Listing, cache: Path) -> Path:
    """The local folder with these files; files of a download that was cut off are kept."""
    identity = f"{store.url}\0{listing.identity}".encode()
    digest = hashlib.sha256(identity).hexdigest()[:HASH_CHARS]
    # The hash comes first: a folder step-N must be of that step.
    folder = cache / f"{digest}-{store.url.rpartition('/')[2]}"
    cache.mkdir(parents=True, exist_ok=True)
    with file_lock(cache / f".{folder.name}.lock"):
        if folder.exists():
            return folder
        temporary = cache / f".tmp-{folder.name}"
        temporary.mkdir(exist_ok=True)

        def move(name: str, count: Callable[[int], None]) -> None:
            size, sha256 = listing.files[name]
            path = temporary / name
            path.parent.mkdir(exist_ok=True)
            try:
                store.download(
                    listing.object_of(name), path, size=size, digest=sha256, on_bytes=count
                )
            except DamageError:
                path.unlink(missing_ok=True)
                raise

        sizes = {
            name: size
            for name, (size, _) in listing.files.items()
            if not (temporary / name).is_file() or (temporary / name).stat().st_size != size
        }
        total = sum(sizes.values())
        log.info("downloading %s of %s to %s", format_bytes(total), store.url, folder)
        transfer(sizes, move, title=f"downloading {store.url}")
        if not listing.is_unchanged():
            shutil.rmtree(temporary)
            raise RemoteError(f"{store.url} changed while it was downloaded")
        if listing.seal is not None:
            name, content = listing.seal
            write_and_fsync(temporary / name, content)
            read_validated(temporary)
        fsync_path(temporary)
        temporary.rename(folder)
        fsync_path(cache)
    return folder


# ---- uploads


@dataclass(frozen=True)
class FlatFiles(SealedFiles):
    """Files that others read, too, so that their objects have the names of the files."""

    def name_of(self, file: str) -> str:
        return file

    def to_upload(self, store: RemoteFolder) -> list[str]:
        """All: an object of this name and size may be of another export that was cut off."""
        del store
        return sorted(self.files)


@contextmanager
def local_output(
    output: Path | str, upload: Callable[[Path, str, str], None], *, key: str
) -> Iterator[Path]:
    """The folder that an export writes: `output`, or for a URL a temporary one in the current
    folder, which `upload` then sends there.

    `key` names the output in errors. Raises `ConfigError` if something is at the URL, and as
    `upload_folder`.
    """
    if isinstance(output, Path):
        yield output
        return
    require_no_model(output, key=key)
    with TemporaryDirectory(prefix=".export-", dir=Path.cwd()) as temporary:
        folder = Path(temporary) / "export"
        yield folder
        try:
            upload(folder, output, key)
        except DamageError as error:
            raise DataError(f"{folder} changed before it was uploaded: {error}") from None


def require_no_model(url: str, *, key: str) -> None:
    """Raises `ConfigError` if an export or a model is at the URL, before another one is made."""
    with reporting(key, url):
        if found := {CONFIG_FILE, HASHES_FILE, MANIFEST_FILE} & RemoteFolder(url).sizes().keys():
            raise ConfigError([f"{key}: {url} exists already: it has {', '.join(sorted(found))}"])


def upload_model(folder: Path, url: str, key: str) -> None:
    """Uploads an exported Hugging Face folder. Raises as `upload_folder`.

    `longhaul.json` is committed before `config.json` is written, by which others know a model: of
    two exports to one URL at once the second is refused.
    """
    names = [f"{path.relative_to(folder)}" for path in folder.rglob("*") if path.is_file()]
    hashes = FileHashes(files={name: hash_file(folder / name) for name in sorted(names)})
    others = {name: each for name, each in hashes.files.items() if name != CONFIG_FILE}
    upload_folder(folder, url, FlatFiles("", HASHES_FILE, seal(hashes), others), key=key)
    size, digest = hashes.files[CONFIG_FILE]
    with reporting(key, url):
        RemoteFolder(url).upload(
            folder / CONFIG_FILE, CONFIG_FILE, size=size, digest=digest, on_bytes=lambda _: None
        )


def upload_checkpoint(folder: Path, url: str, key: str) -> None:
    """Uploads exported weights. Raises as `upload_folder`."""
    content = read_regular(folder / MANIFEST_FILE, max_bytes=MAX_SEALED_BYTES)
    files = remote_checkpoint(read_validated(folder), content)
    upload_folder(folder, url, files, key=key)
