"""The page of a run: its state, numbers, curves and events, from the files of its folder. Imports
no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Generic, NamedTuple, TypeVar

from trainer.config.parse import load
from trainer.config.training_stages import Recipe
from trainer.errors import RunError
from trainer.hardware.host import GIB
from trainer.metrics.event_words import shorten
from trainer.metrics.loggers import format_duration, format_or_dash
from trainer.metrics.prediction import Prediction
from trainer.plan.document import BarChart, LineChart, Table
from trainer.runs import state_of
from trainer.storage import lineage
from trainer.storage.artifact import DamageError, read_artifact
from trainer.storage.durable_io import format_bytes
from trainer.storage.lineage import Lineage
from trainer.storage.retention import list_quarantined
from trainer.storage.run_dir import RunDir
from trainer.watch.follow import RunHistory, Values, number

Section = BarChart | Table | LineChart
T = TypeVar("T")

MAX_SHOWN_EVENTS = 40
MAX_SHOWN_CHECKPOINTS = 10
MAX_SHOWN_LAYERS = 64
MAX_SHOWN_CHANGES = 20
MAX_TIME = 1e11
"""The year 5138, in seconds."""
NO_DROPS = "No token is dropped: experts have no capacity limit."


class State(NamedTuple):
    """A state of a run in words."""

    symbol: str
    text: str
    tone: str
    """`good`, `bad`, or neither: a class of the page's style."""


STATES = {
    "running": State("●", "running", "good"),
    "done": State("✓", "done", "good"),
    "REQUEUE": State("❙❙", "preempted; the same command resumes it", ""),
    "RETRY": State("✗", "failed; another launch may succeed", "bad"),
    "STOP": State("✗", "failed; it needs a person", "bad"),
    "interrupted": State("✗", "interrupted: no launch is running, and none left a reason", "bad"),
    "not started": State("○", "not started", ""),
}


@dataclass(frozen=True, kw_only=True)
class RunPage:
    name: str
    folder: str
    state: State
    reason: str
    summary: str
    """State and step, for the title of a browser's tab."""
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    notes: Sequence[str]
    read_at: str


class Remembered(Generic[T]):
    """A file that is read again only when it has changed."""

    def __init__(self, path: Path, read: Callable[[], T]) -> None:
        self._path = path
        self._read = read
        self._value: T | None = None
        self._version: object = None
        self.problem = ""

    def get(self) -> T | None:
        """None if the file is absent or cannot be read; `problem` then says why."""
        version: object = "absent"
        with suppress(OSError):
            stats = self._path.lstat()
            version = (stats.st_ino, stats.st_mtime_ns, stats.st_size)
        if version != self._version:
            self._version = version
            self._value = None
            self.problem = ""
            if version != "absent":
                self._load()
        return self._value

    def _load(self) -> None:
        try:
            self._value = self._read()
        except (RunError, DamageError) as error:
            self.problem = f"{self._path.name} cannot be read: {error}"
        except OSError as error:
            self.problem = f"{self._path.name} cannot be read: {error.strerror}"


class RunView:
    """A run folder that is looked at again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._history = RunHistory(folder)
        config_path = folder / "config.toml"
        self._config = Remembered[Recipe](
            config_path, lambda: load(["--config", str(config_path)], imports_extensions=False)
        )
        prediction_path = folder / "prediction.json"
        self._prediction = Remembered[Prediction](
            prediction_path, lambda: read_artifact(prediction_path, Prediction)
        )
        self._lineage = Remembered[Lineage | None](
            folder / lineage.LINEAGE_FILE, lambda: lineage.read(folder)
        )

    def page(self) -> RunPage:
        """The page of now. Reads what was added to the files since the last call."""
        self._history.refresh()
        config = self._config.get()
        prediction = self._prediction.get() or Prediction()
        branch = self._lineage.get()
        total = config.training_stages[-1].end_step if config else None
        state, reason = self._state(config, total)
        step = self._history.newest.get("step")
        progress = f"step {step:,}" if isinstance(step, int) else "no step"
        progress += f" of {total:,}" if total else ""
        files = (self._config, self._prediction, self._lineage)
        return RunPage(
            name=config.job.name if config else self._folder.absolute().name,
            folder=str(self._folder),
            state=state,
            reason=reason,
            summary=f"{state.text.partition(';')[0]}, {progress}",
            facts=[*_facts(self._history, prediction, total), *self._ages()],
            sections=[
                *_charts(self._history, prediction),
                *_tables(self._history, prediction),
                *_checkpoint_tables(self._history, self._folder),
                *_lineage_tables(branch, config),
            ],
            notes=[
                *self._history.problems,
                *(each.problem for each in files if each.problem),
                *prediction.warnings,
            ],
            read_at=_utc(time.time()),
        )

    def _state(self, config: Recipe | None, total: int | None) -> tuple[State, str]:
        reached = [step for step, _ in RunDir(self._folder).committed_checkpoints()]
        if config is not None and not config.checkpoint.enabled:
            # Nothing but the metrics says how far it came.
            reached += [step for step, _ in self._history.steps.points[-1:]]
        is_done = total is not None and 0 < total <= max(reached, default=0)
        name, reason = state_of(self._folder, is_done=is_done)
        return STATES[name], shorten(reason)

    def _ages(self) -> Iterator[tuple[str, str]]:
        """The time since the newest record: one that hangs writes none."""
        with suppress(OSError):
            written = (self._folder / "metrics.jsonl").stat().st_mtime
            yield "newest record", f"{format_duration(max(time.time() - written, 0))} ago"


# ---- numbers


def _facts(
    history: RunHistory, prediction: Prediction, total: int | None
) -> Iterator[tuple[str, str]]:
    newest = history.newest
    step = newest.get("step")
    if isinstance(step, int):
        yield "step", f"{step:,}" + (f" of {total:,}" if total else "")
    for label, key, shown in FACTS:
        if (value := number(newest.get(key))) is not None:
            yield label, shown(value)
    for name, curve in history.validations.items():
        if curve.points:
            loss = curve.points[-1][1]["loss"]
            yield f"validation loss, {name}", format_or_dash(loss, ".4f")
    if prediction.step_seconds is not None:
        yield "predicted step time", _seconds(prediction.step_seconds)
    seconds = number(newest.get("step_seconds"))
    if isinstance(step, int) and total and seconds is not None and step < total:
        yield "time left at this pace", format_duration(min((total - step) * seconds, MAX_TIME))
    starts = history.counts["start"]
    if starts:
        ranks = number(history.start.get("world_size"))
        yield "launches", f"{starts:,}" + (f", on {ranks:,.0f} ranks" if ranks else "")
        yield "faults", f"{history.counts.total() - starts:,}"


def _seconds(value: float) -> str:
    return f"{value:,.3g} s" if value < 1000 else f"{value:,.0f} s"


FACTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", "{:.4f}".format),
    ("learning rate", "lr", "{:.2e}".format),
    ("gradient norm", "grad_norm", "{:.3f}".format),
    ("step time", "step_seconds", _seconds),
    ("tokens", "tokens", "{:,.0f}".format),
    ("tokens/s per device", "tokens_per_second_per_device", "{:,.0f}".format),
    ("MFU", "mfu", "{:.1%}".format),
    ("goodput", "goodput_pct", "{:.1f}%".format),
    ("data wait", "data_wait_pct", "{:.1f}%".format),
    ("peak device memory", "memory_peak_gib", "{:.1f} GiB".format),
    ("host memory", "rss_gib", "{:.2f} GiB".format),
)
"""Label, key of the newest record, and how its value is shown."""


# ---- curves


def _charts(history: RunHistory, prediction: Prediction) -> Iterator[LineChart]:
    points = history.steps.points
    validations = {
        f"validation, {name}": _line(curve.points, "loss")
        for name, curve in history.validations.items()
    }
    losses = {"training": _line(points, "loss"), **validations}
    yield from _chart("Loss", "nats per token", losses, from_zero=False)
    yield from _chart(
        "Loss by position in the document",
        "nats per token",
        _position_lines(points),
        from_zero=False,
    )
    step_time = {"measured": _line(points, "step_seconds")}
    if prediction.step_seconds is not None and step_time["measured"]:
        first, last = (step_time["measured"][end][0] for end in (0, -1))
        step_time["predicted"] = [(x, prediction.step_seconds) for x in (first, last)]
    yield from _chart("Step time", "seconds", step_time)
    for title, unit, keys, from_zero in CHARTS:
        lines = {label: _line(points, key) for label, key in keys.items()}
        yield from _chart(title, unit, lines, from_zero=from_zero)


CHARTS = (
    ("Throughput", "tokens/s per device", {"tokens": "tokens_per_second_per_device"}, True),
    ("Utilisation", "share of the device's peak", {"MFU": "mfu", "HFU": "hfu"}, True),
    (
        "Time that counts",
        "% of the time",
        {"goodput": "goodput_pct", "data wait": "data_wait_pct"},
        True,
    ),
    ("Learning rate", "learning rate", {"learning rate": "lr"}, True),
    ("Gradient norm", "norm before clipping", {"gradient norm": "grad_norm"}, True),
    (
        "Balance of work over ranks",
        "busiest rank over the mean",
        {"attention": "attention_imbalance", "data parallelism": "dp_imbalance"},
        False,
    ),
    (
        "Balance of experts",
        "busiest expert over the mean",
        {"busiest expert": "expert_load_max"},
        True,
    ),
    ("Experts without tokens", "experts", {"all layers": "dead_experts"}, True),
    ("Routers", "mean over layers", {"entropy, nats": "router_entropy"}, True),
)
"""Title, unit, keys of records by the names of lines, and whether the axis begins at 0."""


def _line(points: Sequence[tuple[int, Values]], key: str) -> list[tuple[float, float]]:
    return [(step, values[key]) for step, values in points if values.get(key) is not None]


def _position_lines(
    points: Sequence[tuple[int, Values]],
) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for step, values in points:
        for name, loss in values.get("loss_by_position", {}).items():
            lines.setdefault(name, []).append((step, loss))
    return lines


def _chart(
    title: str,
    unit: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    from_zero: bool = True,
) -> Iterator[LineChart]:
    """A chart over steps of the lines that have points; none without any."""
    if drawn := {name: line for name, line in lines.items() if line}:
        yield LineChart(
            title=title,
            x="step",
            y=unit,
            log_x=False,
            log_y=False,
            lines=drawn,
            x_is_tokens=False,
            x_from_zero=False,
            y_from_zero=from_zero,
        )


# ---- tables


def _tables(history: RunHistory, prediction: Prediction) -> Iterator[Table]:
    yield from _prediction_table(history, prediction)
    yield from _load_table(history.newest.get("expert_load"))
    if history.events:
        shown = [*history.events][::-1][:MAX_SHOWN_EVENTS]
        rows = [
            [
                _utc(event.time),
                "" if event.step is None else f"{event.step:,}",
                f"⚠ {event.text}" if event.is_fault else event.text,
            ]
            for event in shown
        ]
        note = "All are in events.jsonl." if len(history.events) > len(shown) else ""
        yield Table(title="Events", columns=["time (UTC)", "step", "event"], rows=rows, note=note)


def _prediction_table(history: RunHistory, prediction: Prediction) -> Iterator[Table]:
    """Predicted numbers beside measured ones."""
    points = history.steps.points
    # The first step compiles, allocates and connects.
    seconds = [value for _, value in _line(points, "step_seconds")][1:]
    peaks = [value for _, value in _line(points, "memory_peak_gib")]
    predicted_gib = None if prediction.device_bytes is None else prediction.device_bytes / GIB
    compared = [
        ("step time, s (median)", prediction.step_seconds, median(seconds) if seconds else None),
        ("peak device memory, GiB", predicted_gib, max(peaks, default=None)),
    ]
    rows = [
        [
            name,
            format_or_dash(predicted, ",.3g"),
            format_or_dash(measured, ",.3g"),
            f"{measured / predicted:.2f}" if measured is not None and predicted else "-",
        ]
        for name, predicted, measured in compared
        if predicted is not None or measured is not None
    ]
    if rows:
        device = f"Predicted for {prediction.device}." if prediction.device else ""
        yield Table(
            title="Predicted and measured",
            columns=["", "predicted", "measured", "ratio"],
            rows=rows,
            note=device,
        )


def _load_table(loads: object) -> Iterator[Table]:
    """The load of the experts of each layer at the newest step."""
    layers = loads if isinstance(loads, list) else []
    rows = list[list[str]]()
    for index, layer in enumerate(layers[:MAX_SHOWN_LAYERS], 1):
        load = [number(each) for each in layer] if isinstance(layer, list) else []
        known = [each for each in load if each is not None]
        if known:
            idle = sum(each == 0 for each in known)
            row = [
                f"{index}",
                f"{max(known):.2f}",
                f"{min(known):.2f}",
                f"{idle:,}",
            ]
            rows.append(row)
    if rows:
        yield Table(
            title="Load of experts at the newest step",
            columns=["layer with experts", "busiest", "idlest", "without tokens"],
            rows=rows,
            note=f"Tokens of an expert over the layer's mean. {NO_DROPS}",
        )


def _checkpoint_tables(history: RunHistory, folder: Path) -> Iterator[Table]:
    run_dir = RunDir(folder)
    on_disk = {step for step, _ in run_dir.committed_checkpoints()}
    steps = sorted({*on_disk, *history.checkpoints}, reverse=True)[:MAX_SHOWN_CHECKPOINTS]
    rows = list[list[str]]()
    for step in steps:
        saved = history.checkpoints.get(step, {})
        size = saved.get("bytes")
        rows.append(
            [
                f"{step:,}",
                _utc(saved.get("time")),
                "-" if size is None else format_bytes(size),
                format_or_dash(saved.get("seconds"), ".1f"),
                format_or_dash(saved.get("blocked_seconds"), ".1f"),
                "on disk" if step in on_disk else "deleted",
            ]
        )
    if rows:
        columns = ["step", "saved (UTC)", "size", "seconds", "training waited", "state"]
        note = shorten("; ".join(list_quarantined(run_dir.checkpoints_dir)))
        yield Table(title="Checkpoints", columns=columns, rows=rows, note=note)


def _lineage_tables(branch: Lineage | None, config: Recipe | None) -> Iterator[Table]:
    rows = list[list[str]]()
    if branch is not None:
        changes = branch.describe_changes()
        rows.append(["branch of", str(branch)])
        rows.append(["parts", branch.describe_parts()])
        rows += [["changed", each] for each in changes[:MAX_SHOWN_CHANGES]]
        if len(changes) > MAX_SHOWN_CHANGES:
            rows.append(["changed", f"{len(changes) - MAX_SHOWN_CHANGES} more keys"])
    if config is not None and config.checkpoint.initial_load_path is not None:
        rows.append(["initial weights", config.checkpoint.initial_load_path])
    if rows:
        yield Table(title="Lineage", columns=["", "from"], rows=rows)


def _utc(seconds: float | None) -> str:
    if seconds is None or not 0 <= seconds < MAX_TIME:
        return "-"
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
