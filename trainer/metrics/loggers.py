"""Log messages, and the console's lines of metric records."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any, TextIO

from trainer.errors import printable
from trainer.hardware.host import GIB
from trainer.storage.durable_io import format_bytes
from trainer.storage.progress import new_bar

KIBI = 1 << 10

log = logging.getLogger(__name__)

Record = dict[str, Any]

ETA_SMOOTHING = 0.1
"""Weight of the newest record in the average step time."""


class ConsoleLogger:
    """One log line per record; in a terminal above a progress bar."""

    def __init__(self, total_steps: int, *, num_token_ranks: int) -> None:
        self._total_steps = total_steps
        self._num_token_ranks = num_token_ranks
        self._num_records = 0
        self._average_step_seconds = 0.0
        self._progress: Any = None
        if sys.stderr.isatty():
            self._progress = new_bar("steps")
            self._progress.add_task("training", total=total_steps)
            self._progress.start()

    def write(self, record: Record) -> None:
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=record["step"])
        eta = (self._total_steps - record["step"]) * self._smooth(record["step_seconds"])
        line = format_step(
            record,
            total_steps=self._total_steps,
            eta_seconds=eta,
            num_token_ranks=self._num_token_ranks,
        )
        log.info("%s", line)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _smooth(self, step_seconds: float) -> float:
        """Exponential moving average of step seconds.

        The second record replaces the first, which compiles.
        """
        self._num_records += 1
        weight = 1.0 if self._num_records <= 2 else ETA_SMOOTHING
        self._average_step_seconds += weight * (step_seconds - self._average_step_seconds)
        return self._average_step_seconds


def format_step(
    record: Record, *, total_steps: int, eta_seconds: float, num_token_ranks: int
) -> str:
    """One console line: `step 20/100  loss 3.2141  grad norm 0.823  lr 9.10e-04  4,812 tok/s
    ...`.

    Load balance is shown if `num_token_ranks`, the ranks that hold different tokens, are several.
    """
    shards = record["loss_by_shard"]
    mfu = record["mfu"]
    peak = record["memory_peak_gib"]
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
    """Looks up `sys.stderr` for each record, because a progress bar replaces it to stay below the
    log lines.
    """

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure_logging(rank: int) -> None:
    """Logs to standard error: rank 0 from INFO up, other ranks from WARNING up with their rank."""
    handler = _StderrHandler()
    handler.setFormatter(_formatter(rank, "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("trainer").setLevel(logging.INFO if rank == 0 else logging.WARNING)


def log_plainly() -> None:
    """Logs messages alone to standard error, for a command of one process."""
    handler = _StderrHandler()
    handler.setFormatter(_PrintableFormatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def add_log_file(folder: Path, rank: int) -> None:
    """Adds a handler that appends messages to `rank-N.log`, which the first one creates."""
    handler = logging.FileHandler(folder / f"rank-{rank}.log", delay=True)
    handler.setFormatter(_formatter(rank, "%Y-%m-%d %H:%M:%S"))
    logging.getLogger().addHandler(handler)


def write_traceback(error: BaseException) -> None:
    """Writes the traceback of an error to the log file of this rank, if it has one."""
    exc_info = (type(error), error, error.__traceback__)
    record = logging.LogRecord(log.name, logging.ERROR, __file__, 0, "traceback:", None, exc_info)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


class _PrintableFormatter(logging.Formatter):
    """Escapes control characters, with which a stranger's names could change the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _formatter(rank: int, time: str) -> logging.Formatter:
    origin = "" if rank == 0 else f"[rank {rank}] "
    return _PrintableFormatter(f"%(asctime)s {origin}%(message)s", datefmt=time)
