"""Checkpoints of a run: when to save, saves in the background, resuming, and pruning.

A save copies the state to the host; a thread writes the copy while training continues. The next
save waits for it.
"""

from __future__ import annotations

import logging
import time
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallelisms.mesh.collectives import all_gather_values
from trainer.checkpoint import resume
from trainer.checkpoint.background_save import Save
from trainer.checkpoint.in_memory import InMemoryCheckpoints
from trainer.checkpoint.initial_weights import is_hugging_face
from trainer.checkpoint.memory_folder import forget
from trainer.checkpoint.save import (
    HostStaging,
    LocalTensorsGetter,
    SaveRequest,
    without_staging,
    write_checkpoint,
)
from trainer.config.job_config import Config, TrainingStage
from trainer.config.migrations import SCHEMA_VERSION
from trainer.errors import CONCLUSIVE_EXIT_CODES, RunError
from trainer.step.process_group import World, attempt_name, gloo_group
from trainer.step.trainer import Trainer
from trainer.storage import manifest
from trainer.storage.durable_io import format_bytes
from trainer.storage.retention import checkpoints_to_delete, delete_checkpoint, valid_checkpoints
from trainer.storage.run_dir import RunDir, flatten_config, stage_position
from trainer.storage.train_state import TrainerState, TrainState

log = logging.getLogger(__name__)

FAILURE_TIMEOUT_SECONDS = 60.0
"""How long a failed run waits for a save in progress: other ranks may be gone."""


class CheckpointManager:
    """Saves and resumes a run. All ranks call every method at the same steps."""

    def __init__(self, config: Config, run_dir: RunDir, world: World) -> None:
        self.config = config
        self.run_dir = run_dir
        self.world = world
        self._staging = HostStaging()
        self._protected: list[Path] = []
        """Checkpoints that this launch resumed from or loaded initial weights from."""
        self._last_saved_step: int | None = None
        """Step of the newest checkpoint on disk that this launch loaded or saved."""
        self._committed_step = -1
        """Step of the newest checkpoint on disk; -1: none."""
        self._in_memory: InMemoryCheckpoints | None = None
        self.has_resumed_from_memory = False
        """Whether this launch resumed from memory: the checkpoint of that step may be missing on
        disk.
        """
        self._last_saved_bytes = 0
        """Size of the newest checkpoint that this launch saved."""
        self._pending_save: Save | None = None
        self._finished_saves: list[Save] = []
        self._last_save: Save | None = None

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: object
    ) -> None:
        """Waits for a save in progress; after an error at most `FAILURE_TIMEOUT_SECONDS`."""
        if self._pending_save is not None:
            # After an error a peer may never finish its part, and the thread would wait for it
            # forever.
            self._pending_save.wait(None if error is None else FAILURE_TIMEOUT_SECONDS)
        if self._in_memory is not None:
            if error is None:
                self._in_memory.wait()
            if error is None or (
                isinstance(error, RunError) and error.status in CONCLUSIVE_EXIT_CODES
            ):
                self._in_memory.remove()

    def should_save(self, step: int, stage: TrainingStage, *, requested: bool = False) -> bool:
        """Whether to save after this step. `requested` must be the same on all ranks."""
        section = self.config.checkpoint
        return section.enabled and (
            requested or step % section.interval == 0 or step == stage.end_step
        )

    def should_copy(self, step: int) -> bool:
        """Whether to copy the state to memory after this step, if it is not saved."""
        interval = self.config.checkpoint.memory_interval
        return interval is not None and step % interval == 0

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint on disk.

        The same on all ranks while no save is in progress.
        """
        return self._committed_step >= 0

    def resume(self, trainer: Trainer) -> Path | None:
        """Resumes from memory if it has a newer step than the disk, else as `resume_from_disk`.

        Returns what the run resumed from; None for the initial weights.
        """
        if self.config.checkpoint.memory_interval is None:
            forget(self.run_dir.path, self.run_dir.checkpoints_dir)
            return self.resume_from_disk(trainer)
        # Rank 0's listing counts for all: other nodes may see the folder later.
        committed = self.run_dir.committed_checkpoints()
        self._committed_step = all_gather_values(committed[-1][0] if committed else -1)[0]
        tensors = _tensors(trainer)
        # A group of its own: copies run in a thread, and two threads must not interleave their
        # collectives in one group.
        group = gloo_group(self.config.distributed)
        self._in_memory = InMemoryCheckpoints(self.run_dir, trainer.world, group, tensors)
        current = _current_state(trainer)
        state = self._in_memory.load_newest(tensors, current, committed_step=self._committed_step)
        if state is None:
            try:
                checkpoint = self.resume_from_disk(trainer)
            except RunError as error:
                # No restart follows, so nothing will use the memory.
                if error.status in CONCLUSIVE_EXIT_CODES:
                    self._in_memory.remove()
                raise
            self._in_memory.release(self._committed_step)
            return checkpoint
        trainer.load_train_state(state.trainer.model_dump())
        self.has_resumed_from_memory = True
        return self._in_memory.folder

    def roll_back(self, trainer: Trainer) -> Path | None:
        """Resumes from the newest checkpoint on disk, which must exist."""
        self.discard_memory()
        return self.resume_from_disk(trainer)

    def discard_memory(self) -> None:
        """Makes sure that nothing resumes from the in-memory checkpoints so far."""
        if self._in_memory is not None:
            self._in_memory.discard()

    def resume_from_disk(self, trainer: Trainer) -> Path | None:
        """Resumes from disk as `resume.resume` does; protects that checkpoint and the initial
        weights from pruning.
        """
        checkpoint = resume.resume(self.config, self.run_dir, trainer, self._group)
        initial = self.config.checkpoint.initial_load_path
        if initial is not None and not is_hugging_face(initial):
            self._protected.append(Path(initial).expanduser())
        self._committed_step = -1
        if checkpoint is not None:
            self._protected.append(checkpoint)
            self._last_saved_step = self._committed_step = trainer.step
        return checkpoint

    # ---- saving

    def save(self, trainer: Trainer) -> None:
        """Waits for the previous save and starts the next, unless the previous one was of the same
        step.

        Training may continue when this returns. Without `checkpoint.async` the save is complete by
        then.
        """
        self.wait()
        # A stop request may follow directly on a save of the same step.
        if trainer.step == self._last_saved_step:
            return
        start_time = time.monotonic()
        threaded = self.config.checkpoint.asynchronous
        # Reading the state first flushes deferred updates of the optimizer.
        tensors = _tensors(trainer)
        state = _current_state(trainer)
        request = SaveRequest(
            checkpoints_dir=self.run_dir.checkpoints_dir,
            step=trainer.step,
            attempt=self._attempt,
            tensors=tensors,
            get_local_tensors=self._local_tensors(tensors, state, threaded=threaded),
            state=state,
            require_lease=self.run_dir.require_lease,
            prune=self._make_room,
            previous_bytes=self._last_saved_bytes,
        )
        self._pending_save = Save(request.step, request.final_path, start_time)
        self._pending_save.start(partial(self._write, request, self._group), threaded=threaded)
        if not threaded:
            self._collect_pending()

    def _local_tensors(
        self, tensors: dict[str, Tensor], state: TrainState, *, threaded: bool
    ) -> LocalTensorsGetter:
        """Chooses what a save writes: the in-memory checkpoint of this step, another copy, or the
        tensors themselves.
        """
        get_copy: LocalTensorsGetter | None = None
        if self._in_memory is not None:
            # One copy of the state serves both: the file in memory is the staging buffer of the
            # save.
            get_copy = self._in_memory.copy(tensors, state, to_disk=threaded)
        elif threaded:
            get_copy = self._staging.start_copy(tensors)
        return get_copy if threaded and get_copy else without_staging(tensors)

    def copy_to_memory(self, trainer: Trainer) -> None:
        """Copies the state to memory. Training may continue when this returns."""
        if self._in_memory is not None:
            self._in_memory.copy(_tensors(trainer), _current_state(trainer), to_disk=False)

    def wait(self) -> Save | None:
        """Waits for the save in progress; returns the newest save, if any.

        Raises `RankFailedError` if the ranks could not agree on the outcome; no further save is
        possible.
        """
        if self._pending_save is not None:
            self._pending_save.wait()
            self._collect_pending()
        return self._last_save

    def pop_finished(self) -> list[Save]:
        """The saves that finished since the last call. Never waits. Raises as `wait`."""
        if self._pending_save is not None and self._pending_save.is_done:
            self._collect_pending()
        finished = self._finished_saves
        self._finished_saves = []
        return finished

    def _collect_pending(self) -> None:
        save = self._pending_save
        self._pending_save = None
        if save is None:
            return
        save.raise_if_aborted()
        if save.problem is None:
            self._last_saved_step = self._committed_step = save.step
            self._last_saved_bytes = save.bytes
            log_args = (save.path, format_bytes(save.bytes), save.seconds, save.blocked_seconds)
            log.info("checkpoint %s: %s in %.1f s, training blocked for %.1f s", *log_args)
        elif self.world.rank == 0:
            log.warning("checkpoint of step %d failed: %s", save.step, save.problem)
        if self._in_memory is not None:
            self._in_memory.release(self._committed_step)
        self._last_save = save
        self._finished_saves.append(save)

    # ---- in the saving thread

    def _write(self, request: SaveRequest, group: ProcessGroup) -> int:
        if self.world.device.type == "cuda":
            torch.cuda.set_device(self.world.device)  # Per thread; the default is device 0.
        num_bytes = write_checkpoint(request, group)
        if self.world.rank == 0:
            self.run_dir.announce_commit()
            self._prune()
        return num_bytes

    def _make_room(self) -> None:
        """Deletes superfluous checkpoints, if one that remains is known to be whole."""
        newest = self.run_dir.committed_checkpoints()[-1:]
        if self._last_saved_step is None and newest:  # Resumed from memory.
            manifest.read_intact(newest[0][1], check_hashes=True)
        self._prune()

    def _prune(self) -> None:
        """Deletes superfluous checkpoints."""
        section = self.config.checkpoint
        try:
            committed = valid_checkpoints(self.run_dir.committed_checkpoints())
            for folder in checkpoints_to_delete(
                committed,
                keep=section.keep,
                keep_every=section.keep_every,
                protected=self._protected,
            ):
                if not self.run_dir.is_in_use(folder):
                    delete_checkpoint(folder)
        except OSError as error:
            log.warning("cannot delete an old checkpoint: %s", error)

    # Made on first use, which is collective: all ranks first save or resume at the same step.
    @cached_property
    def _group(self) -> ProcessGroup:
        return gloo_group(self.config.distributed)

    @cached_property
    def _attempt(self) -> str:
        return attempt_name()


def _tensors(trainer: Trainer) -> dict[str, Tensor]:
    # Copying into a leaf that requires gradients would raise, and dcp saves no graph.
    return {name: tensor.detach() for name, tensor in trainer.state_dict().items()}


def _current_state(trainer: Trainer) -> TrainState:
    return TrainState(
        step=trainer.step,
        trainer=TrainerState.model_validate(trainer.train_state()),
        stage=stage_position(trainer.stage),
        data=trainer.dataset.fingerprints,
        plans=trainer.dataset.plan_fingerprints,
        config=flatten_config(trainer.config),
        schema_version=SCHEMA_VERSION,
        degrees=trainer.mesh.degrees,
        torch=str(torch.__version__),
        # Set where the shards are on the host: reading it here would wait for the device.
        optimizer_steps=None,
    )
