"""One save: prepare, write, hash, commit. Every phase ends in an agreement: all ranks go on, or all raise the same.

The rename to `step-N` is the commit. It needs every rank, so that half of a run whose network is cut never commits.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup

from parallelisms.collectives import copies, local
from trainer.checkpoint import manifest
from trainer.checkpoint.durable_io import sync, write_synced
from trainer.checkpoint.manifest import Manifest
from trainer.checkpoint.rank_sync import PhaseError, agreed, everywhere
from trainer.checkpoint.retention import wipe
from trainer.checkpoint.staging import Held, Planner

AHEAD = 10_000_000
"""Bytes that are on their way from a device while others are written."""
ROOM = 1.1
"""Free bytes that a save asks for, by the bytes that it writes."""
SHARED = "job.output_dir must be on a file system that all nodes share"


@dataclass(frozen=True, kw_only=True)
class Save:
    """What is to be written, and where; on all ranks alike but for the tensors."""

    checkpoints: Path
    step: int
    attempt: str
    tensors: Mapping[str, Tensor]
    """Of the trainer, which may change meanwhile: only their shapes and places are read."""
    held: Held
    """This rank's parts on the host, or where they are if nothing changes them; waits for them, may raise."""
    state: Mapping[str, Any]
    mesh: Mapping[str, int]
    last: int
    """Bytes of the checkpoint before, of the same state; 0 if there is none."""

    @property
    def final(self) -> Path:
        return self.checkpoints / f"step-{self.step}"

    @property
    def temporary(self) -> Path:
        return self.checkpoints / f".tmp-step-{self.step}.{self.attempt}"


def write(save: Save, group: ProcessGroup) -> int:
    """Writes and commits; returns the checkpoint's bytes. Collective.

    Raises `PhaseError`, on all ranks, when a rank could not do its part; nothing but what was there before is left.
    """
    leading = group.rank() == 0
    held, needed = _prepare(save, group, leading=leading)
    if held is None:
        return needed
    try:
        everywhere(lambda: _make(save.temporary), group)
        everywhere(lambda: _write(save, held, group, leading=leading), group)
        shares = agreed(lambda: _hashed(save.temporary, group.rank()), group)
        files = {name: entry for share in shares for name, entry in share.items()}
        everywhere(lambda: _commit(save, files, group.size()) if leading else None, group)
    except PhaseError as error:
        full = agreed(lambda: _clean(save, needed) if leading else "", group)[0]
        if not leading:
            shutil.rmtree(save.temporary, ignore_errors=True)  # Where it is not shared, this rank's part is in its own.
        raise PhaseError(f"{full}{error}") from None
    return sum(size for size, _ in files.values())


def _prepare(save: Save, group: ProcessGroup, *, leading: bool) -> tuple[Mapping[str, Tensor] | None, int]:
    """What this rank writes, None if the checkpoint is there already; and the bytes that all write, or that are there."""
    parts: list[Mapping[str, Tensor]] = []

    def stage() -> float:
        json.dumps(save.state, allow_nan=False)
        parts.append(save.held())
        return sum(local(tensor).nbytes / copies(tensor) for tensor in save.tensors.values())

    computed = int(sum(agreed(stage, group)))
    needed = save.last or computed

    def room() -> int | None:
        if save.final.exists():
            return manifest.read(save.final).bytes
        save.checkpoints.mkdir(parents=True, exist_ok=True)
        wipe(save.checkpoints)
        free = _free(save.checkpoints)
        if free < ROOM * needed:
            raise PhaseError(_full(free, int(ROOM * needed)))
        save.temporary.mkdir()
        return None

    there = agreed(lambda: room() if leading else None, group)[0]
    return (parts[0], needed) if there is None else (None, there)


def _make(temporary: Path) -> None:
    """The folder, for nodes that do not see yet that the first rank made it."""
    try:
        temporary.mkdir(exist_ok=True)
    except FileNotFoundError:
        raise PhaseError(f"{temporary.parent} is missing: {SHARED}") from None


def _write(save: Save, held: Mapping[str, Tensor], group: ProcessGroup, *, leading: bool) -> None:
    # On a device torch copies ahead, and waits for all that is queued there, training too; on the host there is no need.
    ahead = 0 if all(part.device.type == "cpu" for part in held.values()) else AHEAD
    writer = dcp.FileSystemWriter(save.temporary, per_thread_copy_ahead=ahead)
    dcp.save(dict(save.tensors), storage_writer=writer, planner=Planner(held), process_group=group)
    if leading:
        content = json.dumps(save.state, indent=1, allow_nan=False) + "\n"
        write_synced(save.temporary / manifest.STATE, content.encode())


def _hashed(folder: Path, rank: int) -> dict[str, tuple[int, str]]:
    """The files that this rank wrote, with their sizes and hashes."""
    # Not by glob, which finds nothing, and is content, in a folder that is gone.
    mine = [path for path in folder.iterdir() if path.name.startswith(f"__{rank}_")]
    if rank == 0:
        mine += [folder / manifest.METADATA, folder / manifest.STATE]
    return {path.name: manifest.hash_of(path) for path in mine}


def _require_seen(folder: Path, files: Mapping[str, tuple[int, str]]) -> None:
    """Raises `PhaseError` if a file that some rank wrote is not what this rank sees."""
    for name, (size, _) in files.items():
        try:
            seen = (folder / name).lstat().st_size
        except FileNotFoundError:
            raise PhaseError(f"{name} was written, but the first rank does not see it: {SHARED}") from None
        if seen != size:
            raise PhaseError(f"{name} was written with {size:,} bytes, but the first rank sees {seen:,}: {SHARED}")


def _commit(save: Save, files: dict[str, tuple[int, str]], world_size: int) -> None:
    _require_seen(save.temporary, files)
    about = Manifest(
        step=save.step,
        attempt=save.attempt,
        world_size=world_size,
        mesh=dict(save.mesh),
        versions={"torch": torch.__version__, "python": platform.python_version()},
        saved=datetime.now(UTC).isoformat(timespec="seconds"),
        files=files,
    )
    manifest.write(save.temporary, about)
    sync(save.temporary)
    save.temporary.rename(save.final)
    sync(save.checkpoints)


def _clean(save: Save, needed: int) -> str:
    """Removes what there is of a save that failed; returns that the disk is full, if it is."""
    with suppress(OSError):
        written = sum(path.lstat().st_size for path in save.temporary.iterdir())
        free = _free(save.checkpoints)
        shutil.rmtree(save.temporary, ignore_errors=True)
        if free + written < needed:
            return f"{_full(free, needed - written)}; "
    return ""


def _free(folder: Path) -> int:
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize


def _full(free: int, needed: int) -> str:
    return f"disk full: {manifest.size(free)} free, {manifest.size(needed)} needed"
