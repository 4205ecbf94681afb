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
    with bar(title, total_bytes) if sys.stderr.isatty() else lines(title, total_bytes) as advance:
        yield advance


@contextmanager
def bar(title: str, total_bytes: int) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    rate = TextColumn("{task.fields[rate]:,.0f} tokens/s")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), rate, TimeRemainingColumn())
    began, tokens = time.monotonic(), 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=total_bytes or None, rate=0.0)

        def advance(more_bytes: int, more_tokens: int) -> None:
            nonlocal tokens
            tokens += more_tokens
            shown.update(task, advance=more_bytes, rate=tokens / max(time.monotonic() - began, 1e-3))

        yield advance


@contextmanager
def lines(title: str, total_bytes: int) -> Iterator[Callable[[int, int], None]]:
    began = logged = time.monotonic()
    done = tokens = 0

    def advance(more_bytes: int, more_tokens: int) -> None:
        nonlocal logged, done, tokens
        done += more_bytes
        tokens += more_tokens
        now = time.monotonic()
        if now - logged < LOG_SECONDS:
            return
        logged = now
        rate = f"{tokens / (now - began):,.0f} tokens/s"
        if not total_bytes:
            log.info("%s: %s tokens, %s", title, f"{tokens:,}", rate)
            return
        left = (now - began) * max(total_bytes - done, 0) / max(done, 1)
        log.info("%s: %.0f %%, %s, %.0f s left", title, 100 * done / total_bytes, rate, left)

    yield advance
