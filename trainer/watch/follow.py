"""Follows metrics.jsonl and events.jsonl of a run as they grow. Imports no torch.

Each refresh reads what was added since the one before, and at most `MAX_READ_BYTES`: of a longer
part it samples lines. What is kept does not grow with the run. The files may come from a stranger.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from io import BufferedReader
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from models.files import MAX_LINE_BYTES
from trainer.metrics.event_words import FAULTS, describe_event, shorten
from trainer.storage.artifact import DamageError, open_regular, parse_object

MAX_READ_BYTES = 1 << 26
"""Bytes that a refresh reads of a file, at most; some 50,000 records."""
TAIL_BYTES = 1 << 20
"""End of a file that is read whole where the rest is sampled."""
MAX_SAMPLES = 2000
COMPARED_BYTES = 64
MAX_POINTS = 400
"""Points of a curve, to which it is thinned when it has twice as many."""
MAX_EVENTS = 200
MAX_SETS = 16
MAX_CHECKPOINTS = 100
MAX_STEP = 1 << 53

Values = Mapping[str, Any]


class LineFile:
    """A file of JSON objects, one a line, to which a run appends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._last_bytes = b""
        """The last bytes that were read. A file that has others there was replaced."""
        self.problems = dict[str, None]()
        """Why a part is not shown, once each."""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """(whether all that was read before is void, the new objects)."""
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset - len(self._last_bytes))
                is_void = file.read(len(self._last_bytes)) != self._last_bytes
                if is_void:
                    self._restart()
                return is_void, [*self._parsed(self._new_lines(file))]
        except FileNotFoundError:
            is_void = self._offset > 0
            self._restart()
            return is_void, []
        except (OSError, DamageError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self.problems[f"{self._path.name} cannot be read: {reason}"] = None
            return False, []

    def _restart(self) -> None:
        self._offset = 0
        self._last_bytes = b""
        self.problems.clear()

    def _new_lines(self, file: BufferedReader) -> Iterator[bytes]:
        size = os.fstat(file.fileno()).st_size
        if size - self._offset > MAX_READ_BYTES:
            yield from self._sample(file, size - TAIL_BYTES)
        file.seek(self._offset)
        added = file.read(MAX_READ_BYTES)
        # The last line may be half-written.
        whole = added[: added.rfind(b"\n") + 1]
        if len(added) - len(whole) > MAX_LINE_BYTES:
            self.problems[
                f"{self._path.name}: a line of more than {MAX_LINE_BYTES:,} bytes was left out"
            ] = None
            whole = added
        self._offset += len(whole)
        self._last_bytes = (self._last_bytes + whole[-COMPARED_BYTES:])[-COMPARED_BYTES:]
        yield from whole.splitlines()

    def _sample(self, file: BufferedReader, end: int) -> Iterator[bytes]:
        """Lines at equal distances up to `end`, where the next read begins."""
        self.problems[f"{self._path.name} is long: a part of it is shown by samples"] = None
        start = self._offset
        file.seek(start)
        length = len(file.readline(MAX_LINE_BYTES))
        # At each place, a line that begins before it is skipped and the next one is read.
        count = max(1, min(MAX_SAMPLES, MAX_READ_BYTES // (2 * length + 1)))
        for number in range(count):
            file.seek(start + (end - start) * number // count)
            if number:
                file.readline(MAX_LINE_BYTES)
            yield file.readline(MAX_LINE_BYTES)
        file.seek(end - COMPARED_BYTES)
        skipped = file.read(COMPARED_BYTES) + file.readline(MAX_LINE_BYTES)
        self._offset = file.tell()
        self._last_bytes = skipped[-COMPARED_BYTES:]

    def _parsed(self, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
        for line in lines:
            try:
                yield parse_object(line)
            except DamageError:
                self.problems[f"{self._path.name} has lines that are no records"] = None


class Curve:
    """Values by step, which only rise, thinned to a bounded number."""

    def __init__(self) -> None:
        self._points = list[tuple[int, Values]]()
        self._newest: tuple[int, Values] | None = None
        self._gap = 0.0
        """Steps between points that are kept."""

    def add(self, step: int, values: Values) -> None:
        self.cut(step - 1)
        self._newest = (step, values)
        if self._points and step - self._points[-1][0] < self._gap:
            return
        self._points.append(self._newest)
        if len(self._points) > 2 * MAX_POINTS:
            self._gap = (step - self._points[0][0]) / MAX_POINTS
            kept = self._points[:1]
            for point in self._points[1:]:
                if point[0] - kept[-1][0] >= self._gap:
                    kept.append(point)
            self._points = kept

    def cut(self, step: int) -> None:
        """Drops the points after `step`, which the run repeats."""
        while self._points and self._points[-1][0] > step:
            self._points.pop()
        if self._newest is not None and self._newest[0] > step:
            self._newest = self._points[-1] if self._points else None

    @property
    def points(self) -> list[tuple[int, Values]]:
        newest = [self._newest] if self._newest is not None else []
        return self._points if self._points[-1:] == newest else [*self._points, *newest]


class EventLine(NamedTuple):
    """An event, as the page lists it."""

    time: float | None
    step: int | None
    text: str
    is_fault: bool


class RunHistory:
    """Numbers and events of a run, as far as the page shows them."""

    def __init__(self, run_folder: Path) -> None:
        self._metrics = LineFile(run_folder / "metrics.jsonl")
        self._events = LineFile(run_folder / "events.jsonl")
        self._forget_steps()
        self._forget_events()

    def _forget_steps(self) -> None:
        self.steps = Curve()
        self.newest: Values = {}
        """The newest record of metrics.jsonl."""

    def _forget_events(self) -> None:
        self.events = deque[EventLine](maxlen=MAX_EVENTS)
        self.validations = dict[str, Curve]()
        self.checkpoints = dict[int, Values]()
        """Events of the saves, by step; of the newest ones."""
        self.start: Values = {}
        """The newest event of a launch that starts."""
        self.counts = Counter[str]()
        """Events by kind: faults and starts."""

    @property
    def problems(self) -> list[str]:
        return [*self._metrics.problems, *self._events.problems]

    def refresh(self) -> None:
        """Reads what was added since the last call."""
        is_void, records = self._metrics.read()
        if is_void:
            self._forget_steps()
        for record in records:
            if (step := step_of(record)) is not None:
                self.newest = record
                self.steps.add(step, record_values(record))
        is_void, events = self._events.read()
        if is_void:
            self._forget_events()
        for event in events:
            self._add_event(event)

    def _add_event(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if not isinstance(kind, str):
            return
        step = step_of(event)
        is_fault = kind in FAULTS
        if is_fault or kind == "start":
            self.counts[kind] += 1
        if kind == "start":
            self.start = {key: event.get(key) for key in ("world_size", "step")}
            # The steps after it are run again.
            for curve in self.validations.values():
                curve.cut(step or 0)
        elif kind == "checkpoint" and step is not None:
            self._add_checkpoint(step, event)
        elif kind == "validation" and step is not None:
            self._add_validation(step, event)
        text = shorten(describe_event(event))
        self.events.append(EventLine(number(event.get("time")), step, text, is_fault))

    def _add_checkpoint(self, step: int, event: Values) -> None:
        # Written again after a rollback, it is the newest one again.
        self.checkpoints.pop(step, None)
        keys = ("time", "bytes", "seconds", "blocked_seconds")
        self.checkpoints[step] = {key: number(event.get(key)) for key in keys}
        if len(self.checkpoints) > MAX_CHECKPOINTS:
            del self.checkpoints[next(iter(self.checkpoints))]

    def _add_validation(self, step: int, event: Values) -> None:
        name = str(event.get("set"))[:MAX_NAME_CHARS]
        if name in self.validations or len(self.validations) < MAX_SETS:
            curve = self.validations.setdefault(name, Curve())
            curve.add(step, {"loss": number(event.get("loss"))})


MAX_NAME_CHARS = 60
MAX_BUCKETS = 16
DRAWN = (
    "loss",
    "grad_norm",
    "lr",
    "step_seconds",
    "tokens_per_second_per_device",
    "mfu",
    "hfu",
    "goodput_pct",
    "data_wait_pct",
    "attention_imbalance",
    "dp_imbalance",
    "memory_peak_gib",
    "expert_load_max",
    "dead_experts",
    "router_entropy",
    "balance_loss",
)
"""Keys of a record that are drawn over steps."""


def record_values(record: Values) -> Values:
    """The numbers of a record that are drawn."""
    values: dict[str, Any] = {
        key: value for key in DRAWN if (value := number(record.get(key))) is not None
    }
    positions = record.get("loss_by_position")
    if isinstance(positions, dict):
        values["loss_by_position"] = {
            name[:MAX_NAME_CHARS]: loss
            for name in [*positions][:MAX_BUCKETS]
            if (loss := number(positions[name])) is not None
        }
    return values


def number(value: object) -> float | None:
    """A finite number that can be drawn; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        converted = float(value)
    except OverflowError:
        return None
    return converted if isfinite(converted) and abs(converted) < 1e100 else None


def step_of(record: Values) -> int | None:
    step = record.get("step")
    if isinstance(step, bool) or not isinstance(step, int):
        return None
    return step if 0 <= step < MAX_STEP else None
