"""Trackers: where the metrics of a run go, besides its own metrics.jsonl and the console.

An extension adds to `TRACKERS`. No tracker can end a run: one that raises is left out from then
on.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from trainer.config import extension
from trainer.config.extension import TrackedRun
from trainer.config.sections import MetricsSection
from trainer.metrics.event_words import describe_event, shorten
from trainer.metrics.loggers import Record
from trainer.metrics.tracker_clients import (
    InBackground,
    MLflow,
    Tracker,
    Trackio,
    Value,
    WeightsAndBiases,
    without_secrets,
)

log = logging.getLogger(__name__)

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
    "attention_imbalance": "train_balance/attention_imbalance",
    "dp_imbalance": "train_balance/dp_imbalance",
    "memory_peak_gib": "perf/memory_peak_gib",
    "memory_reserved_gib": "perf/memory_reserved_gib",
    "rss_gib": "perf/rss_gib",
}
"""Names of values, by key of a record. TensorBoard opens its first two groups by alphabet: these
are `perf` and `train`, because all others begin with `train_` or `validation`. `perf` has at most
a page of twelve charts.
"""

EXPERT_TAGS = {
    "balance_loss": "train_experts/balance_loss",
    "router_z_loss": "train_experts/router_z_loss",
    "router_entropy": "train_experts/router_entropy",
    "expert_load_max": "train_experts/load_max",
    "dead_experts": "train_experts/dead",
}
"""Names of values of models with experts, by key of a record."""
EVALUATION = "evaluation"
"""Folder in `tensorboard/` of the results of `longhaul evaluate`."""
MAX_SHOWN_LOAD = 2.0
"""White in the image of loads; black is none, and the mean is in the middle."""

# TensorBoard's custom dashboard: category, chart, patterns of tags.
DASHBOARD = {
    "training": {
        "loss": ["train/loss"],
        "loss by position": ["train_loss_by_position/.*"],
        "loss by shard": ["train_loss_by_shard/.*"],
        "loss by source": ["train_loss_by_source/.*"],
        "gradient norm": ["train/grad_norm"],
    },
    "validation": {"loss": ["validation/.*"], "loss by context": ["validation_context/.*"]},
    "performance": {
        "utilisation": ["perf/mfu", "perf/hfu"],
        "tokens per second": ["perf/tokens_per_second"],
        "attention imbalance": ["train_balance/attention_imbalance"],
        "expert load": ["train_experts/load_max"],
        "GiB": ["perf/memory_peak_gib", "perf/memory_reserved_gib", "perf/rss_gib"],
    },
}


def dashboard(tags: Collection[str]) -> dict[str, dict[str, list[str]]]:
    """The charts of `DASHBOARD` that show one of these tags, each with its patterns that do."""
    shown = {
        category: {
            title: found
            for title, patterns in charts.items()
            if (
                found := [
                    each for each in patterns if any(re.fullmatch(each, tag) for tag in tags)
                ]
            )
        }
        for category, charts in DASHBOARD.items()
    }
    return {category: charts for category, charts in shown.items() if charts}


class TensorBoard:
    """Scalars, images of tables, a custom dashboard, and the configuration as text."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._writer: Any = None
        self._tags = set[str]()

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        self._writer = self._writer or self._open_writer()
        for name, value in values.items():
            if isinstance(value, Sequence):
                self._add_image(name, value, step)
            else:
                self._writer.add_scalar(name, value, step)
        self._write_dashboard(
            {name for name, value in values.items() if not isinstance(value, Sequence)}
        )

    def note(self, step: int, kind: str, text: str) -> None:
        self._writer = self._writer or self._open_writer()
        self._writer.add_text(f"train_events/{kind}", text, step)

    def _write_dashboard(self, tags: set[str]) -> None:
        """Again with every chart that gets its first value; TensorBoard shows the newest."""
        before = dashboard(self._tags)
        self._tags |= tags
        if (charts := dashboard(self._tags)) != before:
            layout = {
                category: {title: ["Multiline", patterns] for title, patterns in titled.items()}
                for category, titled in charts.items()
            }
            self._writer.add_custom_scalars(layout)

    def _add_image(self, name: str, table: Sequence[Sequence[float]], step: int) -> None:
        import torch

        image = torch.tensor(table).div(MAX_SHOWN_LOAD).clamp(max=1)
        self._writer.add_image(name, image[None], step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open_writer(self) -> Any:
        # Imported at the first record, because it slows start-up.
        from torch.utils.tensorboard import SummaryWriter

        # Hides steps that an earlier launch logged after its last checkpoint; metrics.jsonl drops
        # them, too.
        folder = events_folder(self._run.folder / "tensorboard", self._run.name)
        writer = SummaryWriter(str(folder), purge_step=self._run.first_step)
        writer.add_text("config", f"```toml\n{self._run.toml}```")
        if self._run.lineage:
            lines = [f"{name}: {value}" for name, value in self._run.lineage.items()]
            writer.add_text("lineage", "  \n".join(lines))
        return writer


def events_folder(folder: Path, name: str) -> Path:
    """The folder of a run's event files in its `tensorboard/`: where there are some already, or
    else one with the name of the run, by which TensorBoard calls it.
    """
    # An earlier version wrote into `tensorboard/` itself. In one place, TensorBoard hides the
    # steps that a resume repeats.
    known = [folder, *sorted(each for each in folder.glob("*") if each.name != EVALUATION)]
    return next((each for each in known if [*each.glob("events.out.*")]), folder / name)


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": partial(InBackground, WeightsAndBiases),
    "trackio": partial(InBackground, Trackio),
    "mlflow": partial(InBackground, MLflow),
}
"""Built-in trackers by name, which `trainer.config.extension.BUILT_IN_TRACKERS` lists."""


class Trackers:
    """All trackers of a run."""

    def __init__(self, run: TrackedRun, names: Iterable[str]) -> None:
        """`names`: those of `wanted`."""
        known = TRACKERS.copy()
        for each in extension.installed():
            known.update(each.extension.trackers)
        self._running = dict[str, Tracker]()
        for name in names:
            with self._left_out_on_error(name):
                self._running[name] = known[name](run)

    def log(self, step: int, values: Mapping[str, Value | None]) -> None:
        """Passes the values to every tracker, without those that are None."""
        # The loop visits a copy of the trackers, because one that raises is removed meanwhile.
        present = {name: value for name, value in values.items() if value is not None}
        for name, tracker in [*self._running.items()]:
            with self._left_out_on_error(name):
                tracker.log(step, present)

    def note(self, step: int, event: Mapping[str, Any]) -> None:
        """Passes an event in words to every tracker that takes texts."""
        kind = str(event["event"])
        # What failed may quote a URL with a password, of which no part must be left.
        text = shorten(without_secrets(describe_event(event)))
        for name, tracker in [*self._running.items()]:
            note = getattr(tracker, "note", None)
            if note is not None:
                with self._left_out_on_error(name):
                    note(step, kind, text)

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
            reason = without_secrets(f"{type(error).__name__}: {error}")
            adding = extension.adding("trackers", name)
            origin = "" if adding is None else f' of extension "{adding.extension.name}"'
            log.warning("tracker %s%s is left out from here on: %s", name, origin, reason)


def wanted(metrics: MetricsSection) -> list[str]:
    """The trackers of a run, by name: ours that the configuration names, and those of its
    extensions.
    """
    ours = [*(["tensorboard"] if metrics.tensorboard else []), *dict.fromkeys(metrics.trackers)]
    return [*ours, *(name for each in extension.installed() for name in each.extension.trackers)]


def with_model(config: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """The configuration with the sizes that it leaves to a family's, and the parameters."""
    sizes = {
        key: size
        for key, value in config["model"].items()
        if value is None and isinstance(size := getattr(model, key, None), int | float)
    }
    section = {**config["model"], **sizes, "parameters": model.num_parameters}
    return {**config, "model": section}


def values_of(record: Record) -> dict[str, Value | None]:
    """The values of a record, by their names in trackers."""
    values: dict[str, Value | None] = {name: record[key] for key, name in TAGS.items()}
    if loads := record.get("expert_load"):
        values |= {name: record[key] for key, name in EXPERT_TAGS.items()}
        values["train_experts/load by layer"] = loads
    values |= {
        f"train_loss_by_position/{name}": loss for name, loss in record["loss_by_position"].items()
    }
    values |= {
        f"train_loss_by_shard/{shard}": loss
        for shard, loss in enumerate(record["loss_by_shard"] or ())
    }
    if len(record["sources"]) > 1:
        sources = record["sources"].items()
        values |= {
            f"train_{key}_by_source/{name}": value
            for name, metrics in sources
            for key, value in metrics.items()
        }
    return values
