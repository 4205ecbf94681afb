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
from trainer.checkpoint.agreement import PhaseError, agreed, everywhere
from trainer.checkpoint.manifest import Manifest
from trainer.checkpoint.retention import wipe
from trainer.checkpoint.staging import Held, Planner
from trainer.files import sync, write_synced

ROOM = 1.1
"""Free bytes that a save asks for, by the bytes that it writes."""


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
    """Bytes of the checkpoint before; 0 if that is not known."""

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
        everywhere(lambda: _write(save, held, group, leading=leading), group)
        shares = agreed(lambda: _hashed(save.temporary, group.rank()), group)
        files = {name: entry for share in shares for name, entry in share.items()}
        everywhere(lambda: _commit(save, files, group.size()) if leading else None, group)
    except PhaseError as error:
        full = agreed(lambda: _clean(save, needed) if leading else "", group)[0]
        raise PhaseError(f"{full}{error}") from None
    return sum(size for size, _ in files.values())


def _prepare(save: Save, group: ProcessGroup, *, leading: bool) -> tuple[Mapping[str, Tensor] | None, int]:
    """What this rank writes, None if the checkpoint is there already; and the bytes that all write, or that are there."""
    parts: list[Mapping[str, Tensor]] = []

    def stage() -> float:
        json.dumps(save.state, allow_nan=False)
        parts.append(save.held())
        return sum(local(tensor).nbytes / copies(tensor) for tensor in save.tensors.values())

    needed = max(save.last, int(sum(agreed(stage, group))))

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


def _write(save: Save, held: Mapping[str, Tensor], group: ProcessGroup, *, leading: bool) -> None:
    # Other nodes may not see the folder yet; its exist_ok is for those that do.
    save.temporary.mkdir(exist_ok=True)
    writer = dcp.FileSystemWriter(save.temporary)
    dcp.save(dict(save.tensors), storage_writer=writer, planner=Planner(held), process_group=group)
    if leading:
        content = json.dumps(save.state, indent=1, allow_nan=False) + "\n"
        write_synced(save.temporary / manifest.STATE, content.encode())


def _hashed(folder: Path, rank: int) -> dict[str, tuple[int, str]]:
    """The files that this rank wrote, with their sizes and hashes."""
    mine = [*folder.glob(f"__{rank}_*")]
    if rank == 0:
        mine += [folder / manifest.METADATA, folder / manifest.STATE]
    return {path.name: manifest.hash_of(path) for path in mine}


def _commit(save: Save, files: dict[str, tuple[int, str]], world_size: int) -> None:
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
