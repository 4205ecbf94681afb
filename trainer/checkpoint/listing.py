"""The checkpoints that a command names: in a folder, or their copies at a URL. Imports no torch
until files are verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trainer.errors import ResumeError
from trainer.storage import manifest
from trainer.storage.artifact import DamageError
from trainer.storage.manifest import MANIFEST_FILE, Manifest
from trainer.storage.object_store import RemoteFolder, reporting
from trainer.storage.progress import progress
from trainer.storage.remote_checkpoints import (
    copy_folders,
    read_remote_checkpoint,
    reasons_of_damage,
)
from trainer.storage.remote_files import transfer
from trainer.storage.retention import PIN_FILE, is_pinned, list_quarantined, parse_step
from trainer.storage.run_dir import RunDir, find_checkpoints


@dataclass(frozen=True)
class ListedCheckpoint:
    step: int
    place: str
    """Folder or URL."""
    is_pinned: bool
    read_manifest: Callable[[], Manifest]
    """Raises `DamageError`."""
    find_damage: Callable[[], list[str]]
    """One line per damaged file; hashes all of them and shows progress."""


@dataclass(frozen=True)
class Listing:
    checkpoints: Sequence[ListedCheckpoint]
    """Oldest first; at least one."""
    set_aside: Sequence[str]
    """A line for each damaged one that does not count any more."""


@contextmanager
def listed_checkpoints(place: Path | str) -> Iterator[Listing]:
    """The checkpoints of a folder, or of a URL as text.

    Raises `ResumeError` if there are none, and, also in this context, as `reporting` for a store
    that refuses or fails.
    """
    if isinstance(place, Path):
        yield _local(place)
        return
    with reporting("command line: DIR", place):
        yield _copies(place)


# ---- folders


def select_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints that `folder` names, oldest first.

    Raises `ResumeError` if there are none.
    """
    _, checkpoints = find_checkpoints(folder)
    if not checkpoints and (folder / MANIFEST_FILE).exists():
        # Exported, or copied out of its run folder.
        checkpoints = [(0, folder)]
    if not checkpoints:
        raise ResumeError(f"{folder} is neither a checkpoint nor a run folder with a checkpoint")
    return checkpoints


def find_file_damage(folder: Path) -> list[str]:
    """One line per damaged file; shows progress."""
    try:
        found = manifest.read_validated(folder)
    except DamageError as error:
        return [str(error)]
    with progress(f"verifying {folder.name}", total=found.bytes) as shown:
        names = sorted(found.files)
        damaged = manifest.find_damage(folder, found, names, on_bytes=shown.advance)
    from trainer.checkpoint.load import find_metadata_damage

    return damaged or find_metadata_damage(folder)


def _local(folder: Path) -> Listing:
    checkpoints = [
        ListedCheckpoint(
            step=step,
            place=f"{path}",
            is_pinned=is_pinned(path),
            read_manifest=partial(manifest.read_validated, path),
            find_damage=partial(find_file_damage, path),
        )
        for step, path in select_checkpoints(folder)
    ]
    return Listing(checkpoints, list_quarantined(RunDir(folder).checkpoints_dir))


# ---- copies


def _copies(url: str) -> Listing:
    store = RemoteFolder(url)
    sizes = store.sizes()
    checkpoints = [_listed_copy(store, folder, sizes) for folder in copy_folders(sizes)]
    if not checkpoints:
        raise ResumeError(f"{url} is neither a copy of a checkpoint nor a folder of copies")
    return Listing(checkpoints, reasons_of_damage(store, sizes))


def _listed_copy(store: RemoteFolder, folder: str, sizes: Mapping[str, int]) -> ListedCheckpoint:
    url = f"{store.url}/{folder}".rstrip("/")
    return ListedCheckpoint(
        # Exported weights have none.
        step=parse_step(url.rpartition("/")[2]) or 0,
        place=url,
        is_pinned=f"{folder}/{PIN_FILE}".lstrip("/") in sizes,
        read_manifest=partial(_read_copied_manifest, store, folder),
        find_damage=partial(_find_copy_damage, store, folder),
    )


def _read_copied_manifest(store: RemoteFolder, folder: str) -> Manifest:
    return read_remote_checkpoint(store, folder).manifest


def _find_copy_damage(store: RemoteFolder, folder: str) -> list[str]:
    """One line per damaged file; reads all of them, and keeps none."""
    try:
        copy = read_remote_checkpoint(store, folder)
    except DamageError as error:
        return [f"{MANIFEST_FILE} is damaged: {error}"]
    damaged = list[str]()

    def verify(name: str, on_bytes: Callable[[int], None]) -> None:
        size, digest = copy.files[name]
        try:
            store.verify(copy.name_of(name), size=size, digest=digest, on_bytes=on_bytes)
        except DamageError as error:
            damaged.append(str(error))

    sizes = {name: size for name, (size, _) in copy.files.items()}
    transfer(sizes, verify, title=f"verifying {folder or store.url}")
    return sorted(damaged)
