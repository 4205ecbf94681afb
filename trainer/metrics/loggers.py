"""Where a record of metrics goes: metrics.jsonl, TensorBoard and the console."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from trainer.checkpoint.durable_io import Lines
from trainer.checkpoint.run_dir import RunFolder
from trainer.config.job_config import Config

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
    "goodput_pct": "perf/goodput_pct",
    "attention_imbalance": "perf/attention_imbalance",
    "memory_peak_gib": "memory/peak_gib",
    "memory_reserved_gib": "memory/reserved_gib",
    "rss_gib": "memory/rss_gib",
}


class Sink(Protocol):
    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl, a line at a time, on disk before anything that depends on it is."""

    def __init__(self, folder: RunFolder) -> None:
        self._lines = Lines(folder.metrics)

    def write(self, record: Record) -> None:
        self._lines.append(json.dumps(record, allow_nan=False))

    def close(self) -> None:
        self._lines.close()


class TensorBoard:
    """TensorBoard files with a dashboard of the numbers that belong together, and the configuration as text."""

    def __init__(self, folder: RunFolder, config: Config, first_step: int) -> None:
        self._folder = folder
        self._config = config
        self._first_step = first_step
        self._writer: Any = None
        self._is_lost = False

    def write(self, record: Record) -> None:
        numbers = {tag: record[key] for key, tag in TAGS.items()}
        numbers |= {f"position/{name}": loss for name, loss in record["loss_by_position"].items()}
        numbers |= {f"loss_by_shard/{shard}": loss for shard, loss in enumerate(record["loss_by_shard"] or ())}
        if len(record["sources"]) > 1:
            each = record["sources"].items()
            numbers |= {f"{key}_by_source/{name}": value for name, found in each for key, value in found.items()}
        self.add(numbers, record["step"])

    def add(self, numbers: Mapping[str, float | None], step: int) -> None:
        """Numbers by their tags; None is left out."""
        if self._is_lost:
            return
        with self._surviving():
            self._writer = self._writer or self._open()
            for tag, number in numbers.items():
                if number is not None:
                    self._writer.add_scalar(tag, number, step)

    def close(self) -> None:
        if self._writer is not None and not self._is_lost:
            with self._surviving():
                self._writer.close()

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """What a disk may do is told, and from then on nothing more is written."""
        try:
            yield
        except OSError as error:
            self._is_lost = True
            log.warning("%s cannot be written to any more: %s", self._folder.tensorboard, error)

    def _open(self) -> Any:
        # Imported at the first line: it is not what a user waits for at start-up.
        from torch.utils.tensorboard import SummaryWriter

        from trainer.config.parse import to_toml

        # What an earlier life of this run wrote past its last checkpoint is hidden, as it is cut from metrics.jsonl.
        writer = SummaryWriter(str(self._folder.tensorboard), purge_step=self._first_step)
        writer.add_text("config", "```toml\n" + to_toml(self._config) + "```")
        charts = {
            "training": {
                "loss": ["Multiline", [TAGS["loss"]]],
                "loss by position": ["Multiline", ["position/.*"]],
                "loss by shard": ["Multiline", ["loss_by_shard/.*"]],
                "loss by source": ["Multiline", ["loss_by_source/.*"]],
                "gradient norm": ["Multiline", [TAGS["grad_norm"]]],
            },
            "validation": {
                "loss": ["Multiline", ["validation/.*"]],
                "loss by context": ["Multiline", ["validation_context/.*"]],
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
        f"loss {or_dash(record['loss'], '.4f')}",
        *([f"shards {in_a_row(record['loss_by_shard'])}"] if record["loss_by_shard"] else []),
        f"grad {or_dash(record['grad_norm'], '.3f')}",
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


def or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def in_a_row(losses: list[float | None]) -> str:
    """Each of them, or of more than a line has room for, the range."""
    known = [loss for loss in losses if loss is not None]
    if len(losses) > 8 and known:
        return f"{min(known):.2f} to {max(known):.2f}"
    return " ".join(or_dash(loss, ".2f") for loss in losses)


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


def console(steps: int, *, ranks: int) -> Sink:
    kind = Bar if sys.stderr.isatty() else LogLines
    return kind(steps, ranks=ranks)
