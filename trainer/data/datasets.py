"""The datasets of a run, from folders of prepared tokens: which sequences are trained and
validated on.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

from models.score_pairs import FULL_ATTENTION, Windows
from trainer.config.data import PACKING_VERSION, DataSection
from trainer.config.job_config import Config
from trainer.data.copy_task import CopyDataset
from trainer.data.holdout import ValidationSet, build_validation_set
from trainer.data.packing import DocumentFilter, PackedDataset, load_or_build_plan
from trainer.data.sequences import BlendedDataset
from trainer.data.shuffle import splitmix64
from trainer.data.token_dataset import TokenDataset


def build_train_dataset(
    config: Config, folders: Mapping[str, Path], *, stage: int = 0
) -> BlendedDataset:
    """The sequences of a run, or of its stage of this number. Raises DataError.

    `folders` holds the prepared tokens of each source, as `trainer.data.prepare.prepare_datasets`
    gives them.
    """
    training = config.training
    model = config.model.build()
    windows = model.layers_by_window
    if not config.data.is_synthetic:
        options: dict[str, int] = {
            "seq_len": training.seq_len,
            "seed": training.seed,
            "stage": stage,
        }
        return build_blended_dataset(config.data, folders, windows=windows, **options)
    copy_dataset = CopyDataset(
        vocab_size=model.vocab_size,
        period=config.data.copy_period or training.seq_len // 2,
        seq_len=training.seq_len,
        num_sequences=training.steps * training.global_batch_size,
        seed=shuffle_seed(training.seed, stage, 0),
    )
    return BlendedDataset([copy_dataset], seq_len=training.seq_len, windows=windows)


def build_blended_dataset(
    data: DataSection,
    folders: Mapping[str, Path],
    *,
    seq_len: int,
    seed: int,
    stage: int = 0,
    windows: Windows = FULL_ATTENTION,
) -> BlendedDataset:
    """The packed sequences of `[data]`.

    Each source of each stage is shuffled differently. Raises DataError.
    """
    mix = data.effective_mix
    packed_datasets = list[PackedDataset]()
    token_datasets = {
        name: TokenDataset(folders[name]) for name in sorted({item.source for item in mix})
    }
    for index, item in enumerate(mix):
        document_filter = DocumentFilter(
            min_length=item.min_length,
            max_length=item.max_length,
            max_len=item.max_len,
            exclude_holdout=data.holdout or None,
        )
        tokens = token_datasets[item.source]
        plan = load_or_build_plan(
            tokens,
            seq_len=seq_len,
            packing=data.packing,
            version=data.packing_version or PACKING_VERSION,
            seed=seed,
            document_filter=document_filter,
        )
        packed_datasets.append(PackedDataset(tokens, plan, seed=shuffle_seed(seed, stage, index)))
    return BlendedDataset(
        packed_datasets,
        seq_len=seq_len,
        mask=data.mask,
        weights=[
            # Weights are shares of tokens, but sequences are drawn: a source with padding needs
            # more. Fractions give every machine the same order of sources.
            Fraction(str(item.weight)) / packed.fill_ratio
            for item, packed in zip(mix, packed_datasets, strict=True)
        ],
        names=[item.label for item in mix],
        windows=windows,
    )


def shuffle_seed(seed: int, stage: int, index: int) -> int:
    """The seed of source `index` of a stage's mix."""
    return splitmix64(splitmix64(seed) ^ stage << 32 ^ index) if stage or index else seed


def build_validation_sets(config: Config, folders: Mapping[str, Path]) -> list[ValidationSet]:
    """The run's validation sets, the same in every stage: `config` is that of the whole run.

    Raises DataError.
    """
    data = config.data
    training_sources = {
        item.source for stage in config.training_stages for item in stage.config.data.effective_mix
    }
    # A corpus may have several names.
    training_folders = {folders[name] for name in training_sources if name in folders}
    return [
        build_validation_set(
            name,
            section,
            TokenDataset(folders[section.source]),
            packing=data.packing,
            version=data.packing_version or PACKING_VERSION,
            mask=data.mask,
            holdout=(data.holdout or None)
            if folders[section.source] in training_folders
            else None,
        )
        for name, section in config.validation.sets.items()
    ]
