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
from trainer.checkpoint.async_save import AsyncSave, SaveResult
from trainer.checkpoint.initial_weights import is_hugging_face
from trainer.checkpoint.manifest import format_bytes
from trainer.checkpoint.retention import checkpoints_to_delete, delete_checkpoint, valid_checkpoints
from trainer.checkpoint.run_dir import RunDir, flatten_config, stage_position
from trainer.checkpoint.save import SaveRequest
from trainer.checkpoint.staging import HostStaging, without_staging
from trainer.config.job_config import Config, TrainingStage
from trainer.distributed import World, attempt_name, gloo_group
from trainer.trainer import Trainer

log = logging.getLogger(__name__)

FAILURE_TIMEOUT_SECONDS = 60.0
"""Seconds that a run which failed waits for a save that is under way: other ranks may be gone."""


class CheckpointManager:
    """Of a run, whose configuration has all its stages. All ranks call everything, at the same updates."""

    def __init__(self, config: Config, run_dir: RunDir, world: World) -> None:
        self.config, self.run_dir, self.world = config, run_dir, world
        self._staging = HostStaging()
        self._protected: list[Path] = []
        """What this start of the run goes on from, or began with."""
        self._last_saved_step: int | None = None
        """Of the newest save that did not fail."""
        self._last_saved_bytes = 0
        """Of the newest that this start wrote."""
        self._pending_save: AsyncSave | None = None
        self._finished_saves: list[SaveResult] = []
        self._last_result: SaveResult | None = None

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for a save that is under way; after an error not for ever."""
        if self._pending_save is not None:
            self._pending_save.wait(None if kind is None else FAILURE_TIMEOUT_SECONDS)

    # ---- when

    def should_save(self, step: int, stage: TrainingStage, *, requested: bool = False) -> bool:
        """Whether to save after this update; `asked` is the same on all ranks."""
        section = self.config.checkpoint
        return section.enabled and (requested or step % section.interval == 0 or step == stage.end_step)

    @property
    def has_checkpoint(self) -> bool:
        """Whether one was loaded or saved by this start of the run; on all ranks alike, as long as none is under way."""
        return self._last_saved_step is not None

    # ---- going on

    def resume(self, trainer: Trainer) -> Path | None:
        """As `resuming.resume`; what it went on from, or began with, is not deleted."""
        checkpoint = resume.resume(self.config, self.run_dir, trainer, self._group)
        initial = self.config.checkpoint.initial_load_path
        if initial is not None and not is_hugging_face(initial):
            self._protected.append(Path(initial).expanduser())
        if checkpoint is not None:
            self._protected.append(checkpoint)
            self._last_saved_step = trainer.step
        return checkpoint

    # ---- saving

    def save(self, trainer: Trainer) -> None:
        """Begins to save the state, once the save before has ended; does nothing if that was of the same update.

        Training may go on when it returns. Without `checkpoint.async` all is done by then.
        """
        self.wait()
        if trainer.step == self._last_saved_step:
            return
        start_time, section = time.monotonic(), self.config.checkpoint
        tensors = {name: tensor.detach() for name, tensor in trainer.state_dict().items()}
        state = {
            "step": trainer.step,
            "trainer": trainer.train_state(),
            "stage": stage_position(trainer.stage),
            "data": trainer.dataset.fingerprints,
            "config": flatten_config(trainer.config),
            "degrees": trainer.mesh.degrees,
            "torch": torch.__version__,
        }
        request = SaveRequest(
            checkpoints_dir=self.run_dir.checkpoints_dir,
            step=trainer.step,
            attempt=self._attempt,
            tensors=tensors,
            get_local_tensors=self._staging.start_copy(tensors) if section.asynchronous else without_staging(tensors),
            state=state,
            mesh_degrees=trainer.mesh.degrees,
            previous_bytes=self._last_saved_bytes,
        )
        self._pending_save = AsyncSave(
            request, self._group, self.world.device, on_commit=self._prune, start_time=start_time
        )
        self._pending_save.start(threaded=section.asynchronous)
        if not section.asynchronous:
            self._collect_pending()

    def wait(self) -> SaveResult | None:
        """Waits for the save that is under way; returns how the newest one ended, if there was one.

        Raises what kept the ranks from agreeing on it: they can then not save any more.
        """
        if self._pending_save is not None:
            self._pending_save.wait()
            self._collect_pending()
        return self._last_result

    def pop_finished(self) -> list[SaveResult]:
        """The saves that ended since this was last asked. Never waits; raises as `wait` does."""
        if self._pending_save is not None and self._pending_save.is_done:
            self._collect_pending()
        finished, self._finished_saves = self._finished_saves, []
        return finished

    def _collect_pending(self) -> None:
        pending, self._pending_save = self._pending_save, None
        if pending is None:
            return
        result = pending.result()
        if result.problem is None:
            self._last_saved_step, self._last_saved_bytes = result.step, result.bytes
            log_args = (result.path, format_bytes(result.bytes), result.seconds, result.blocked_seconds)
            log.info("checkpoint %s: %s in %.1f s, for which training waited %.1f s", *log_args)
        elif self.world.rank == 0:
            log.warning("the checkpoint of update %d failed: %s", result.step, result.problem)
        self._last_result = result
        self._finished_saves.append(result)

    def _prune(self) -> None:
        """Deletes what is superfluous. Called by the thread that saves, after a commit."""
        if self.world.rank != 0:
            return
        section = self.config.checkpoint
        try:
            committed = valid_checkpoints(self.run_dir.committed_checkpoints())
            for folder in checkpoints_to_delete(
                committed, keep=section.keep, keep_every=section.keep_every, protected=self._protected
            ):
                delete_checkpoint(folder)
        except OSError as error:
            log.warning("an old checkpoint could not be deleted: %s", error)

    @cached_property
    def _group(self) -> ProcessGroup:
        return gloo_group(self.config.distributed)

    @cached_property
    def _attempt(self) -> str:
        return attempt_name()
