"""Metrics of a run: one record per logged step feeds metrics.jsonl, TensorBoard and the console.

docs/metrics.md defines the metrics, including MFU and HFU; `models/config.py` counts the FLOPs.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from socket import gethostname
from typing import Any

from models import kernel_choice
from parallelisms.mesh.collectives import all_gather_values, max_over_ranks
from trainer.checkpoint.background_save import Save
from trainer.config.extension import TrackedRun, installed
from trainer.config.job_config import Config
from trainer.config.toml_format import to_toml
from trainer.data.deal import Cost
from trainer.errors import DivergedError, LostMetricsError
from trainer.hardware.device import ComputeProbe, peak_device_memory, peak_flops, peak_host_memory
from trainer.hardware.host import GIB
from trainer.metrics.accumulator import finite_or_none, position_bucket_names
from trainer.metrics.loggers import ConsoleLogger, Record, format_losses, format_or_dash
from trainer.metrics.prediction import read_prediction
from trainer.metrics.trackers import Trackers, values_of, wanted, with_model
from trainer.resilience.anomalies import (
    MAX_ROLLBACKS,
    CollapseDetector,
    LossSpikeError,
    StragglerDetector,
)
from trainer.resilience.replicas import DriftedRank
from trainer.run.validation import ValidationResult, format_validation
from trainer.step.routers import expert_layers, router_metrics
from trainer.step.trainer import StepMetrics, StepResult, Trainer
from trainer.storage import lineage
from trainer.storage.durable_io import LineAppender, format_bytes
from trainer.storage.run_dir import RunDir, find_checkpoints
from trainer.storage.run_id import recorded_run_id

log = logging.getLogger(__name__)

TRACKED_OTHERWISE = (
    "checkpoint",
    "checkpoint_failed",
    "checkpoint_uploaded",
    "validation",
    "planned",
)
"""Events that are no points in trackers: routine ones, and those whose numbers trackers have."""


class MetricsProcessor:
    """Logs the first and last step of a launch, every `metrics.log_interval`-th, and every skipped
    one.

    Collective: rates and memory are maxima over ranks. Only rank 0 writes.
    """

    def __init__(self, config: Config, run_dir: RunDir, trainer: Trainer) -> None:
        """`config` covers all training stages."""
        self.run_config = config
        self.run_dir = run_dir
        self.trainer = trainer
        self.config = trainer.config
        self.stage = trainer.stage
        self.dataset = trainer.dataset
        self.device = trainer.world.device
        self.is_rank_zero = trainer.world.rank == 0
        self.model = self.config.model.build()
        memory = self.config.memory
        executed = partial(
            self.model.hardware_flops,
            recompute=memory.recompute,
            blocks_per_checkpoint=memory.blocks_per_checkpoint,
        )
        self.flops = [
            # FLOPs are linear in tokens and (query, key) pairs: two evaluations give both
            # coefficients.
            (count(tokens=1, pairs=0), count(tokens=0, pairs=1))
            for count in (self.model.flops, executed)
        ]
        """FLOPs per token and per pair: (model FLOPs, executed FLOPs)."""
        self.prediction = read_prediction(run_dir.prediction_path)
        per_token = self.prediction.seconds_per_token
        per_pair = self.prediction.seconds_per_pair
        self.cost = (
            Cost(*self.flops[1])
            if per_token is None or per_pair is None
            else Cost(per_token, per_pair)
        )
        """Predicted work of a sequence: in seconds if the device is known, else in executed
        FLOPs.
        """
        self.peak_flops = self.config.metrics.peak_flops or peak_flops(self.device)
        self.last_metrics: StepMetrics | None = None
        self.straggler_detector = StragglerDetector(self.config.health.straggler_ratio)
        self.compute_probe = ComputeProbe(self.device)
        self.hostname = gethostname()
        self.expert_layers = expert_layers(self.model)
        self.expert_collapse = CollapseDetector(self.config.health.max_dead_experts_pct)
        self.rollbacks = 0
        """Rollbacks to the newest checkpoint."""
        self.failed_saves = 0
        """Checkpoints that this launch could not write."""
        self._untracked = SimpleQueue[Mapping[str, Any]]()
        """Events, of the thread that uploads too, since extensions' trackers know one thread."""
        run_dir.announce_event = self._untracked.put
        self._start()

    def _start(self) -> None:
        """Starts to log after the trainer's step; later metrics of an earlier launch are
        dropped.
        """
        self.first_step = self.trainer.step + 1
        self.skipped_steps = self.trainer.train_state()["skipped"]
        """Steps of the run with a non-finite gradient."""
        self._pending: StepResult | None = None
        self._interval: list[tuple[float, StepMetrics]] = []
        """(data wait, metrics) of the steps since the previous record."""
        if self.is_rank_zero:
            self.run_dir.record_start(self.run_config, self.trainer.step)
            num_token_ranks = self.trainer.mesh.dp_cp_group.size()
            self.lines = LineAppender(self.run_dir.metrics_path)
            self.console = ConsoleLogger(self.stage.total_steps, num_token_ranks=num_token_ranks)
            self.trackers = Trackers(self._tracked_run(), wanted(self.config.metrics))

    def _tracked_run(self) -> TrackedRun:
        config = self.run_config
        return TrackedRun(
            name=config.job.name,
            folder=self.run_dir.path,
            first_step=self.first_step,
            config=with_model(config.model_dump(mode="json"), self.model)
            | {"world_size": self.trainer.world.size},
            toml=to_toml(config),
            prediction=self.prediction.model_dump(mode="json", exclude_defaults=True),
            lineage=self._lineage(),
        )

    def _lineage(self) -> dict[str, str]:
        """The run whose weights this one continued from; empty if there is none."""
        found = dict[str, str]()
        if (branch := lineage.read(self.run_dir.path)) is not None:
            found["branch"] = branch.describe()
        if (path := self.run_config.checkpoint.initial_load_path) is not None:
            found["initial_load_path"] = path
            parent, _ = find_checkpoints(Path(path).expanduser())
            if (parent_id := recorded_run_id(parent.path)) is not None:
                found["run_id"] = parent_id
        return found

    def record_rollback(
        self, spike: LossSpikeError, checkpoint: Path | None, skipped_range: tuple[int, int]
    ) -> None:
        """Drops the metrics of the steps that the trainer rolled back."""
        # Files are opened again, because lines after the checkpoint are cut off.
        self.close()
        self._start()
        self.rollbacks += 1
        self._log_event(
            "rolled_back", step=spike.step, to=str(checkpoint), without_rows=skipped_range
        )
        if self.is_rank_zero:
            message = "rolled back from step %d to %s, skipping sequences %d to %d"
            log.warning(message, spike.step, checkpoint, *skipped_range)

    def record_drifted_ranks(self, drifted: Sequence[DriftedRank]) -> None:
        # No flush: a spike in the pending step would roll back instead of ending the run.
        self._log_event("replica_mismatch", step=self.trainer.step, ranks=[*map(vars, drifted)])

    def record_unstable_step(self, ranks: Sequence[Mapping[str, object]]) -> None:
        self._log_event("unstable_step", step=self.trainer.step, ranks=[*map(dict, ranks)])

    def _log_event(self, kind: str, **fields: Any) -> None:
        if self.is_rank_zero:
            self.run_dir.log_event(kind, **fields)
            self._track_events()

    def _track_events(self) -> None:
        """Sends trackers the events that this process has logged since the last time."""
        while not self._untracked.empty():
            self._track_event(self._untracked.get())

    def _track_event(self, event: Mapping[str, Any]) -> None:
        step = event.get("step", self.trainer.step)
        kind = event["event"]
        if kind not in TRACKED_OTHERWISE:
            self.trackers.log(step, {f"train_events/{kind}": 1.0})
        # A validation is a point of a curve, and there are many.
        if kind != "validation":
            self.trackers.note(step, event)

    def log_run_start(self, resumed_from: Path | None) -> None:
        if not self.is_rank_zero:
            return
        trainer = self.trainer
        stage = self.stage
        for config_change in trainer.config_changes:
            log.info("changed since the checkpoint: %s", config_change)
        degrees = (
            ", ".join(f"{axis} {size}" for axis, size in trainer.mesh.degrees.items() if size > 1)
            or "1 process"
        )
        model = f"{self.config.model.family} {self.config.model.size}"
        log.info(
            "model %s, %s, on %s: %s",
            model,
            self.model.parameter_summary,
            self.device.type,
            degrees,
        )
        for text in filter(
            None,
            (
                *(f"{name}: {value}" for name, value in self._lineage().items()),
                *self.prediction.summary,
                self._expected_imbalance(),
                self.prediction.memory_summary,
            ),
        ):
            log.info("%s", text)
        _log_extensions()
        log.info("attention kernel: %s", kernel_choice.describe(trainer.parallel_model.kernel))
        training = self.config.training
        sources = self.dataset.summary(training.steps * training.global_batch_size)
        for each in self.run_config.training_stages[stage.index :]:
            if each.num_stages > 1:
                log.info("%s", each.summary())
            for text in sources if each.index == stage.index else ():
                log.info("  %s", text)
        for warning in self.prediction.warnings:
            log.warning("%s", warning)
        if self.peak_flops is None and self.device.type == "cuda":
            log.warning(
                "no MFU: the peak FLOP/s of this device are unknown; set metrics.peak_flops"
            )
        if resumed_from is not None:
            self._log_resume(resumed_from)
        self._track_earlier_events()
        resumed = str(resumed_from) if resumed_from else None
        self._log_event(
            "start",
            step=trainer.step,
            stage=stage.name,
            world_size=trainer.world.size,
            resumed=resumed,
        )

    def _track_earlier_events(self) -> None:
        """Sends trackers the events that this launch logged before they were created."""
        for event in self.run_dir.events_before_start():
            self._track_event({**event, "step": self.trainer.step})

    def _expected_imbalance(self) -> str:
        """Describes the expected load balance of data parallelism in the next steps; empty on one
        rank.
        """
        trainer = self.trainer
        if trainer.mesh.dp_degree == 1:
            return ""
        work = trainer.loader.next_steps(
            trainer.next_sequence, max_steps=self.stage.end_step - trainer.step
        )
        return f"data parallelism: dp imbalance {work.imbalance(self.cost):.2f} in the next {work.steps} steps"

    def _log_resume(self, checkpoint: Path) -> None:
        trainer = self.trainer
        stage = self.stage
        if trainer.step == stage.start_step and stage.index > 0:
            optimizer_state = (
                "a new optimizer" if stage.resets_optimizer else "the optimizer's state"
            )
            log.info("%s starts from %s with %s", stage, checkpoint, optimizer_state)
            return
        names = self.dataset.names
        counts = self.dataset.round_robin.counts(trainer.next_sequence)
        sources = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True))
        log.info(
            "resumed from %s: continuing with step %d, sequence %d%s; the data %s",
            *(
                checkpoint,
                self.first_step,
                trainer.next_sequence,
                f" ({sources})" if len(names) > 1 else "",
                "is unchanged" if trainer.next_sequence else "starts from its beginning",
            ),
        )

    def record_checkpoints(self, saves: Sequence[Save]) -> None:
        """Logs finished saves."""
        for save in saves:
            if save.problem is not None:
                self.failed_saves += 1
                self._log_event("checkpoint_failed", step=save.step, reason=save.problem)
                self._add_scalars(
                    {"train_checkpoint/failures": float(self.failed_saves)}, save.step
                )
            else:
                fields = {
                    key: getattr(save, key) for key in ("bytes", "seconds", "blocked_seconds")
                }
                self._log_event("checkpoint", path=str(save.path), step=save.step, **fields)
                self._add_scalars(
                    {f"train_checkpoint/{key}": float(value) for key, value in fields.items()},
                    save.step,
                )

    def _add_scalars(self, scalars: Mapping[str, float | None], step: int) -> None:
        if self.is_rank_zero:
            self.trackers.log(step, scalars)

    def record_validation(self, results: Sequence[ValidationResult]) -> None:
        """Logs validation results, after the metrics of the step that they follow."""
        self.flush()
        for result in results if self.is_rank_zero else ():
            event = result.event(self.run_dir.first_validation_loss(result.name))
            self._log_event("validation", stage=self.stage.name, **event)
            log.info("%s", format_validation(event))
            self._add_scalars(result.tracked_values(), result.step)

    def log_run_end(self, reason: str = "") -> None:
        """Logs how the stage ended, where the results are, and the next command.

        `reason` is that of a preemption.
        """
        if not self.is_rank_zero:
            return
        step = self.trainer.step
        stage = self.stage
        total_steps = self.stage.total_steps
        last = self.last_metrics
        loss, shards = (last.loss, last.loss_by_shard) if last is not None else (math.nan, None)
        fields = {"step": step, "loss": finite_or_none(loss), "skipped": self.skipped_steps}
        newest = next(
            (folder for _, folder in reversed(self.run_dir.committed_checkpoints())), None
        )
        if reason:
            self._log_event("preempted", reason=reason, **fields)
            location = f"from {newest}" if newest else "from step 0: there is no checkpoint"
            message = "preempted after step %d of %d (%s); run the same command to resume %s"
            log.info(message, step, total_steps, reason, location)
        elif stage.index + 1 < stage.num_stages:
            self._log_event("stage", name=stage.name, **fields)
            log.info("%s done, loss %.3f; run the same command for the next stage", stage, loss)
        else:
            self._log_event("end", **fields)
            skipped = (
                f", {self.skipped_steps} skipped for a non-finite gradient"
                if self.skipped_steps
                else ""
            )
            first_loss = format_or_dash(self.run_dir.first_loss(), ".3f")
            shard_losses = f" (by cp rank {format_losses(shards)})" if shards else ""
            location = f"newest checkpoint {newest}, " if newest else ""
            script = Path(sys.executable).with_name("tensorboard")
            command = f"{script if script.exists() else 'tensorboard'} --logdir {self.run_dir.tensorboard_dir}"
            charts = f"Charts: {command}. " if self.config.metrics.tensorboard else ""
            extension = "another [[stage]]" if stage.name else "a higher --training.steps"
            log.info(
                f"done: all {total_steps} steps{skipped}; loss {first_loss} -> {loss:.3f}{shard_losses}. "
                f"Results in {self.run_dir.path} ({location}metrics.jsonl). "
                f"{charts}To continue, run the same command with {extension}"
            )

    def require_written(self, reason: str) -> None:
        """Raises LostMetricsError on all ranks if lines are lost at the end of a launch; only
        warns at a preemption. Collective.
        """
        lost = (
            [*filter(None, (self.lines.close(), self.run_dir.close_events()))]
            if self.is_rank_zero
            else []
        )
        if problems := all_gather_values(lost)[0]:
            if not reason:
                raise LostMetricsError(*problems)
            if self.is_rank_zero:
                log.warning("%s", "; ".join(problems))

    def record_step(self, result: StepResult) -> None:
        """Logs the previous step, whose metrics have reached the host by now.

        On a CPU, logs this one, too.
        """
        self.flush(result)
        # A CPU has nothing in flight, so waiting a step would only delay the log.
        if self.device.type == "cpu":
            self.flush()

    def flush(self, following: StepResult | None = None) -> None:
        """Logs the pending step, in place of which `following` is pending then.

        Waits for the device.
        """
        previous = self._pending
        # Replaced first: if processing raises, no later flush processes the step again.
        self._pending = following
        if previous is not None:
            self._process(previous)

    def close(self) -> None:
        if self.is_rank_zero:
            self._track_events()
            for logger in (self.lines, self.console, self.trackers):
                logger.close()

    def _process(self, result: StepResult) -> None:
        metrics = self.last_metrics = result.read()
        if not metrics.targets:
            raise DivergedError(
                f"step {result.step} has no target: each token of its batch is padding or ends a document"
            )
        self._interval.append((result.data_wait_seconds, metrics))
        self.skipped_steps += metrics.skipped
        self.trainer.goodput.add_step(metrics.step_seconds)
        # Every step counts, logged or not: detectors compare consecutive losses, and their state
        # is equal on all ranks.
        spikes = self.trainer.loss_spikes
        sigmas = spikes.observe(metrics.loss, skipped=metrics.skipped)
        if result.was_rerun and self.is_rank_zero:
            log.warning(
                "step %d gave the same result when it was run again: suspect its data", result.step
            )
            self._log_event("rerun", step=result.step, loss=finite_or_none(metrics.loss))
        if metrics.skipped and self.is_rank_zero:
            log.warning(
                "step %d skipped: non-finite gradient (norm %s)", result.step, metrics.grad_norm
            )
            self._log_event("skipped", step=result.step)
        is_logged = result.step % self.config.metrics.log_interval == 0
        if is_logged or metrics.skipped or result.step in (self.first_step, self.stage.end_step):
            self._write(self._build_record(result, metrics))
        if self.prediction.step_seconds and (
            comparison := self.prediction.compare(metrics.step_seconds)
        ):
            log.info(
                "step time: %(measured_seconds).3g s, predicted %(predicted_seconds).3g s for %(device)s",
                comparison,
            )
            self._log_event("planned", **comparison)
        if spikes.has_diverged:
            raise DivergedError(
                f"steps {result.step - spikes.consecutive_skips + 1} to {result.step} had a non-finite gradient "
                f"(health.max_consecutive_skips = {spikes.consecutive_skips})"
            )
        # Last, because it may raise to roll back: the record of the step is written by then.
        if sigmas is not None:
            self._handle_spike(result, metrics, sigmas)

    def _write(self, record: Record) -> None:
        self._interval = []
        if not self.is_rank_zero:
            return
        # A launch that lost the run folder must not write between the lines of its successor.
        self.run_dir.require_lease()
        # On disk when this returns, so a checkpoint never precedes its metrics.
        self.lines.append(json.dumps(record, allow_nan=False))
        self.console.write(record)
        self.trackers.log(record["step"], values_of(record))
        self._track_events()
        if record["step"] == self.first_step and record["memory_peak_gib"] is not None:
            predicted = self.prediction.device_bytes
            comparison = "" if predicted is None else f", predicted {format_bytes(predicted)}"
            log.info(
                "peak memory: %s%s", format_bytes(record["memory_peak_gib"] * GIB), comparison
            )

    def _handle_spike(self, result: StepResult, metrics: StepMetrics, sigmas: float) -> None:
        if self.is_rank_zero:
            doubt = (
                ""
                if self.trainer.rerun
                else ": without training.deterministic, data or hardware may be the cause"
            )
            said = (result.step, metrics.loss, sigmas, doubt)
            log.warning("step %d: loss %.3f is %.0f sigmas above the recent mean%s", *said)
            self._log_event("spike", step=result.step, loss=metrics.loss, sigmas=sigmas)
        if self.config.health.on_spike == "roll_back" and self.rollbacks < MAX_ROLLBACKS:
            raise LossSpikeError(result.step, self.trainer.next_sequence)

    def _check_stragglers(self, seconds: float, data_wait_seconds: float) -> None:
        """Logs a rank that the others wait for. Collective."""
        # Times outside of collectives: inside them, all ranks take as long as the slowest.
        ranks = all_gather_values([self.hostname, data_wait_seconds, self.compute_probe.seconds()])
        straggler = self.straggler_detector.observe(ranks, seconds) if self.is_rank_zero else None
        if straggler is not None:
            log.warning("%s", straggler)
            self._log_event("straggler", step=self.trainer.step, **vars(straggler))

    def _build_record(self, result: StepResult, metrics: StepMetrics) -> Record:
        """The record of a step; rates cover all steps since the previous record. Collective."""
        seconds = sum(each.step_seconds for _, each in self._interval)
        data_wait_seconds = sum(wait for wait, _ in self._interval)
        tokens = sum(each.tokens for _, each in self._interval)
        pairs = sum(each.attended_pairs for _, each in self._interval)
        # Maxima, because the slowest rank bounds throughput, and the fullest runs out of memory
        # first.
        peak, reserved = peak_device_memory(self.device) or (0.0, 0.0)
        self._check_stragglers(seconds, data_wait_seconds)
        local_values = [seconds, data_wait_seconds, peak, reserved, peak_host_memory()]
        seconds, data_wait_seconds, peak, reserved, rss = max_over_ranks(None, local_values)
        device_seconds = seconds * self.trainer.world.size
        model_flops, executed_flops = (
            of_token * tokens + of_pair * pairs for of_token, of_pair in self.flops
        )
        is_accelerator = self.device.type != "cpu"
        record: Record = {
            "step": result.step,
            "tokens": metrics.tokens_seen,
            "loss": finite_or_none(metrics.loss),
            "grad_norm": finite_or_none(metrics.grad_norm),
            "lr": result.lr,
            "step_seconds": seconds / len(self._interval),
            "tokens_per_second": tokens / seconds,
            "tokens_per_second_per_device": tokens / device_seconds,
            "tflops_per_device": model_flops / device_seconds / 1e12,
            "mfu": model_flops / device_seconds / self.peak_flops if self.peak_flops else None,
            "hfu": executed_flops / device_seconds / self.peak_flops if self.peak_flops else None,
            "data_wait_pct": 100 * data_wait_seconds / seconds,
            "memory_peak_gib": peak / GIB if is_accelerator else None,
            "memory_reserved_gib": reserved / GIB if is_accelerator else None,
            "rss_gib": rss / GIB,
            "goodput_pct": self.trainer.goodput.percent(),
            "attention_imbalance": metrics.attention_imbalance,
            "dp_imbalance": self.dp_imbalance(result.busiest_pairs, result.mean_pairs),
            "loss_by_position": dict(
                zip(
                    position_bucket_names(),
                    map(finite_or_none, metrics.loss_by_position),
                    strict=True,
                )
            ),
            "loss_by_shard": [*map(finite_or_none, metrics.loss_by_shard)]
            if metrics.loss_by_shard
            else None,
            **self._router_metrics(metrics),
            "stage": self.stage.name,
            "sources": self._source_metrics(result, metrics),
        }
        return record | {"skipped": True} if metrics.skipped else record

    def _router_metrics(self, metrics: StepMetrics) -> Mapping[str, object]:
        """Router metrics of a step; warns of layers whose tokens go to few experts."""
        found = router_metrics(self.model, metrics.router_sums, metrics.targets)
        loads: Any = found.get("expert_load", ())
        for layer in self.expert_collapse.observe(loads):
            log.warning(
                "layer %d has collapsed: most of its experts had no token for ten steps",
                self.expert_layers[layer],
            )
            self._log_event("expert_collapse", layer=self.expert_layers[layer])
        return found

    def dp_imbalance(self, busiest_pairs: float, mean_pairs: float) -> float:
        """Predicted work of the busiest data-parallel rank over the mean, in one step."""
        tokens = self.trainer.loader.tokens_per_rank
        return self.cost.imbalance(
            busiest_pairs=busiest_pairs, mean_pairs=mean_pairs, tokens=tokens
        )

    def _source_metrics(
        self, result: StepResult, metrics: StepMetrics
    ) -> dict[str, dict[str, float | None]]:
        epochs = self.dataset.epochs(result.next_sequence)
        per_source = zip(
            self.dataset.names,
            metrics.tokens_by_source,
            epochs,
            metrics.loss_by_source,
            strict=True,
        )
        return {
            name: {"tokens": int(tokens), "epochs": epoch, "loss": loss and finite_or_none(loss)}
            for name, tokens, epoch, loss in per_source
        }


def _log_extensions() -> None:
    for each in installed():
        log.info(
            "extension %s %s from %s", each.extension.name, each.extension.version, each.folder
        )
