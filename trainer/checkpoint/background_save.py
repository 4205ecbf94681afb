"""A save in a background thread, and its outcome."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from trainer.checkpoint.rank_sync import PhaseError, describe_error
from trainer.errors import EXIT_FAILURE, RankFailedError, ResumeError, RunFailedError


class Save:
    """A save, in a background thread or synchronous, and its outcome.

    The thread is a daemon: a process that exits on an error must not wait for ranks that are gone.
    """

    def __init__(self, step: int, path: Path, start_time: float) -> None:
        """Training has been blocked since `start_time`."""
        self.step = step
        self._start_time = start_time
        self.path: Path | None = path
        """Folder of the checkpoint. None for a failed save; `problem` then has the reason."""
        self.problem: str | None = None
        self.bytes = 0
        self.seconds = 0.0
        self.blocked_seconds = 0.0
        """Time for which training was blocked: by the copy of the state and by waits for the end
        of the save.
        """
        self._error: BaseException | None = None
        self._thread: Thread | None = None

    def start(self, write: Callable[[], int], *, threaded: bool) -> None:
        """Calls `write`, which commits the checkpoint and returns its bytes."""
        if threaded:
            self._thread = Thread(
                target=self._run,
                args=(write,),
                name=f"checkpoint of step {self.step}",
                daemon=True,
            )
            self._thread.start()
        else:
            self._run(write)
        self.blocked_seconds = time.monotonic() - self._start_time

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        started = time.monotonic()
        if self._thread is not None:
            self._thread.join(timeout)
        self.blocked_seconds += time.monotonic() - started

    def raise_if_aborted(self) -> None:
        """Raises `RankFailedError` if the ranks could not agree on an outcome; no further save is
        possible.
        """
        if self._error is not None:
            message = f"checkpoint of step {self.step} aborted: {describe_error(self._error)}"
            raise RankFailedError(EXIT_FAILURE, message) from self._error

    def _run(self, write: Callable[[], int]) -> None:
        try:
            self.bytes = write()
        # All ranks agreed on these, so training continues and the next save tries again. After any
        # other error the ranks may be out of step in their collectives.
        except (PhaseError, ResumeError, RunFailedError) as error:
            self.path = None
            self.problem = str(error)
        except BaseException as error:  # noqa: BLE001 - `raise_if_aborted` raises it in the main thread
            self._error = error
        self.seconds = time.monotonic() - self._start_time
