"""Where a record of metrics goes: metrics.jsonl, TensorBoard and the console."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from trainer.checkpoint.durable_io import LineAppender
from trainer.checkpoint.run_dir import RunDir
from trainer.config.job_config import Config

log = logging.getLogger(__name__)

Record = dict[str, Any]

# TensorBoard's tag of each number of a record.
TENSORBOARD_TAGS = {
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


class MetricsLogger(Protocol):
    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


class JsonlLogger:
    """metrics.jsonl, a line at a time, on disk before anything that depends on it is."""

    def __init__(self, folder: RunDir) -> None:
        self._lines = LineAppender(folder.metrics_path)

    def write(self, record: Record) -> None:
        self._lines.append(json.dumps(record, allow_nan=False))

    def close(self) -> None:
        self._lines.close()


class TensorBoardLogger:
    """TensorBoard files with a dashboard of the numbers that belong together, and the configuration as text."""

    def __init__(self, folder: RunDir, config: Config, first_step: int) -> None:
        self._folder = folder
        self._config = config
        self._first_step = first_step
        self._writer: Any = None
        self._has_failed = False

    def write(self, record: Record) -> None:
        scalars = {tag: record[key] for key, tag in TENSORBOARD_TAGS.items()}
        scalars |= {f"position/{name}": loss for name, loss in record["loss_by_position"].items()}
        scalars |= {f"loss_by_shard/{shard}": loss for shard, loss in enumerate(record["loss_by_shard"] or ())}
        if len(record["sources"]) > 1:
            sources = record["sources"].items()
            scalars |= {f"{key}_by_source/{name}": value for name, metrics in sources for key, value in metrics.items()}
        self.add_scalars(scalars, record["step"])

    def add_scalars(self, scalars: Mapping[str, float | None], step: int) -> None:
        """Numbers by their tags; None is left out."""
        if self._has_failed:
            return
        with self._disable_on_error():
            self._writer = self._writer or self._open_writer()
            for tag, value in scalars.items():
                if value is not None:
                    self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        if self._writer is not None and not self._has_failed:
            with self._disable_on_error():
                self._writer.close()

    @contextmanager
    def _disable_on_error(self) -> Iterator[None]:
        """What a disk may do is told, and from then on nothing more is written."""
        try:
            yield
        except OSError as error:
            self._has_failed = True
            log.warning("%s cannot be written to any more: %s", self._folder.tensorboard_dir, error)

    def _open_writer(self) -> Any:
        # Imported at the first line: it is not what a user waits for at start-up.
        from torch.utils.tensorboard import SummaryWriter

        from trainer.config.toml_format import to_toml

        # What an earlier life of this run wrote past its last checkpoint is hidden, as it is cut from metrics.jsonl.
        writer = SummaryWriter(str(self._folder.tensorboard_dir), purge_step=self._first_step)
        writer.add_text("config", "```toml\n" + to_toml(self._config) + "```")
        charts = {
            "training": {
                "loss": ["Multiline", [TENSORBOARD_TAGS["loss"]]],
                "loss by position": ["Multiline", ["position/.*"]],
                "loss by shard": ["Multiline", ["loss_by_shard/.*"]],
                "loss by source": ["Multiline", ["loss_by_source/.*"]],
                "gradient norm": ["Multiline", [TENSORBOARD_TAGS["grad_norm"]]],
            },
            "validation": {
                "loss": ["Multiline", ["validation/.*"]],
                "loss by context": ["Multiline", ["validation_context/.*"]],
            },
            "performance": {
                "utilisation": ["Multiline", [TENSORBOARD_TAGS["mfu"], TENSORBOARD_TAGS["hfu"]]],
                "tokens per second": ["Multiline", [TENSORBOARD_TAGS["tokens_per_second"]]],
                "attention imbalance": ["Multiline", [TENSORBOARD_TAGS["attention_imbalance"]]],
                "GiB": ["Multiline", ["memory/.*"]],
            },
        }
        writer.add_custom_scalars(charts)
        return writer


def format_step(record: Record, *, total_steps: int, eta_seconds: float, num_token_ranks: int) -> str:
    """A record for people: `update 20/100  loss 3.214  grad 0.82  lr 9.1e-04  4,812 tok/s  ...`.

    `ranks` hold tokens: one alone has nothing to balance.
    """
    parts = [
        f"update {record['step']}/{total_steps}",
        f"loss {format_or_dash(record['loss'], '.4f')}",
        *([f"shards {format_losses(record['loss_by_shard'])}"] if record["loss_by_shard"] else []),
        f"grad {format_or_dash(record['grad_norm'], '.3f')}",
        f"lr {record['lr']:.2e}",
        f"{record['tokens_per_second']:,.0f} tok/s",
        f"{record['tflops_per_device']:.3g} TFLOP/s",
        *([f"mfu {record['mfu']:.1%}"] if record["mfu"] is not None else []),
        *([f"gpu {record['memory_peak_gib']:.1f} GiB"] if record["memory_peak_gib"] is not None else []),
        f"rss {record['rss_gib']:.2f} GiB",
        f"data {record['data_wait_pct']:.1f}%",
        *([f"imbalance {record['attention_imbalance']:.2f}"] if num_token_ranks > 1 else []),
        f"left {format_duration(eta_seconds)}",
    ]
    return "  ".join(parts)


def format_or_dash(value: float | None, format_spec: str) -> str:
    return "-" if value is None else format(value, format_spec)


def format_losses(losses: list[float | None]) -> str:
    """Each of them, or of more than a line has room for, the range."""
    finite_losses = [loss for loss in losses if loss is not None]
    if len(losses) > 8 and finite_losses:
        return f"{min(finite_losses):.2f} to {max(finite_losses):.2f}"
    return " ".join(format_or_dash(loss, ".2f") for loss in losses)


def format_duration(seconds: float) -> str:
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{remainder:02d}"


class ConsoleLogger:
    """A line per record in the log, readable in a SLURM file."""

    def __init__(self, total_steps: int, *, num_token_ranks: int) -> None:
        self._total_steps = total_steps
        self._num_token_ranks = num_token_ranks

    def write(self, record: Record) -> None:
        eta_seconds = (self._total_steps - record["step"]) * record["step_seconds"]
        log.info(
            "%s",
            format_step(
                record, total_steps=self._total_steps, eta_seconds=eta_seconds, num_token_ranks=self._num_token_ranks
            ),
        )

    def close(self) -> None:
        pass


class ProgressBarLogger:
    """The same lines over a progress bar, for a terminal."""

    def __init__(self, total_steps: int, *, num_token_ranks: int) -> None:
        self._console = ConsoleLogger(total_steps, num_token_ranks=num_token_ranks)
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("training", total=total_steps)
        self._progress.start()

    def write(self, record: Record) -> None:
        self._progress.update(self._task, completed=record["step"])
        self._console.write(record)

    def close(self) -> None:
        self._progress.stop()


def build_console_logger(total_steps: int, *, num_token_ranks: int) -> MetricsLogger:
    logger_class = ProgressBarLogger if sys.stderr.isatty() else ConsoleLogger
    return logger_class(total_steps, num_token_ranks=num_token_ranks)
