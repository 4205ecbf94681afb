"""The one door for files from anywhere: regular ones, of a bounded size, which no link leads out
of their folder.

A pipe is not waited for, a device not read. Imports no torch.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from io import BufferedReader
from pathlib import Path

MAX_CONFIG_BYTES = 1 << 24
"""Largest TOML file, small record, and JSON of a Hugging Face folder but for its tokenizer and
index.
"""
MAX_TOKENIZER_BYTES = 1 << 27
"""Largest file of a tokenizer; the largest that are released have 35 MB."""
MAX_TENSOR_INDEX_BYTES = 1 << 26
"""Largest model.safetensors.index.json."""
MAX_SEALED_BYTES = 1 << 28
"""Largest sealed JSON file: the manifest of a checkpoint of a million files."""
MAX_SHARD_INDEX_BYTES = 1 << 33
"""Largest file of the document starts, or hashes, of a shard of prepared tokens."""
MAX_LINE_BYTES = 1 << 24
"""Largest line of metrics.jsonl and events.jsonl."""
MAX_RECORD_BYTES = 1 << 26
"""Largest line of JSON, or other text that is read as a whole, of a corpus.

Parsing takes up to 25 times as much memory.
"""

HUB_REPOSITORY = re.compile(r"(datasets|models|spaces)--.+")
HUB_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
NOT_REGULAR = "it is not a regular file"
OUTSIDE_LINK = "it is a link that leads out of its folder; copy the file there"
# O_NONBLOCK: opening a pipe that nobody writes to would wait forever.
FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class UnusableFileError(OSError):
    """Not a regular file, too large, or outside its folder; `strerror` says which."""


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """The content of a file. Raises `UnusableFileError`, and OSError if it cannot be read."""
    with open_regular(path) as file:
        return _read_bounded(file, path, max_bytes)


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file. Raises `UnusableFileError` for a pipe, device or folder, and OSError."""
    # The descriptor is checked, not the path, which may name another file by then.
    return _regular(os.open(path, FLAGS), path)


def read_beneath(folder: Path, name: str | Path, *, max_bytes: int) -> bytes:
    """A file of a folder that may come from a stranger. Raises as `read_regular`, also for a link
    that leads out.

    Links of the Hugging Face hub's cache, which lead to its blobs, are followed.
    """
    path = folder / name
    root = os.path.realpath(folder)
    target = os.path.realpath(path)
    owner = root if is_beneath(root, target) else hub_repository(str(path.absolute()), target)
    if owner is None:
        raise UnusableFileError(errno.ELOOP, OUTSIDE_LINK, str(path))
    try:
        with open_beneath(owner, target) as file:
            return _read_bounded(file, path, max_bytes)
    except OSError as error:
        error.filename = str(path)
        raise


def open_beneath(root: str, path: str) -> BufferedReader:
    """Opens the regular file at `path`, below the folder `root`, although others may change what
    is between them.

    Raises OSError for a link at any place, and `UnusableFileError` for a pipe or a device, which
    it does not wait for.
    """
    *folders, name = path.removeprefix(root).strip("/").split("/")
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Each folder is opened relative to the one before. A path that is checked and opened later
        # could be replaced by a link in between.
        for each in folders:
            inner = os.open(each, FLAGS | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        descriptor = os.open(name, FLAGS | os.O_NOFOLLOW, dir_fd=folder)
    finally:
        os.close(folder)
    return _regular(descriptor, path)


def is_beneath(root: str, target: str) -> bool:
    """Whether a path without links is below the folder `root`, of which there are none either."""
    return target.startswith(f"{root.rstrip('/')}/")


def hub_repository(link: str, target: str) -> str | None:
    """The folder of a repository in the Hugging Face hub's cache, if a link of its snapshots leads
    to one of its blobs.

    REPOSITORY/snapshots/REVISION/.../FILE -> REPOSITORY/blobs/HASH
    """
    blob = Path(target)
    repository = blob.parents[min(1, len(blob.parents) - 1)]
    is_blob = blob.parent.name == "blobs" and HUB_BLOB.fullmatch(blob.name)
    snapshots = str(repository / "snapshots")
    is_hub = (
        is_blob
        and HUB_REPOSITORY.fullmatch(repository.name)
        and is_beneath(snapshots, os.path.realpath(Path(link).parent))
    )
    return str(repository) if is_hub else None


def _regular(descriptor: int, path: Path | str) -> BufferedReader:
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise UnusableFileError(errno.EINVAL, NOT_REGULAR, str(path))


def _read_bounded(file: BufferedReader, path: Path, max_bytes: int) -> bytes:
    if (size := os.fstat(file.fileno()).st_size) > max_bytes:
        raise UnusableFileError(
            errno.EFBIG, f"it has {size:,} bytes, more than {max_bytes:,}", str(path)
        )
    return file.read(size)
