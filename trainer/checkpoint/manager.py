"""The checkpoints of a run: when one is due, saves in the background, and what the run goes on from.

A save copies the state to the host, and a thread writes it while training goes on. The next save waits for it.
"""

from __future__ import annotations

import logging
import time
from functools import cached_property
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from trainer.checkpoint import resume
from trainer.checkpoint.async_save import Saved, UnderWay
from trainer.checkpoint.initial_weights import is_hugging_face
from trainer.checkpoint.manifest import size
from trainer.checkpoint.retention import delete, good, superfluous
from trainer.checkpoint.run_dir import RunFolder, flat, place
from trainer.checkpoint.save import Save
from trainer.checkpoint.staging import Staging, in_place
from trainer.config.job_config import Config, Stage
from trainer.distributed import World, attempt, gloo_group
from trainer.trainer import Trainer

log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds that a run which failed waits for a save that is under way: other ranks may be gone."""


class Checkpoints:
    """Of a run, whose configuration has all its stages. All ranks call everything, at the same updates."""

    def __init__(self, config: Config, folder: RunFolder, world: World) -> None:
        self.config, self.folder, self.world = config, folder, world
        self._staging = Staging()
        self._kept: list[Path] = []
        """What this start of the run goes on from, or began with."""
        self._last_step: int | None = None
        """Of the newest save that did not fail."""
        self._last_bytes = 0
        """Of the newest that this start wrote."""
        self._under_way: UnderWay | None = None
        self._ended: list[Saved] = []
        self._newest: Saved | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for a save that is under way; after an error not for ever."""
        if self._under_way is not None:
            self._under_way.wait(None if kind is None else PATIENCE)

    # ---- when

    def due(self, step: int, stage: Stage, *, asked: bool = False) -> bool:
        """Whether to save after this update; `asked` is the same on all ranks."""
        section = self.config.checkpoint
        return section.enabled and (asked or step % section.interval == 0 or step == stage.last_step)

    @property
    def are_there(self) -> bool:
        """Whether one was loaded or saved by this start of the run; on all ranks alike, as long as none is under way."""
        return self._last_step is not None

    # ---- going on

    def resume(self, trainer: Trainer) -> Path | None:
        """As `resuming.resume`; what it went on from, or began with, is not deleted."""
        checkpoint = resume.resume(self.config, self.folder, trainer, self._group)
        initial = self.config.checkpoint.initial
        if initial is not None and not is_hugging_face(initial):
            self._kept.append(Path(initial).expanduser())
        if checkpoint is not None:
            self._kept.append(checkpoint)
            self._last_step = trainer.step
        return checkpoint

    # ---- saving

    def save(self, trainer: Trainer) -> None:
        """Begins to save the state, once the save before has ended; does nothing if that was of the same update.

        Training may go on when it returns. Without `checkpoint.async` all is done by then.
        """
        self.wait()
        if trainer.step == self._last_step:
            return
        began, section = time.monotonic(), self.config.checkpoint
        tensors = {name: tensor.detach() for name, tensor in trainer.tensors().items()}
        state = {
            "step": trainer.step,
            "trainer": trainer.scalars(),
            "stage": place(trainer.stage),
            "data": trainer.rows.fingerprints,
            "config": flat(trainer.config),
            "degrees": trainer.mesh.degrees,
            "torch": torch.__version__,
        }
        save = Save(
            checkpoints=self.folder.checkpoints,
            step=trainer.step,
            attempt=self._attempt,
            tensors=tensors,
            held=self._staging.begin(tensors) if section.asynchronous else in_place(tensors),
            state=state,
            mesh=trainer.mesh.degrees,
            last=self._last_bytes,
        )
        self._under_way = UnderWay(save, self._group, self.world.device, committed=self._prune, began=began)
        self._under_way.start(threaded=section.asynchronous)
        if not section.asynchronous:
            self._take()

    def wait(self) -> Saved | None:
        """Waits for the save that is under way; returns how the newest one ended, if there was one.

        Raises what kept the ranks from agreeing on it: they can then not save any more.
        """
        if self._under_way is not None:
            self._under_way.wait()
            self._take()
        return self._newest

    def collected(self) -> list[Saved]:
        """The saves that ended since this was last asked. Never waits; raises as `wait` does."""
        if self._under_way is not None and self._under_way.has_ended:
            self._take()
        ended, self._ended = self._ended, []
        return ended

    def _take(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        ended = under_way.outcome()
        if ended.problem is None:
            self._last_step, self._last_bytes = ended.step, ended.bytes
            told = (ended.path, size(ended.bytes), ended.seconds, ended.blocked_seconds)
            log.info("checkpoint %s: %s in %.1f s, for which training waited %.1f s", *told)
        elif self.world.rank == 0:
            log.warning("the checkpoint of update %d failed: %s", ended.step, ended.problem)
        self._newest = ended
        self._ended.append(ended)

    def _prune(self) -> None:
        """Deletes what is superfluous. Called by the thread that saves, after a commit."""
        if self.world.rank != 0:
            return
        section = self.config.checkpoint
        try:
            committed = good(self.folder.committed())
            for folder in superfluous(committed, keep=section.keep, keep_every=section.keep_every, kept=self._kept):
                delete(folder)
        except OSError as error:
            log.warning("an old checkpoint could not be deleted: %s", error)

    @cached_property
    def _group(self) -> ProcessGroup:
        return gloo_group(self.config.distributed)

    @cached_property
    def _attempt(self) -> str:
        return attempt()
