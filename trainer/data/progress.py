"""Progress of a long preparation: a bar on a terminal, a log line every few seconds elsewhere."""

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
    """Yields a function to call with the bytes and tokens processed since its last call."""
    # Imported here: most launches find their data prepared.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = (
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        "{task.fields[rate]}",
        TimeRemainingColumn(),
    )
    is_terminal = sys.stderr.isatty()
    num_bytes = 0
    num_tokens = 0
    started_at = last_logged = time.monotonic()
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not is_terminal
    ) as bar:
        task = bar.add_task(title, total=total_bytes or None, rate="")

        def advance(more_bytes: int, more_tokens: int) -> None:
            nonlocal num_bytes, num_tokens, last_logged
            num_bytes = num_bytes + more_bytes
            num_tokens = num_tokens + more_tokens
            now = time.monotonic()
            seconds = max(now - started_at, 1e-3)
            rate = f"{num_tokens / seconds:,.0f} tokens/s"
            bar.update(task, completed=num_bytes, rate=rate)
            if is_terminal or now - last_logged < LOG_SECONDS:
                return
            last_logged = now
            if total_bytes:
                eta = seconds * max(total_bytes - num_bytes, 0) / max(num_bytes, 1)
                log.info(
                    "%s: %.0f %%, %s, eta %.0f s", title, 100 * num_bytes / total_bytes, rate, eta
                )
            else:
                log.info("%s: %s tokens, %s", title, f"{num_tokens:,}", rate)

        yield advance
