"""Progress of a long preparation: a bar on a terminal, a log line every few seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

log = logging.getLogger(__name__)

LOG_SECONDS = 10.0

Show = Callable[[int, int, float], None]
"""Called with the bytes and tokens so far, and the seconds since the start."""


@contextmanager
def progress(title: str, *, total_bytes: int) -> Iterator[Callable[[int, int], None]]:
    """Yields a function to call with the bytes and tokens processed since its last call."""
    started_at, num_bytes, num_tokens = time.monotonic(), 0, 0
    with progress_bar(title, total_bytes) if sys.stderr.isatty() else nullcontext(log_show(title, total_bytes)) as show:

        def advance(more_bytes: int, more_tokens: int) -> None:
            nonlocal num_bytes, num_tokens
            num_bytes += more_bytes
            num_tokens += more_tokens
            show(num_bytes, num_tokens, max(time.monotonic() - started_at, 1e-3))

        yield advance


@contextmanager
def progress_bar(title: str, total_bytes: int) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    rate = TextColumn("{task.fields[rate]:,.0f} tokens/s")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), rate, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total_bytes or None, rate=0.0)
        yield lambda num_bytes, num_tokens, seconds: bar.update(task, completed=num_bytes, rate=num_tokens / seconds)


def log_show(title: str, total_bytes: int) -> Show:
    last_logged = time.monotonic()

    def show(num_bytes: int, num_tokens: int, seconds: float) -> None:
        nonlocal last_logged
        if time.monotonic() - last_logged < LOG_SECONDS:
            return
        last_logged = time.monotonic()
        rate = f"{num_tokens / seconds:,.0f} tokens/s"
        if not total_bytes:
            log.info("%s: %s tokens, %s", title, f"{num_tokens:,}", rate)
            return
        eta = seconds * max(total_bytes - num_bytes, 0) / max(num_bytes, 1)
        log.info("%s: %.0f %%, %s, eta %.0f s", title, 100 * num_bytes / total_bytes, rate, eta)

    return show
