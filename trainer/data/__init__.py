"""Data: text to tokens once, tokens to rows, rows to micro-batches, each a pure function of what comes before."""

from __future__ import annotations

from fractions import Fraction

from trainer.config.job_config import CORPUS, Config, DataSection
from trainer.data.copy_task import CopyRows
from trainer.data.errors import DataError
from trainer.data.holdout import HeldOut, held_out
from trainer.data.packed_dataset import Packed
from trainer.data.packing import Choice, saved_plan
from trainer.data.prepare import prepare
from trainer.data.sequences import Rows
from trainer.data.shuffle import mix
from trainer.data.source import Source
from trainer.data.tokenizer import Tokenizer, load_tokenizer

__all__ = ["DataError", "held_out_of", "load_tokenizer", "open_rows", "rows_of", "source_of", "sources_of"]


def rows_of(config: Config, *, stage: int = 0) -> Rows:
    """The rows of a run, or of its stage of this number; text is tokenized first. Call it before any process group
    exists.

    Raises DataError, and ConfigError if the model has no row for a token of the tokenizer's.
    """
    training = config.training
    if config.is_made_up:
        copied = CopyRows(
            vocab_size=config.model.build().vocab_size,
            period=config.data.copy_period or training.seq_len // 2,
            seq_len=training.seq_len,
            num_rows=training.steps * training.global_batch_size,
            seed=order(training.seed, stage, 0),
        )
        return Rows([copied], seq_len=training.seq_len)
    tokenizer = load_tokenizer(config.tokenizer.kind, config.tokenizer.path)
    config.require_vocabulary(tokenizer.vocab_size)
    return open_rows(config.data, tokenizer, seq_len=training.seq_len, seed=training.seed, stage=stage)


def open_rows(data: DataSection, tokenizer: Tokenizer, *, seq_len: int, seed: int, stage: int = 0) -> Rows:
    """The rows of `[data]`, prepared if they are not yet. Call it before any process group exists. Raises DataError.

    Every source of every stage has an order of its own.
    """
    sources = {name: prepare(source_of(data, name), tokenizer) for name in sorted({item.source for item in data.drawn})}
    packed: list[Packed] = []
    for index, item in enumerate(data.drawn):
        without = data.holdout or None
        choice = Choice(at_least=item.at_least, below=item.below, max_len=item.max_len, without=without)
        plan = saved_plan(sources[item.source], seq_len=seq_len, packing=data.packing, choice=choice)
        packed.append(Packed(sources[item.source], plan, seed=order(seed, stage, index)))
    return Rows(
        packed,
        seq_len=seq_len,
        mask=data.mask,
        weights=[Fraction(str(item.weight)) / source.filled for item, source in zip(data.drawn, packed, strict=True)],
        names=[item.label for item in data.drawn],
    )


def order(seed: int, stage: int, index: int) -> int:
    """The seed of a source of a stage."""
    return mix(mix(seed) ^ stage << 32 ^ index) if stage or index else seed


def held_out_of(config: Config) -> list[HeldOut]:
    """The rows of the run's validation sets, prepared if they are not yet. Call it before any process group exists.

    They are the same in every stage: `config` is that of the whole run. Raises as `rows_of` does.
    """
    data, sets = config.data, config.validation.sets
    if not sets:
        return []
    tokenizer = load_tokenizer(config.tokenizer.kind, config.tokenizer.path)
    config.require_vocabulary(tokenizer.vocab_size)
    prepared = {name: prepare(source_of(data, name), tokenizer) for name in sorted(config.validation.sources)}
    learned = [source_of(data, name) for name in drawn_of(config)]  # A corpus may have several names.
    return [
        held_out(
            name,
            section,
            prepared[section.source],
            packing=data.packing,
            mask=data.mask,
            part=(data.holdout or None) if source_of(data, section.source) in learned else None,
        )
        for name, section in sets.items()
    ]


def sources_of(config: Config) -> dict[str, Source]:
    """The corpora that a run reads, in any of its stages, by name."""
    return {name: source_of(config.data, name) for name in sorted(drawn_of(config) | config.validation.sources)}


def drawn_of(config: Config) -> set[str]:
    """Names of the sources that rows are drawn from, in any stage."""
    return {item.source for stage in config.stages for item in stage.config.data.drawn}


def source_of(data: DataSection, name: str) -> Source:
    given = {} if name == CORPUS else data.sources[name].model_dump(exclude_none=True)
    inherited = ("documents", "max_document", "bad_files", "separators", "text_key", "cache_dir")
    values = {key: getattr(data, key) for key in inherited} | given
    return Source(corpus=values.pop("path", data.corpus), **values)
