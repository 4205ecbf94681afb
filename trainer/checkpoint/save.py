"""One save in four phases: prepare, write, hash, commit. All ranks agree after each phase, or all
raise the same error.

The commit is the rename to `step-N` in `_commit`. It needs the agreement of every rank, so a
partitioned run never commits.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup

from parallelisms.mesh.collectives import num_replicas, to_local
from trainer import __version__
from trainer.checkpoint.rank_sync import (
    PhaseError,
    run_and_gather,
    run_on_all_ranks,
    run_on_rank_zero,
)
from trainer.checkpoint.write_tensors import StagedSavePlanner, write_tensors
from trainer.errors import ResumeError
from trainer.storage import manifest
from trainer.storage.artifact import seal
from trainer.storage.durable_io import format_bytes, fsync_path, write_and_fsync
from trainer.storage.manifest import Manifest
from trainer.storage.retention import remove_temporary_folders
from trainer.storage.train_state import STATE_FILE, TrainState

LocalTensorsGetter = Callable[[], Mapping[str, Tensor]]
"""Waits for the copies and returns this rank's shard of every tensor."""
COPY_AHEAD_BYTES = 10_000_000
"""Bytes copied from a device ahead of the write."""
FREE_SPACE_FACTOR = 1.1
"""Free disk space that a save requires, relative to the bytes that it writes."""
SHARED_FILE_SYSTEM_HINT = "job.output_dir must be on a file system that all nodes share"


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """Inputs of one save. All fields except the tensors are the same on all ranks."""

    checkpoints_dir: Path
    step: int
    attempt: str
    tensors: Mapping[str, Tensor]
    """The trainer's tensors.

    Only shapes and placements are read, because training may change the values.
    """
    get_local_tensors: LocalTensorsGetter
    """Returns this rank's shards to write. May block and may raise."""
    state: TrainState
    """The contents of `state.json`."""
    require_lease: Callable[[], None]
    """Raises `RunFailedError` on rank 0 if another launch has taken the run over."""
    prune: Callable[[], None]
    """Deletes superfluous checkpoints; called on rank 0 if the disk is full."""
    previous_bytes: int
    """Size of the previous checkpoint of the same state; 0 if there is none."""

    @property
    def final_path(self) -> Path:
        return self.checkpoints_dir / f"step-{self.step}"

    @property
    def temporary_path(self) -> Path:
        return self.checkpoints_dir / f".tmp-step-{self.step}.{self.attempt}"


def write_checkpoint(request: SaveRequest, group: ProcessGroup) -> int:
    """Writes and commits a checkpoint, unless it exists already; returns its bytes. Collective.

    If any rank fails, all ranks raise `PhaseError` and the temporary folder is removed.
    """
    rank_bytes = run_and_gather(lambda: _rank_bytes(request), group)
    # Wait for the copies before anything is created: a rank whose copy failed must stop all others
    # here.
    local_tensors = run_on_all_ranks(request.get_local_tensors, group)
    # The previous checkpoint of the same state knows the size best, with file headers and padding.
    num_bytes = request.previous_bytes or int(sum(rank_bytes))
    existing_bytes = run_on_rank_zero(lambda: _reserve_space(request, num_bytes), group)
    if existing_bytes is not None:
        return existing_bytes
    try:
        run_on_all_ranks(lambda: _create_temporary_folder(request.temporary_path), group)
        write_tensors(
            request.tensors,
            StagedSavePlanner(local_tensors),
            _writer(request, local_tensors),
            group,
        )
        run_on_rank_zero(lambda: _write_state(request, local_tensors), group)
        # Each rank hashes what it reads back from the file system, not what it meant to write.
        rank_files: list[dict[str, Any]] = run_and_gather(
            lambda: _hash_own_files(request.temporary_path, group.rank()), group
        )
        files = {
            name: (size, digest)
            for own_files in rank_files
            for name, [size, digest] in own_files.items()
        }
        run_on_rank_zero(lambda: _commit(request, files, group.size()), group)
    except PhaseError as error:
        disk_full_note = run_on_rank_zero(lambda: _clean_up(request, num_bytes), group)
        # On a file system that is not shared, each rank has its own folder.
        shutil.rmtree(request.temporary_path, ignore_errors=True)
        raise PhaseError(f"{disk_full_note}{error}") from None
    return sum(size for size, _ in files.values())


def _rank_bytes(request: SaveRequest) -> float:
    """Bytes of the checkpoint, divided among the ranks that write them."""
    return sum(
        to_local(tensor).nbytes / num_replicas(tensor) for tensor in request.tensors.values()
    )


def _reserve_space(request: SaveRequest, num_bytes: int) -> int | None:
    """Creates the temporary folder, or returns the bytes of the checkpoint if it exists."""
    if request.final_path.exists():
        return manifest.read(request.final_path).bytes
    request.checkpoints_dir.mkdir(parents=True, exist_ok=True)
    remove_temporary_folders(request.checkpoints_dir)
    free = _free_bytes(request.checkpoints_dir)
    needed = FREE_SPACE_FACTOR * num_bytes
    if free < needed:
        # Only now, since older checkpoints are all that a failed save leaves.
        request.prune()
        free = _free_bytes(request.checkpoints_dir)
    if free < needed:
        raise PhaseError(_disk_full_message(free, int(needed)))
    request.temporary_path.mkdir()
    return None


def _create_temporary_folder(temporary: Path) -> None:
    """Creates the folder on nodes that do not see yet that rank 0 created it."""
    try:
        temporary.mkdir(exist_ok=True)
    except FileNotFoundError:
        raise PhaseError(f"{temporary.parent} is missing: {SHARED_FILE_SYSTEM_HINT}") from None


def _writer(request: SaveRequest, local_tensors: Mapping[str, Tensor]) -> dcp.FileSystemWriter:
    # Copy-ahead synchronizes with all queued device work, including training. Host tensors do not
    # need it.
    copy_ahead_bytes = (
        0
        if all(shard.device.type == "cpu" for shard in local_tensors.values())
        else COPY_AHEAD_BYTES
    )
    return dcp.FileSystemWriter(request.temporary_path, per_thread_copy_ahead=copy_ahead_bytes)


def _write_state(request: SaveRequest, local_tensors: Mapping[str, Tensor]) -> None:
    state = request.state.model_copy(update={"optimizer_steps": optimizer_steps(local_tensors)})
    write_and_fsync(request.temporary_path / STATE_FILE, seal(state, owner=request.attempt))


def current_versions() -> dict[str, str]:
    return {
        "longhaul": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def optimizer_steps(local_tensors: Mapping[str, Tensor]) -> int | None:
    """Steps that this rank's optimizer tensors count; None without any."""
    steps = [
        to_local(x)
        for name, x in local_tensors.items()
        if name.startswith("optimizer.") and name.endswith(".step")
    ]
    if not steps:
        return None
    # Each parameter counts for itself. A difference means that a step was interrupted, or that
    # files were mixed.
    least, most = torch.stack(steps).aminmax()
    if least != most:
        raise ResumeError(f"its optimizer tensors count {int(least)} to {int(most)} steps")
    return int(least)


def _hash_own_files(folder: Path, rank: int) -> dict[str, Any]:
    """[size, sha256] of the files that this rank wrote, by name."""
    # `iterdir` raises if the folder is gone, `glob` does not.
    own_files = [path for path in folder.iterdir() if path.name.startswith(f"__{rank}_")]
    if rank == 0:
        own_files += [folder / manifest.METADATA_FILE, folder / STATE_FILE]
    return {path.name: [*manifest.hash_file(path)] for path in own_files}


def _require_visible(folder: Path, files: Mapping[str, tuple[int, str]]) -> None:
    """Raises `PhaseError` if rank 0 does not see a file of another rank in full."""
    for name, (size, _) in files.items():
        try:
            visible = (folder / name).lstat().st_size
        except FileNotFoundError:
            raise PhaseError(
                f"{name} was written, but rank 0 does not see it: {SHARED_FILE_SYSTEM_HINT}"
            ) from None
        if visible != size:
            seen = f"with {size:,} bytes, but rank 0 sees {visible:,}"
            raise PhaseError(f"{name} was written {seen}: {SHARED_FILE_SYSTEM_HINT}")


def _commit(request: SaveRequest, files: dict[str, tuple[int, str]], world_size: int) -> None:
    """Writes the manifest and renames the temporary folder to `step-N`. Called on rank 0."""
    # A launch that was paused may have lost the run folder meanwhile; it must not commit into it.
    request.require_lease()
    _require_visible(request.temporary_path, files)
    # The manifest is written last, and the rename commits. Entries are flushed before it and the
    # parent folder after it, so a crash leaves a whole checkpoint or none.
    checkpoint_manifest = Manifest(
        step=request.step,
        attempt=request.attempt,
        world_size=world_size,
        mesh=request.state.degrees,
        versions=current_versions(),
        saved=datetime.now(UTC).isoformat(timespec="seconds"),
        files=files,
    )
    manifest.write(request.temporary_path, checkpoint_manifest)
    fsync_path(request.temporary_path)
    request.temporary_path.rename(request.final_path)
    fsync_path(request.checkpoints_dir)


def _clean_up(request: SaveRequest, needed: int) -> str:
    """Removes the files of a failed save.

    Returns a note if the disk is full, else an empty string.
    """
    with suppress(OSError):
        # Before the files are removed: what they take belongs to what the save needs.
        written = sum(path.lstat().st_size for path in request.temporary_path.iterdir())
        free = _free_bytes(request.checkpoints_dir)
        shutil.rmtree(request.temporary_path, ignore_errors=True)
        if free + written < needed:
            return f"{_disk_full_message(free, needed - written)}; "
    return ""


def _free_bytes(folder: Path) -> int:
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def _disk_full_message(free: int, needed: int) -> str:
    return f"disk full: {format_bytes(free)} free, {format_bytes(needed)} needed"


class HostStaging:
    """Host buffers for this rank's shards, as large as the state: those given, or allocated by the
    first copy.

    For state on a CUDA device the buffers are pinned. The copies run on the current stream, so
    they precede the next change of the state.
    """

    def __init__(self, buffers: Mapping[str, Tensor] | None = None) -> None:
        self._buffers = dict(buffers or {})

    def start_copy(self, tensors: Mapping[str, Tensor]) -> LocalTensorsGetter:
        """Starts to overwrite the buffers.

        The returned function raises the error if the copy could not start.
        """
        shards = {name: to_local(tensor.detach()) for name, tensor in tensors.items()}
        on_device = [shard.device for shard in shards.values() if shard.device.type == "cuda"]
        copy_done: torch.cuda.Event | None = None
        failure: RuntimeError | None = None
        try:
            staged = {
                name: self._buffer(name, shard).copy_(shard, non_blocking=True)
                for name, shard in shards.items()
            }
            # An event, not a synchronization: the saving thread waits for it while training
            # continues.
            copy_done = (
                torch.cuda.current_stream(on_device[0]).record_event() if on_device else None
            )
        except RuntimeError as error:
            # Usually out of memory. A failed save must not stop training.
            failure = error

        def wait_for_copy() -> dict[str, Tensor]:
            if failure is not None:
                raise failure
            if copy_done is not None:
                copy_done.synchronize()
            return staged

        return wait_for_copy

    def _buffer(self, name: str, shard: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (shard.shape, shard.dtype):
            # Only copies into pinned memory are asynchronous.
            pinned = shard.device.type == "cuda"
            buffer = torch.empty(shard.shape, dtype=shard.dtype, device="cpu", pin_memory=pinned)
            self._buffers[name] = buffer
        return buffer


def without_staging(tensors: Mapping[str, Tensor]) -> LocalTensorsGetter:
    """The shards themselves, without a copy, for a synchronous save."""
    return lambda: {name: to_local(tensor) for name, tensor in tensors.items()}
