"""A run of Longhaul: parse -> check -> build -> loop -> exit status. Usually started by ./run_train.sh."""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    # Importing torch takes seconds, in which the launcher may die and leave its workers to themselves, or the user may
    # interrupt, who has no use for the traceback of an import.
    from trainer.orphans import die_with_launcher

    die_with_launcher()
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import torch

from trainer import logs
from trainer.checkpoint.checkpoints import Checkpoints
from trainer.config import Config, Stage
from trainer.data import DataError, held_out_of, rows_of
from trainer.data.held import HeldOut
from trainer.data.rows import Rows
from trainer.distributed import World, place, process_group, require_agreement, settled
from trainer.heartbeat import Heartbeat
from trainer.initial import require_initial
from trainer.load import load
from trainer.metrics import Metrics
from trainer.profiler import Profilers
from trainer.run_folder import ResumeError, RunFolder, finished, next_stage
from trainer.status import BAD_CONFIGURATION, DONE, FAILED, NO_RETRY, ConfigError, RankError, RunError
from trainer.trainer import Trainer
from trainer.validation import Validation

log = logging.getLogger("trainer")


def main(argv: list[str]) -> int:
    rank, world_size, _ = place(os.environ)
    logs.configure(rank)
    try:
        config = load(argv)
        if problems := config.stage_problems():
            raise ConfigError(problems)
        stage = next_stage(config)
        config.require(world_size, first=stage.index if stage else 0)
        if stage is None:
            log.info(finished(config))
            return DONE
        require_initial(stage.config)
        folder = RunFolder(config.output_dir)
        folder.make()
        logs.keep(folder.logs, rank)
        # Before the process group exists: its patience is not made for tokenizing a corpus.
        rows = [rows_of(each.config, stage=each.index) for each in config.stages[stage.index :]]
        sets = held_out_of(config)
        with folder.locked(leading=rank == 0), process_group(config.distributed) as world:
            facts = {f"fingerprint of {name}": value for name, value in rows[0].fingerprints.items()}
            facts |= {f"fingerprint of the set {each.name}": each.fingerprint for each in sets}
            require_agreement(
                stage.config, facts | {"stage": stage.name, "newest checkpoint": str(folder.newest(config))}
            )
            train(config, replace(stage, config=settled(stage.config, world)), folder, world, rows, sets)
        return DONE
    except RankError as error:
        return refuse(error.status, f"[rank {rank}] {error}")
    # What follows is found by all ranks alike.
    except ConfigError as error:
        return refuse(BAD_CONFIGURATION, *(error.problems if rank == 0 else ()))
    except (DataError, ResumeError) as error:
        return refuse(NO_RETRY, *([str(error)] if rank == 0 else ()))
    except RunError as error:
        return refuse(FAILED, *([str(error)] if rank == 0 else ()))
    except KeyboardInterrupt:
        resume = "interrupted; the same command goes on from the newest checkpoint"
        return refuse(FAILED, *([resume] if rank == 0 else ()))


def train(
    config: Config, stage: Stage, folder: RunFolder, world: World, rows: Sequence[Rows], sets: Sequence[HeldOut] = ()
) -> None:
    """Runs a stage, whose rows are the first; the others are those of later ones. It is judged by the sets."""
    profilers = Profilers(stage.config, folder.logs, rank=world.rank, world_size=world.size, device=world.device)
    try:
        trainer = Trainer(stage.config, world, rows[0], stage=stage)
        checkpoints = Checkpoints(config, folder, world)
        resumed = checkpoints.resume(trainer)
        profilers.step(trainer.step)
        metrics = Metrics(config, folder, trainer, later=rows[1:], resumed=resumed)
        validation = Validation(trainer, sets)
        with closing(metrics), checkpoints, Heartbeat(trainer) as heartbeat:
            if not trainer.step:
                metrics.validated(validation.run())
            for update in heartbeat.updates():
                metrics.write(update)
                profilers.step(update.step)
                if validation.due(update.step):
                    metrics.validated(validation.run())
                metrics.checkpointed(checkpoints.collected())
                if checkpoints.due(update.step, stage):
                    metrics.flush()  # The lines of all updates in a checkpoint are on disk before it is.
                    checkpoints.save(trainer)
            metrics.flush()
            last = checkpoints.wait()
            metrics.checkpointed(checkpoints.collected())
            if last is not None and last.problem is not None:
                raise RunError(f"the checkpoint of update {last.step}, the last, failed: {last.problem}")
            metrics.farewell()
    except DataError as error:
        raise RankError(NO_RETRY, str(error)) from error
    except torch.OutOfMemoryError as error:
        raise RankError(FAILED, profilers.out_of_memory(error)) from error


def refuse(status: int, *problems: str) -> int:
    sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
