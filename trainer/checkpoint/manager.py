"""Checkpoints of a run: when to save, saves in the background, resuming, and pruning.

A save copies the state to the host; a thread writes the copy while training continues. The next save waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from threading import Thread

import torch
from torch.distributed import ProcessGroup

from trainer.checkpoint import resume
from trainer.checkpoint.durable_io import format_bytes
from trainer.checkpoint.initial_weights import is_hugging_face
from trainer.checkpoint.rank_sync import PhaseError, describe_error
from trainer.checkpoint.retention import checkpoints_to_delete, delete_checkpoint, valid_checkpoints
from trainer.checkpoint.run_dir import RunDir, flatten_config, stage_position
from trainer.checkpoint.save import HostStaging, SaveRequest, without_staging, write_checkpoint
from trainer.checkpoint.train_state import TrainerState, TrainState
from trainer.config.job_config import Config, TrainingStage
from trainer.config.migrations import SCHEMA_VERSION
from trainer.distributed import World, attempt_name, gloo_group
from trainer.errors import EXIT_FAILURE, RankFailedError, ResumeError, RunFailedError
from trainer.trainer import Trainer

log = logging.getLogger(__name__)

FAILURE_TIMEOUT_SECONDS = 60.0
"""How long a failed run waits for a save in progress: other ranks may be gone."""


class Save:
    """A save, in a background thread or synchronous, and its outcome.

    The thread is a daemon: a process that exits on an error must not wait for ranks that are gone.
    """

    def __init__(self, step: int, path: Path, start_time: float) -> None:
        """Training has been blocked since `start_time`."""
        self.step, self._start_time = step, start_time
        self.path: Path | None = path
        """None for a failed save; `problem` then has the reason."""
        self.problem: str | None = None
        self.bytes, self.seconds = 0, 0.0
        self.blocked_seconds = 0.0
        """Time for which training was blocked: by the copy of the state and by waits for the end of the save."""
        self._error: BaseException | None = None
        self._thread: Thread | None = None

    def start(self, write: Callable[[], int], *, threaded: bool) -> None:
        """Calls `write`, which commits the checkpoint and returns its bytes."""
        if threaded:
            self._thread = Thread(target=self._run, args=(write,), name=f"checkpoint of step {self.step}", daemon=True)
            self._thread.start()
        else:
            self._run(write)
        self.blocked_seconds = time.monotonic() - self._start_time

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        started = time.monotonic()
        if self._thread is not None:
            self._thread.join(timeout)
        self.blocked_seconds += time.monotonic() - started

    def raise_if_aborted(self) -> None:
        """Raises `RankFailedError` if the ranks could not agree on an outcome; no further save is possible."""
        if self._error is not None:
            message = f"checkpoint of step {self.step} aborted: {describe_error(self._error)}"
            raise RankFailedError(EXIT_FAILURE, message) from self._error

    def _run(self, write: Callable[[], int]) -> None:
        try:
            self.bytes = write()
        except (PhaseError, ResumeError, RunFailedError) as error:
            self.path, self.problem = None, str(error)
        except BaseException as error:  # noqa: BLE001 - `raise_if_aborted` raises it in the main thread
            self._error = error
        self.seconds = time.monotonic() - self._start_time


class CheckpointManager:
    """Saves and resumes a run. All ranks call every method at the same steps."""

    def __init__(self, config: Config, run_dir: RunDir, world: World) -> None:
        self.config, self.run_dir, self.world = config, run_dir, world
        self._staging = HostStaging()
        self._protected: list[Path] = []
        """Checkpoints that this launch resumed from or loaded initial weights from."""
        self._last_saved_step: int | None = None
        """Step of the newest checkpoint that this launch loaded or saved."""
        self._last_saved_bytes = 0
        """Size of the newest checkpoint that this launch saved."""
        self._pending_save: Save | None = None
        self._finished_saves: list[Save] = []
        self._last_save: Save | None = None

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for a save in progress; after an error at most `FAILURE_TIMEOUT_SECONDS`."""
        if self._pending_save is not None:
            self._pending_save.wait(None if kind is None else FAILURE_TIMEOUT_SECONDS)

    def should_save(self, step: int, stage: TrainingStage, *, requested: bool = False) -> bool:
        """Whether to save after this step. `requested` must be the same on all ranks."""
        section = self.config.checkpoint
        return section.enabled and (requested or step % section.interval == 0 or step == stage.end_step)

    @property
    def has_checkpoint(self) -> bool:
        """Whether this launch loaded or saved a checkpoint. The same on all ranks while no save is in progress."""
        return self._last_saved_step is not None

    def resume(self, trainer: Trainer) -> Path | None:
        """As `resume.resume`, and protects the checkpoint and the initial weights from pruning."""
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
        """Waits for the previous save and starts the next, unless the previous one was of the same step.

        Training may continue when this returns. Without `checkpoint.async` the save is complete by then.
        """
        self.wait()
        if trainer.step == self._last_saved_step:
            return
        start_time, threaded = time.monotonic(), self.config.checkpoint.asynchronous
        tensors = {name: tensor.detach() for name, tensor in trainer.state_dict().items()}
        state = TrainState(
            step=trainer.step,
            trainer=TrainerState.model_validate(trainer.train_state()),
            stage=stage_position(trainer.stage),
            data=trainer.dataset.fingerprints,
            plans=trainer.dataset.plan_fingerprints,
            config=flatten_config(trainer.config),
            schema_version=SCHEMA_VERSION,
            degrees=trainer.mesh.degrees,
            torch=str(torch.__version__),
            optimizer_steps=None,
        )
        request = SaveRequest(
            checkpoints_dir=self.run_dir.checkpoints_dir,
            step=trainer.step,
            attempt=self._attempt,
            tensors=tensors,
            get_local_tensors=self._staging.start_copy(tensors) if threaded else without_staging(tensors),
            state=state,
            require_lease=self.run_dir.require_lease,
            prune=self._prune,
            previous_bytes=self._last_saved_bytes,
        )
        self._pending_save = Save(request.step, request.final_path, start_time)
        self._pending_save.start(partial(self._write, request, self._group), threaded=threaded)
        if not threaded:
            self._collect_pending()

    def wait(self) -> Save | None:
        """Waits for the save in progress; returns the newest save, if any.

        Raises `RankFailedError` if the ranks could not agree on the outcome; no further save is possible.
        """
        if self._pending_save is not None:
            self._pending_save.wait()
            self._collect_pending()
        return self._last_save

    def pop_finished(self) -> list[Save]:
        """The saves that finished since the last call. Never waits. Raises as `wait`."""
        if self._pending_save is not None and self._pending_save.is_done:
            self._collect_pending()
        finished, self._finished_saves = self._finished_saves, []
        return finished

    def _collect_pending(self) -> None:
        save, self._pending_save = self._pending_save, None
        if save is None:
            return
        save.raise_if_aborted()
        if save.problem is None:
            self._last_saved_step, self._last_saved_bytes = save.step, save.bytes
            log_args = (save.path, format_bytes(save.bytes), save.seconds, save.blocked_seconds)
            log.info("checkpoint %s: %s in %.1f s, training blocked for %.1f s", *log_args)
        elif self.world.rank == 0:
            log.warning("checkpoint of step %d failed: %s", save.step, save.problem)
        self._last_save = save
        self._finished_saves.append(save)

    # ---- in the saving thread

    def _write(self, request: SaveRequest, group: ProcessGroup) -> int:
        if self.world.device.type == "cuda":
            torch.cuda.set_device(self.world.device)  # Per thread; the default is device 0.
        num_bytes = write_checkpoint(request, group)
        if self.world.rank == 0:
            self._prune()
        return num_bytes

    def _prune(self) -> None:
        """Deletes superfluous checkpoints."""
        section = self.config.checkpoint
        try:
            committed = valid_checkpoints(self.run_dir.committed_checkpoints())
            for folder in checkpoints_to_delete(
                committed, keep=section.keep, keep_every=section.keep_every, protected=self._protected
            ):
                delete_checkpoint(folder)
        except OSError as error:
            log.warning("cannot delete an old checkpoint: %s", error)

    @cached_property
    def _group(self) -> ProcessGroup:
        return gloo_group(self.config.distributed)

    @cached_property
    def _attempt(self) -> str:
        return attempt_name()
