"""Reads tensors from a checkpoint without executing code that a malicious checkpoint may contain.

torch.distributed.checkpoint unpickles `.metadata` and non-tensor entries without restrictions.
Here `.metadata` may contain only an allowlist of classes, only tensors are read, and only from
files that the manifest lists.
"""

from __future__ import annotations

import io
import pickle
import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import EnumMeta
from math import prod
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
    Metadata,
    ReadItem,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from parallelisms.mesh.collectives import all_gather_values
from trainer.checkpoint.rank_sync import describe_error, root_cause, run_on_all_ranks
from trainer.errors import ResumeError, RunFailedError
from trainer.storage import manifest
from trainer.storage.artifact import DamageError, read_regular
from trainer.storage.manifest import MAX_RETRIES, TRANSIENT_ERRNOS, retry_io

MODEL_PREFIX = "model."
MAX_CELLS = 10_000_000
"""Limit of cells in the grid that the edges of a tensor's chunks make: enough for 3,000 by 3,000
ranks.
"""
ALLOWED_GLOBALS = frozenset(
    (module, name)
    for module, names in {
        "torch.distributed.checkpoint.metadata": (
            "Metadata MetadataIndex TensorStorageMetadata ChunkStorageMetadata TensorProperties StorageMeta "
            "_MEM_FORMAT_ENCODING"
        ),
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
        "torch.serialization": "_get_layout",
        "torch": " ".join(
            [
                "Size",
                *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
            ]
        ),
        "pathlib": "PosixPath",
        "pathlib._local": "PosixPath",
        "collections": "OrderedDict",
        "builtins": "getattr",
    }.items()
    for name in names.split()
)
"""Globals that `.metadata` may name: torch's own metadata, dtypes, and `getattr`, by which Python
3.11.2 names enums.
"""


class RestrictedUnpickler(pickle._Unpickler):
    """Unpickler that loads checkpoint metadata only.

    Raises `DamageError` for a global outside `ALLOWED_GLOBALS` and for an attribute that is not a
    dataclass field. Subclasses the Python unpickler because the C one has no hook before BUILD
    sets a state. A two-part state of a pickle sets attributes of any object that it can name,
    including classes.
    """

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in ALLOWED_GLOBALS:
            raise DamageError(
                f"{manifest.METADATA_FILE} names {module_name}.{global_name}, which is not allowed"
            )
        return (
            _enum_member
            if global_name == "getattr"
            else super().find_class(module_name, global_name)
        )

    # BUILD calls `__setstate__` or fills `__dict__`, so it is checked before it runs.
    def load_build(self) -> None:
        _require_dataclass_fields(self.stack[-2], self.stack[-1])  # type: ignore[attr-defined]
        super().load_build()  # type: ignore[misc]

    # The unpickler looks opcodes up in this table; overriding the method alone has no effect.
    dispatch = pickle._Unpickler.dispatch | {pickle.BUILD[0]: load_build}  # type: ignore[assignment]


def _enum_member(owner: Any, name: str) -> Any:
    if not isinstance(owner, EnumMeta) or name not in owner.__members__:
        raise DamageError(
            f"{manifest.METADATA_FILE} names the attribute {name!r} of {owner!r}, which is not allowed"
        )
    return owner[name]


class CheckpointReader(FileSystemReader):
    """Reads and validates `.metadata` on construction.

    Raises `ResumeError` or `RunFailedError`.
    """

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self.checkpoint = checkpoint
        files = manifest.read_intact(checkpoint, check_hashes=False).files
        path = checkpoint / manifest.METADATA_FILE
        # The manifest's size bounds the read: a damaged file must not fill the memory.
        content = retry_io(path, lambda: read_regular(path, max_bytes=files[path.name][0]))
        try:
            self.metadata: Metadata = RestrictedUnpickler(io.BytesIO(content)).load()
            _validate_metadata(self.metadata, files)
        except DamageError as error:
            raise ResumeError(f"{checkpoint} cannot be read: {error}") from None
        except Exception as error:
            reason = f"{path.name} cannot be parsed: {describe_error(error)}"
            raise ResumeError(f"{checkpoint} cannot be read: {reason}") from error
        self.tensor_metadata: dict[str, TensorStorageMetadata] = self.metadata.state_dict_metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.metadata


class TensorLoadPlanner(DefaultLoadPlanner):
    """Refuses to unpickle non-tensor entries."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:  # noqa: ARG002 - as torch calls it
        raise DamageError(f"{read_item.dest_index.fqn} is not a tensor")


def find_metadata_damage(checkpoint: Path) -> list[str]:
    """Damage of `.metadata` that its hash does not show, one line each.

    Raises `RunFailedError` if it cannot be read now.
    """
    try:
        CheckpointReader(checkpoint)
    except ResumeError as error:
        return [str(error)]
    return []


def load_tensors(
    checkpoint: Path,
    tensors: dict[str, Tensor],
    pp_group: ProcessGroup,
    *,
    prefix: str = "",
    group: ProcessGroup | None = None,
) -> None:
    """Fills the tensors. Collective over `group`.

    Raises `ResumeError` unless the tensors of all ranks of `pp_group` together are those in the
    checkpoint whose names start with `prefix`. Raises `RunFailedError` for an I/O error.
    """
    reader = run_on_all_ranks(lambda: CheckpointReader(checkpoint), group)

    def describe(shape: torch.Size, dtype: torch.dtype) -> str:
        # memory.optimizer_dtype may change on resume. Only optimizer moments can be bfloat16.
        return str((tuple(shape), torch.float32 if dtype is torch.bfloat16 else dtype))

    # Compare before reading: dcp.load would fill what matches and leave the rest as it is.
    saved = {
        name: describe(entry.size, entry.properties.dtype)
        for name, entry in reader.tensor_metadata.items()
        if name.startswith(prefix)
    }
    own = {name: describe(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    # Only stages differ in their tensors; all other ranks have shards of the same names.
    expected = {
        name: entry for stage in all_gather_values(own, pp_group) for name, entry in stage.items()
    }
    require_matching_tensors(checkpoint, saved, expected)
    run_on_all_ranks(lambda: read_tensors(reader, tensors), group)


def require_matching_tensors(
    checkpoint: Path,
    saved: Mapping[str, object],
    expected: Mapping[str, object],
    *,
    max_shown: int = 10,
) -> None:
    """Raises `ResumeError` unless names and values are equal. A value is a shape, or a shape and a
    dtype.

    torch.distributed.checkpoint ignores absent names and other dtypes silently.
    """
    mismatches = [
        f"{name} is {saved.get(name, 'absent')} in the checkpoint and {expected.get(name, 'absent')} in the model"
        for name in sorted(saved.keys() | expected.keys())
        if saved.get(name) != expected.get(name)
    ]
    if mismatches:
        listed = (
            f" {mismatches[0]}"
            if max_shown == 1
            else "".join(f"\n  {line}" for line in mismatches[:max_shown])
        )
        raise ResumeError(
            f"{checkpoint} does not match the model: {len(mismatches)} tensors differ:{listed}"
        )


def read_tensors(reader: CheckpointReader, tensors: dict[str, Tensor]) -> None:
    """Fills the tensors, or this rank's shards of them. Raises `ResumeError` or `RunFailedError`.

    A rank finds what it needs in `.metadata` by itself: torch's own plan of all ranks would be
    sent as pickles.
    """
    for attempt in range(MAX_RETRIES + 1):
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(tensors, storage_reader=reader, planner=TensorLoadPlanner(), no_dist=True)
            return
        # CheckpointException derives from BaseException.
        except (Exception, CheckpointException) as error:
            is_transient = getattr(root_cause(error), "errno", None) in TRANSIENT_ERRNOS
            if not is_transient or attempt == MAX_RETRIES:
                error_type = RunFailedError if is_transient else ResumeError
                raise error_type(
                    f"{reader.checkpoint} cannot be read: {describe_error(error)}"
                ) from error


def read_full_tensor(reader: CheckpointReader, name: str) -> Tensor:
    """An unsharded tensor of a checkpoint, read in this process."""
    entry = reader.tensor_metadata[name]
    state_dict = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
    read_tensors(reader, state_dict)
    return state_dict[name]


def _require_dataclass_fields(instance: object, state: object) -> None:
    """Raises `DamageError` unless the state sets only dataclass fields or is a tuple for
    `__setstate__`.
    """
    cls: type = type(instance)
    names = {field.name for field in fields(cls)} if is_dataclass(cls) else set[str]()
    has_setstate = hasattr(cls, "__setstate__")
    if names and (
        type(state) is tuple if has_setstate else type(state) is dict and state.keys() <= names
    ):
        return
    raise DamageError(
        f"{manifest.METADATA_FILE} sets attributes of {cls.__module__}.{cls.__name__} that are not dataclass fields"
    )


def _validate_metadata(metadata: Metadata, files: Mapping[str, tuple[int, str]]) -> None:
    if type(metadata) is not Metadata:
        raise DamageError(f"{manifest.METADATA_FILE} is not checkpoint metadata")
    for name, entry in metadata.state_dict_metadata.items():
        if type(name) is not str or type(entry) is not TensorStorageMetadata:
            raise DamageError(f"{name} is not a tensor")
        if problem := tiling_problem(
            entry.size, [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
        ):
            raise DamageError(f"{manifest.METADATA_FILE} has chunks of {name} that {problem}")
    _require_stored(metadata, files)


def _require_stored(metadata: Metadata, files: Mapping[str, tuple[int, str]]) -> None:
    """Raises `DamageError` unless every chunk of a tensor is stored within a listed file, and
    nothing else is.
    """
    wanted = {
        (name, chunk.offsets)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks
    }
    storage = metadata.storage_data or {}
    if missing := wanted - {
        (index.fqn, index.offset) for index in storage if type(index) is MetadataIndex
    }:
        name, offsets = min(missing)
        raise DamageError(
            f"{manifest.METADATA_FILE} does not say where {name} is stored from {[*offsets]} on"
        )
    for index, stored in storage.items():
        if type(index) is not MetadataIndex or index.fqn not in metadata.state_dict_metadata:
            raise DamageError(
                f"{manifest.METADATA_FILE} stores a tensor that it does not describe: {index}"
            )
        where = f"{manifest.METADATA_FILE} stores {index.fqn}"
        file = stored.relative_path
        if file not in files:
            raise DamageError(f'{where} in "{file}", which the manifest does not list')
        if not (0 <= stored.offset <= stored.offset + stored.length <= files[file][0]):
            raise DamageError(f"{where} outside {file}")
        if stored.transform_descriptors:
            raise DamageError(
                f"{index.fqn} is stored as {stored.transform_descriptors}, which is not supported"
            )


def tiling_problem(
    size: Sequence[int], chunks: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> str:
    """The reason why chunks, given by offsets and sizes, do not hold each element of a tensor
    exactly once; else "".
    """
    for offsets, sizes in chunks:
        if not len(offsets) == len(sizes) == len(size) or any(
            offset < 0 or length < 0 or offset + length > total
            for offset, length, total in zip(offsets, sizes, size, strict=True)
        ):
            return f"lie outside its shape {[*size]}"
    # Where a tensor has fewer rows than ranks, some ranks have an empty chunk.
    filled = [(offsets, sizes) for offsets, sizes in chunks if 0 not in sizes]
    if (found := sum(prod(sizes) for _, sizes in filled)) != prod(size):
        return f"hold {found:,} of its {prod(size):,} elements"
    # The count is right, so an element is missing only if another is there twice. The edges of all
    # chunks make a grid, in whose cells coverage is constant: counting cells is enough.
    edges = [
        sorted({0, *(edge for at, length in boxes for edge in (at, at + length))})
        for boxes in (
            [(offsets[dim], sizes[dim]) for offsets, sizes in filled] for dim in range(len(size))
        )
    ]
    if prod(map(len, edges)) > MAX_CELLS:
        return "are cut too irregularly"
    cells = torch.zeros([len(each) for each in edges], dtype=torch.int32)
    for offsets, sizes in filled:
        cells[
            tuple(
                slice(bisect_left(each, at), bisect_left(each, at + length))
                for each, at, length in zip(edges, offsets, sizes, strict=True)
            )
        ] += 1
    return "overlap" if cells.numel() and int(cells.max()) > 1 else ""
