"""A checkpoint may come from anybody: reading it executes nothing that is in it."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path, PosixPath
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.serialization import _get_layout

from tests.system.in_process import configured, saved_by, trainer_of
from tests.system.runs import reseal, tensors, write_run
from trainer.checkpoint import manifest
from trainer.checkpoint.load import (
    ALLOWED_GLOBALS,
    CheckpointReader,
    RestrictedUnpickler,
    read_full_tensor,
    read_tensors,
)
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.manifest import DamageError
from trainer.checkpoint.run_dir import ResumeError, RunDir, read_state

NAME = "model.head.norm.weight"
IS_DIR = PosixPath.is_dir


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    config = configured(write_run(root), root / "run")
    with trainer_of(config) as trainer:
        return saved_by(CheckpointManager(config, RunDir(config.output_dir), trainer.world), trainer)


@pytest.fixture
def saved(made: Path, tmp_path: Path) -> Path:
    """A checkpoint, to be changed."""
    return Path(shutil.copytree(made, tmp_path / made.name))


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.marker,)


def metadata_of(checkpoint: Path) -> Metadata:
    found: Metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    return found


def rewrite(checkpoint: Path, content: object) -> None:
    """Puts another `.metadata` there, with a manifest that says so."""
    (checkpoint / ".metadata").write_bytes(pickle.dumps(content))
    reseal(checkpoint)


def test_what_is_in_a_checkpoint_is_read_bit_by_bit(saved: Path) -> None:
    reader, expected = CheckpointReader(saved), tensors(saved)
    assert reader.tensor_metadata.keys() == expected.keys()
    assert all(torch.equal(read_full_tensor(reader, name), tensor) for name, tensor in expected.items())


def test_torch_names_in_metadata_what_is_allowed(saved: Path) -> None:
    """If this fails after an upgrade of torch, its `.metadata` names something new: look at it, then allow it."""
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
    assert marker.exists(), "it would have been executed"
    marker.unlink()
    with pytest.raises(ResumeError, match=r"step-0 cannot be read: .metadata names pathlib.*which no checkpoint needs"):
        CheckpointReader(saved)
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    ["os.system", "builtins.eval", "torch.load", "torch.serialization.load", "torch.hub.load", "pathlib.Path"],
)
def test_names_that_no_checkpoint_needs_are_refused(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    content = b"c" + module.encode() + b"\n" + attribute.encode() + b"\n."
    with pytest.raises(DamageError, match=f"names {name}, which no checkpoint needs"):
        RestrictedUnpickler(io.BytesIO(content)).load()


SIZE = b"ctorch\nSize\n"
INDEX = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
PROPERTIES = b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n"
HARMLESS = b"}X\x03\x00\x00\x00fqnNs"
ENCODING = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
SETS: dict[str, bytes] = {
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
"""Pickles, up to the state of what they set attributes of; they name nothing but what is allowed."""


@pytest.fixture
def mended() -> Iterator[None]:
    """Takes back what the bytes do that work on pickle's own unpickler."""
    yield
    if "is_dir" in vars(PosixPath):
        del PosixPath.is_dir


@pytest.mark.usefixtures("mended")
def test_a_pickle_sets_attributes_of_a_class_if_it_may() -> None:
    pickle.loads(b"\x80\x02" + SETS["a class by two parts"] + b"b.")
    assert vars(PosixPath)["is_dir"] is torch.Size


@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize("content", SETS.values(), ids=list(SETS))
def test_no_attribute_is_set_but_a_field_of_an_instance(content: bytes) -> None:
    touched = (PosixPath, MetadataIndex, _get_layout, _MEM_FORMAT_ENCODING(0))
    before = [{**vars(each)} for each in touched]
    with pytest.raises(DamageError, match=r"sets attributes of \S+ that are not its own"):
        RestrictedUnpickler(io.BytesIO(b"\x80\x02" + content + b"b.")).load()
    assert PosixPath.is_dir is IS_DIR
    assert [{**vars(each)} for each in touched] == before


def test_metadata_is_read_as_pickle_reads_it(saved: Path) -> None:
    assert RestrictedUnpickler(io.BytesIO((saved / ".metadata").read_bytes())).load() == metadata_of(saved)


def test_what_is_no_tensor_is_refused_and_not_unpickled(saved: Path, tmp_path: Path) -> None:
    """torch.distributed.checkpoint unpickles such entries as they come."""
    marker = tmp_path / "executed"
    folder = tmp_path / "step-1"
    state = {NAME: torch.ones(64), "hostile": Hostile(marker)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder / "state.json").write_bytes((saved / "state.json").read_bytes())
    about = manifest.read(saved)
    files = {path.name: manifest.hash_file(path) for path in folder.iterdir()}
    manifest.write(folder, replace(about, step=1, files=files))
    with pytest.raises(ResumeError, match="BytesStorageMetadata, which no checkpoint needs"):
        CheckpointReader(folder)
    # And if it came so far, it would still not be unpickled.
    reader = CheckpointReader(saved)
    reader.metadata, reader.path = metadata_of(folder), folder
    with pytest.raises(ResumeError, match="hostile is no tensor"):
        read_tensors(reader, cast(Any, {"hostile": None}), no_dist=True)
    assert not marker.exists()


def test_a_hostile_data_file_executes_nothing(saved: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    metadata = metadata_of(saved)
    content = io.BytesIO()
    torch.save(Hostile(marker), content)
    data = saved / "__0_0.distcp"
    places = {index: place for index, place in metadata.storage_data.items() if index.fqn == NAME}
    ((index, place),) = places.items()
    moved = replace(place, offset=data.stat().st_size, length=len(content.getvalue()))
    with data.open("ab") as file:
        file.write(content.getvalue())
    rewrite(saved, replace(metadata, storage_data=metadata.storage_data | {index: moved}))
    with pytest.raises(ResumeError, match=r"step-0 cannot be read: UnpicklingError: Weights only load failed"):
        read_full_tensor(CheckpointReader(saved), NAME)
    assert not marker.exists()


def elsewhere(path: str) -> Callable[[Metadata], Metadata]:
    def change(metadata: Metadata) -> Metadata:
        moved = {index: replace(place, relative_path=path) for index, place in metadata.storage_data.items()}
        return replace(metadata, storage_data=moved)

    return change


def placed(**changed: Any) -> Callable[[Metadata], Metadata]:
    def change(metadata: Metadata) -> Metadata:
        moved = {index: replace(place, **changed) for index, place in metadata.storage_data.items()}
        return replace(metadata, storage_data=moved)

    return change


LIES: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "a path": (elsewhere("../../../secret"), 'in "../../../secret", which is no file of it'),
    "a root": (elsewhere("/etc/passwd"), 'in "/etc/passwd", which is no file of it'),
    "beyond the end": (placed(length=1 << 40), "beyond __0_0.distcp"),
    "before the start": (placed(offset=-1), "beyond __0_0.distcp"),
    "an extension": (placed(transform_descriptors=["zstd"]), r"is stored as \['zstd'\]"),
    "bytes": (
        lambda metadata: replace(metadata, state_dict_metadata={NAME: BytesStorageMetadata()}),
        f"{NAME} is no tensor|BytesStorageMetadata, which no checkpoint needs",
    ),
    "a list": (lambda _: [1, 2], "describes no checkpoint"),
    "an entry too much": (
        lambda metadata: replace(metadata, state_dict_metadata={}),
        "places what it does not describe",
    ),
    "text": (lambda metadata: replace(metadata, state_dict_metadata=cast(Any, "x")), "cannot be understood"),
}


@pytest.mark.parametrize(("change", "told"), LIES.values(), ids=list(LIES))
def test_metadata_that_leads_elsewhere_is_refused(saved: Path, change: Callable[[Metadata], object], told: str) -> None:
    rewrite(saved, change(metadata_of(saved)))
    with pytest.raises(ResumeError, match=f"step-0 cannot be read: .*({told})"):
        CheckpointReader(saved)


@pytest.mark.parametrize(
    "content",
    [
        '{"step": 1, "trainer": {}, "data": {}, "config": {}, "stage": {}}',
        '{"step": 1, "trainer": {}, "data": {}, "config": {}, "stage": {"index": "0"}}',
        "[" * 100_000,
        '{"step": {"__reduce__": "os.system"}}',
    ],
    ids=["no stage", "a stage in words", "deep", "hostile"],
)
def test_a_hostile_state_is_refused(saved: Path, content: str) -> None:
    (saved / "state.json").write_text(content)
    reseal(saved)
    with pytest.raises(ResumeError, match=r"state\.json (is damaged|cannot be read)"):
        read_state(saved)


def test_a_tensor_is_read_into_the_type_that_is_asked_for(saved: Path) -> None:
    into = {NAME: torch.empty(64, dtype=torch.float64)}
    read_tensors(CheckpointReader(saved), into, no_dist=True)
    assert torch.equal(into[NAME], tensors(saved)[NAME].double())


def test_a_manifest_that_others_wrote_is_still_checked(saved: Path) -> None:
    path = saved / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    with pytest.raises(ResumeError, match=r"step-0 cannot be read: manifest\.json does not have its own hash"):
        CheckpointReader(saved)
