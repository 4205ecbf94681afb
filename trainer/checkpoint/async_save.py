"""One save in progress, in a background thread or synchronously, and its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import torch
from torch.distributed import ProcessGroup

from trainer.checkpoint.rank_sync import PhaseError, describe_error
from trainer.checkpoint.save import SaveRequest, write_checkpoint
from trainer.errors import EXIT_FAILURE, RankFailedError, ResumeError, RunFailedError


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """Outcome of a save."""

    step: int
    path: Path | None
    """None for a failed save; `problem` then has the reason."""
    problem: str | None
    bytes: int
    seconds: float
    blocked_seconds: float
    """Time for which training was blocked: by the copy of the state and by waits for the end of the save."""


class AsyncSave:
    """A save in a daemon thread: a process that exits on an error must not wait for ranks that are gone."""

    def __init__(
        self,
        request: SaveRequest,
        group: ProcessGroup,
        device: torch.device,
        *,
        on_commit: Callable[[], None],
        start_time: float,
    ) -> None:
        """`on_commit` is called in the thread after a commit. Training has been blocked since `start_time`."""
        self._request, self._group, self._device, self._on_commit = request, group, device, on_commit
        self._start_time, self._blocked_seconds = start_time, 0.0
        self._bytes, self._seconds = 0, 0.0
        self._problem: str | None = None
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name=f"checkpoint of step {request.step}", daemon=True)

    def start(self, *, threaded: bool) -> None:
        if threaded:
            self._thread.start()
        else:
            self._run()
        self._blocked_seconds = time.monotonic() - self._start_time

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        started = time.monotonic()
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._blocked_seconds += time.monotonic() - started

    def result(self) -> SaveResult:
        """The outcome. Raises `RankFailedError` if the ranks could not agree on one; no further save is possible."""
        step = self._request.step
        if self._error is not None:
            message = f"checkpoint of step {step} aborted: {describe_error(self._error)}"
            raise RankFailedError(EXIT_FAILURE, message) from self._error
        return SaveResult(
            step=step,
            path=None if self._problem else self._request.final_path,
            problem=self._problem,
            bytes=self._bytes,
            seconds=self._seconds,
            blocked_seconds=self._blocked_seconds,
        )

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # Per thread; the default is device 0.
            self._bytes = write_checkpoint(self._request, self._group)
            self._on_commit()
        except (PhaseError, ResumeError, RunFailedError) as error:
            self._problem = str(error)
        except BaseException as error:  # noqa: BLE001 - `result` raises it in the main thread
            self._error = error
        self._seconds = time.monotonic() - self._start_time
