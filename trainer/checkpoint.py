"""Checkpoints: written beside, committed by a rename, resumed from automatically.

Tensors go through torch.distributed.checkpoint, each rank its shards; everything else is in `state.json`.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from models.hf_config import HuggingFaceError
from parallelisms.collectives import gather_over
from trainer.config import Config, Stage
from trainer.files import sync, write_synced
from trainer.initial import folder_of, is_hugging_face, load_hugging_face
from trainer.run_folder import ResumeError, RunFolder, check_resume, differences, flat, place
from trainer.status import NO_RETRY, RankError
from trainer.trainer import Trainer

log = logging.getLogger(__name__)
WEIGHTS = "model."


class Checkpoints:
    """Of a run, whose configuration has all its stages."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self.config = config
        self.folder = folder

    def due(self, step: int, stage: Stage, *, asked: bool = False) -> bool:
        section = self.config.checkpoint
        return section.enabled and (asked or step % section.interval == 0 or step == stage.last_step)

    def resume(self, trainer: Trainer) -> Path | None:
        """Loads the newest committed checkpoint into the trainer, if there is one; else weights to begin with.

        Raises `ResumeError` when it is of another run or holds other tensors than the trainer needs.
        """
        checkpoint = self.folder.newest(self.config)
        if checkpoint is None:
            if self.config.checkpoint.initial is not None:
                self._begin(self.config.checkpoint.initial, trainer)
            return None
        state = check_resume(self.config, checkpoint)
        theirs, mine = state["data"], trainer.rows.fingerprints
        shared = theirs.keys() & mine.keys()
        if begins := state["stage"]["index"] != trainer.stage.index:
            theirs = {name: theirs[name] for name in shared}
            mine = {name: mine[name] for name in shared}
        if changed := differences(theirs, mine):
            raise ResumeError(f"{checkpoint} was trained on other data: {'; '.join(changed)}")
        tensors = trainer.tensors()
        prefix = WEIGHTS if begins and trainer.stage.is_fresh else ""
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        load(checkpoint, tensors, trainer.mesh.pp, prefix=prefix)
        trainer.restore(state["trainer"])
        trainer.changes = [] if begins else differences(state["config"], flat(trainer.config))
        return checkpoint

    def save(self, trainer: Trainer) -> Path:
        """Writes and commits the trainer's state, then drops checkpoints beyond the newest `checkpoint.keep`."""
        import torch.distributed.checkpoint as dcp

        final = self.folder.checkpoints / f"step-{trainer.step}"
        if final.exists():
            return final
        started = time.perf_counter()
        leading = trainer.world.rank == 0
        temporary = self.folder.checkpoints / f".tmp-{final.name}"
        scalars = trainer.scalars()
        if leading:
            self.folder.checkpoints.mkdir(parents=True, exist_ok=True)
            for left_over in self.folder.checkpoints.glob(".tmp-*"):
                shutil.rmtree(left_over)
            temporary.mkdir()
        distributed.barrier()
        dcp.save(trainer.tensors(), storage_writer=dcp.FileSystemWriter(temporary))
        if leading:
            self._write_state(temporary, trainer, scalars)
            sync(temporary)
            temporary.rename(final)
            sync(self.folder.checkpoints)
            self._prune()
        distributed.barrier()
        log.info("checkpoint %s (%.1f s)", final, time.perf_counter() - started)
        return final

    def _begin(self, initial: str, trainer: Trainer) -> None:
        """Only the weights. What is wrong with them on this rank alone raises `RankError`."""
        # Another run may commit while ranks look for its newest.
        folder = gather_over(folder_of(initial))[0]
        if is_hugging_face(initial):
            try:
                load_hugging_face(folder, trainer.config.model.build(), trainer.optimizer.named)
            except HuggingFaceError as error:
                raise RankError(NO_RETRY, str(error)) from error
        else:
            weights = {name: tensor for name, tensor in trainer.tensors().items() if name.startswith(WEIGHTS)}
            load(folder, weights, trainer.mesh.pp, prefix=WEIGHTS)
        log.info("the run begins with the weights of %s", folder)

    def _write_state(self, folder: Path, trainer: Trainer, scalars: dict[str, Any]) -> None:
        state = {
            "step": trainer.step,
            "trainer": scalars,
            "stage": place(trainer.stage),
            "data": trainer.rows.fingerprints,
            "config": flat(trainer.config),
            "degrees": trainer.mesh.degrees,
            "torch": torch.__version__,
        }
        content = json.dumps(state, indent=1, allow_nan=False) + "\n"
        write_synced(folder / "state.json", content.encode())

    def _prune(self) -> None:
        initial = Path(self.config.checkpoint.initial or "").resolve()
        for _, folder in self.folder.committed()[: -self.config.checkpoint.keep]:
            if folder.resolve() == initial:
                continue
            # Out of the way under a name that is no checkpoint's, so that a crash while deleting leaves none in part.
            doomed = folder.rename(folder.with_name(f".tmp-old-{folder.name}"))
            shutil.rmtree(doomed)


def load(
    checkpoint: Path, tensors: dict[str, torch.Tensor], stages: distributed.ProcessGroup, *, prefix: str = ""
) -> None:
    """Fills the tensors, which of all `stages` together must be those in the checkpoint whose names have the prefix."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import CheckpointException

    reader = dcp.FileSystemReader(checkpoint)
    try:
        metadata = reader.read_metadata()
    except Exception as error:
        raise ResumeError(f"{checkpoint} cannot be read: {describe(error)}") from error
    entries = {name: entry for name, entry in metadata.state_dict_metadata.items() if name.startswith(prefix)}
    _check_tensors(checkpoint, entries, tensors, stages)
    try:
        dcp.load(tensors, storage_reader=reader)
    except (Exception, CheckpointException) as error:
        raise ResumeError(f"{checkpoint} cannot be read: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """An error in one line; of several ranks' errors the first."""
    failures = getattr(error, "failures", None)
    cause = next(iter(failures.values()))[0] if failures else error
    return f"{type(cause).__name__}: {cause}".splitlines()[0]


def _check_tensors(
    checkpoint: Path, entries: dict[str, Any], tensors: dict[str, torch.Tensor], stages: distributed.ProcessGroup
) -> None:
    """torch.distributed.checkpoint loads silently what lacks a tensor's name or has another dtype; this does not.

    Except that moments of memory.optimizer_dtype, which alone may be bfloat16, become those of the other.
    """
    alike = {torch.bfloat16: torch.float32}
    found = {name: (tuple(entry.size), entry.properties.dtype) for name, entry in entries.items()}
    saved = {name: (size, alike.get(dtype, dtype)) for name, (size, dtype) in found.items()}
    mine = {name: (tuple(tensor.shape), alike.get(tensor.dtype, tensor.dtype)) for name, tensor in tensors.items()}
    wanted = {name: entry for stage in gather_over(mine, stages) for name, entry in stage.items()}
    if all(name.startswith("model.") for name in wanted):
        saved = {name: entry for name, entry in saved.items() if name.startswith("model.")}
    wrong = [
        f"{name} is {saved.get(name, 'absent')} there and {wanted.get(name, 'absent')} here"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    if wrong:
        shown = "".join(f"\n  {line}" for line in wrong[:5])
        raise ResumeError(f"{checkpoint} does not hold this model: {len(wrong)} tensors differ:{shown}")
