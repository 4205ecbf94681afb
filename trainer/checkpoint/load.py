"""Tensors out of a checkpoint, without executing what may be in it.

torch.distributed.checkpoint unpickles `.metadata` and what is no tensor as they come. Here `.metadata` may hold only
what ours do, tensors are all that is read, and out of no other file than the manifest names.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    FileSystemReader,
    LoadPlanner,
    Metadata,
    ReadItem,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from parallelisms.collectives import gather_over
from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import PASSING, RETRIES, DamageError, retried
from trainer.checkpoint.rank_sync import cause, describe, everywhere
from trainer.errors import ResumeError, RunError

WEIGHTS = "model."
_METADATA = "torch.distributed.checkpoint.metadata"
ALLOWED = frozenset(
    {
        *(
            (_METADATA, name)
            for name in (
                "Metadata",
                "MetadataIndex",
                "TensorStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
        ("collections", "OrderedDict"),
        *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    }
)
"""All that `.metadata` may name; torch's own classes, and types of numbers."""


class Restricted(pickle._Unpickler):
    """Raises `DamageError` for every name that is not in `ALLOWED`, and for every attribute that is no dataclass's field.

    Both before anything is done with them. It is the unpickler in Python, because that in C lets nobody look at a state
    before it is set: with a state of two parts a pickle sets attributes of whatever it may name, of classes too.
    """

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in ALLOWED:
            raise DamageError(f"{manifest.METADATA} names {module_name}.{global_name}, which no checkpoint needs")
        return super().find_class(module_name, global_name)

    def load_build(self) -> None:
        _require_fields(self.stack[-2], self.stack[-1])  # type: ignore[attr-defined]
        super().load_build()  # type: ignore[misc]

    dispatch = pickle._Unpickler.dispatch | {pickle.BUILD[0]: load_build}  # type: ignore[assignment]


class Reader(FileSystemReader):
    """Reads `.metadata` once, when it is made. Raises `ResumeError` or `RunError` for what cannot be used."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self.checkpoint = checkpoint
        try:
            about = manifest.sound(checkpoint)
            if found := manifest.damage(checkpoint, about, about.files, hashed=False):
                raise DamageError("; ".join(found))
            content = retried(checkpoint / manifest.METADATA, (checkpoint / manifest.METADATA).read_bytes)
            self.metadata = _metadata(content, about.files)
        except DamageError as error:
            raise ResumeError(f"{checkpoint} cannot be read: {error}") from None
        self.entries: dict[str, TensorStorageMetadata] = self.metadata.state_dict_metadata  # type: ignore[assignment]

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.metadata


class TensorsOnly(DefaultLoadPlanner):
    """Refuses to unpickle what is no tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:  # noqa: ARG002 - as torch calls it
        raise DamageError(f"{read_item.dest_index.fqn} is no tensor")


def load(
    checkpoint: Path,
    tensors: dict[str, Tensor],
    stages: ProcessGroup,
    *,
    prefix: str = "",
    group: ProcessGroup | None = None,
) -> None:
    """Fills the tensors, which of all `stages` together must be those in the checkpoint whose names have the prefix.

    Collective, over `group`. Raises `ResumeError` or `RunError`.
    """
    reader = everywhere(lambda: Reader(checkpoint), group)
    # Moments of memory.optimizer_dtype, which alone may be bfloat16, become those of the other.
    alike = {torch.bfloat16: torch.float32}
    saved = {
        name: (tuple(entry.size), alike.get(entry.properties.dtype, entry.properties.dtype))
        for name, entry in reader.entries.items()
        if name.startswith(prefix)
    }
    mine = {name: (tuple(tensor.shape), alike.get(tensor.dtype, tensor.dtype)) for name, tensor in tensors.items()}
    wanted = {name: entry for stage in gather_over(mine, stages) for name, entry in stage.items()}
    require_alike(checkpoint, saved, wanted)
    fill(reader, tensors, group=group)


def require_alike(
    checkpoint: Path, saved: Mapping[str, object], wanted: Mapping[str, object], *, shown: int = 10
) -> None:
    """torch.distributed.checkpoint loads silently what lacks a tensor's name or has another dtype; this does not.

    What stands beside a name is a shape, or a shape and a dtype. Raises `ResumeError`.
    """
    wrong = [
        f"{name} is {saved.get(name, 'absent')} there and {wanted.get(name, 'absent')} here"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    if wrong:
        listed = f" {wrong[0]}" if shown == 1 else "".join(f"\n  {line}" for line in wrong[:shown])
        raise ResumeError(f"{checkpoint} does not hold this model: {len(wrong)} tensors differ:{listed}")


def fill(reader: Reader, tensors: dict[str, Tensor], *, group: ProcessGroup | None = None, alone: bool = False) -> None:
    """Reads the tensors' values, of which each rank its part; or, `alone`, in a process that is no rank.

    Raises `ResumeError` or `RunError`, on all ranks alike.
    """
    for attempt in range(RETRIES + 1):
        planner: LoadPlanner = TensorsOnly()
        try:
            with warnings.catch_warnings():
                if alone:
                    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(tensors, storage_reader=reader, planner=planner, process_group=group, no_dist=alone)
            return
        except (Exception, CheckpointException) as error:
            passing = getattr(cause(error), "errno", None) in PASSING
            if not passing:
                raise ResumeError(f"{reader.checkpoint} cannot be read: {describe(error)}") from error
            if attempt == RETRIES:
                raise RunError(f"{reader.checkpoint} cannot be read: {describe(error)}") from error


def whole(reader: Reader, name: str) -> Tensor:
    """A tensor of a checkpoint, whatever ranks wrote it, read in this process."""
    entry = reader.entries[name]
    into = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
    fill(reader, into, alone=True)
    return into[name]


def _metadata(content: bytes, files: Mapping[str, tuple[int, str]]) -> Metadata:
    """What `.metadata` says, if it is what torch writes of tensors in these files. Raises `DamageError`."""
    try:
        metadata = Restricted(io.BytesIO(content)).load()
        _require_tensors(metadata, files)
    except DamageError:
        raise
    except Exception as error:
        raise DamageError(f"{manifest.METADATA} cannot be understood: {describe(error)}") from error
    return metadata  # type: ignore[no-any-return]  # `_require_tensors` has seen to it.


def _require_fields(instance: object, state: object) -> None:
    """Raises `DamageError` unless the state says fields of a dataclass's instance, or is a tuple for its `__setstate__`."""
    kind: type = type(instance)
    known = _fields(kind)
    own = hasattr(kind, "__setstate__")
    if known and (type(state) is tuple if own else type(state) is dict and state.keys() <= known):
        return
    raise DamageError(f"{manifest.METADATA} sets attributes of {kind.__module__}.{kind.__name__} that are not its own")


@cache
def _fields(kind: type) -> frozenset[str]:
    """Names of a dataclass's fields; none of what is no dataclass."""
    return frozenset(field.name for field in fields(kind)) if is_dataclass(kind) else frozenset()


def _require_tensors(metadata: Metadata, files: Mapping[str, tuple[int, str]]) -> None:
    if type(metadata) is not Metadata:
        raise DamageError(f"{manifest.METADATA} describes no checkpoint")
    for name, entry in metadata.state_dict_metadata.items():
        if type(name) is not str or type(entry) is not TensorStorageMetadata:
            raise DamageError(f"{name} is no tensor")
    for index, place in (metadata.storage_data or {}).items():
        if type(index) is not MetadataIndex or index.fqn not in metadata.state_dict_metadata:
            raise DamageError(f"{manifest.METADATA} places what it does not describe: {index}")
        if place.relative_path not in files:
            raise DamageError(
                f'{manifest.METADATA} places {index.fqn} in "{place.relative_path}", which is no file of it'
            )
        size, _ = files[place.relative_path]
        if not (0 <= place.offset <= place.offset + place.length <= size):
            raise DamageError(f"{manifest.METADATA} places {index.fqn} beyond {place.relative_path}")
        if place.transform_descriptors:
            raise DamageError(f"{index.fqn} is stored as {place.transform_descriptors}, which is not known here")
