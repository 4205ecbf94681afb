"""Reading an untrusted checkpoint executes nothing in it."""

from __future__ import annotations

import io
import json
import pickle
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from itertools import pairwise, product
from pathlib import Path, PosixPath
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.serialization import _get_layout

from tests.system.in_process import configured, saved_by, trainer_of
from tests.system.runs import reseal, tensors, write_run
from trainer.checkpoint.load import (
    ALLOWED_GLOBALS,
    CheckpointReader,
    RestrictedUnpickler,
    read_full_tensor,
    read_tensors,
    tiling_problem,
)
from trainer.checkpoint.manager import CheckpointManager
from trainer.storage import manifest
from trainer.storage.artifact import DamageError
from trainer.storage.manifest import read_state
from trainer.storage.run_dir import ResumeError, RunDir

NAME = "model.head.norm.weight"
IS_DIR = PosixPath.is_dir


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    config = configured(write_run(root), root / "run")
    with trainer_of(config) as trainer:
        return saved_by(
            CheckpointManager(config, RunDir(config.output_dir), trainer.world), trainer
        )


@pytest.fixture
def saved(made: Path, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    return Path(shutil.copytree(made, tmp_path / made.name))


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.marker,)


def metadata_of(checkpoint: Path) -> Metadata:
    metadata: Metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    return metadata


def rewrite(checkpoint: Path, content: object) -> None:
    """Replaces `.metadata` and updates the manifest."""
    (checkpoint / ".metadata").write_bytes(pickle.dumps(content))
    reseal(checkpoint)


def test_tensors_are_read_bitwise(saved: Path) -> None:
    reader = CheckpointReader(saved)
    expected = tensors(saved)
    assert reader.tensor_metadata.keys() == expected.keys()
    assert all(
        torch.equal(read_full_tensor(reader, name), tensor) for name, tensor in expected.items()
    )


def test_metadata_names_only_allowed_globals(saved: Path) -> None:
    """If this fails after an upgrade of torch, its `.metadata` names a new global: review it, then
    allow it.
    """
    named: set[tuple[str, str]] = set()

    class Recorder(pickle.Unpickler):
        def find_class(self, module_name: str, global_name: str, /) -> Any:
            named.add((module_name, global_name))
            return super().find_class(module_name, global_name)

    content = (saved / ".metadata").read_bytes()
    Recorder(io.BytesIO(content)).load()
    assert named <= ALLOWED_GLOBALS, f"torch {torch.__version__} names {named - ALLOWED_GLOBALS}"
    assert len(named) >= 10


def test_hostile_metadata_executes_nothing(saved: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    rewrite(saved, [metadata_of(saved), Hostile(marker)])
    pickle.loads((saved / ".metadata").read_bytes())
    assert marker.exists(), "plain pickle executes it"
    marker.unlink()
    with pytest.raises(
        ResumeError, match=r"step-0 cannot be read: .metadata names pathlib.*which is not allowed"
    ):
        CheckpointReader(saved)
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "builtins.eval",
        "torch.load",
        "torch.serialization.load",
        "torch.hub.load",
        "pathlib.Path",
    ],
)
def test_other_globals_are_refused(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    content = b"c" + module.encode() + b"\n" + attribute.encode() + b"\n."
    with pytest.raises(DamageError, match=f"names {name}, which is not allowed"):
        RestrictedUnpickler(io.BytesIO(content)).load()


SIZE = b"ctorch\nSize\n"
INDEX = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
PROPERTIES = b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n"
HARMLESS = b"}X\x03\x00\x00\x00fqnNs"
ENCODING = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
PICKLES: dict[str, bytes] = {
    "a class by two parts": b"cpathlib\nPosixPath\n(N}X\x06\x00\x00\x00is_dir" + SIZE + b"st",
    "a dataclass": INDEX + HARMLESS,
    "a dataclass by two parts": INDEX + b"(N" + HARMLESS + b"t",
    "a function": b"ctorch.serialization\n_get_layout\n}X\x01\x00\x00\x00aNs",
    "a member of an enum": ENCODING + b"K\x00\x85R}X\x07\x00\x00\x00_value_K\x07s",
    "an instance of another class": b"ccollections\nOrderedDict\n)R}X\x04\x00\x00\x00keysNs",
    "an instance by two parts": INDEX + b")\x81(N" + HARMLESS + b"t",
    "a method of an instance": INDEX + b")\x81}X\x08\x00\x00\x00__hash__Ns",
    "a way to be set": INDEX + b")\x81}X\x0c\x00\x00\x00__setstate__" + SIZE + b"s",
    "properties by name": PROPERTIES + b")\x81}X\x05\x00\x00\x00dtypeNs",
}
"""Pickles before BUILD, which sets a state. They name only allowed globals."""


@pytest.fixture
def restore_is_dir() -> Iterator[None]:
    """Undoes what the pickle does to a class with the plain unpickler."""
    yield
    if "is_dir" in vars(PosixPath):
        del PosixPath.is_dir


@pytest.mark.usefixtures("restore_is_dir")
def test_plain_pickle_sets_attributes_of_a_class() -> None:
    pickle.loads(b"\x80\x02" + PICKLES["a class by two parts"] + b"b.")
    assert vars(PosixPath)["is_dir"] is torch.Size


@pytest.mark.usefixtures("restore_is_dir")
@pytest.mark.parametrize("content", PICKLES.values(), ids=list(PICKLES))
def test_only_fields_of_dataclass_instances_are_set(content: bytes) -> None:
    touched = (PosixPath, MetadataIndex, _get_layout, _MEM_FORMAT_ENCODING(0))
    before = [{**vars(each)} for each in touched]
    with pytest.raises(DamageError, match=r"sets attributes of \S+ that are not dataclass fields"):
        RestrictedUnpickler(io.BytesIO(b"\x80\x02" + content + b"b.")).load()
    assert PosixPath.is_dir is IS_DIR
    assert [{**vars(each)} for each in touched] == before


def test_valid_metadata_is_read_as_by_pickle(saved: Path) -> None:
    assert RestrictedUnpickler(
        io.BytesIO((saved / ".metadata").read_bytes())
    ).load() == metadata_of(saved)


class EnumsByGetattr(pickle.Pickler):
    """As Python 3.11.2 pickles members of an enum."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def test_metadata_of_python_3_11_2_is_read(saved: Path) -> None:
    written = io.BytesIO()
    EnumsByGetattr(written).dump(metadata_of(saved))
    assert b"getattr" in written.getvalue()
    assert RestrictedUnpickler(io.BytesIO(written.getvalue())).load() == metadata_of(saved)


@pytest.mark.parametrize(
    ("owner", "name"), [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__")]
)
def test_getattr_reaches_only_memory_formats(owner: type, name: str) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return getattr, (owner, name)

    with pytest.raises(
        DamageError, match=f"names the attribute '{name}' of .*, which is not allowed"
    ):
        RestrictedUnpickler(io.BytesIO(pickle.dumps(Hostile()))).load()


def test_a_non_tensor_entry_is_refused_and_not_unpickled(saved: Path, tmp_path: Path) -> None:
    """torch.distributed.checkpoint unpickles such entries."""
    marker = tmp_path / "executed"
    folder = tmp_path / "hostile" / "step-0"
    state = {NAME: torch.ones(64), "hostile": Hostile(marker)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder / "state.json").write_bytes((saved / "state.json").read_bytes())
    checkpoint_manifest = manifest.read(saved)
    files = {path.name: manifest.hash_file(path) for path in folder.iterdir()}
    manifest.write(folder, checkpoint_manifest.model_copy(update={"files": files}))
    with pytest.raises(ResumeError, match="BytesStorageMetadata, which is not allowed"):
        CheckpointReader(folder)
    # Even past the reader's validation, the entry is not unpickled.
    reader = CheckpointReader(saved)
    reader.metadata = metadata_of(folder)
    reader.path = folder
    with pytest.raises(ResumeError, match="hostile is not a tensor"):
        read_tensors(reader, cast(Any, {"hostile": None}))
    assert not marker.exists()


def test_a_hostile_data_file_executes_nothing(saved: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    metadata = metadata_of(saved)
    content = io.BytesIO()
    torch.save(Hostile(marker), content)
    data = saved / "__0_0.distcp"
    entries = {
        index: storage for index, storage in metadata.storage_data.items() if index.fqn == NAME
    }
    ((index, storage),) = entries.items()
    moved = replace(storage, offset=data.stat().st_size, length=len(content.getvalue()))
    with data.open("ab") as file:
        file.write(content.getvalue())
    rewrite(saved, replace(metadata, storage_data=metadata.storage_data | {index: moved}))
    with pytest.raises(
        ResumeError, match=r"step-0 cannot be read: UnpicklingError: Weights only load failed"
    ):
        read_full_tensor(CheckpointReader(saved), NAME)
    assert not marker.exists()


def with_path(path: str) -> Callable[[Metadata], Metadata]:
    def change(metadata: Metadata) -> Metadata:
        moved = {
            index: replace(storage, relative_path=path)
            for index, storage in metadata.storage_data.items()
        }
        return replace(metadata, storage_data=moved)

    return change


def with_storage(**changed: Any) -> Callable[[Metadata], Metadata]:
    def change(metadata: Metadata) -> Metadata:
        moved = {
            index: replace(storage, **changed) for index, storage in metadata.storage_data.items()
        }
        return replace(metadata, storage_data=moved)

    return change


def with_chunks(
    change: Callable[[list[ChunkStorageMetadata]], list[ChunkStorageMetadata]],
) -> Callable[[Metadata], Metadata]:
    def changed(metadata: Metadata) -> Metadata:
        entry = cast(Any, metadata.state_dict_metadata[NAME])
        chunks = {NAME: replace(entry, chunks=change([*entry.chunks]))}
        return replace(metadata, state_dict_metadata=metadata.state_dict_metadata | chunks)

    return changed


def with_sizes(*sizes: int) -> Callable[[Metadata], Metadata]:
    return with_chunks(
        lambda chunks: [replace(chunk, sizes=torch.Size(sizes)) for chunk in chunks]
    )


INVALID: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "a path": (
        with_path("../../../secret"),
        'in "../../../secret", which the manifest does not list',
    ),
    "a root": (with_path("/etc/passwd"), 'in "/etc/passwd", which the manifest does not list'),
    "beyond the end": (with_storage(length=1 << 40), "outside __0_0.distcp"),
    "before the start": (with_storage(offset=-1), "outside __0_0.distcp"),
    "an extension": (with_storage(transform_descriptors=["zstd"]), r"is stored as \['zstd'\]"),
    "bytes": (
        lambda metadata: replace(metadata, state_dict_metadata={NAME: BytesStorageMetadata()}),
        f"{NAME} is not a tensor|BytesStorageMetadata, which is not allowed",
    ),
    "a list": (lambda _: [1, 2], "is not checkpoint metadata"),
    "an undescribed entry": (
        lambda metadata: replace(metadata, state_dict_metadata={}),
        "stores a tensor that it does not describe",
    ),
    "text": (
        lambda metadata: replace(metadata, state_dict_metadata=cast(Any, "x")),
        "cannot be parsed",
    ),
    "no chunk": (with_chunks(lambda _: []), f"chunks of {NAME} that hold 0 of its 64 elements"),
    "half a chunk": (with_sizes(32), "hold 32 of its 64 elements"),
    "a chunk twice": (with_chunks(lambda chunks: chunks * 2), "hold 128 of its 64 elements"),
    "a chunk beyond the end": (with_sizes(65), r"lie outside its shape \[64\]"),
    "a chunk of another rank": (with_sizes(8, 8), r"lie outside its shape"),
    "a chunk that is not stored": (
        lambda metadata: replace(
            metadata,
            storage_data={
                key: value for key, value in metadata.storage_data.items() if key.fqn != NAME
            },
        ),
        f"does not say where {NAME} is stored",
    ),
}


@pytest.mark.parametrize(("change", "message"), INVALID.values(), ids=list(INVALID))
def test_invalid_metadata_is_refused(
    saved: Path, change: Callable[[Metadata], object], message: str
) -> None:
    rewrite(saved, change(metadata_of(saved)))
    with pytest.raises(ResumeError, match=f"step-0 cannot be read: .*({message})"):
        CheckpointReader(saved)


def tiles(shape: Sequence[int], draw: random.Random) -> list[tuple[list[int], list[int]]]:
    """Offsets and sizes of a grid that a mesh might cut, with a cut of a cell now and then."""
    cuts = [
        sorted({0, size, *(draw.randint(0, size) for _ in range(draw.randint(0, 3)))})
        for size in shape
    ]
    boxes = [
        ([low for low, _ in cell], [high - low for low, high in cell])
        for cell in product(*map(pairwise, cuts))
    ]
    offsets, sizes = boxes.pop(draw.randrange(len(boxes)))
    dim = draw.randrange(len(shape))
    at = draw.randint(0, sizes[dim])
    second = [each + at * (axis == dim) for axis, each in enumerate(offsets)]
    parts = [[at if axis == dim else size for axis, size in enumerate(sizes)]]
    parts += [[sizes[dim] - at if axis == dim else size for axis, size in enumerate(sizes)]]
    return [*boxes, (offsets, parts[0]), (second, parts[1])]


@pytest.mark.parametrize("seed", range(200))
def test_chunks_that_tile_a_tensor_are_accepted_and_no_others(seed: int) -> None:
    draw = random.Random(seed)
    shape = [draw.randint(1, 9) for _ in range(draw.randint(1, 3))]
    chunks = tiles(shape, draw)
    draw.shuffle(chunks)
    assert tiling_problem(shape, chunks) == ""
    counts = torch.zeros(shape, dtype=torch.int64)
    offsets, _ = chunks[draw.randrange(len(chunks))]
    offsets[draw.randrange(len(shape))] += draw.choice((-1, 1, 2))
    inside = all(
        low >= 0 and low + size <= total
        for at, n in chunks
        for low, size, total in zip(at, n, shape, strict=True)
    )
    if inside:
        for at, n in chunks:
            counts[tuple(slice(low, low + size) for low, size in zip(at, n, strict=True))] += 1
    assert bool(tiling_problem(shape, chunks)) != (inside and bool((counts == 1).all()))


@pytest.mark.parametrize(
    "content",
    [
        '{"step": 1, "trainer": {}, "data": {}, "config": {}, "stage": {}}',
        '{"step": 1, "trainer": {}, "data": {}, "config": {}, "stage": {"index": "0"}}',
        "[" * 100_000,
        '{"step": {"__reduce__": "os.system"}}',
    ],
    ids=["no stage", "a stage index that is text", "deep", "hostile"],
)
def test_a_hostile_state_is_refused(saved: Path, content: str) -> None:
    (saved / "state.json").write_text(content)
    reseal(saved)
    with pytest.raises(ResumeError, match=r"state\.json (is damaged|cannot be read)"):
        read_state(saved)


def test_a_tensor_is_converted_to_the_requested_dtype(saved: Path) -> None:
    tensors_by_name = {NAME: torch.empty(64, dtype=torch.float64)}
    read_tensors(CheckpointReader(saved), tensors_by_name)
    assert torch.equal(tensors_by_name[NAME], tensors(saved)[NAME].double())


def test_a_reformatted_manifest_is_refused(saved: Path) -> None:
    path = saved / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    with pytest.raises(
        ResumeError, match=r"step-0 cannot be read: manifest\.json is damaged: it does not match"
    ):
        CheckpointReader(saved)
