"""A run in this process: the configuration of the whole-run tests, and a trainer on its own process group."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.system.runs import arguments
from trainer.checkpoint.manager import Checkpoints
from trainer.checkpoint.run_dir import RunFolder
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.data import held_out_of, open_rows
from trainer.data.sequences import Rows
from trainer.data.tokenizer import ByteTokenizer
from trainer.distributed import World, process_group
from trainer.resilience.preemption import Stops
from trainer.resilience.signals import Requests
from trainer.train_loop import train
from trainer.trainer import Trainer


def configured(run: Path, folder: Path, *options: str) -> Config:
    return load(arguments(run, folder, *options))


def rows_of(config: Config) -> Rows:
    return open_rows(config.data, ByteTokenizer(), seq_len=config.training.seq_len, seed=config.training.seed)


def saved_by(checkpoints: Checkpoints, trainer: Trainer) -> Path:
    """Saves what the trainer holds, and waits for it."""
    checkpoints.save(trainer)
    saved = checkpoints.wait()
    assert saved is not None
    assert saved.path is not None, saved.problem
    return saved.path


def run_here(config: Config) -> None:
    """Trains in this process."""
    folder = RunFolder(config.output_dir)
    folder.make()
    rows, sets = rows_of(config), held_out_of(config)
    with process_group(config.distributed) as world:
        stops = Stops(config, Requests(), leading=True)
        train(config, config.stages[0], folder, world, rows=[rows], sets=sets, stops=stops)


@contextmanager
def trainer_of(config: Config) -> Iterator[Trainer]:
    rows = rows_of(config)
    with process_group(config.distributed) as world:
        assert isinstance(world, World)
        yield Trainer(config, world, rows)
    gc.collect()
