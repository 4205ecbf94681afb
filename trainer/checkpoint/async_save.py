"""A save that is under way, in a thread or not: the same work, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import torch
from torch.distributed import ProcessGroup

from trainer.checkpoint.rank_sync import PhaseError, describe
from trainer.checkpoint.save import Save, write
from trainer.errors import FAILED, RankError, ResumeError, RunError


@dataclass(frozen=True, kw_only=True)
class Saved:
    """How a save ended."""

    step: int
    path: Path | None
    """None where it failed, and `problem` says why."""
    problem: str | None
    bytes: int
    seconds: float
    blocked_seconds: float
    """How long training stood still for it: for the copy of the state, and for its end where something waited for that."""


class UnderWay:
    """A daemon thread: a process that leaves because of an error must not wait for ranks that are gone."""

    def __init__(
        self, save: Save, group: ProcessGroup, device: torch.device, *, committed: Callable[[], None], began: float
    ) -> None:
        """`committed` is called in the thread, after a commit; `began` is when training began to stand still."""
        self._save, self._group, self._device, self._committed = save, group, device, committed
        self._began, self._blocked = began, 0.0
        self._bytes, self._seconds = 0, 0.0
        self._problem: str | None = None
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name=f"checkpoint of update {save.step}", daemon=True)

    def start(self, *, threaded: bool) -> None:
        if threaded:
            self._thread.start()
        else:
            self._run()
        self._blocked = time.monotonic() - self._began

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, patience: float | None = None) -> None:
        started = time.monotonic()
        if self._thread.is_alive():
            self._thread.join(patience)
        self._blocked += time.monotonic() - started

    def outcome(self) -> Saved:
        """How it ended. Raises `RankError` if ranks could not even agree on that: they can then not save any more."""
        step = self._save.step
        if self._error is not None:
            told = f"the checkpoint of update {step} was given up: {describe(self._error)}"
            raise RankError(FAILED, told) from self._error
        return Saved(
            step=step,
            path=None if self._problem else self._save.final,
            problem=self._problem,
            bytes=self._bytes,
            seconds=self._seconds,
            blocked_seconds=self._blocked,
        )

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # Of this thread; else it would be the machine's first.
            self._bytes = write(self._save, self._group)
            self._committed()
        except (PhaseError, ResumeError, RunError) as error:
            self._problem = str(error)
        except BaseException as error:  # noqa: BLE001 - `outcome` raises it where somebody listens
            self._error = error
        self._seconds = time.monotonic() - self._began
