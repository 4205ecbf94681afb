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

from parallelisms.collectives import all_gather_object
from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import MAX_RETRIES, TRANSIENT_ERRNOS, DamageError, retry_io
from trainer.checkpoint.rank_sync import describe_error, root_cause, run_on_all_ranks
from trainer.errors import ResumeError, RunFailedError

MODEL_PREFIX = "model."
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
ALLOWED_GLOBALS = frozenset(
    {
        *(
            (_METADATA_MODULE, name)
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


class RestrictedUnpickler(pickle._Unpickler):
    """Raises `DamageError` for every name that is not in `ALLOWED`, and for every attribute that is no dataclass's field.

    Both before anything is done with them. It is the unpickler in Python, because that in C lets nobody look at a state
    before it is set: with a state of two parts a pickle sets attributes of whatever it may name, of classes too.
    """

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in ALLOWED_GLOBALS:
            raise DamageError(f"{manifest.METADATA_FILE} names {module_name}.{global_name}, which no checkpoint needs")
        return super().find_class(module_name, global_name)

    def load_build(self) -> None:
        _require_dataclass_fields(self.stack[-2], self.stack[-1])  # type: ignore[attr-defined]
        super().load_build()  # type: ignore[misc]

    dispatch = pickle._Unpickler.dispatch | {pickle.BUILD[0]: load_build}  # type: ignore[assignment]


class CheckpointReader(FileSystemReader):
    """Reads `.metadata` once, when it is made. Raises `ResumeError` or `RunError` for what cannot be used."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self.checkpoint = checkpoint
        try:
            checkpoint_manifest = manifest.read_validated(checkpoint)
            if problems := manifest.find_damage(
                checkpoint, checkpoint_manifest, checkpoint_manifest.files, check_hashes=False
            ):
                raise DamageError("; ".join(problems))
            content = retry_io(checkpoint / manifest.METADATA_FILE, (checkpoint / manifest.METADATA_FILE).read_bytes)
            self.metadata = _parse_metadata(content, checkpoint_manifest.files)
        except DamageError as error:
            raise ResumeError(f"{checkpoint} cannot be read: {error}") from None
        self.tensor_metadata: dict[str, TensorStorageMetadata] = self.metadata.state_dict_metadata  # type: ignore[assignment]

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.metadata


class TensorLoadPlanner(DefaultLoadPlanner):
    """Refuses to unpickle what is no tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:  # noqa: ARG002 - as torch calls it
        raise DamageError(f"{read_item.dest_index.fqn} is no tensor")


def load_tensors(
    checkpoint: Path,
    tensors: dict[str, Tensor],
    pp_group: ProcessGroup,
    *,
    prefix: str = "",
    group: ProcessGroup | None = None,
) -> None:
    """Fills the tensors, which of all `stages` together must be those in the checkpoint whose names have the prefix.

    Collective, over `group`. Raises `ResumeError` or `RunError`.
    """
    reader = run_on_all_ranks(lambda: CheckpointReader(checkpoint), group)
    # Moments of memory.optimizer_dtype, which alone may be bfloat16, become those of the other.
    canonical_dtype = {torch.bfloat16: torch.float32}
    saved = {
        name: (tuple(entry.size), canonical_dtype.get(entry.properties.dtype, entry.properties.dtype))
        for name, entry in reader.tensor_metadata.items()
        if name.startswith(prefix)
    }
    rank_entries = {
        name: (tuple(tensor.shape), canonical_dtype.get(tensor.dtype, tensor.dtype)) for name, tensor in tensors.items()
    }
    expected = {name: entry for stage in all_gather_object(rank_entries, pp_group) for name, entry in stage.items()}
    require_matching_tensors(checkpoint, saved, expected)
    read_tensors(reader, tensors, group=group)


def require_matching_tensors(
    checkpoint: Path, saved: Mapping[str, object], expected: Mapping[str, object], *, max_shown: int = 10
) -> None:
    """torch.distributed.checkpoint loads silently what lacks a tensor's name or has another dtype; this does not.

    What stands beside a name is a shape, or a shape and a dtype. Raises `ResumeError`.
    """
    mismatches = [
        f"{name} is {saved.get(name, 'absent')} there and {expected.get(name, 'absent')} here"
        for name in sorted(saved.keys() | expected.keys())
        if saved.get(name) != expected.get(name)
    ]
    if mismatches:
        listed = f" {mismatches[0]}" if max_shown == 1 else "".join(f"\n  {line}" for line in mismatches[:max_shown])
        raise ResumeError(f"{checkpoint} does not hold this model: {len(mismatches)} tensors differ:{listed}")


def read_tensors(
    reader: CheckpointReader, tensors: dict[str, Tensor], *, group: ProcessGroup | None = None, no_dist: bool = False
) -> None:
    """Reads the tensors' values, of which each rank its part; or, `alone`, in a process that is no rank.

    Raises `ResumeError` or `RunError`, on all ranks alike.
    """
    for attempt in range(MAX_RETRIES + 1):
        planner: LoadPlanner = TensorLoadPlanner()
        try:
            with warnings.catch_warnings():
                if no_dist:
                    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(tensors, storage_reader=reader, planner=planner, process_group=group, no_dist=no_dist)
            return
        except (Exception, CheckpointException) as error:
            is_transient = getattr(root_cause(error), "errno", None) in TRANSIENT_ERRNOS
            if not is_transient:
                raise ResumeError(f"{reader.checkpoint} cannot be read: {describe_error(error)}") from error
            if attempt == MAX_RETRIES:
                raise RunFailedError(f"{reader.checkpoint} cannot be read: {describe_error(error)}") from error


def read_full_tensor(reader: CheckpointReader, name: str) -> Tensor:
    """A tensor of a checkpoint, whatever ranks wrote it, read in this process."""
    entry = reader.tensor_metadata[name]
    state_dict = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
    read_tensors(reader, state_dict, no_dist=True)
    return state_dict[name]


def _parse_metadata(content: bytes, files: Mapping[str, tuple[int, str]]) -> Metadata:
    """What `.metadata` says, if it is what torch writes of tensors in these files. Raises `DamageError`."""
    try:
        metadata = RestrictedUnpickler(io.BytesIO(content)).load()
        _validate_metadata(metadata, files)
    except DamageError:
        raise
    except Exception as error:
        raise DamageError(f"{manifest.METADATA_FILE} cannot be understood: {describe_error(error)}") from error
    return metadata  # type: ignore[no-any-return]  # `_require_tensors` has seen to it.


def _require_dataclass_fields(instance: object, state: object) -> None:
    """Raises `DamageError` unless the state says fields of a dataclass's instance, or is a tuple for its `__setstate__`."""
    cls: type = type(instance)
    field_names = _field_names(cls)
    has_setstate = hasattr(cls, "__setstate__")
    if field_names and (type(state) is tuple if has_setstate else type(state) is dict and state.keys() <= field_names):
        return
    raise DamageError(
        f"{manifest.METADATA_FILE} sets attributes of {cls.__module__}.{cls.__name__} that are not its own"
    )


@cache
def _field_names(cls: type) -> frozenset[str]:
    """Names of a dataclass's fields; none of what is no dataclass."""
    return frozenset(field.name for field in fields(cls)) if is_dataclass(cls) else frozenset()


def _validate_metadata(metadata: Metadata, files: Mapping[str, tuple[int, str]]) -> None:
    if type(metadata) is not Metadata:
        raise DamageError(f"{manifest.METADATA_FILE} describes no checkpoint")
    for name, entry in metadata.state_dict_metadata.items():
        if type(name) is not str or type(entry) is not TensorStorageMetadata:
            raise DamageError(f"{name} is no tensor")
    for index, storage_info in (metadata.storage_data or {}).items():
        if type(index) is not MetadataIndex or index.fqn not in metadata.state_dict_metadata:
            raise DamageError(f"{manifest.METADATA_FILE} places what it does not describe: {index}")
        if storage_info.relative_path not in files:
            raise DamageError(
                f'{manifest.METADATA_FILE} places {index.fqn} in "{storage_info.relative_path}", which is no file of it'
            )
        size, _ = files[storage_info.relative_path]
        if not (0 <= storage_info.offset <= storage_info.offset + storage_info.length <= size):
            raise DamageError(f"{manifest.METADATA_FILE} places {index.fqn} beyond {storage_info.relative_path}")
        if storage_info.transform_descriptors:
            raise DamageError(f"{index.fqn} is stored as {storage_info.transform_descriptors}, which is not known here")
