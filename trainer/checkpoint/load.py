"""Reads tensors from a checkpoint without executing code that a malicious checkpoint may contain.

torch.distributed.checkpoint unpickles `.metadata` and non-tensor entries without restrictions. Here `.metadata` may
contain only an allowlist of classes, only tensors are read, and only from files that the manifest lists.
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
"""Classes and functions that `.metadata` may name: those of torch's own metadata, and dtypes."""


class RestrictedUnpickler(pickle._Unpickler):
    """Raises `DamageError` for a global outside `ALLOWED_GLOBALS` and for an attribute that is not a dataclass field.

    Subclasses the Python unpickler because the C one has no hook before BUILD sets a state. A two-part state of a
    pickle sets attributes of any object that it can name, including classes.
    """

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in ALLOWED_GLOBALS:
            raise DamageError(f"{manifest.METADATA_FILE} names {module_name}.{global_name}, which is not allowed")
        return super().find_class(module_name, global_name)

    def load_build(self) -> None:
        _require_dataclass_fields(self.stack[-2], self.stack[-1])  # type: ignore[attr-defined]
        super().load_build()  # type: ignore[misc]

    dispatch = pickle._Unpickler.dispatch | {pickle.BUILD[0]: load_build}  # type: ignore[assignment]


class CheckpointReader(FileSystemReader):
    """Reads and validates `.metadata` on construction. Raises `ResumeError` or `RunFailedError`."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self.checkpoint = checkpoint
        files = manifest.read_intact(checkpoint, check_hashes=False).files
        try:
            content = retry_io(checkpoint / manifest.METADATA_FILE, (checkpoint / manifest.METADATA_FILE).read_bytes)
            self.metadata = _parse_metadata(content, files)
        except DamageError as error:
            raise ResumeError(f"{checkpoint} cannot be read: {error}") from None
        self.tensor_metadata: dict[str, TensorStorageMetadata] = self.metadata.state_dict_metadata  # type: ignore[assignment]

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.metadata


class TensorLoadPlanner(DefaultLoadPlanner):
    """Refuses to unpickle non-tensor entries."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:  # noqa: ARG002 - as torch calls it
        raise DamageError(f"{read_item.dest_index.fqn} is not a tensor")


def load_tensors(
    checkpoint: Path,
    tensors: dict[str, Tensor],
    pp_group: ProcessGroup,
    *,
    prefix: str = "",
    group: ProcessGroup | None = None,
) -> None:
    """Fills the tensors. Collective over `group`.

    Raises `ResumeError` unless the tensors of all ranks of `pp_group` together are those in the checkpoint whose names
    start with `prefix`. Raises `RunFailedError` for an I/O error.
    """
    reader = run_on_all_ranks(lambda: CheckpointReader(checkpoint), group)
    # memory.optimizer_dtype may change on resume. Only optimizer moments can be bfloat16.
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
    """Raises `ResumeError` unless names and values are equal. A value is a shape, or a shape and a dtype.

    torch.distributed.checkpoint ignores absent names and other dtypes silently.
    """
    mismatches = [
        f"{name} is {saved.get(name, 'absent')} in the checkpoint and {expected.get(name, 'absent')} in the model"
        for name in sorted(saved.keys() | expected.keys())
        if saved.get(name) != expected.get(name)
    ]
    if mismatches:
        listed = f" {mismatches[0]}" if max_shown == 1 else "".join(f"\n  {line}" for line in mismatches[:max_shown])
        raise ResumeError(f"{checkpoint} does not match the model: {len(mismatches)} tensors differ:{listed}")


def read_tensors(
    reader: CheckpointReader, tensors: dict[str, Tensor], *, group: ProcessGroup | None = None, no_dist: bool = False
) -> None:
    """Fills the tensors, each rank its shards; with `no_dist`, in a process without a process group.

    Raises `ResumeError` or `RunFailedError`, the same on all ranks.
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
    """An unsharded tensor of a checkpoint, read in this process."""
    entry = reader.tensor_metadata[name]
    state_dict = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
    read_tensors(reader, state_dict, no_dist=True)
    return state_dict[name]


def _parse_metadata(content: bytes, files: Mapping[str, tuple[int, str]]) -> Metadata:
    """Unpickles and validates `.metadata`. `files` are the manifest's. Raises `DamageError`."""
    try:
        metadata = RestrictedUnpickler(io.BytesIO(content)).load()
        _validate_metadata(metadata, files)
    except DamageError:
        raise
    except Exception as error:
        raise DamageError(f"{manifest.METADATA_FILE} cannot be parsed: {describe_error(error)}") from error
    return metadata  # type: ignore[no-any-return]  # `_validate_metadata` checked the type.


def _require_dataclass_fields(instance: object, state: object) -> None:
    """Raises `DamageError` unless the state sets only dataclass fields or is a tuple for `__setstate__`."""
    cls: type = type(instance)
    field_names = _field_names(cls)
    has_setstate = hasattr(cls, "__setstate__")
    if field_names and (type(state) is tuple if has_setstate else type(state) is dict and state.keys() <= field_names):
        return
    raise DamageError(
        f"{manifest.METADATA_FILE} sets attributes of {cls.__module__}.{cls.__name__} that are not dataclass fields"
    )


@cache
def _field_names(cls: type) -> frozenset[str]:
    """Field names of a dataclass; empty for another class."""
    return frozenset(field.name for field in fields(cls)) if is_dataclass(cls) else frozenset()


def _validate_metadata(metadata: Metadata, files: Mapping[str, tuple[int, str]]) -> None:
    if type(metadata) is not Metadata:
        raise DamageError(f"{manifest.METADATA_FILE} is not checkpoint metadata")
    for name, entry in metadata.state_dict_metadata.items():
        if type(name) is not str or type(entry) is not TensorStorageMetadata:
            raise DamageError(f"{name} is not a tensor")
    for index, storage_info in (metadata.storage_data or {}).items():
        if type(index) is not MetadataIndex or index.fqn not in metadata.state_dict_metadata:
            raise DamageError(f"{manifest.METADATA_FILE} stores a tensor that it does not describe: {index}")
        if storage_info.relative_path not in files:
            raise DamageError(
                f'{manifest.METADATA_FILE} stores {index.fqn} in "{storage_info.relative_path}", '
                "which the manifest does not list"
            )
        size, _ = files[storage_info.relative_path]
        if not (0 <= storage_info.offset <= storage_info.offset + storage_info.length <= size):
            raise DamageError(f"{manifest.METADATA_FILE} stores {index.fqn} outside {storage_info.relative_path}")
        if storage_info.transform_descriptors:
            raise DamageError(f"{index.fqn} is stored as {storage_info.transform_descriptors}, which is not supported")
