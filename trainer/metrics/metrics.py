"""Numbers of a run: metrics.jsonl, TensorBoard and the console, all from one record per logged update.

Definitions, also of MFU and HFU, are in docs/metrics.md; the FLOPs themselves in `models/config.py`.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname

from parallelisms.collectives import gather_over, max_over
from trainer.checkpoint.async_save import Saved
from trainer.checkpoint.run_dir import RunFolder
from trainer.config.job_config import Config, Stage
from trainer.data.sequences import Rows
from trainer.evaluation.validation import Result, sentence
from trainer.hardware.device import GIB, Work, device_memory, host_memory, peak_flops, planned_device
from trainer.memory.estimator import ledger
from trainer.memory.report import table
from trainer.metrics.loggers import JsonLines, Record, Sink, TensorBoard, console, in_a_row, or_dash
from trainer.metrics.step_metrics import finite, position_names
from trainer.plan.predicted_vs_measured import Beside
from trainer.resilience.anomalies import ROLLBACKS, LostError, Pace, SpikeError
from trainer.trainer import Measured, Trainer, Update

log = logging.getLogger(__name__)


class Metrics:
    """Collects updates and writes every `metrics.log_interval`-th, the first and the last.

    All ranks take part, because memory is the maximum over them; only rank 0 has sinks.
    """

    def __init__(
        self, config: Config, folder: RunFolder, trainer: Trainer, *, later: Sequence[Rows] = (), resumed: Path | None
    ) -> None:
        """`config` is that of all stages, `later` the rows of those after this one."""
        self.whole, self.config = config, trainer.config
        self.trainer = trainer
        self.stage, self.rows = trainer.stage, trainer.rows
        self.folder = folder
        self.world = trainer.world
        self.model = self.config.model.build()
        self.predicted = ledger(self.config, self.world.size)
        self.planned = Beside(self.config, self.world.size, planned_device(self.config, self.world.device))
        self.peak = self.config.metrics.peak_flops or peak_flops(self.world.device)
        self.steps = self.stage.total
        self.first_step = trainer.step + 1
        self.last_loss = math.nan
        self.last_by_shard: list[float | None] | None = None
        self.skipped = trainer.scalars()["skipped"]
        """Updates of the run so far whose gradient was not finite."""
        self.pace = Pace(self.config.health.straggler_ratio)
        self.work, self.host = Work(self.world.device), gethostname()
        self.rollbacks = 0
        """Since the newest checkpoint."""
        self.failed_saves = 0
        """Checkpoints that could not be written since this start."""
        self._pending: Update | None = None
        self._since = Totals()
        self.sinks: list[Sink] = []
        if self.world.rank == 0:
            folder.begin(config, trainer.step)
            left = config.stages[self.stage.index :]
            self._greet(trainer, [*zip(left, (trainer.rows, *later), strict=True)], resumed)
            self._open(config)

    def _open(self, config: Config) -> None:
        self.sinks = [JsonLines(self.folder), console(self.steps, ranks=self.trainer.mesh.tokens.size())]
        if config.metrics.tensorboard:
            self.sinks.append(TensorBoard(self.folder, config, self.first_step))

    def rolled_back(self, spike: SpikeError, checkpoint: Path | None, rows: tuple[int, int]) -> None:
        """The trainer goes on from an earlier update; what was written since is cut."""
        self._pending, self._since, self.first_step = None, Totals(), self.trainer.step + 1
        self.skipped = self.trainer.scalars()["skipped"]
        self.rollbacks += 1
        if self.world.rank != 0:
            return
        self.close()
        self.folder.begin(self.whole, self.trainer.step)
        self._open(self.whole)
        self.folder.event("rolled back", step=spike.step, to=str(checkpoint), without_rows=rows)
        log.warning("rolled back from update %d to %s; rows %d to %d are left out", spike.step, checkpoint, *rows)

    def _greet(self, trainer: Trainer, left: Sequence[tuple[Stage, Rows]], resumed: Path | None) -> None:
        for change in trainer.changes:
            log.info("changed since the checkpoint: %s", change)
        degrees = " x ".join(f"{axis} {size}" for axis, size in trainer.mesh.degrees.items())
        log.info("%s on %s, %s", degrees, self.world.device, f"{self.model.num_parameters:,} parameters")
        topology = self.config.topology(self.world.size, nodes=self.world.nodes)
        for told in (*topology.drawing(), *self.config.plans(self.world.size), *table(self.predicted)):
            log.info("%s", told)
        log.info("attention kernel: %s", trainer.placed.kernel)
        for stage, rows in left:
            if stage.count > 1:
                log.info("%s", stage.summary())
            for told in rows.summary(stage.config.training.steps * stage.config.training.global_batch_size):
                log.info("  %s", told)
        for remark in (*self.config.remarks(self.world.size), *topology.remarks()):
            log.warning("%s", remark)
        if self.peak is None and self.world.device.type == "cuda":
            log.warning("no peak FLOP/s is known for this device, so no MFU: set metrics.peak_flops")
        if resumed is not None and trainer.step == self.stage.first_step and self.stage.index > 0:
            state = "a fresh optimizer" if self.stage.is_fresh else "the optimizer's state"
            log.info("%s begins from %s, with %s", self.stage, resumed, state)
        elif resumed is not None:
            drawn = dict(zip(self.rows.names, self.rows.mix.counts(trainer.next_row), strict=True))
            told = f" ({', '.join(f'{name} {count}' for name, count in drawn.items())})" if len(drawn) > 1 else ""
            log.info(
                "resumed from %s: next are update %d and row %d%s; the data is the same",
                *(resumed, self.first_step, trainer.next_row, told),
            )
        start = {
            "step": trainer.step,
            "stage": self.stage.name,
            "world_size": self.world.size,
            "resumed": str(resumed) if resumed else None,
        }
        self.folder.event("start", **start)

    def checkpointed(self, saves: Sequence[Saved]) -> None:
        """Writes how saves ended."""
        self.failed_saves += sum(saved.problem is not None for saved in saves)
        for saved in saves if self.world.rank == 0 else ():
            if saved.problem is not None:
                self.folder.event("checkpoint_failed", step=saved.step, reason=saved.problem)
                numbers = {"checkpoint/failures": float(self.failed_saves)}
            else:
                keys = ("bytes", "seconds", "blocked_seconds")
                facts = {key: getattr(saved, key) for key in keys}
                self.folder.event("checkpoint", path=str(saved.path), step=saved.step, **facts)
                numbers = {f"checkpoint/{key}": float(value) for key, value in facts.items()}
            for sink in self.sinks:
                if isinstance(sink, TensorBoard):
                    sink.add(numbers, saved.step)

    def validated(self, results: Sequence[Result]) -> None:
        """Writes what the sets say after the last update that was written or taken."""
        self.flush()
        if self.world.rank != 0:
            return
        for result in results:
            first = self.folder.first_validation(result.name)
            event = result.event(first)
            self.folder.event("validation", stage=self.stage.name, **event)
            log.info("%s", sentence(event))
            for sink in self.sinks:
                if isinstance(sink, TensorBoard):
                    sink.add(result.tags(), result.step)

    def farewell(self, reason: str = "") -> None:
        """Says why the run ended, or why it is left, where everything is, and what to do next."""
        if self.world.rank != 0:
            return
        facts = {"step": self.trainer.step, "loss": finite(self.last_loss), "skipped": self.skipped}
        if reason:
            self.folder.event("left", reason=reason, **facts)
            newest = self.folder.committed()[-1:]
            where = f"from {newest[0][1]}" if newest else "from the beginning: there is no checkpoint"
            log.info(
                "left after update %d of %d (%s); the same command goes on %s",
                self.trainer.step,
                self.steps,
                reason,
                where,
            )
            return
        if self.stage.index + 1 < self.stage.count:
            self.folder.event("stage", name=self.stage.name, **facts)
            log.info(
                "%s is done, loss %.3f; the next one follows, or the same command begins it", self.stage, self.last_loss
            )
            return
        self.folder.event("end", **facts)
        committed = self.folder.committed()
        beside = Path(sys.executable).with_name("tensorboard")
        tensorboard = beside if beside.exists() else "tensorboard"
        where = f"newest checkpoint {committed[-1][1]}, " if committed else ""
        log.info(
            "done: all %d updates%s; loss %s -> %.3f%s. Everything is in %s (%smetrics.jsonl). "
            "%sGo on: the same command with %s",
            self.steps,
            f", {self.skipped} of them skipped because their gradient was not finite" if self.skipped else "",
            or_dash(self.folder.first_loss(), ".3f"),
            self.last_loss,
            f" (shards {in_a_row(self.last_by_shard)})" if self.last_by_shard else "",
            self.folder.path,
            where,
            f"Look: {tensorboard} --logdir {self.folder.tensorboard}. " if self.config.metrics.tensorboard else "",
            "another [[stage]]" if self.stage.name else "a higher --training.steps",
        )

    def write(self, update: Update) -> None:
        """Takes an update and writes the one before, whose numbers have left the device by now; a CPU's are there."""
        previous, self._pending = self._pending, update
        if previous is not None:
            self._take(previous)
        if self.world.device.type == "cpu":
            self.flush()

    def flush(self) -> None:
        """Writes the update that is still pending; waits for the device."""
        previous, self._pending = self._pending, None
        if previous is not None:
            self._take(previous)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()

    def _take(self, update: Update) -> None:
        measured = update.read()
        self._since.add(update, measured)
        self.last_loss = measured.loss
        self.last_by_shard = measured.loss_by_shard
        self.skipped += measured.skipped
        self.trainer.goodput.add(measured.step_seconds)
        above = self.trainer.losses.take(measured.loss, skipped=measured.skipped)
        if measured.skipped and self.world.rank == 0:
            log.warning("update %d skipped: its gradient is not finite (norm %s)", update.step, measured.grad_norm)
            self.folder.event("skipped", step=update.step)
        if update.step in (self.first_step, self.stage.last_step) or measured.skipped or self._is_due(update.step):
            record = self._record(update, measured)
            self._since = Totals()
            for sink in self.sinks:
                sink.write(record)
            if update.step == self.first_step and record["memory_peak_gib"] is not None and self.world.rank == 0:
                predicted = self.predicted.device / GIB
                log.info("memory at its peak: %.2f GiB, predicted %.2f", record["memory_peak_gib"], predicted)
        beside = self.planned.take(measured.step_seconds)
        if beside is not None and self.world.rank == 0:
            log.info(
                "an update takes %(measured_seconds).3g s, predicted %(predicted_seconds).3g for %(device)s", beside
            )
            self.folder.event("planned", **beside)
        if self.trainer.losses.is_lost:
            skipped = self.trainer.losses.skipped_in_a_row
            raise LostError(
                f"update {update.step} and the {skipped - 1} before it had no finite gradient "
                f"(health.skipped_in_a_row = {skipped})"
            )
        if above is not None:
            self._spike(update, measured, above)

    def _spike(self, update: Update, measured: Measured, above: float) -> None:
        if self.world.rank == 0:
            log.warning("update %d: loss %.3f is %.0f sigmas above those before", update.step, measured.loss, above)
            self.folder.event("spike", step=update.step, loss=measured.loss, sigmas=above)
        if self.config.health.on_spike == "roll_back" and self.rollbacks < ROLLBACKS:
            raise SpikeError(update.step, self.trainer.next_row)

    def _lag(self, seconds: float, waited: float) -> None:
        """Tells of a rank that the others wait for."""
        everyone = gather_over((self.host, waited, self.work.seconds()))
        if self.world.rank != 0:
            return
        hosts, waits, works = zip(*everyone, strict=True)
        straggler = self.pace.take(hosts, waited=waits, worked=works, of=seconds)
        if straggler is not None:
            log.warning("%s", straggler)
            self.folder.event("straggler", **vars(straggler))

    def _is_due(self, step: int) -> bool:
        return step % self.config.metrics.log_interval == 0

    def _record(self, update: Update, measured: Measured) -> Record:
        """The line of an update; rates are over all updates since the line before."""
        since = self._since
        # The slowest rank sets the pace, and the fullest runs out first.
        peak, reserved = device_memory(self.world.device) or (0.0, 0.0)
        self._lag(since.seconds, since.waited)
        mine = [since.seconds, since.waited, peak, reserved, host_memory()]
        seconds, waited, peak, reserved, rss = max_over(None, mine)
        devices = self.world.size
        amounts = {"tokens": since.tokens, "pairs": since.pairs}
        flops = self.model.flops(**amounts) / seconds / devices
        memory = self.config.memory
        again = self.model.executed_flops(**amounts, recompute=memory.recompute, input_every=memory.input_every)
        executed = again / seconds / devices
        on_device = self.world.device.type != "cpu"
        record: Record = {
            "step": update.step,
            "tokens": measured.tokens_seen,
            "loss": finite(measured.loss),
            "grad_norm": finite(measured.grad_norm),
            "lr": update.lr,
            "step_seconds": seconds / since.updates,
            "tokens_per_second": since.tokens / seconds,
            "tokens_per_second_per_device": since.tokens / seconds / devices,
            "tflops_per_device": flops / 1e12,
            "mfu": flops / self.peak if self.peak else None,
            "hfu": executed / self.peak if self.peak else None,
            "data_wait_pct": 100 * waited / seconds,
            "memory_peak_gib": peak / GIB if on_device else None,
            "memory_reserved_gib": reserved / GIB if on_device else None,
            "rss_gib": rss / GIB,
            "goodput_pct": self.trainer.goodput.percent(),
            "attention_imbalance": measured.attention_imbalance,
            "loss_by_position": dict(zip(position_names(), map(finite, measured.loss_by_position), strict=True)),
            "loss_by_shard": [finite(loss) for loss in measured.loss_by_shard] if measured.loss_by_shard else None,
            "stage": self.stage.name,
            "sources": self._sources(update, measured),
        }
        return record | {"skipped": True} if measured.skipped else record

    def _sources(self, update: Update, measured: Measured) -> dict[str, dict[str, float | None]]:
        epochs = self.rows.epochs(update.rows)
        each = zip(self.rows.names, measured.tokens_by_source, epochs, measured.loss_by_source, strict=True)
        return {
            name: {"tokens": int(tokens), "epochs": gone_through, "loss": loss and finite(loss)}
            for name, tokens, gone_through, loss in each
        }


@dataclass
class Totals:
    """What happened since the last line."""

    updates: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    tokens: float = 0.0
    pairs: float = 0.0

    def add(self, update: Update, measured: Measured) -> None:
        self.updates += 1
        self.seconds += measured.step_seconds
        self.waited += update.data_wait_seconds
        self.tokens += measured.tokens
        self.pairs += measured.pairs
