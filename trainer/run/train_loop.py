"""The training loop: steps, and between them metrics, validation, checkpoints and preemption."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import closing

import torch

from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.memory_folder import Newest
from trainer.config.job_config import Config, TrainingStage
from trainer.data.holdout import ValidationSet
from trainer.data.sequences import BlendedDataset
from trainer.errors import EXIT_FAILURE, EXIT_NO_RETRY, DataError, RankFailedError, RunFailedError
from trainer.metrics.prediction import read_prediction
from trainer.metrics.profiler import Profilers
from trainer.resilience.anomalies import LossSpikeError
from trainer.resilience.preemption import Preemption
from trainer.resilience.replicas import MAX_NAMED_RANKS, find_drifted_ranks
from trainer.resilience.watchdog import Watchdog
from trainer.run import hooks
from trainer.run.metrics_processor import MetricsProcessor
from trainer.run.progress import ProgressReporter
from trainer.run.validation import Validator
from trainer.step.build import require_right_gradients
from trainer.step.process_group import World
from trainer.step.rerun import UnstableStepError
from trainer.step.trainer import StepResult, Trainer
from trainer.storage.run_dir import RunDir

log = logging.getLogger("trainer")

HANG_FACTOR = 10
"""A step or save counts as hung after this many times the slowest one so far, if that is more than
`distributed.hang_minutes`.
"""
LOAD_TIMEOUT_SECONDS = 4 * 3600.0
"""Reading a checkpoint of terabytes twice, once to verify it, from slow disks."""


def train(
    config: Config,
    stage: TrainingStage,
    run_dir: RunDir,
    world: World,
    *,
    dataset: BlendedDataset,
    validation_sets: Sequence[ValidationSet],
    preemption: Preemption,
) -> str:
    """Trains a stage on all ranks.

    Returns the reason of a preemption, or "" at the end of the stage. Raises RankFailedError for a
    failure of this rank, DivergedError and ResumeError on all ranks.
    """
    stage_config = stage.config
    profilers = Profilers(
        stage_config.profiler,
        run_dir.logs_dir,
        rank=world.rank,
        device=world.device,
        advice=lambda: read_prediction(run_dir.prediction_path).out_of_memory_advice,
    )
    loop: TrainLoop | None = None
    with Watchdog(run_dir.hangs_dir, rank=world.rank) as watchdog:
        watchdog.arm("start-up", 60 * stage_config.distributed.start_timeout_minutes)
        try:
            require_right_gradients(stage_config)
            trainer = Trainer(stage_config, world, dataset, stage=stage)
            watchdog.arm("loading the checkpoint", LOAD_TIMEOUT_SECONDS)
            loop = TrainLoop(
                config,
                run_dir,
                trainer,
                profilers,
                validation_sets=validation_sets,
                preemption=preemption,
                watchdog=watchdog,
            )
            return loop.run()
        except DataError as error:
            raise RankFailedError(EXIT_NO_RETRY, str(error)) from error
        except torch.OutOfMemoryError as error:
            # Before the first step and checkpoint, a restart cannot help; later, fragmentation may
            # be the cause.
            in_memory = Newest.read(run_dir.checkpoints_dir).in_memory
            has_run = (
                run_dir.committed_checkpoints()
                or in_memory >= 0
                or (loop is not None and loop.slowest_step_seconds)
            )
            status = EXIT_FAILURE if has_run else EXIT_NO_RETRY
            raise RankFailedError(status, profilers.report_out_of_memory(error)) from error


class TrainLoop:
    """One launch of a stage, resumed from the newest checkpoint."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        trainer: Trainer,
        profilers: Profilers,
        *,
        validation_sets: Sequence[ValidationSet],
        preemption: Preemption,
        watchdog: Watchdog,
    ) -> None:
        self.stage = trainer.stage
        self.trainer = trainer
        self.profilers = profilers
        self.preemption = preemption
        self.watchdog = watchdog
        self.checkpoints = CheckpointManager(config, run_dir, trainer.world)
        resumed = self.checkpoints.resume(trainer)
        profilers.step(trainer.step)
        self.metrics = MetricsProcessor(config, run_dir, trainer)
        self.metrics.log_run_start(resumed)
        self.validation = Validator(trainer, validation_sets)
        self.slowest_step_seconds = 0.0
        """Longest time of a step so far; 0 before the first step."""
        self._slowest_save_seconds: float | None = None
        self._lr = 0.0
        """Learning rate of the newest step of this launch."""

    def run(self) -> str:
        with closing(self.metrics), self.checkpoints, ProgressReporter(self.trainer) as progress:
            self._arm_long_timeout("the first step")
            # The loss before training: later validations are compared with it.
            if not self.trainer.step:
                self._validate()
            # The crash may have come before this step's checkpoint was committed, so it is saved
            # again.
            elif self.checkpoints.has_resumed_from_memory and self.checkpoints.should_save(
                self.trainer.step, self.stage
            ):
                self._save()
            # A rollback starts the steps again: the generator reads its data from the new
            # position.
            while True:
                try:
                    reason = self._run_steps(progress)
                except LossSpikeError as spike:
                    self._roll_back(spike)
                except UnstableStepError as error:
                    self.metrics.record_unstable_step(error.ranks)
                    raise
                else:
                    self._arm_save("the last checkpoint")
                    self._finish_saves()
                    self.metrics.log_run_end(reason)
                    hooks.call("on_end", hooks.view(self.trainer, self._lr), reason)
                    self.metrics.require_written(reason)
                    return reason

    def _run_steps(self, progress: ProgressReporter) -> str:
        step_start = time.monotonic()
        # Closed also on a stop or an error, which ends the thread that reads ahead.
        with closing(progress.train_steps()) as step_results:
            for step_result in step_results:
                self.metrics.record_step(step_result)  # On a GPU, waits for the previous step.
                self.slowest_step_seconds = max(
                    self.slowest_step_seconds, time.monotonic() - step_start
                )
                if reason := self._after_step(step_result):
                    return reason
                step_start = time.monotonic()
                timeout = self._hang_seconds(self.slowest_step_seconds)
                self.watchdog.arm(f"step {step_result.step + 1}", timeout)
            self.metrics.flush()
        return ""

    def _after_step(self, step_result: StepResult) -> str:
        """Runs what is due after a step; returns the reason of a preemption, or ""."""
        self.profilers.step(step_result.step)
        self._lr = step_result.lr
        hooks.call("on_step", hooks.view(self.trainer, self._lr))
        if self.validation.sets and self.validation.should_validate(step_result.step):
            self._validate()
        # Expires before the timeout of the collectives themselves.
        timeout = min(
            self._hang_seconds(self.slowest_step_seconds),
            0.9 * 60 * self.trainer.config.distributed.timeout_minutes,
        )
        self.watchdog.arm(f"work after step {step_result.step}", timeout)
        self._record_finished_saves()
        decision = self.preemption.check(self._slowest_save_seconds)
        # After the last step there is nothing left to preempt.
        stop_reason = decision.stop_reason if step_result.step < self.stage.total_steps else ""
        if stop_reason:
            self.metrics.flush()
            log.info("stopping after step %d: %s", step_result.step, stop_reason)
        requested = decision.should_save or bool(stop_reason)
        should_save = self.checkpoints.should_save(
            step_result.step, self.stage, requested=requested
        )
        # Before the save: what is wrong must not be saved.
        if self._should_check_replicas(step_result.step, is_before_save=should_save):
            self._check_replicas()
        if should_save:
            self._save()
        elif self.checkpoints.should_copy(step_result.step):
            # A pending loss may be a spike, from which the run would have to resume.
            self.metrics.flush()
            self.checkpoints.copy_to_memory(self.trainer)
        return stop_reason

    def _save(self) -> None:
        # Metrics of all steps in a checkpoint are on disk before it is.
        self.metrics.flush()
        # The save before may still be writing.
        self._arm_save("a checkpoint")
        self.checkpoints.save(self.trainer)
        self.metrics.rollbacks = 0
        self.preemption.record_save()

    def _should_check_replicas(self, step: int, *, is_before_save: bool) -> bool:
        """Whether to compare replicas now.

        Before a save, so that a run that finds a difference resumes from a checkpoint of equal
        copies.
        """
        config = self.trainer.config
        interval = config.health.replica_check_interval
        if interval is not None:
            return is_before_save or step % interval == 0
        return is_before_save and compares_replicas_before_saves(config, self.trainer.mesh.degrees)

    def _check_replicas(self) -> None:
        """Raises RunFailedError on all ranks if copies of a weight or moment differ."""
        if drifted := find_drifted_ranks(self.trainer.state_dict()):
            self.metrics.record_drifted_ranks(drifted)
            self.checkpoints.discard_memory()
            named = "; ".join(map(str, drifted[:MAX_NAMED_RANKS]))
            raise RunFailedError(f"replicas differ after step {self.trainer.step}: {named}")

    def _validate(self) -> None:
        results = []
        self._arm_long_timeout("a validation set")
        for result in self.validation.validate():
            results.append(result)
            self._arm_long_timeout("a validation set")
        self.metrics.record_validation(results)

    def _arm_save(self, activity: str) -> None:
        if self._slowest_save_seconds is None:
            self._arm_long_timeout(activity)
        else:
            self.watchdog.arm(activity, self._hang_seconds(self._slowest_save_seconds))

    def _hang_seconds(self, slowest_seconds: float) -> float:
        """The limit of work whose slowest time so far is given: slow work must not count as
        hung.
        """
        section = self.trainer.config.distributed
        return max(60 * section.hang_minutes, HANG_FACTOR * slowest_seconds)

    def _arm_long_timeout(self, activity: str) -> None:
        """Arms the watchdog with the start-up timeout, for work of unknown length."""
        timeout = 60 * self.trainer.config.distributed.start_timeout_minutes
        self.watchdog.arm(activity, timeout)

    def _record_finished_saves(self) -> None:
        """Logs and times the saves that finished since the last call."""
        saves = self.checkpoints.pop_finished()
        self.metrics.record_checkpoints(saves)
        for saved in saves:
            if saved.problem is None:
                if self.trainer.world.rank == 0:
                    hooks.call("on_checkpoint", saved.step, saved.path)
                self._slowest_save_seconds = max(self._slowest_save_seconds or 0.0, saved.seconds)

    def _finish_saves(self) -> None:
        """Waits for the running save. Raises RunFailedError if the last save failed."""
        last = self.checkpoints.wait()
        self._record_finished_saves()
        # Earlier failures were followed by another save; after the last one, steps would be lost.
        if last is not None and last.problem is not None:
            raise RunFailedError(
                f"the last checkpoint, of step {last.step}, failed: {last.problem}"
            )

    def _roll_back(self, spike: LossSpikeError) -> None:
        """Loads the newest checkpoint and skips the sequences of the steps after it."""
        self.watchdog.arm("rolling back to a checkpoint", LOAD_TIMEOUT_SECONDS)
        self.checkpoints.wait()
        self._record_finished_saves()
        if not self.checkpoints.has_checkpoint:
            log.warning("not rolled back: there is no checkpoint")
            return
        checkpoint = self.checkpoints.roll_back(self.trainer)
        first = self.trainer.next_sequence
        # All sequences since the checkpoint are skipped: the loss says that some are bad, not
        # which.
        self.trainer.next_sequence = max(first, spike.next_sequence)
        self.metrics.record_rollback(spike, checkpoint, (first, self.trainer.next_sequence))


def compares_replicas_before_saves(config: Config, degrees: Mapping[str, int]) -> bool:
    """Whether replicas exist that an undisturbed run keeps equal, and comparing them is not
    switched off.
    """
    if not config.health.check_replicas or degrees["dp_replicate"] == degrees["tp"] == 1:
        return False
    # Else tp ranks compute some gradients each for itself, and kernels may round differently.
    shares_work = config.parallelism.sequence_parallel and config.parallelism.loss_parallel
    return degrees["tp"] == 1 or shares_work or config.training.deterministic
