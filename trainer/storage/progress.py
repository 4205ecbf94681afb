"""Progress of long work: a bar on a terminal, a log line every few seconds elsewhere. Imports no
torch.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Literal

from trainer.storage.durable_io import format_bytes

log = logging.getLogger(__name__)

LOG_SECONDS = 10.0
NARROW_COLUMNS = 80
"""A narrower terminal shows no rate, so that title and bar keep some room."""

Unit = Literal["bytes", "files"]


class Progress:
    """The part of some work that is done. Threads may call it at once."""

    def __init__(self, title: str, total: int, unit: Unit, bar: Any) -> None:
        """`bar`: a started `rich.progress.Progress`; None without a terminal."""
        self._title = title
        self._total = total
        self._unit = unit
        self._done = 0
        self._num_tokens = 0
        self._started_at = time.monotonic()
        self._last_logged = self._started_at
        self._lock = Lock()
        self._bar = bar
        self._task = bar and bar.add_task(title, total=total or None, rate="")

    def advance(self, more: int, more_tokens: int = 0) -> None:
        """Adds what was done since the last call."""
        with self._lock:
            self._done += more
            self._num_tokens += more_tokens
            self._show()

    def show(self, done: int, total: int) -> None:
        """Shows these numbers instead; the total may have grown."""
        with self._lock:
            self._done = done
            self._total = total
            self._show()

    def _show(self) -> None:
        now = time.monotonic()
        # What is repeated after an error may exceed the total.
        done = min(self._done, self._total or self._done)
        if self._bar is not None:
            rate = self._rate(done, now)
            self._bar.update(self._task, completed=done, total=self._total or None, rate=rate)
        elif now - self._last_logged >= LOG_SECONDS:
            self._last_logged = now
            log.info("%s: %s", self._title, self._line(done, now))

    def _line(self, done: int, now: float) -> str:
        rate = self._rate(done, now)
        if not self._total:
            amount = f"{self._num_tokens:,} tokens" if self._num_tokens else format_bytes(done)
            return f"{amount}, {rate}"
        eta = (now - self._started_at) * (self._total - done) / max(done, 1)
        return f"{100 * done / self._total:.0f} %, {rate}, eta {eta:.0f} s"

    def _rate(self, done: int, now: float) -> str:
        seconds = max(now - self._started_at, 1e-3)
        if self._unit == "files":
            return f"{done / seconds:,.0f} files/s"
        if self._num_tokens:
            return f"{self._num_tokens / seconds:,.0f} tokens/s"
        return f"{format_bytes(done / seconds)}/s"


@contextmanager
def progress(title: str, *, total: int, unit: Unit = "bytes") -> Iterator[Progress]:
    """Shows progress within its context. `total` is 0 where it is unknown."""
    if not sys.stderr.isatty():
        yield Progress(title, total, unit, None)
        return
    with new_bar(unit) as bar:
        yield Progress(title, total, unit, bar)


def new_bar(unit: Unit | Literal["steps"]) -> Any:
    """A `rich.progress.Progress` on standard error, of one line at any width."""
    # Imported here: most commands have nothing that takes long.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar
    from rich.table import Column

    console = Console(stderr=True)

    def number_column() -> Column:
        return Column(no_wrap=True, justify="right")

    counted = DownloadColumn(binary_units=True, table_column=number_column())
    columns: list[Any] = [
        # Title and bar share what the numbers leave. A title may be a name of a stranger.
        TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        ),
        BarColumn(bar_width=None, table_column=Column(ratio=1, max_width=40)),
        counted if unit == "bytes" else MofNCompleteColumn(table_column=number_column()),
    ]
    if console.width >= NARROW_COLUMNS and unit != "steps":
        columns.append(TextColumn("{task.fields[rate]}", table_column=number_column()))
    columns.append(TimeRemainingColumn(table_column=number_column()))
    # Lines of output that is no terminal, a file, say, stay there.
    return Bar(
        *columns,
        console=console,
        transient=True,
        expand=True,
        redirect_stdout=sys.stdout.isatty(),
    )
