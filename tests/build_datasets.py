"""Datasets prepared and built in one call, as the launcher and a rank do one after the other."""

from __future__ import annotations

from trainer.config.data import DataSection
from trainer.config.job_config import Config
from trainer.config.source import corpus_spec
from trainer.data import datasets
from trainer.data.holdout import ValidationSet
from trainer.data.prepare import prepare, prepare_datasets
from trainer.data.sequences import BlendedDataset
from trainer.data.tokenizer import Tokenizer


def build_train_dataset(config: Config, *, stage: int = 0) -> BlendedDataset:
    return datasets.build_train_dataset(config, prepare_datasets(config), stage=stage)


def build_validation_sets(config: Config) -> list[ValidationSet]:
    return datasets.build_validation_sets(config, prepare_datasets(config))


def build_blended_dataset(
    data: DataSection, tokenizer: Tokenizer, *, seq_len: int, seed: int, stage: int = 0
) -> BlendedDataset:
    names = {item.source for item in data.effective_mix}
    folders = {name: prepare(corpus_spec(data, name), tokenizer).folder for name in sorted(names)}
    return datasets.build_blended_dataset(data, folders, seq_len=seq_len, seed=seed, stage=stage)
