"""Log messages, and loggers of metric records: TensorBoard and the console."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from trainer.config.job_config import Config
from trainer.hardware.host import GIB
from trainer.storage.durable_io import format_bytes

KIBI = 1 << 10

log = logging.getLogger(__name__)

Record = dict[str, Any]

ETA_SMOOTHING = 0.1
"""Weight of the newest record in the average step time."""

# TensorBoard tag by record key.
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
    "dp_imbalance": "perf/dp_imbalance",
    "memory_peak_gib": "memory/peak_gib",
    "memory_reserved_gib": "memory/reserved_gib",
    "rss_gib": "memory/rss_gib",
}

EXPERT_TAGS = {
    "balance_loss": "experts/balance_loss",
    "router_z_loss": "experts/router_z_loss",
    "router_entropy": "experts/router_entropy",
    "expert_load_max": "experts/load_max",
    "dead_experts": "experts/dead",
}
"""Of models with experts only."""
MAX_SHOWN_LOAD = 2.0
"""White in the image of loads; black is none, and the mean is in the middle."""

# TensorBoard's custom dashboard: category, chart, tags.
DASHBOARD = {
    "training": {
        "loss": ["train/loss"],
        "loss by position": ["position/.*"],
        "loss by shard": ["loss_by_shard/.*"],
        "loss by source": ["loss_by_source/.*"],
        "gradient norm": ["train/grad_norm"],
    },
    "validation": {"loss": ["validation/.*"], "loss by context": ["validation_context/.*"]},
    "performance": {
        "utilisation": ["perf/mfu", "perf/hfu"],
        "tokens per second": ["perf/tokens_per_second"],
        "attention imbalance": ["perf/attention_imbalance"],
        "expert load": ["experts/load_max"],
        "GiB": ["memory/.*"],
    },
}


class TensorBoardLogger:
    """TensorBoard scalars, a custom dashboard, and the configuration as text, if `metrics.tensorboard` is set."""

    def __init__(self, config: Config, folder: Path, first_step: int) -> None:
        self._config, self._folder, self._first_step = config, folder, first_step
        self._is_enabled = config.metrics.tensorboard
        self._writer: Any = None

    def write(self, record: Record) -> None:
        scalars = {tag: record[key] for key, tag in TENSORBOARD_TAGS.items()}
        if loads := record.get("expert_load"):
            scalars |= {tag: record[key] for key, tag in EXPERT_TAGS.items()}
            self._add_image("experts/load by layer", loads, record["step"])
        scalars |= {f"position/{name}": loss for name, loss in record["loss_by_position"].items()}
        scalars |= {f"loss_by_shard/{shard}": loss for shard, loss in enumerate(record["loss_by_shard"] or ())}
        if len(record["sources"]) > 1:
            sources = record["sources"].items()
            scalars |= {f"{key}_by_source/{name}": value for name, metrics in sources for key, value in metrics.items()}
        self.add_scalars(scalars, record["step"])

    def add_scalars(self, scalars: Mapping[str, float | None], step: int) -> None:
        """Scalars by tag; None is skipped."""
        with self._disable_on_error():
            if self._is_enabled:
                self._writer = self._writer or self._open_writer()
                for tag, value in scalars.items():
                    if value is not None:
                        self._writer.add_scalar(tag, value, step)

    def _add_image(self, tag: str, loads: list[list[float]], step: int) -> None:
        """A row for each layer, a column for each expert."""
        import torch

        with self._disable_on_error():
            if self._is_enabled:
                self._writer = self._writer or self._open_writer()
                image = torch.tensor(loads).div(MAX_SHOWN_LOAD).clamp(max=1)
                self._writer.add_image(tag, image[None], step)

    def close(self) -> None:
        with self._disable_on_error():
            if self._is_enabled and self._writer is not None:
                self._writer.close()

    @contextmanager
    def _disable_on_error(self) -> Iterator[None]:
        """Logs the first OSError and disables this logger, since training does not depend on it."""
        try:
            yield
        except OSError as error:
            self._is_enabled = False
            log.warning("TensorBoard logging disabled: cannot write to %s: %s", self._folder, error)

    def _open_writer(self) -> Any:
        # Imported at the first record, because it slows start-up.
        from torch.utils.tensorboard import SummaryWriter

        from trainer.config.toml_format import to_toml

        # Hides steps that an earlier launch logged after its last checkpoint; metrics.jsonl drops them, too.
        writer = SummaryWriter(str(self._folder), purge_step=self._first_step)
        writer.add_text("config", "```toml\n" + to_toml(self._config) + "```")
        writer.add_custom_scalars(
            {
                category: {title: ["Multiline", tags] for title, tags in charts.items()}
                for category, charts in DASHBOARD.items()
            }
        )
        return writer


class ConsoleLogger:
    """One log line per record; in a terminal above a progress bar."""

    def __init__(self, total_steps: int, *, num_token_ranks: int) -> None:
        self._total_steps, self._num_token_ranks = total_steps, num_token_ranks
        self._num_records, self._average_step_seconds = 0, 0.0
        self._progress: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._progress.add_task("training", total=total_steps)
            self._progress.start()

    def write(self, record: Record) -> None:
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=record["step"])
        eta = (self._total_steps - record["step"]) * self._smooth(record["step_seconds"])
        line = format_step(
            record, total_steps=self._total_steps, eta_seconds=eta, num_token_ranks=self._num_token_ranks
        )
        log.info("%s", line)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _smooth(self, step_seconds: float) -> float:
        """Exponential moving average of step seconds. The second record replaces the first, which compiles."""
        self._num_records += 1
        weight = 1.0 if self._num_records <= 2 else ETA_SMOOTHING
        self._average_step_seconds += weight * (step_seconds - self._average_step_seconds)
        return self._average_step_seconds


def format_step(record: Record, *, total_steps: int, eta_seconds: float, num_token_ranks: int) -> str:
    """One console line: `step 20/100  loss 3.2141  grad norm 0.823  lr 9.10e-04  4,812 tok/s  ...`.

    Load balance is shown if `num_token_ranks`, the ranks that hold different tokens, are several.
    """
    shards, mfu, peak = record["loss_by_shard"], record["mfu"], record["memory_peak_gib"]
    parts = (
        f"step {record['step']}/{total_steps}",
        f"loss {format_or_dash(record['loss'], '.4f')}",
        f"loss by cp rank {format_losses(shards)}" if shards else "",
        f"grad norm {format_or_dash(record['grad_norm'], '.3f')}",
        f"lr {record['lr']:.2e}",
        f"{record['tokens_per_second']:,.0f} tok/s",
        f"{record['tflops_per_device']:.3g} TFLOP/s",
        "" if mfu is None else f"mfu {mfu:.1%}",
        "" if peak is None else f"peak mem {format_bytes(peak * GIB)}",
        f"rss {format_bytes(record['rss_gib'] * GIB)}",
        f"data wait {record['data_wait_pct']:.1f}%",
        f"attn imbalance {record['attention_imbalance']:.2f}" if num_token_ranks > 1 else "",
        f"expert load {record['expert_load_max']:.2f}" if "expert_load_max" in record else "",
        f"dp imbalance {record['dp_imbalance']:.2f}" if record["dp_imbalance"] != 1 else "",
        f"eta {format_duration(eta_seconds)}",
    )
    return "  ".join(filter(None, parts))


def format_or_dash(value: float | None, format_spec: str) -> str:
    return "-" if value is None else format(value, format_spec)


def format_losses(losses: list[float | None]) -> str:
    """Up to 8 losses, or the range of more."""
    finite_losses = [loss for loss in losses if loss is not None]
    if len(losses) > 8 and finite_losses:
        return f"{min(finite_losses):.2f} to {max(finite_losses):.2f}"
    return " ".join(format_or_dash(loss, ".2f") for loss in losses)


def format_tokens(value: float) -> str:
    """Multiples of 1024 in K or M (8192 is 8K, 1572864 is 1.5M), other numbers in full."""
    if value < KIBI or value % KIBI:
        return f"{value:,.10g}"
    is_mega = value >= KIBI**2 and value % (KIBI**2 / 8) == 0
    return f"{value / KIBI**2:,g}M" if is_mega else f"{value / KIBI:,.10g}K"


def format_duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


# ---- messages


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Looks up `sys.stderr` for each record, because a progress bar replaces it to stay below the log lines."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure_logging(rank: int) -> None:
    """To standard error: rank 0 from INFO up, other ranks from WARNING up with their rank."""
    handler = _StderrHandler()
    handler.setFormatter(_formatter(rank, "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("trainer").setLevel(logging.INFO if rank == 0 else logging.WARNING)


def add_log_file(folder: Path, rank: int) -> None:
    """Also appends to `rank-N.log`, which is only created with the first message."""
    handler = logging.FileHandler(folder / f"rank-{rank}.log", delay=True)
    handler.setFormatter(_formatter(rank, "%Y-%m-%d %H:%M:%S"))
    logging.getLogger().addHandler(handler)


def _formatter(rank: int, time: str) -> logging.Formatter:
    origin = "" if rank == 0 else f"[rank {rank}] "
    return logging.Formatter(f"%(asctime)s {origin}%(message)s", datefmt=time)
