"""Metrics of a run: one record per logged step feeds metrics.jsonl, TensorBoard and the console.

docs/metrics.md defines the metrics, including MFU and HFU; `models/config.py` counts the FLOPs.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname

from parallelisms.collectives import all_gather_object, max_over_ranks
from trainer.checkpoint.async_save import SaveResult
from trainer.checkpoint.manifest import format_bytes
from trainer.checkpoint.run_dir import RunDir
from trainer.config.job_config import Config, TrainingStage
from trainer.data.sequences import BlendedDataset
from trainer.errors import DivergedError
from trainer.evaluation.validation import ValidationResult, format_validation
from trainer.hardware.device import (
    ComputeProbe,
    peak_device_memory,
    peak_flops,
    peak_host_memory,
)
from trainer.hardware.host import GIB
from trainer.metrics.loggers import (
    JsonlLogger,
    MetricsLogger,
    Record,
    TensorBoardLogger,
    build_console_logger,
    format_losses,
    format_or_dash,
)
from trainer.metrics.prediction import read_prediction
from trainer.metrics.step_metrics import finite_or_none, position_bucket_names
from trainer.resilience.anomalies import MAX_ROLLBACKS, LossSpikeError, StragglerDetector
from trainer.trainer import StepMetrics, StepResult, Trainer

log = logging.getLogger(__name__)


class MetricsProcessor:
    """Logs the first and last step of a launch, every `metrics.log_interval`-th, and every skipped one.

    Collective: rates and memory are maxima over ranks. Only rank 0 has loggers.
    """

    def __init__(
        self,
        config: Config,
        folder: RunDir,
        trainer: Trainer,
        *,
        later_datasets: Sequence[BlendedDataset] = (),
        resumed_from: Path | None,
    ) -> None:
        """`config` covers all training stages; `later_datasets` belong to the stages after this one."""
        self.run_config, self.config = config, trainer.config
        self.trainer = trainer
        self.stage, self.dataset = trainer.stage, trainer.dataset
        self.folder = folder
        self.world = trainer.world
        self.model = self.config.model.build()
        self.prediction = read_prediction(folder.prediction_path)
        self.peak_flops = self.config.metrics.peak_flops or peak_flops(self.world.device)
        self.total_steps = self.stage.total_steps
        self.first_step = trainer.step + 1
        self.last_loss = math.nan
        self.last_loss_by_shard: list[float | None] | None = None
        self.skipped_steps = trainer.train_state()["skipped"]
        """Steps of the run with a non-finite gradient."""
        self.straggler_detector = StragglerDetector(self.config.health.straggler_ratio)
        self.compute_probe, self.hostname = ComputeProbe(self.world.device), gethostname()
        self.rollbacks = 0
        """Since the newest checkpoint."""
        self.failed_saves = 0
        """Checkpoints that this launch could not write."""
        self._pending_result: StepResult | None = None
        self._interval = IntervalTotals()
        self.loggers: list[MetricsLogger] = []
        if self.world.rank == 0:
            folder.record_start(config, trainer.step)
            remaining_stages = config.training_stages[self.stage.index :]
            self._log_run_start(
                trainer, [*zip(remaining_stages, (trainer.dataset, *later_datasets), strict=True)], resumed_from
            )
            self._open_loggers(config)

    def _open_loggers(self, config: Config) -> None:
        self.loggers = [
            JsonlLogger(self.folder),
            build_console_logger(self.total_steps, num_token_ranks=self.trainer.mesh.dp_cp_group.size()),
        ]
        if config.metrics.tensorboard:
            self.loggers.append(TensorBoardLogger(self.folder, config, self.first_step))

    def record_rollback(self, spike: LossSpikeError, checkpoint: Path | None, skipped_range: tuple[int, int]) -> None:
        """Drops the metrics of the steps that the trainer rolled back."""
        self._pending_result, self._interval, self.first_step = None, IntervalTotals(), self.trainer.step + 1
        self.skipped_steps = self.trainer.train_state()["skipped"]
        self.rollbacks += 1
        if self.world.rank != 0:
            return
        self.close()
        self.folder.record_start(self.run_config, self.trainer.step)
        self._open_loggers(self.run_config)
        self.folder.log_event("rolled_back", step=spike.step, to=str(checkpoint), without_rows=skipped_range)
        first, end = skipped_range
        log.warning("rolled back from step %d to %s, skipping sequences %d to %d", spike.step, checkpoint, first, end)

    def _log_run_start(
        self,
        trainer: Trainer,
        remaining_stages: Sequence[tuple[TrainingStage, BlendedDataset]],
        resumed_from: Path | None,
    ) -> None:
        for config_change in trainer.config_changes:
            log.info("changed since the checkpoint: %s", config_change)
        degrees = ", ".join(f"{axis} {size}" for axis, size in trainer.mesh.degrees.items() if size > 1) or "1 process"
        model = f"{self.config.model.family} {self.config.model.size}"
        parameters = f"{self.model.num_parameters:,}"
        log.info("model %s, %s parameters, on %s: %s", model, parameters, self.world.device.type, degrees)
        for text in self.prediction.summary:
            log.info("%s", text)
        if self.prediction.memory_summary is not None:
            log.info("%s", self.prediction.memory_summary)
        log.info("attention kernel: %s", trainer.parallel_model.kernel)
        for stage, dataset in remaining_stages:
            if stage.num_stages > 1:
                log.info("%s", stage.summary())
            for text in dataset.summary(stage.config.training.steps * stage.config.training.global_batch_size):
                log.info("  %s", text)
        for warning in self.prediction.warnings:
            log.warning("%s", warning)
        if self.peak_flops is None and self.world.device.type == "cuda":
            log.warning("no MFU: the peak FLOP/s of this device are unknown; set metrics.peak_flops")
        if resumed_from is not None:
            self._log_resume(trainer, resumed_from)
        fields = {
            "step": trainer.step,
            "stage": self.stage.name,
            "world_size": self.world.size,
            "resumed": str(resumed_from) if resumed_from else None,
        }
        self.folder.log_event("start", **fields)

    def _log_resume(self, trainer: Trainer, checkpoint: Path) -> None:
        if trainer.step == self.stage.start_step and self.stage.index > 0:
            optimizer_state = "a new optimizer" if self.stage.resets_optimizer else "the optimizer's state"
            log.info("%s starts from %s with %s", self.stage, checkpoint, optimizer_state)
            return
        names, counts = self.dataset.names, self.dataset.round_robin.counts(trainer.next_sequence)
        sources = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True))
        log.info(
            "resumed from %s: next are step %d and sequence %d%s; same data",
            *(checkpoint, self.first_step, trainer.next_sequence, f" ({sources})" if len(names) > 1 else ""),
        )

    def record_checkpoints(self, saves: Sequence[SaveResult]) -> None:
        """Logs the results of finished saves."""
        self.failed_saves += sum(saved.problem is not None for saved in saves)
        for saved in saves if self.world.rank == 0 else ():
            if saved.problem is not None:
                self.folder.log_event("checkpoint_failed", step=saved.step, reason=saved.problem)
                scalars = {"checkpoint/failures": float(self.failed_saves)}
            else:
                keys = ("bytes", "seconds", "blocked_seconds")
                fields = {key: getattr(saved, key) for key in keys}
                self.folder.log_event("checkpoint", path=str(saved.path), step=saved.step, **fields)
                scalars = {f"checkpoint/{key}": float(value) for key, value in fields.items()}
            for logger in self.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.add_scalars(scalars, saved.step)

    def record_validation(self, results: Sequence[ValidationResult]) -> None:
        """Logs validation results, after the metrics of the step that they follow."""
        self.flush()
        if self.world.rank != 0:
            return
        for result in results:
            first_loss = self.folder.first_validation_loss(result.name)
            event = result.event(first_loss)
            self.folder.log_event("validation", stage=self.stage.name, **event)
            log.info("%s", format_validation(event))
            for logger in self.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.add_scalars(result.tensorboard_scalars(), result.step)

    def log_run_end(self, reason: str = "") -> None:
        """Logs how the stage ended, where the results are, and the next command. `reason` is that of a preemption."""
        if self.world.rank != 0:
            return
        fields = {"step": self.trainer.step, "loss": finite_or_none(self.last_loss), "skipped": self.skipped_steps}
        if reason:
            self.folder.log_event("preempted", reason=reason, **fields)
            latest_checkpoint = self.folder.committed_checkpoints()[-1:]
            location = f"from {latest_checkpoint[0][1]}" if latest_checkpoint else "from step 0: there is no checkpoint"
            log.info(
                "preempted after step %d of %d (%s); run the same command to resume %s",
                self.trainer.step,
                self.total_steps,
                reason,
                location,
            )
            return
        if self.stage.index + 1 < self.stage.num_stages:
            self.folder.log_event("stage", name=self.stage.name, **fields)
            log.info("%s done, loss %.3f; run the same command for the next stage", self.stage, self.last_loss)
            return
        self.folder.log_event("end", **fields)
        checkpoints = self.folder.committed_checkpoints()
        tensorboard_script = Path(sys.executable).with_name("tensorboard")
        tensorboard = tensorboard_script if tensorboard_script.exists() else "tensorboard"
        location = f"newest checkpoint {checkpoints[-1][1]}, " if checkpoints else ""
        log.info(
            "done: all %d steps%s; loss %s -> %.3f%s. Results in %s (%smetrics.jsonl). "
            "%sTo continue, run the same command with %s",
            self.total_steps,
            f", {self.skipped_steps} skipped for a non-finite gradient" if self.skipped_steps else "",
            format_or_dash(self.folder.first_loss(), ".3f"),
            self.last_loss,
            f" (shards {format_losses(self.last_loss_by_shard)})" if self.last_loss_by_shard else "",
            self.folder.path,
            location,
            f"Charts: {tensorboard} --logdir {self.folder.tensorboard_dir}. "
            if self.config.metrics.tensorboard
            else "",
            "another [[stage]]" if self.stage.name else "a higher --training.steps",
        )

    def record_step(self, result: StepResult) -> None:
        """Logs the previous step, whose metrics have reached the host by now. On a CPU, logs this one, too."""
        previous, self._pending_result = self._pending_result, result
        if previous is not None:
            self._process(previous)
        if self.world.device.type == "cpu":
            self.flush()

    def flush(self) -> None:
        """Logs the pending step. Waits for the device."""
        previous, self._pending_result = self._pending_result, None
        if previous is not None:
            self._process(previous)

    def close(self) -> None:
        for logger in self.loggers:
            logger.close()

    def _process(self, result: StepResult) -> None:
        metrics = result.read()
        self._interval.add(result, metrics)
        self.last_loss = metrics.loss
        self.last_loss_by_shard = metrics.loss_by_shard
        self.skipped_steps += metrics.skipped
        self.trainer.goodput.add_step(metrics.step_seconds)
        sigmas = self.trainer.loss_spikes.observe(metrics.loss, skipped=metrics.skipped)
        if metrics.skipped and self.world.rank == 0:
            log.warning("step %d skipped: non-finite gradient (norm %s)", result.step, metrics.grad_norm)
            self.folder.log_event("skipped", step=result.step)
        if result.step in (self.first_step, self.stage.end_step) or metrics.skipped or self._should_log(result.step):
            record = self._build_record(result, metrics)
            self._interval = IntervalTotals()
            for logger in self.loggers:
                logger.write(record)
            if result.step == self.first_step and record["memory_peak_gib"] is not None and self.world.rank == 0:
                predicted = self.prediction.device_bytes
                comparison_text = "" if predicted is None else f", predicted {format_bytes(predicted)}"
                log.info("peak memory: %s%s", format_bytes(record["memory_peak_gib"] * GIB), comparison_text)
        comparison = self.prediction.compare(metrics.step_seconds)
        if comparison is not None and self.world.rank == 0:
            log.info(
                "step time: %(measured_seconds).3g s, predicted %(predicted_seconds).3g s for %(device)s", comparison
            )
            self.folder.log_event("planned", **comparison)
        if self.trainer.loss_spikes.has_diverged:
            consecutive_skips = self.trainer.loss_spikes.consecutive_skips
            raise DivergedError(
                f"steps {result.step - consecutive_skips + 1} to {result.step} had a non-finite gradient "
                f"(health.max_consecutive_skips = {consecutive_skips})"
            )
        if sigmas is not None:
            self._handle_spike(result, metrics, sigmas)

    def _handle_spike(self, result: StepResult, metrics: StepMetrics, sigmas: float) -> None:
        if self.world.rank == 0:
            log.warning("step %d: loss %.3f is %.0f sigmas above the recent mean", result.step, metrics.loss, sigmas)
            self.folder.log_event("spike", step=result.step, loss=metrics.loss, sigmas=sigmas)
        if self.config.health.on_spike == "roll_back" and self.rollbacks < MAX_ROLLBACKS:
            raise LossSpikeError(result.step, self.trainer.next_sequence)

    def _check_stragglers(self, seconds: float, data_wait_seconds: float) -> None:
        """Logs a rank that the others wait for. Collective."""
        per_rank = all_gather_object((self.hostname, data_wait_seconds, self.compute_probe.seconds()))
        if self.world.rank != 0:
            return
        hosts, data_waits, compute_seconds = zip(*per_rank, strict=True)
        straggler = self.straggler_detector.observe(
            hosts, data_waits=data_waits, compute_seconds=compute_seconds, interval_seconds=seconds
        )
        if straggler is not None:
            log.warning("%s", straggler)
            self.folder.log_event("straggler", **vars(straggler))

    def _should_log(self, step: int) -> bool:
        return step % self.config.metrics.log_interval == 0

    def _build_record(self, result: StepResult, metrics: StepMetrics) -> Record:
        """The record of a step; rates cover all steps since the previous record. Collective."""
        interval = self._interval
        # Maxima, because the slowest rank bounds throughput, and the fullest runs out of memory first.
        peak, reserved = peak_device_memory(self.world.device) or (0.0, 0.0)
        self._check_stragglers(interval.seconds, interval.data_wait_seconds)
        local_values = [interval.seconds, interval.data_wait_seconds, peak, reserved, peak_host_memory()]
        seconds, data_wait_seconds, peak, reserved, rss = max_over_ranks(None, local_values)
        num_devices = self.world.size
        counts = {"tokens": interval.tokens, "pairs": interval.pairs}
        model_flops_per_second = self.model.flops(**counts) / seconds / num_devices
        memory = self.config.memory
        executed_flops = self.model.hardware_flops(
            **counts, recompute=memory.recompute, blocks_per_checkpoint=memory.blocks_per_checkpoint
        )
        executed_flops_per_second = executed_flops / seconds / num_devices
        is_accelerator = self.world.device.type != "cpu"
        record: Record = {
            "step": result.step,
            "tokens": metrics.tokens_seen,
            "loss": finite_or_none(metrics.loss),
            "grad_norm": finite_or_none(metrics.grad_norm),
            "lr": result.lr,
            "step_seconds": seconds / interval.num_steps,
            "tokens_per_second": interval.tokens / seconds,
            "tokens_per_second_per_device": interval.tokens / seconds / num_devices,
            "tflops_per_device": model_flops_per_second / 1e12,
            "mfu": model_flops_per_second / self.peak_flops if self.peak_flops else None,
            "hfu": executed_flops_per_second / self.peak_flops if self.peak_flops else None,
            "data_wait_pct": 100 * data_wait_seconds / seconds,
            "memory_peak_gib": peak / GIB if is_accelerator else None,
            "memory_reserved_gib": reserved / GIB if is_accelerator else None,
            "rss_gib": rss / GIB,
            "goodput_pct": self.trainer.goodput.percent(),
            "attention_imbalance": metrics.attention_imbalance,
            "loss_by_position": dict(
                zip(position_bucket_names(), map(finite_or_none, metrics.loss_by_position), strict=True)
            ),
            "loss_by_shard": [finite_or_none(loss) for loss in metrics.loss_by_shard]
            if metrics.loss_by_shard
            else None,
            "stage": self.stage.name,
            "sources": self._source_metrics(result, metrics),
        }
        return record | {"skipped": True} if metrics.skipped else record

    def _source_metrics(self, result: StepResult, metrics: StepMetrics) -> dict[str, dict[str, float | None]]:
        epochs = self.dataset.epochs(result.next_sequence)
        per_source = zip(self.dataset.names, metrics.tokens_by_source, epochs, metrics.loss_by_source, strict=True)
        return {
            name: {"tokens": int(tokens), "epochs": epoch, "loss": loss and finite_or_none(loss)}
            for name, tokens, epoch, loss in per_source
        }


@dataclass
class IntervalTotals:
    """Sums over the steps since the previous record."""

    num_steps: int = 0
    seconds: float = 0.0
    data_wait_seconds: float = 0.0
    tokens: float = 0.0
    pairs: float = 0.0

    def add(self, result: StepResult, metrics: StepMetrics) -> None:
        self.num_steps += 1
        self.seconds += metrics.step_seconds
        self.data_wait_seconds += result.data_wait_seconds
        self.tokens += metrics.tokens
        self.pairs += metrics.attended_pairs
