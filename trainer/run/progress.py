"""Progress of long steps: a log line for every minute that a step lasts.

    step 3/1000 running for 0:02:00: micro-batch 1 of 4, backward, 12 of 32 blocks done; eta 0:09:40

The host runs ahead of a CUDA device, so launched work says little. It records markers, each with a
CUDA event, which a thread polls without synchronizing. Markers lie between blocks, on the residual
stream and, by a hook, on its gradient. So compiled blocks stay whole, and recomputed blocks count
once.

Shape suffixes: B sequences, S tokens on this rank, E width of the residual stream.
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
from trainer.step.trainer import StepResult, Trainer

log = logging.getLogger(__name__)

BACKWARD_COST = 2.5
"""Rough cost of a block's backward in forwards: 2, or 3 with recomputation."""


class ProgressReporter:
    """Context in which rank 0 logs the progress of a step every `interval` seconds."""

    def __init__(self, trainer: Trainer, *, interval: float = 60.0) -> None:
        self._trainer = trainer
        self._interval = interval
        self._num_micro_batches = trainer.loader.num_micro_batches
        num_blocks = sum(len(stage.blocks) for stage in trainer.stage_modules.values())
        self.total_work = (1 + BACKWARD_COST) * self._num_micro_batches * num_blocks
        """Cost of a step in block forwards, of which `completed_work` are done."""
        self.completed_work = 0.0
        self._step = 0
        self._num_reports = 0
        self._position = ""
        self._step_start = 0.0
        self._previous_step_seconds = 0.0
        self._markers: deque[tuple[torch.cuda.Event | None, Callable[[], None]]] = deque()
        self._stop_event = Event()
        self._thread = Thread(target=self._poll, name="progress", daemon=True)

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
        """`Trainer.train_steps` with markers for the progress of each step."""
        results = self._trainer.train_steps()
        while self._trainer.step < self._trainer.stage.end_step:
            self._add_marker(self._on_step_start, self._trainer.step + 1)
            result = next(results)
            self._add_marker(self._on_step_end)
            yield result

    def _track_block(self, calls: Iterator[int], num_blocks: int, x_BSE: Tensor) -> Tensor:
        # The hook runs before the first block and after each one: num_blocks + 1 calls per
        # micro-batch.
        micro_batch, blocks_done = divmod(next(calls), num_blocks + 1)

        def on_gradient(_: Tensor) -> None:
            hook.remove()  # A pipeline reuses its receive buffers.
            self._add_marker(
                self._on_block, "backward", micro_batch, num_blocks - blocks_done, num_blocks
            )

        self._add_marker(self._on_block, "forward", micro_batch, blocks_done, num_blocks)
        if x_BSE.requires_grad:
            hook = x_BSE.register_hook(on_gradient)
        return x_BSE

    def _add_marker(self, callback: Callable[..., None], *args: object) -> None:
        # Only rank 0 reports; elsewhere the queue would grow without a reader.
        if self._thread.is_alive():
            event = torch.cuda.Event() if self._trainer.world.device.type == "cuda" else None
            if event is not None:
                event.record()
            self._markers.append((event, partial(callback, *args)))

    # ---- on the polling thread

    def _poll(self) -> None:
        with suppress(torch.AcceleratorError):  # Training raises it, too.
            while not self._stop_event.wait(self._interval / 60):
                # Markers are in order of launch, so the first one that is not reached ends the
                # search.
                while self._markers and ((event := self._markers[0][0]) is None or event.query()):
                    self._markers.popleft()[1]()
                elapsed = time.monotonic() - self._step_start
                if self._step and elapsed // self._interval > self._num_reports:
                    self._num_reports = int(elapsed // self._interval)
                    self._log_progress(elapsed)

    def _on_step_start(self, step: int) -> None:
        self._step = step
        self._step_start = time.monotonic()
        self._num_reports = 0
        self._position = "before the first block"
        self.completed_work = 0.0

    def _on_step_end(self) -> None:
        self._step, self._previous_step_seconds = 0, time.monotonic() - self._step_start

    def _on_block(
        self, direction: str, micro_batch_index: int, blocks_done: int, num_blocks: int
    ) -> None:
        micro_batch = f"micro-batch {micro_batch_index % self._num_micro_batches + 1} of {self._num_micro_batches}"
        self._position = f"{micro_batch}, {direction}, {blocks_done} of {num_blocks} blocks done"
        if blocks_done:
            self.completed_work += BACKWARD_COST if direction == "backward" else 1

    def _log_progress(self, elapsed: float) -> None:
        # The previous step is the best guess; once exceeded, or in the first step, the share of
        # finished work is.
        eta_seconds = self._previous_step_seconds - elapsed
        if eta_seconds <= 0 and self.completed_work:  # Already longer than the previous step.
            eta_seconds = elapsed * (self.total_work / self.completed_work - 1)
        eta_text = f"; eta {format_duration(eta_seconds)}" if eta_seconds > 0 else ""
        step = f"{self._step}/{self._trainer.stage.total_steps}"
        duration = format_duration(elapsed)
        log.info("step %s running for %s: %s%s", step, duration, self._position, eta_text)
