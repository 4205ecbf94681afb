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

from models.linear import identity
from trainer.metrics.loggers import format_duration
from trainer.trainer import StepResult, Trainer

log = logging.getLogger(__name__)

BACKWARD_COST = 2.5
"""Forward passes that a block's backward pass lasts, roughly: 2, or 3 where it is computed again."""


class ProgressReporter:
    """Rank 0 tells, as long as this is entered, how far an update is after every `interval` seconds of it."""

    def __init__(self, trainer: Trainer, *, interval: float = 60.0) -> None:
        self._trainer, self._interval = trainer, interval
        self._total_steps, self._num_micro_batches = trainer.stage.total_steps, trainer.loader.num_micro_batches
        self.total_work = (
            (1 + BACKWARD_COST)
            * self._num_micro_batches
            * sum(len(stage.blocks) for stage in trainer.stage_modules.values())
        )
        """Forward passes of a block that an update lasts; `done` are behind it."""
        self.completed_work = 0.0
        self._step, self._step_start, self._num_reports, self._previous_step_seconds, self._position = (
            0,
            0.0,
            0,
            0.0,
            "",
        )
        self._markers: deque[tuple[torch.cuda.Event | None, Callable[[], None]]] = deque()
        self._stop_event = Event()
        self._thread = Thread(target=self._poll, name="heartbeat", daemon=True)

    def __enter__(self) -> ProgressReporter:
        if self._trainer.world.rank == 0:
            for stage in self._trainer.stage_modules.values():
                stage.block_boundary_hook = partial(self._track_block, count(), len(stage.blocks))
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_event.set()
        if self._thread.is_alive():
            self._thread.join()
        for stage in self._trainer.stage_modules.values():
            stage.block_boundary_hook = identity

    def train_steps(self) -> Generator[StepResult, None, None]:
        """Those of the trainer."""
        results = self._trainer.train_steps()
        while self._trainer.step < self._trainer.stage.end_step:
            self._add_marker(self._on_step_start, self._trainer.step + 1)
            result = next(results)
            self._add_marker(self._on_step_end)
            yield result

    def _track_block(self, calls: Iterator[int], num_blocks: int, x_BSE: Tensor) -> Tensor:
        micro_batch, blocks_done = divmod(next(calls), num_blocks + 1)

        def on_gradient(_: Tensor) -> None:
            hook.remove()  # A pipeline receives into the same tensors again.
            self._add_marker(
                self._on_block, "backward", micro_batch, num_blocks - blocks_done, num_blocks, BACKWARD_COST
            )

        self._add_marker(self._on_block, "forward", micro_batch, blocks_done, num_blocks, 1.0)
        if x_BSE.requires_grad:
            hook = x_BSE.register_hook(on_gradient)
        return x_BSE

    def _add_marker(self, callback: Callable[..., None], *args: object) -> None:
        if self._thread.is_alive():
            event = torch.cuda.Event() if self._trainer.world.device.type == "cuda" else None
            if event is not None:
                event.record()
            self._markers.append((event, partial(callback, *args)))

    # ---- in the thread

    def _poll(self) -> None:
        with suppress(torch.AcceleratorError):  # A device that failed: the run meets it, too.
            while not self._stop_event.wait(self._interval / 60):
                while self._markers and ((event := self._markers[0][0]) is None or event.query()):
                    self._markers.popleft()[1]()
                elapsed = time.monotonic() - self._step_start
                if self._step and elapsed // self._interval > self._num_reports:
                    self._num_reports = int(elapsed // self._interval)
                    self._log_progress(elapsed)

    def _on_step_start(self, step: int) -> None:
        self._step, self._step_start, self._num_reports = step, time.monotonic(), 0
        self._position, self.completed_work = "no block begun", 0.0

    def _on_step_end(self) -> None:
        self._step, self._previous_step_seconds = 0, time.monotonic() - self._step_start

    def _on_block(self, direction: str, micro_batch_index: int, blocks_done: int, num_blocks: int, cost: float) -> None:
        micro_batch = f"micro-batch {micro_batch_index % self._num_micro_batches + 1} of {self._num_micro_batches}"
        self._position = f"{micro_batch}, {direction}, {blocks_done} of {num_blocks} blocks done"
        self.completed_work += cost if blocks_done else 0

    def _log_progress(self, elapsed: float) -> None:
        eta_seconds = self._previous_step_seconds - elapsed
        if eta_seconds <= 0 and self.completed_work:  # Not as long as the update before: then by the share of the work.
            eta_seconds = elapsed * (self.total_work / self.completed_work - 1)
        eta_text = f"; about {format_duration(eta_seconds)} left" if eta_seconds > 0 else ""
        log.info(
            "update %d/%d has run for %s: %s%s",
            self._step,
            self._total_steps,
            format_duration(elapsed),
            self._position,
            eta_text,
        )
