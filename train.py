"""A run of Longhaul: parse -> check -> build -> loop -> exit status. Usually started by ./run_train.sh."""

from __future__ import annotations

import logging
import os
import sys

if __name__ == "__main__":
    # Importing torch takes seconds, in which the launcher may die and leave its workers to themselves.
    from trainer.orphans import die_with_launcher

    die_with_launcher()

import torch

from trainer import logs
from trainer.checkpoint import Checkpoints
from trainer.config import Config, ConfigError
from trainer.data import DataError, open_rows
from trainer.data.rows import Rows
from trainer.data.tokenizer import load_tokenizer
from trainer.distributed import World, place, process_group
from trainer.load import load
from trainer.metrics import Metrics, recording
from trainer.profiler import Profilers
from trainer.run_folder import ResumeError, RunFolder, finished
from trainer.trainer import Trainer

log = logging.getLogger("trainer")

DONE, FAILED, BAD_CONFIGURATION, NO_RETRY = 0, 1, 2, 78


def main(argv: list[str]) -> int:
    rank, world_size, _ = place(os.environ)
    logs.configure(rank)
    try:
        config = load(argv)
        config.require(world_size)
        if already := finished(config):
            log.info(already)
            return DONE
        folder = RunFolder(config.output_dir)
        folder.make()
        logs.keep(folder.logs, rank)
        tokenizer = load_tokenizer(config.tokenizer.kind, config.tokenizer.path)
        config.require_vocabulary(tokenizer.vocab_size)
        # Before the process group exists: its patience is not made for tokenizing a corpus.
        rows = open_rows(config.data, tokenizer, seq_len=config.training.seq_len, seed=config.training.seed)
        with process_group(config.distributed) as world:
            return train(config, folder, world, rows)
    except ConfigError as error:
        return refuse(rank, BAD_CONFIGURATION, *error.problems)
    except (DataError, ResumeError) as error:
        return refuse(rank, NO_RETRY, str(error))
    except KeyboardInterrupt:
        return refuse(rank, FAILED, "interrupted; the same command goes on from the newest checkpoint")


def train(config: Config, folder: RunFolder, world: World, rows: Rows) -> int:
    trainer = Trainer(config, world, rows)
    checkpoints = Checkpoints(config, folder)
    resumed = checkpoints.resume(trainer)
    profilers = Profilers(config, folder.logs, rank=world.rank, device=world.device)
    with recording(Metrics(config, folder, trainer, resumed=resumed)) as metrics:
        profilers.step(trainer.step)
        try:
            for update in trainer.updates():
                metrics.write(update)
                profilers.step(update.step)
                if checkpoints.due(update.step):
                    metrics.flush()  # The lines of all updates in a checkpoint are on disk before it is.
                    metrics.checkpointed(checkpoints.save(trainer))
        except torch.OutOfMemoryError as error:
            return refuse(world.rank, FAILED, profilers.out_of_memory(error))
    metrics.farewell()
    return DONE


def refuse(rank: int, status: int, *problems: str) -> int:
    if rank == 0:
        sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
