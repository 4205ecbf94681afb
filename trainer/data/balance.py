"""The work of a run's first steps, for the planner: from its prepared corpus, if there is one."""

from __future__ import annotations

from pathlib import Path

from trainer.config.job_config import Config
from trainer.config.source import corpus_specs
from trainer.data.datasets import build_train_dataset
from trainer.data.loader import MicroBatchLoader, StepWork
from trainer.data.prepare import prepared_folder
from trainer.data.tokenizer import open_tokenizer


def first_steps(config: Config, world_size: int) -> StepWork | None:
    """The work of the first steps; None if the corpus is not prepared yet. Raises DataError."""
    folders = dict[str, Path]()
    tokenizer = open_tokenizer(config.tokenizer)
    for name, spec in corpus_specs(config).items():
        if (folder := prepared_folder(spec, tokenizer)) is None:
            return None
        folders[name] = folder
    training = config.training
    degrees = config.parallelism.degrees(world_size)
    # Rank 0 stands for all: every rank deals the whole step and knows its busiest rank.
    loader = MicroBatchLoader(
        build_train_dataset(config, folders),
        dp_rank=0,
        dp_size=degrees["dp_replicate"] * degrees["dp_shard"],
        global_batch_size=training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
    )
    return loader.next_steps(0, max_steps=training.steps)
