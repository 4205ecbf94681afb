"""Trackers: where the metrics of a run go, besides its own metrics.jsonl and the console.

An extension adds to `TRACKERS`. No tracker can end a run: one that raises is left out from then
on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from trainer.config import extension
from trainer.config.extension import TrackedRun
from trainer.metrics.loggers import Record

log = logging.getLogger(__name__)

Value = float | Sequence[Sequence[float]]
"""A number, or a table: the load of experts has a row for each layer and a column for each
expert.
"""

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
    "dp_imbalance": "perf/dp_imbalance",
    "memory_peak_gib": "memory/peak_gib",
    "memory_reserved_gib": "memory/reserved_gib",
    "rss_gib": "memory/rss_gib",
}
"""Names of values, by key of a record."""

EXPERT_TAGS = {
    "balance_loss": "experts/balance_loss",
    "router_z_loss": "experts/router_z_loss",
    "router_entropy": "experts/router_entropy",
    "expert_load_max": "experts/load_max",
    "dead_experts": "experts/dead",
}
"""Names of values of models with experts, by key of a record."""
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


class Tracker(Protocol):
    """A destination of metrics on rank 0, created at the start of a launch and again after a
    rollback.
    """

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Takes what is known of a step; not necessarily all at once."""

    def close(self) -> None:
        """Ends the tracker. Called once."""


class TensorBoard:
    """Scalars, images of tables, a custom dashboard, and the configuration as text."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._writer: Any = None

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        # Imported at the first record, because it slows start-up.
        self._writer = self._writer or self._open_writer()
        for name, value in values.items():
            if isinstance(value, Sequence):
                self._add_image(name, value, step)
            else:
                self._writer.add_scalar(name, value, step)

    def _add_image(self, name: str, table: Sequence[Sequence[float]], step: int) -> None:
        import torch

        image = torch.tensor(table).div(MAX_SHOWN_LOAD).clamp(max=1)
        self._writer.add_image(name, image[None], step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open_writer(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        # Hides steps that an earlier launch logged after its last checkpoint; metrics.jsonl drops
        # them, too.
        writer = SummaryWriter(
            str(self._run.folder / "tensorboard"), purge_step=self._run.first_step
        )
        writer.add_text("config", f"```toml\n{self._run.toml}```")
        if self._run.lineage:
            writer.add_text("lineage", self._run.lineage)
        writer.add_custom_scalars(
            {
                category: {title: ["Multiline", tags] for title, tags in charts.items()}
                for category, charts in DASHBOARD.items()
            }
        )
        return writer


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {"tensorboard": TensorBoard}
"""Built-in trackers by name, which `trainer.config.extension.BUILT_IN_TRACKERS` lists."""


class Trackers:
    """All trackers of a run."""

    def __init__(self, run: TrackedRun, *, without: Collection[str] = ()) -> None:
        """`without`: names in `TRACKERS`, or in those of extensions, that are not wanted."""
        known = TRACKERS.copy()
        for each in extension.installed():
            known.update(each.extension.trackers)
        self._running = dict[str, Tracker]()
        for name in [name for name in known if name not in without]:
            with self._left_out_on_error(name):
                self._running[name] = known[name](run)

    def log(self, step: int, values: Mapping[str, Value | None]) -> None:
        """Passes the values to every tracker, without those that are None."""
        # The loop visits a copy of the trackers, because one that raises is removed meanwhile.
        present = {name: value for name, value in values.items() if value is not None}
        for name, tracker in [*self._running.items()]:
            with self._left_out_on_error(name):
                tracker.log(step, present)

    def close(self) -> None:
        for name, tracker in [*self._running.items()]:
            with self._left_out_on_error(name):
                tracker.close()
        self._running.clear()

    @contextmanager
    def _left_out_on_error(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - training depends on no tracker
            self._running.pop(name, None)
            log.warning(
                "tracker %s is left out from here on: %s: %s", name, type(error).__name__, error
            )


def values_of(record: Record) -> dict[str, Value | None]:
    """The values of a record, by their names in trackers."""
    values: dict[str, Value | None] = {name: record[key] for key, name in TAGS.items()}
    if loads := record.get("expert_load"):
        values |= {name: record[key] for key, name in EXPERT_TAGS.items()}
        values["experts/load by layer"] = loads
    values |= {f"position/{name}": loss for name, loss in record["loss_by_position"].items()}
    values |= {
        f"loss_by_shard/{shard}": loss for shard, loss in enumerate(record["loss_by_shard"] or ())
    }
    if len(record["sources"]) > 1:
        sources = record["sources"].items()
        values |= {
            f"{key}_by_source/{name}": value
            for name, metrics in sources
            for key, value in metrics.items()
        }
    return values
