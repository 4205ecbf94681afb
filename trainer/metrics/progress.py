"""Signs of life: a line in the log for every minute that an update lasts, with how far it is.

    update 3/1000 has run for 0:02:00: micro-batch 1 of 4, backward, 12 of 32 blocks done; about 0:09:40 left

The host runs ahead of a CUDA device, so what it launched says little. It leaves marks, each with an event, and a thread
asks now and then which have happened: nothing waits. There is a mark wherever the residual stream passes between
blocks, and by a hook on its gradient wherever that does; so compiled blocks are whole, and recomputed ones counted once.

Shape suffixes: B rows, S tokens on this rank, E width of the residual stream.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from threading import Event, Thread

import torch
from torch import Tensor

from models.view import unchanged
from trainer.metrics.loggers import duration
from trainer.trainer import Trainer, Update

log = logging.getLogger(__name__)

BACKWARD = 2.5
"""Forward passes that a block's backward pass lasts, roughly: 2, or 3 where it is computed again."""


class Heartbeat:
    """Rank 0 tells, as long as this is entered, how far an update is after every `interval` seconds of it."""

    def __init__(self, trainer: Trainer, *, interval: float = 60.0) -> None:
        self._trainer, self._interval = trainer, interval
        self._steps, self._micro_batches = trainer.stage.total, trainer.loader.num_micro_batches
        self.work = (1 + BACKWARD) * self._micro_batches * sum(len(part.blocks) for part in trainer.parts.values())
        """Forward passes of a block that an update lasts; `done` are behind it."""
        self.done = 0.0
        self._step, self._began, self._beats, self._before, self._at = 0, 0.0, 0, 0.0, ""
        self._marks: deque[tuple[torch.cuda.Event | None, Callable[[], None]]] = deque()
        self._ended = Event()
        self._thread = Thread(target=self._watch, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        if self._trainer.world.rank == 0:
            for part in self._trainer.parts.values():
                part.between = partial(self._between, count(), len(part.blocks))
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        for part in self._trainer.parts.values():
            part.between = unchanged

    def updates(self) -> Generator[Update, None, None]:
        """Those of the trainer."""
        updates = self._trainer.updates()
        while self._trainer.step < self._trainer.stage.last_step:
            self._mark(self._begin, self._trainer.step + 1)
            update = next(updates)
            self._mark(self._end)
            yield update

    def _between(self, numbers: Iterator[int], blocks: int, x_BSE: Tensor) -> Tensor:
        number, passed = divmod(next(numbers), blocks + 1)

        def back(_: Tensor) -> None:
            hook.remove()  # A pipeline receives into the same tensors again.
            self._mark(self._pass, "backward", number, blocks - passed, blocks, BACKWARD)

        self._mark(self._pass, "forward", number, passed, blocks, 1.0)
        if x_BSE.requires_grad:
            hook = x_BSE.register_hook(back)
        return x_BSE

    def _mark(self, happened: Callable[..., None], *what: object) -> None:
        if self._thread.is_alive():
            event = torch.cuda.Event() if self._trainer.world.device.type == "cuda" else None
            if event is not None:
                event.record()
            self._marks.append((event, partial(happened, *what)))

    # ---- in the thread

    def _watch(self) -> None:
        with suppress(torch.AcceleratorError):  # A device that failed: the run meets it, too.
            while not self._ended.wait(self._interval / 60):
                while self._marks and ((event := self._marks[0][0]) is None or event.query()):
                    self._marks.popleft()[1]()
                elapsed = time.monotonic() - self._began
                if self._step and elapsed // self._interval > self._beats:
                    self._beats = int(elapsed // self._interval)
                    self._tell(elapsed)

    def _begin(self, step: int) -> None:
        self._step, self._began, self._beats = step, time.monotonic(), 0
        self._at, self.done = "no block begun", 0.0

    def _end(self) -> None:
        self._step, self._before = 0, time.monotonic() - self._began

    def _pass(self, way: str, number: int, passed: int, blocks: int, work: float) -> None:
        micro_batch = f"micro-batch {number % self._micro_batches + 1} of {self._micro_batches}"
        self._at = f"{micro_batch}, {way}, {passed} of {blocks} blocks done"
        self.done += work if passed else 0

    def _tell(self, elapsed: float) -> None:
        left = self._before - elapsed
        if left <= 0 and self.done:  # Not as long as the update before: then by the share of the work.
            left = elapsed * (self.work / self.done - 1)
        about = f"; about {duration(left)} left" if left > 0 else ""
        log.info("update %d/%d has run for %s: %s%s", self._step, self._steps, duration(elapsed), self._at, about)
