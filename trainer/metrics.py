"""Numbers of a run: metrics.jsonl, TensorBoard and the console, all from one record per logged update.

Definitions, also of MFU and HFU, are in docs/metrics.md; the FLOPs themselves in `models/config.py`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from parallelisms.collectives import max_over
from trainer.config import Config
from trainer.hardware import GIB, device_memory, host_memory, peak_flops
from trainer.ledger import ledger
from trainer.levers import table
from trainer.numbers import POSITIONS
from trainer.run_folder import RunFolder
from trainer.trainer import Measured, Trainer, Update

log = logging.getLogger(__name__)

Record = dict[str, Any]

# TensorBoard's tag of each number of a record.
TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "tokens": "train/tokens",
    "mfu": "perf/mfu",
    "hfu": "perf/hfu",
    "tflops_per_device": "perf/tflops_per_device",
    "tokens_per_second": "perf/tokens_per_second",
    "tokens_per_second_per_device": "perf/tokens_per_second_per_device",
    "step_seconds": "perf/step_seconds",
    "data_wait_pct": "perf/data_wait_pct",
    "attention_imbalance": "perf/attention_imbalance",
    "memory_peak_gib": "memory/peak_gib",
    "memory_reserved_gib": "memory/reserved_gib",
    "rss_gib": "memory/rss_gib",
}


class Sink(Protocol):
    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


class Metrics:
    """Collects updates and writes every `metrics.log_interval`-th, the first and the last.

    All ranks take part, because memory is the maximum over them; only rank 0 has sinks.
    """

    def __init__(self, config: Config, folder: RunFolder, trainer: Trainer, *, resumed: Path | None) -> None:
        self.config = config
        self.folder = folder
        self.world = trainer.world
        self.model = config.model.build()
        self.predicted = ledger(config, self.world.size)
        self.peak = config.metrics.peak_flops or peak_flops(self.world.device)
        self.steps = config.training.steps
        self.first_step = trainer.step + 1
        self.last_loss = math.nan
        self.last_by_shard: list[float | None] | None = None
        self.skipped = trainer.scalars()["skipped"]
        """Updates of the run so far whose gradient was not finite."""
        self._pending: Update | None = None
        self._since = Totals()
        self.sinks: list[Sink] = []
        if self.world.rank == 0:
            folder.begin(config, trainer.step)
            self._greet(trainer, resumed)
            self.sinks = [JsonLines(folder), console(config, ranks=trainer.mesh.tokens.size())]
            if config.metrics.tensorboard:
                self.sinks.append(TensorBoard(folder, config, self.first_step))

    def _greet(self, trainer: Trainer, resumed: Path | None) -> None:
        for change in trainer.changes:
            log.info("changed since the checkpoint: %s", change)
        degrees = " x ".join(f"{axis} {size}" for axis, size in trainer.mesh.degrees.items())
        log.info("%s on %s, %s", degrees, self.world.device, f"{self.model.num_parameters:,} parameters")
        topology = self.config.topology(self.world.size, nodes=self.world.nodes)
        for told in (*topology.drawing(), *self.config.plans(self.world.size), *table(self.predicted)):
            log.info("%s", told)
        log.info("attention kernel: %s", trainer.kernel)
        log.info("%s", trainer.loader.summary(self.steps))
        for remark in (*self.config.remarks(self.world.size), *topology.remarks()):
            log.warning("%s", remark)
        if self.peak is None and self.world.device.type == "cuda":
            log.warning("no peak FLOP/s is known for this device, so no MFU: set metrics.peak_flops")
        if resumed is not None:
            log.info("resumed from %s: next are update %d and row %d", resumed, self.first_step, trainer.next_row)
        start = {"step": trainer.step, "world_size": self.world.size, "resumed": str(resumed) if resumed else None}
        self.folder.event("start", **start)

    def checkpointed(self, checkpoint: Path) -> None:
        if self.world.rank == 0:
            self.folder.event("checkpoint", path=str(checkpoint))

    def farewell(self) -> None:
        """Says why the run ended, where everything is, and what to do next."""
        if self.world.rank != 0:
            return
        self.folder.event("end", step=self.steps, loss=_finite(self.last_loss), skipped=self.skipped)
        committed = self.folder.committed()
        beside = Path(sys.executable).with_name("tensorboard")
        tensorboard = beside if beside.exists() else "tensorboard"
        where = f"newest checkpoint {committed[-1][1]}, " if committed else ""
        log.info(
            "done: all %d updates%s; loss %s -> %.3f%s. Everything is in %s (%smetrics.jsonl). "
            "%sGo on: the same command with a higher --training.steps",
            self.steps,
            f", {self.skipped} of them skipped because their gradient was not finite" if self.skipped else "",
            _or_dash(self.folder.first_loss(), ".3f"),
            self.last_loss,
            f" (shards {_in_a_row(self.last_by_shard)})" if self.last_by_shard else "",
            self.folder.path,
            where,
            f"Look: {tensorboard} --logdir {self.folder.tensorboard}. " if self.config.metrics.tensorboard else "",
        )

    def write(self, update: Update) -> None:
        """Takes an update and writes the one before, whose numbers have left the device by now."""
        previous, self._pending = self._pending, update
        if previous is not None:
            self._take(previous)

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
        if measured.skipped and self.world.rank == 0:
            log.warning("update %d skipped: its gradient is not finite (norm %s)", update.step, measured.grad_norm)
            self.folder.event("skipped", step=update.step)
        if update.step in (self.first_step, self.steps) or measured.skipped or self._is_due(update.step):
            record = self._record(update, measured)
            self._since = Totals()
            for sink in self.sinks:
                sink.write(record)
            if update.step == self.first_step and record["memory_peak_gib"] is not None and self.world.rank == 0:
                predicted = self.predicted.device / GIB
                log.info("memory at its peak: %.2f GiB, predicted %.2f", record["memory_peak_gib"], predicted)

    def _is_due(self, step: int) -> bool:
        return step % self.config.metrics.log_interval == 0

    def _record(self, update: Update, measured: Measured) -> Record:
        """The line of an update; rates are over all updates since the line before."""
        since = self._since
        # The slowest rank sets the pace, and the fullest runs out first.
        peak, reserved = device_memory(self.world.device) or (0.0, 0.0)
        mine = [since.seconds, since.waited, peak, reserved, host_memory()]
        seconds, waited, peak, reserved, rss = max_over(None, mine)
        devices = self.world.size
        amounts = {"tokens": since.tokens, "pairs": since.pairs}
        flops = self.model.flops(**amounts) / seconds / devices
        memory = self.config.memory
        every = memory.input_every
        executed = self.model.executed_flops(**amounts, recompute=memory.recompute, every=every) / seconds / devices
        on_device = self.world.device.type != "cpu"
        record: Record = {
            "step": update.step,
            "tokens": measured.tokens_seen,
            "loss": _finite(measured.loss),
            "grad_norm": _finite(measured.grad_norm),
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
            "attention_imbalance": measured.attention_imbalance,
            "loss_by_position": dict(zip(position_names(), map(_finite, measured.loss_by_position), strict=True)),
            "loss_by_shard": [_finite(loss) for loss in measured.loss_by_shard] if measured.loss_by_shard else None,
        }
        return record | {"skipped": True} if measured.skipped else record


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


def _finite(value: float | None) -> float | None:
    """JSON has no NaN: what is not finite is null, and the line says that the update was skipped."""
    return value if value is not None and math.isfinite(value) else None


def position_names() -> list[str]:
    """`0-256`, `256-1K`, ..., `1M-`."""
    names = ["0", *(_short(edge) for edge in POSITIONS), ""]
    return [f"{low}-{high}" for low, high in pairwise(names)]


def _short(number: int) -> str:
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if number >= size and number % size == 0:
            return f"{number // size}{letter}"
    return str(number)


class JsonLines:
    """metrics.jsonl, a line at a time, on disk before anything that depends on it is."""

    def __init__(self, folder: RunFolder) -> None:
        self._file = folder.metrics.open("a")

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """TensorBoard files with a dashboard of the numbers that belong together, and the configuration as text."""

    def __init__(self, folder: RunFolder, config: Config, first_step: int) -> None:
        self._folder = folder
        self._config = config
        self._first_step = first_step
        self._writer: Any = None

    def write(self, record: Record) -> None:
        if self._writer is None:
            self._writer = self._open()
        step = record["step"]
        for key, tag in TAGS.items():
            if record[key] is not None:
                self._writer.add_scalar(tag, record[key], step)
        for name, loss in record["loss_by_position"].items():
            if loss is not None:
                self._writer.add_scalar(f"position/{name}", loss, step)
        for shard, loss in enumerate(record["loss_by_shard"] or ()):
            if loss is not None:
                self._writer.add_scalar(f"loss_by_shard/{shard}", loss, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> Any:
        # Imported at the first line, after the first update: it is not what a user waits for at start-up.
        from torch.utils.tensorboard import SummaryWriter

        from trainer.load import to_toml

        # What an earlier life of this run wrote past its last checkpoint is hidden, as it is cut from metrics.jsonl.
        writer = SummaryWriter(str(self._folder.tensorboard), purge_step=self._first_step)
        writer.add_text("config", "```toml\n" + to_toml(self._config) + "```")
        charts = {
            "training": {
                "loss": ["Multiline", [TAGS["loss"]]],
                "loss by position": ["Multiline", ["position/.*"]],
                "loss by shard": ["Multiline", ["loss_by_shard/.*"]],
                "gradient norm": ["Multiline", [TAGS["grad_norm"]]],
            },
            "performance": {
                "utilisation": ["Multiline", [TAGS["mfu"], TAGS["hfu"]]],
                "tokens per second": ["Multiline", [TAGS["tokens_per_second"]]],
                "attention imbalance": ["Multiline", [TAGS["attention_imbalance"]]],
                "GiB": ["Multiline", ["memory/.*"]],
            },
        }
        writer.add_custom_scalars(charts)
        return writer


def line(record: Record, *, steps: int, remaining_seconds: float, ranks: int) -> str:
    """A record for people: `update 20/100  loss 3.214  grad 0.82  lr 9.1e-04  4,812 tok/s  ...`.

    `ranks` hold tokens: one alone has nothing to balance.
    """
    parts = [
        f"update {record['step']}/{steps}",
        f"loss {_or_dash(record['loss'], '.4f')}",
        *([f"shards {_in_a_row(record['loss_by_shard'])}"] if record["loss_by_shard"] else []),
        f"grad {_or_dash(record['grad_norm'], '.3f')}",
        f"lr {record['lr']:.2e}",
        f"{record['tokens_per_second']:,.0f} tok/s",
        f"{record['tflops_per_device']:.3g} TFLOP/s",
        *([f"mfu {record['mfu']:.1%}"] if record["mfu"] is not None else []),
        *([f"gpu {record['memory_peak_gib']:.1f} GiB"] if record["memory_peak_gib"] is not None else []),
        f"rss {record['rss_gib']:.2f} GiB",
        f"data {record['data_wait_pct']:.1f}%",
        *([f"imbalance {record['attention_imbalance']:.2f}"] if ranks > 1 else []),
        f"left {duration(remaining_seconds)}",
    ]
    return "  ".join(parts)


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _in_a_row(losses: list[float | None]) -> str:
    """Each of them, or of more than a line has room for, the range."""
    known = [loss for loss in losses if loss is not None]
    if len(losses) > 8 and known:
        return f"{min(known):.2f} to {max(known):.2f}"
    return " ".join(_or_dash(loss, ".2f") for loss in losses)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


class LogLines:
    """A line per record in the log, readable in a SLURM file."""

    def __init__(self, steps: int, *, ranks: int) -> None:
        self._steps = steps
        self._ranks = ranks

    def write(self, record: Record) -> None:
        left = (self._steps - record["step"]) * record["step_seconds"]
        log.info("%s", line(record, steps=self._steps, remaining_seconds=left, ranks=self._ranks))

    def close(self) -> None:
        pass


class Bar:
    """The same lines over a progress bar, for a terminal."""

    def __init__(self, steps: int, *, ranks: int) -> None:
        self._lines = LogLines(steps, ranks=ranks)
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("training", total=steps)
        self._progress.start()

    def write(self, record: Record) -> None:
        self._progress.update(self._task, completed=record["step"])
        self._lines.write(record)

    def close(self) -> None:
        self._progress.stop()


def console(config: Config, *, ranks: int) -> Sink:
    kind = Bar if sys.stderr.isatty() else LogLines
    return kind(config.training.steps, ranks=ranks)
