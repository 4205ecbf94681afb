"""Data: text to tokens once, tokens to rows, rows to micro-batches, each a pure function of what comes before."""

from __future__ import annotations

from fractions import Fraction

from trainer.config.job_config import DEFAULT_SOURCE, Config, DataSection
from trainer.data.copy_task import CopyDataset
from trainer.data.errors import DataError
from trainer.data.holdout import ValidationSet, build_validation_set
from trainer.data.packed_dataset import PackedDataset
from trainer.data.packing import DocumentFilter, load_or_build_plan
from trainer.data.prepare import prepare
from trainer.data.sequences import BlendedDataset
from trainer.data.shuffle import splitmix64
from trainer.data.source import CorpusSpec
from trainer.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "DataError",
    "build_blended_dataset",
    "build_train_dataset",
    "build_validation_sets",
    "corpus_spec",
    "corpus_specs",
    "load_tokenizer",
]


def build_train_dataset(config: Config, *, stage: int = 0) -> BlendedDataset:
    """The rows of a run, or of its stage of this number; text is tokenized first. Call it before any process group
    exists.

    Raises DataError, and ConfigError if the model has no row for a token of the tokenizer's.
    """
    training = config.training
    if config.is_synthetic:
        copy_dataset = CopyDataset(
            vocab_size=config.model.build().vocab_size,
            period=config.data.copy_period or training.seq_len // 2,
            seq_len=training.seq_len,
            num_sequences=training.steps * training.global_batch_size,
            seed=shuffle_seed(training.seed, stage, 0),
        )
        return BlendedDataset([copy_dataset], seq_len=training.seq_len)
    tokenizer = load_tokenizer(config.tokenizer.kind, config.tokenizer.path)
    config.require_vocab_size(tokenizer.vocab_size)
    return build_blended_dataset(config.data, tokenizer, seq_len=training.seq_len, seed=training.seed, stage=stage)


def build_blended_dataset(
    data: DataSection, tokenizer: Tokenizer, *, seq_len: int, seed: int, stage: int = 0
) -> BlendedDataset:
    """The rows of `[data]`, prepared if they are not yet. Call it before any process group exists. Raises DataError.

    Every source of every stage has an order of its own.
    """
    token_datasets = {
        name: prepare(corpus_spec(data, name), tokenizer)
        for name in sorted({item.source for item in data.effective_mix})
    }
    packed_datasets: list[PackedDataset] = []
    for index, item in enumerate(data.effective_mix):
        exclude_holdout = data.holdout or None
        document_filter = DocumentFilter(
            min_length=item.min_length,
            max_length=item.max_length,
            max_len=item.max_len,
            exclude_holdout=exclude_holdout,
        )
        plan = load_or_build_plan(
            token_datasets[item.source], seq_len=seq_len, packing=data.packing, document_filter=document_filter
        )
        packed_datasets.append(PackedDataset(token_datasets[item.source], plan, seed=shuffle_seed(seed, stage, index)))
    return BlendedDataset(
        packed_datasets,
        seq_len=seq_len,
        mask=data.mask,
        weights=[
            Fraction(str(item.weight)) / source.fill_ratio
            for item, source in zip(data.effective_mix, packed_datasets, strict=True)
        ],
        names=[item.label for item in data.effective_mix],
    )


def shuffle_seed(seed: int, stage: int, index: int) -> int:
    """The seed of a source of a stage."""
    return splitmix64(splitmix64(seed) ^ stage << 32 ^ index) if stage or index else seed


def build_validation_sets(config: Config) -> list[ValidationSet]:
    """The rows of the run's validation sets, prepared if they are not yet. Call it before any process group exists.

    They are the same in every stage: `config` is that of the whole run. Raises as `rows_of` does.
    """
    data, sets = config.data, config.validation.sets
    if not sets:
        return []
    tokenizer = load_tokenizer(config.tokenizer.kind, config.tokenizer.path)
    config.require_vocab_size(tokenizer.vocab_size)
    token_datasets = {name: prepare(corpus_spec(data, name), tokenizer) for name in sorted(config.validation.sources)}
    training_specs = [
        corpus_spec(data, name) for name in training_source_names(config)
    ]  # A corpus may have several names.
    return [
        build_validation_set(
            name,
            section,
            token_datasets[section.source],
            packing=data.packing,
            mask=data.mask,
            holdout=(data.holdout or None) if corpus_spec(data, section.source) in training_specs else None,
        )
        for name, section in sets.items()
    ]


def corpus_specs(config: Config) -> dict[str, CorpusSpec]:
    """The corpora that a run reads, in any of its stages, by name."""
    return {
        name: corpus_spec(config.data, name)
        for name in sorted(training_source_names(config) | config.validation.sources)
    }


def training_source_names(config: Config) -> set[str]:
    """Names of the sources that rows are drawn from, in any stage."""
    return {item.source for stage in config.training_stages for item in stage.config.data.effective_mix}


def corpus_spec(data: DataSection, name: str) -> CorpusSpec:
    overrides = {} if name == DEFAULT_SOURCE else data.sources[name].model_dump(exclude_none=True)
    inherited = ("documents", "max_document", "bad_files", "separators", "text_key", "cache_dir")
    values = {key: getattr(data, key) for key in inherited} | overrides
    return CorpusSpec(corpus=values.pop("path", data.corpus), **values)
