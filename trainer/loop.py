"""The loop of a run: updates, and between them whatever is due: metrics, validation, checkpoints, leaving."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import closing

import torch

from trainer.checkpoint import Checkpoints
from trainer.config import Config, Stage
from trainer.data import DataError
from trainer.data.held import HeldOut
from trainer.data.rows import Rows
from trainer.distributed import World
from trainer.health import SpikeError
from trainer.heartbeat import Heartbeat
from trainer.metrics import Metrics
from trainer.profiler import Profilers
from trainer.run_folder import RunFolder
from trainer.status import FAILED, NO_RETRY, RankError
from trainer.stops import Stops
from trainer.trainer import Trainer, Update
from trainer.validation import Validation
from trainer.watchdog import Watchdog

log = logging.getLogger("trainer")

SLOWER = 10
"""Times the slowest update so far that one may last before it counts as hung."""


def train(
    config: Config,
    stage: Stage,
    folder: RunFolder,
    world: World,
    *,
    rows: Sequence[Rows],
    sets: Sequence[HeldOut],
    stops: Stops,
) -> str:
    """Runs a stage, whose rows are the first; the others are those of later ones. It is judged by the sets.

    Returns why all ranks left before its end; nothing if they did not. Raises RankError for what one rank meets, and
    LostError and ResumeError, which all do.
    """
    alone = stage.config
    profilers = Profilers(alone, folder.logs, rank=world.rank, world_size=world.size, device=world.device)
    loop: Loop | None = None
    with Watchdog(folder.hangs, rank=world.rank) as watchdog:
        watchdog.expect("the start", 60 * alone.distributed.start_timeout_minutes)
        try:
            trainer = Trainer(alone, world, rows[0], stage=stage)
            loop = Loop(config, folder, trainer, profilers, rows=rows, sets=sets, stops=stops, watchdog=watchdog)
            return loop.run()
        except DataError as error:
            raise RankError(NO_RETRY, str(error)) from error
        except torch.OutOfMemoryError as error:
            # What does not fit at first never will; later, memory may be in pieces.
            status = FAILED if loop is not None and loop.slowest else NO_RETRY
            raise RankError(status, profilers.out_of_memory(error)) from error


class Loop:
    """Goes on from the newest checkpoint."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        trainer: Trainer,
        profilers: Profilers,
        *,
        rows: Sequence[Rows],
        sets: Sequence[HeldOut],
        stops: Stops,
        watchdog: Watchdog,
    ) -> None:
        self.stage, self.trainer, self.profilers = trainer.stage, trainer, profilers
        self.stops, self.watchdog = stops, watchdog
        self.checkpoints = Checkpoints(config, folder)
        resumed = self.checkpoints.resume(trainer)
        profilers.step(trainer.step)
        self.metrics = Metrics(config, folder, trainer, later=rows[1:], resumed=resumed)
        self.validation = Validation(trainer, sets)
        self.slowest = 0.0
        """Seconds of the slowest update so far."""
        self._save_seconds = 0.0

    def run(self) -> str:
        with closing(self.metrics), Heartbeat(self.trainer) as heartbeat:
            if not self.trainer.step:
                self.metrics.validated(self.validation.run())
            while True:
                try:
                    reason = self._updates(heartbeat)
                except SpikeError as spike:
                    self._roll_back(spike)
                else:
                    self.metrics.flush()
                    self.metrics.farewell(reason)
                    return reason

    def _updates(self, heartbeat: Heartbeat) -> str:
        section = self.trainer.config.distributed
        began = time.monotonic()
        with closing(heartbeat.updates()) as updates:
            for update in updates:
                self.slowest = max(self.slowest, time.monotonic() - began)
                # What follows takes as long as it takes, the ranks waiting for each other.
                self.watchdog.expect(f"what follows update {update.step}", 60 * section.start_timeout_minutes)
                if reason := self._between(update):
                    return reason
                began = time.monotonic()
                self.watchdog.expect(f"update {update.step + 1}", max(60 * section.hang_minutes, SLOWER * self.slowest))
        return ""

    def _between(self, update: Update) -> str:
        """Does what is due after an update; why all ranks leave now, if they do."""
        self.metrics.write(update)
        self.profilers.step(update.step)
        if self.validation.due(update.step):
            self.metrics.validated(self.validation.run())
        verdict = self.stops.ask(self._save_seconds)
        leaves = verdict.reason if update.step < self.stage.total else ""
        if leaves:
            log.info("leaving after update %d: %s", update.step, leaves)
        if self.checkpoints.due(update.step, self.stage, asked=verdict.saves or bool(leaves)):
            began = time.monotonic()
            self.metrics.flush()  # The lines of all updates in a checkpoint are on disk before it is.
            self.metrics.checkpointed(self.checkpoints.save(self.trainer))
            self._save_seconds = time.monotonic() - began
            self.stops.saved()
        return leaves

    def _roll_back(self, spike: SpikeError) -> None:
        """To the newest checkpoint, from which on the rows of the updates that followed are left out."""
        checkpoint = self.checkpoints.resume(self.trainer)
        first = self.trainer.next_row
        self.trainer.next_row = max(first, spike.row)
        self.metrics.rolled_back(spike, checkpoint, (first, self.trainer.next_row))
