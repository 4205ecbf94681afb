"""Runs and trainers in the test process, on a process group of one rank."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.build_datasets import build_blended_dataset, build_validation_sets
from tests.system.runs import arguments
from trainer.checkpoint.manager import CheckpointManager
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.data.sequences import BlendedDataset
from trainer.data.tokenizer import ByteTokenizer
from trainer.resilience.preemption import Preemption
from trainer.resilience.signals import SignalHandler
from trainer.run.train_loop import train
from trainer.step.process_group import World, process_group
from trainer.step.trainer import Trainer
from trainer.storage.run_dir import RunDir


def configured(run: Path, folder: Path, *options: str) -> Config:
    return load(arguments(run, folder, *options))


def dataset_of(config: Config) -> BlendedDataset:
    return build_blended_dataset(
        config.data, ByteTokenizer(), seq_len=config.training.seq_len, seed=config.training.seed
    )


def saved_by(checkpoints: CheckpointManager, trainer: Trainer) -> Path:
    """Saves the trainer, waits for the save, and returns its path."""
    checkpoints.save(trainer)
    saved = checkpoints.wait()
    assert saved is not None
    assert saved.path is not None, saved.problem
    return saved.path


def run_here(config: Config) -> None:
    """Trains in this process."""
    folder = RunDir(config.output_dir)
    folder.create()
    dataset = dataset_of(config)
    sets = build_validation_sets(config)
    with process_group(config.distributed) as world:
        preemption = Preemption(config, SignalHandler(), is_leader=True)
        stage = config.training_stages[0]
        train(
            config,
            stage,
            folder,
            world,
            dataset=dataset,
            validation_sets=sets,
            preemption=preemption,
        )


@contextmanager
def trainer_of(config: Config) -> Iterator[Trainer]:
    dataset = dataset_of(config)
    with process_group(config.distributed) as world:
        assert isinstance(world, World)
        yield Trainer(config, world, dataset)
    gc.collect()
