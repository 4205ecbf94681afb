"""How far a long preparation is: a bar where somebody looks, a line of the log every few seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

LOG_SECONDS = 10.0


@contextmanager
def progress(title: str, *, total_bytes: int) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to call with the bytes and tokens done since its last call."""
    with progress_bar(title, total_bytes) if sys.stderr.isatty() else progress_log(title, total_bytes) as advance:
        yield advance


@contextmanager
def progress_bar(title: str, total_bytes: int) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    rate = TextColumn("{task.fields[rate]:,.0f} tokens/s")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), rate, TimeRemainingColumn())
    started_at, tokens = time.monotonic(), 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as display:
        task = display.add_task(title, total=total_bytes or None, rate=0.0)

        def advance(more_bytes: int, more_tokens: int) -> None:
            nonlocal tokens
            tokens += more_tokens
            display.update(task, advance=more_bytes, rate=tokens / max(time.monotonic() - started_at, 1e-3))

        yield advance


@contextmanager
def progress_log(title: str, total_bytes: int) -> Iterator[Callable[[int, int], None]]:
    started_at = last_logged = time.monotonic()
    done = tokens = 0

    def advance(more_bytes: int, more_tokens: int) -> None:
        nonlocal last_logged, done, tokens
        done += more_bytes
        tokens += more_tokens
        now = time.monotonic()
        if now - last_logged < LOG_SECONDS:
            return
        last_logged = now
        rate = f"{tokens / (now - started_at):,.0f} tokens/s"
        if not total_bytes:
            log.info("%s: %s tokens, %s", title, f"{tokens:,}", rate)
            return
        eta = (now - started_at) * max(total_bytes - done, 0) / max(done, 1)
        log.info("%s: %.0f %%, %s, %.0f s left", title, 100 * done / total_bytes, rate, eta)

    yield advance
