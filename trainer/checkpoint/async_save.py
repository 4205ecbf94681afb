"""A save that is under way, in a thread or not: the same work, and how it ended."""

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
    """How a save ended."""

    step: int
    path: Path | None
    """None where it failed, and `problem` says why."""
    problem: str | None
    bytes: int
    seconds: float
    blocked_seconds: float
    """How long training stood still for it: for the copy of the state, and for its end where something waited for that."""


class AsyncSave:
    """A daemon thread: a process that leaves because of an error must not wait for ranks that are gone."""

    def __init__(
        self,
        request: SaveRequest,
        group: ProcessGroup,
        device: torch.device,
        *,
        on_commit: Callable[[], None],
        start_time: float,
    ) -> None:
        """`committed` is called in the thread, after a commit; `began` is when training began to stand still."""
        self._request, self._group, self._device, self._on_commit = request, group, device, on_commit
        self._start_time, self._blocked_seconds = start_time, 0.0
        self._bytes, self._seconds = 0, 0.0
        self._problem: str | None = None
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name=f"checkpoint of update {request.step}", daemon=True)

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
        """How it ended. Raises `RankError` if ranks could not even agree on that: they can then not save any more."""
        step = self._request.step
        if self._error is not None:
            message = f"the checkpoint of update {step} was given up: {describe_error(self._error)}"
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
                torch.cuda.set_device(self._device)  # Of this thread; else it would be the machine's first.
            self._bytes = write_checkpoint(self._request, self._group)
            self._on_commit()
        except (PhaseError, ResumeError, RunFailedError) as error:
            self._problem = str(error)
        except BaseException as error:  # noqa: BLE001 - `outcome` raises it where somebody listens
            self._error = error
        self._seconds = time.monotonic() - self._start_time
