"""The loop of a run: updates, and between them whatever is due: metrics, validation, checkpoints, leaving."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import closing

import torch

from trainer.checkpoint.async_save import Saved
from trainer.checkpoint.manager import Checkpoints
from trainer.checkpoint.run_dir import RunFolder
from trainer.config.job_config import Config, Stage
from trainer.data import DataError
from trainer.data.holdout import HeldOut
from trainer.data.sequences import Rows
from trainer.distributed import World
from trainer.errors import FAILED, NO_RETRY, RankError, RunError
from trainer.evaluation.validation import Validation
from trainer.metrics.metrics import Metrics
from trainer.metrics.profiler import Profilers
from trainer.metrics.progress import Heartbeat
from trainer.resilience.anomalies import SpikeError
from trainer.resilience.preemption import Stops
from trainer.resilience.watchdog import Watchdog
from trainer.trainer import Trainer, Update

log = logging.getLogger("trainer")

SLOWER = 10
"""Times the slowest update so far that one may last before it counts as hung; the same of saves."""
LOADING_SECONDS = 4 * 3600.0
"""For reading a checkpoint twice, once to verify it: terabytes, from slow disks."""


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
            watchdog.expect("loading", LOADING_SECONDS)
            loop = Loop(config, folder, trainer, profilers, rows=rows, sets=sets, stops=stops, watchdog=watchdog)
            return loop.run()
        except DataError as error:
            raise RankError(NO_RETRY, str(error)) from error
        except torch.OutOfMemoryError as error:
            # What never fitted never will; later, memory may be in pieces, or another process may still hold some.
            status = FAILED if folder.committed() or (loop is not None and loop.slowest) else NO_RETRY
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
        self.checkpoints = Checkpoints(config, folder, trainer.world)
        resumed = self.checkpoints.resume(trainer)
        profilers.step(trainer.step)
        self.metrics = Metrics(config, folder, trainer, later=rows[1:], resumed=resumed)
        self.validation = Validation(trainer, sets)
        self.slowest = 0.0
        """Seconds of the slowest update so far."""
        self._save_seconds: float | None = None

    def run(self) -> str:
        with closing(self.metrics), self.checkpoints, Heartbeat(self.trainer) as heartbeat:
            self._expect_waiting("the first update")
            if not self.trainer.step:
                self._validate()
            while True:
                try:
                    reason = self._updates(heartbeat)
                except SpikeError as spike:
                    self._roll_back(spike)
                else:
                    self._expect_waiting("the last checkpoint", SLOWER * (self._save_seconds or 0.0))
                    self._settle()
                    self.metrics.farewell(reason)
                    return reason

    def _updates(self, heartbeat: Heartbeat) -> str:
        section = self.trainer.config.distributed
        began = time.monotonic()
        with closing(heartbeat.updates()) as updates:
            for update in updates:
                self.metrics.write(update)  # Waits for the update before, where a device computes it.
                self.slowest = max(self.slowest, time.monotonic() - began)
                if reason := self._between(update):
                    return reason
                began = time.monotonic()
                self.watchdog.expect(f"update {update.step + 1}", max(60 * section.hang_minutes, SLOWER * self.slowest))
            self.metrics.flush()
        return ""

    def _between(self, update: Update) -> str:
        """Does what is due after an update; why all ranks leave now, if they do."""
        self.profilers.step(update.step)
        if self.validation.due(update.step):
            self._expect_waiting("a set of validation")
            self._validate()
        self._expect_between(f"what follows update {update.step}")
        for saved in self._collected():
            if saved.problem is None:
                self._save_seconds = max(self._save_seconds or 0.0, saved.seconds)
        verdict = self.stops.ask(self._save_seconds)
        leaves = verdict.reason if update.step < self.stage.total else ""
        if leaves:
            self.metrics.flush()
            log.info("leaving after update %d: %s", update.step, leaves)
        if self.checkpoints.due(update.step, self.stage, asked=verdict.saves or bool(leaves)):
            self.metrics.flush()  # The lines of all updates in a checkpoint are on disk before it is.
            self._expect_waiting("the checkpoint before", SLOWER * (self._save_seconds or 0.0))
            self.checkpoints.save(self.trainer)
            self.metrics.rollbacks = 0
            self.stops.saved()
        return leaves

    def _validate(self) -> None:
        results = []
        for result in self.validation.run():
            results.append(result)
            self._expect_waiting("a set of validation")
        self.metrics.validated(results)

    def _expect_waiting(self, what: str, least: float = 0.0) -> None:
        """What takes long on each rank by itself."""
        self.watchdog.expect(what, max(least, 60 * self.trainer.config.distributed.start_timeout_minutes))

    def _expect_between(self, what: str) -> None:
        """What is soon done, unless a rank does not come: told before the ranks' own patience ends."""
        self.watchdog.expect(what, 0.9 * 60 * self.trainer.config.distributed.timeout_minutes)

    def _collected(self) -> list[Saved]:
        """The saves that ended meanwhile, which are told."""
        ended = self.checkpoints.collected()
        self.metrics.checkpointed(ended)
        return ended

    def _settle(self) -> None:
        """Waits for a save that is under way. Raises RunError if the newest one failed, which is the last."""
        last = self.checkpoints.wait()
        self._collected()
        if last is not None and last.problem is not None:
            raise RunError(f"the checkpoint of update {last.step}, the last, failed: {last.problem}")

    def _roll_back(self, spike: SpikeError) -> None:
        """To the newest checkpoint, from which on the rows of the updates that followed are left out."""
        self.watchdog.expect("going back to a checkpoint", LOADING_SECONDS)
        self.checkpoints.wait()
        self._collected()
        if not self.checkpoints.are_there:
            log.warning("there is no checkpoint to go back to")
            return
        checkpoint = self.checkpoints.resume(self.trainer)
        first = self.trainer.next_row
        self.trainer.next_row = max(first, spike.row)
        self.metrics.rolled_back(spike, checkpoint, (first, self.trainer.next_row))
